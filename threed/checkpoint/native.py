"""The native checkpoint: one safetensors file a rank, and a manifest that says where every value is.

    step-40/manifest.json            format, configuration, counters, hash of every file, sections (`sections`)
    step-40/rank-00000.safetensors   this rank's parts of weight, exp_avg and exp_avg_sq, buffers, generator states

`writing` saves it, this module loads it, in any topology: a rank reads the manifest and, of the files, what it needs.
Nothing is pickled. A checkpoint is complete when its manifest exists: files are written into `step-40.tmp` and flushed,
the manifest is written last, and the folder renamed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from threed import collectives
from threed.checkpoint import finite, fit
from threed.checkpoint.extras import Extras
from threed.checkpoint.files import CheckpointError, plain
from threed.checkpoint.lazy_tensors import TensorSource
from threed.checkpoint.manifest import MANIFEST as MANIFEST
from threed.checkpoint.manifest import did_you_mean as did_you_mean
from threed.checkpoint.manifest import missing
from threed.checkpoint.manifest import read_manifest as read_manifest
from threed.checkpoint.manifest import verify as verify
from threed.checkpoint.reading import Reader
from threed.checkpoint.resuming import model_differences, optimizer_differences
from threed.collectives import raise_together
from threed.config import Config
from threed.sharding import slices
from threed.topology import Axis, Topology
from threed.zero.optimizer import Optimizer
from threed.zero.records import (
    PREVIOUS,
    WEIGHT,
    fill_in_place,
    initialise,
    read,
    records,
    records_of,
    states,
)

# ---------------------------------------------------------------------------------------------------------- reading


def load(
    path: Path, optimizer: Optimizer, topology: Topology, config: Config, extras: Extras,
    hashed: Collection[str] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Fills the optimizer and the buffers from a checkpoint of any topology; returns its counters. Collective.

    Every rank hashes a share of the files, or the files named in `hashed` if a machine does not have all of them. The
    hashes are checked before anything is overwritten.

    Raises:
        CheckpointError: on every rank, if a file is damaged or the checkpoint is another model's; nothing has changed.
            Values that are not finite are found while they are read: a new engine is initialised again, and one that
            has trained is marked as torn.
    """
    everyone = topology.axis("world")
    checked, problems = _checked(path, optimizer, config, everyone, hashed)
    raise_together(problems, everyone, CheckpointError)
    assert checked is not None
    manifest, reader = checked
    share = _share(manifest, everyone, hashed)
    here = fit.expected(optimizer, extras.buffers, topology)
    other = "; ".join(_differences(reader, here))
    fix = "build the model as it was saved, or pass its tensors to Engine.load_full_state_dict by hand"
    problem = f"{path} is another model's: {other}: {fix}" if other else None
    raise_together([problem], everyone, CheckpointError)
    kept = {name: parts - {PREVIOUS} for name, parts in reader.parts.items()}
    fresh = {name for name in here.with_moments if kept[name] == {WEIGHT}}
    same = manifest["topology"] == topology.sizes

    rank = everyone.index if same else None
    unreadable = _attempt(path, lambda: _unreadable(path, reader, fresh, optimizer, extras, rank))
    if any(collectives.exchange(bool(unreadable), everyone)):
        damaged = _attempt(path, lambda: verify(path, share))  # more precise, if files are damaged
        raise_together(damaged, everyone, CheckpointError)
        raise_together(unreadable, everyone, CheckpointError)
    damaged = _attempt(path, lambda: verify(path, share))
    raise_together(damaged, everyone, CheckpointError)
    _overwrite(path, reader, here.trained, optimizer, everyone)

    extras.buffers.restore(reader.buffers, reader.buffer)
    state = dict(manifest["state"])
    # moments of a start are zero
    _tell(topology.rank, reader, here, fresh if state["updates"] else set())
    seed = f"{config.train.seed}/{state['steps']}"
    extras.restore_generators(reader.generators(topology.rank) if same else {}, same, seed)
    optimizer.updates.fill_(state["updates"])
    optimizer.bad.restore(state)
    optimizer.scaler.restore(state)
    reader.close()
    return state


def _checked(
    path: Path, optimizer: Optimizer, config: Config, everyone: Axis, hashed: Collection[str] | None
) -> tuple[tuple[dict[str, Any], Reader] | None, list[str]]:
    """Returns manifest and reader of a checkpoint whose files exist, or the problems that this rank found."""
    found: list[tuple[dict[str, Any], Reader]] = []

    def check() -> list[str]:
        manifest = read_manifest(path)
        problems = model_differences(manifest, config) or optimizer_differences(manifest, config)
        mine = _share(manifest, everyone, hashed)
        problems = problems or missing(path, mine)
        if not problems:
            found.append((manifest, Reader(path, manifest)))
        return problems

    problems = _attempt(path, check)
    return (None if problems else found[0]), problems


def _share(
    manifest: Mapping[str, Any], everyone: Axis, hashed: Collection[str] | None
) -> dict[str, Any]:
    """Returns the files that this rank is to look at, as a manifest has them."""
    files = manifest["files"]
    if hashed is None:
        return {"files": files[everyone.index :: everyone.size]}
    return {"files": [entry for entry in files if entry["file"] in hashed]}


def _attempt(path: Path, look: Callable[[], list[str]]) -> list[str]:
    """Returns the problems that are found. Any error counts, so that every rank refuses the checkpoint, and the next
    older one is tried."""
    try:
        return look()
    except CheckpointError as error:
        return [str(error)]
    except Exception as error:
        return [f"{path} cannot be read: {type(error).__name__}: {plain(error)}"]


def _unreadable(
    path: Path,
    reader: Reader,
    fresh: Collection[str],
    optimizer: Optimizer,
    extras: Extras,
    rank: int | None,
) -> list[str]:
    """Returns the reasons why states, buffers, or the generators of `rank` cannot be read. fresh: tensors whose moments
    begin at zero."""
    try:
        for record in records(optimizer):
            piece = record.piece
            if record.part in (WEIGHT, PREVIOUS) or piece.name not in fresh:
                reader.check(record.part, piece.name, piece.start, piece.size)
        reader.check_buffers(extras.buffers.persistent())
        problems = extras.problems(reader.buffers, {} if rank is None else reader.generators(rank))
    except CheckpointError as error:
        return [str(error) if str(path) in str(error) else f"{path}: {error}"]
    return [f"{path}: {problem}" for problem in problems]


def _overwrite(
    path: Path, source: TensorSource, trained: Collection[str], optimizer: Optimizer, everyone: Axis
) -> None:
    """Sets all states from a checkpoint. Collective.

    Raises:
        CheckpointError: on every rank, if values of `trained` are not finite, or cannot be read. A new optimizer is
            then initialised again, another one is marked as inconsistent.
    """
    initial, restore = optimizer.consistency.initial, finite.Restore(source, trained)
    try:
        with optimizer.consistency.changing():
            fill_in_place(optimizer, restore)
            why = "so training cannot go on from it"
            problems = [f"{path}: {problem}, {why}" for problem in restore.problems]
            raise_together(problems, everyone, CheckpointError)
            # a checkpoint of another format, or converted
            if optimizer.layout.policy.param_dtype == torch.float16:
                problems = _attempt(path, lambda: _overflows(path, optimizer))
                raise_together(problems, everyone, CheckpointError)
    except CheckpointError:  # on every rank
        if initial is not None:
            initialise(optimizer, initial, again=True, everything=True)
        raise


def _overflows(path: Path, optimizer: Optimizer) -> list[str]:
    """Returns which of this rank's weights are beyond the format that the layers run in; the first of them."""
    dtype = optimizer.layout.policy.param_dtype
    try:
        for state in states(optimizer):
            parts = [part for part in (WEIGHT,) if part in state.storages]
            with optimizer.staged(state, parts) as held:
                for record in records_of(state, (WEIGHT,)):
                    finite.narrowed(record.piece.name, record.of(held[WEIGHT]), dtype)
    except CheckpointError as error:
        return [f"{path}: {error}"]
    return []


def _differences(reader: Reader, here: fit.Expected) -> list[str]:
    """Returns a line for each mismatch between a checkpoint and the model."""
    found = {name: shape for name, (*_, shape) in reader.buffers.items()}
    problems = fit.differences(reader.shapes, here.weights, "weights")
    return problems + fit.differences(found, here.buffers, "buffers")


def _tell(rank: int, reader: Reader, here: fit.Expected, fresh: set[str]) -> None:
    """Warns of what was not restored."""
    left = {
        name for name, parts in reader.parts.items() if parts - {PREVIOUS} > {WEIGHT}
    } - here.trained
    some = "of {}, which were frozen" if fresh < here.trained else "at all, only weights"
    fit.tell(rank, f"the checkpoint has no moments {some}: they begin at zero", fresh)
    fit.tell(rank, "moments of {} are left out: they are not trained any more", left)


# ------------------------------------------------------------------------------------------------------- collecting


def collect(optimizer: Optimizer, topology: Topology, part: str = WEIGHT) -> dict[str, Tensor]:
    """Returns full tensors by global name on rank 0 (at least fp32, on the CPU), else an empty dict. Collective.

    part: the weights (masters), or one of the parts that the optimizer's rule keeps.
    """
    everyone = topology.axis("world")
    mine = [record for record in records(optimizer, (part,)) if record.owned]
    wide = torch.float64 if optimizer.layout.policy.param_dtype == torch.float64 else torch.float32
    empty = torch.empty(0, dtype=wide)
    held = (
        torch.cat([values.reshape(-1).to("cpu", wide, copy=True) for _, values in some])
        for _, some in groupby(read(optimizer, mine), key=lambda both: both[0].state)
    )
    about = [
        [[r.piece.name, r.piece.shape, r.piece.start, r.piece.size] for r in some]
        for _, some in groupby(mine, key=lambda record: record.state)
    ]
    full: dict[str, Tensor] = {}
    # a bucket of each rank at a time
    for boxes in zip_longest(*collectives.exchange(about, everyone), fillvalue=[]):
        flat = next(held, empty)
        flat = flat if everyone.size == 1 else flat.to(topology.device)
        for values, some in zip(collectives.gather_to_first(flat, everyone), boxes, strict=False):
            _place(values, some, full)
    return full


def _place(values: Tensor, boxes: Sequence[Any], full: dict[str, Tensor]) -> None:
    """Copies values [n] to their boxes, given as (global name, global shape, start, size), one after the other."""
    at = 0
    for name, shape, start, size in boxes:
        n = math.prod(size)
        target = full.setdefault(name, values.new_empty(shape))
        target[slices(start, size)] = values[at : at + n].view(size)
        at += n
