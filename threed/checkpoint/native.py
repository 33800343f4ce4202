"""The native checkpoint: one safetensors file a rank, and a manifest that says where every value is.

    step-40/manifest.json            format, configuration, counters, hash of every file, sections (`sections`)
    step-40/rank-00000.safetensors   this rank's parts of weight, exp_avg and exp_avg_sq, buffers, generator states

`writing` saves it, this module loads it, in any topology: a rank reads the manifest and, of the files, what it needs.
Nothing is pickled. A checkpoint is complete when its manifest exists: files are written into `step-40.tmp` and flushed,
the manifest is written last, and the folder renamed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from threed import collectives
from threed.checkpoint import finite, fit
from threed.checkpoint.extras import Extras
from threed.checkpoint.files import CheckpointError, plain
from threed.checkpoint.manifest import MANIFEST as MANIFEST
from threed.checkpoint.manifest import parts_of
from threed.checkpoint.manifest import read_manifest as read_manifest
from threed.checkpoint.manifest import verify as verify
from threed.checkpoint.reading import Reader
from threed.config import Config, ModelConfig
from threed.resolution import resolve_model
from threed.sharding import Box, Piece, slices
from threed.topology import Axis, Topology
from threed.zero.optimizer import Optimizer
from threed.zero.records import PREVIOUS, WEIGHT, Record, fill_in_place, read, records

# ---------------------------------------------------------------------------------------------------------- reading


def load(
    path: Path, optimizer: Optimizer, topology: Topology, config: Config, extras: Extras,
    hashed: Collection[str] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Fills the optimizer and the buffers from a checkpoint of any topology; returns its counters. Collective.

    Every rank hashes a share of the files, or those named `hashed` where not all of them are on its machine;
    CheckpointError on all ranks when one is damaged or another model's.
    """
    everyone = topology.axis("world")
    checked, problems = _checked(path, optimizer, config, extras, everyone, hashed)
    _refuse(problems, everyone)
    assert checked is not None
    manifest, reader = checked
    here, old = fit.expected(optimizer, extras.buffers, topology), manifest["version"] == 1
    other = "; ".join(_differences(reader, here, old))
    fix = "build the model as it was saved, or pass its tensors to Engine.load_full_state_dict by hand"
    _refuse([f"{path} is another model's: {other}: {fix}"] if other else [], everyone)
    kept = {name: parts - {PREVIOUS} for name, parts in reader.parts.items()}
    fresh = {name for name in here.trained if kept[name] == {WEIGHT}} if optimizer.rule.state_names else set()
    wanted = (r for r in records(optimizer) if r.part in (WEIGHT, PREVIOUS) or r.piece.name not in fresh)
    _refuse(_unreadable(path, reader, wanted, extras), everyone)  # before anything is overwritten

    def write(part: str, piece: Piece, box: Box, out: Tensor) -> None:
        if part not in (WEIGHT, PREVIOUS) and piece.name in fresh:
            out.zero_()
        else:
            reader.into(reader.stands_for(part, piece.name), piece.name, box.start, box.size, out)

    watch = finite.Watch(write, here.trained)
    fill_in_place(optimizer, watch)
    optimizer.tear()  # until all ranks have found nothing
    _refuse([f"{path}: {problem}, so training cannot go on from it" for problem in watch.problems], everyone)
    optimizer.mend()
    extras.buffers.restore(reader.buffers, reader.buffer)
    state = dict(manifest["state"])
    _tell(topology.rank, reader, here, fresh if state["updates"] else set())  # moments of a start are zero
    same = manifest["topology"] == topology.sizes
    seed = f"{config.train.seed}/{state['steps']}"
    extras.restore_generators(reader.generators(topology.rank) if same else {}, same, seed)
    optimizer.updates.fill_(state["updates"])
    optimizer.bad.restore(state)
    optimizer.scaler.restore(state)
    reader.close()
    return state


def _unreadable(path: Path, reader: Reader, wanted: Iterable[Record], extras: Extras) -> list[str]:
    """Returns why some of the boxes that this rank wants, or its buffers, cannot be read; the first reason."""
    try:
        for r in wanted:
            reader.check(reader.stands_for(r.part, r.piece.name), r.piece.name, r.box.start, r.box.size)
        reader.check_buffers(extras.buffers.persistent())
    except CheckpointError as error:
        return [str(error) if str(path) in str(error) else f"{path}: {error}"]
    return []


def _checked(
    path: Path, optimizer: Optimizer, config: Config, extras: Extras, everyone: Axis, hashed: Collection[str] | None
) -> tuple[tuple[dict[str, Any], Reader] | None, list[str]]:
    """Returns manifest and reader of a checkpoint, or what is wrong with it, as this rank sees it.

    Any error counts, so that every rank refuses the checkpoint, and the next older one is tried.
    """
    try:
        manifest = read_manifest(path)
        parts = optimizer.rule.state_names
        problems = model_differences(manifest, config) or optimizer_differences(manifest, config, parts)
        some = manifest if hashed is None else {"files": [e for e in manifest["files"] if e["file"] in hashed]}
        problems = problems or verify(path, some, *((everyone.index, everyone.size) if hashed is None else ()))
        if problems:
            return None, problems
        reader = Reader(path, manifest)
        same = manifest["topology"] == extras.topology.sizes
        problems = extras.problems(reader.buffers, reader.generators(everyone.index) if same else {})
        return (manifest, reader), [f"{path}: {problem}" for problem in problems]
    except CheckpointError as error:
        return None, [str(error)]
    except Exception as error:
        return None, [f"{path} cannot be read: {type(error).__name__}: {plain(error)}"]


def _differences(reader: Reader, here: fit.Expected, old: bool) -> list[str]:
    """Returns what of a checkpoint does not fit the model; old: its version has no buffers."""
    found = {name: shape for name, (*_, shape) in reader.buffers.items()}
    problems = fit.differences(reader.shapes, here.weights, "weights")
    return problems + ([] if old else fit.differences(found, here.buffers, "buffers"))


def _tell(rank: int, reader: Reader, here: fit.Expected, fresh: set[str]) -> None:
    """Warns of what was not restored."""
    left = {name for name, parts in reader.parts.items() if parts - {PREVIOUS} > {WEIGHT}} - here.trained
    kept = {name for name, shape in here.buffers.items() if shape is not None} - set(reader.buffers)
    some = "of {}, which were frozen" if fresh < here.trained else "at all, only weights"
    fit.tell(rank, f"the checkpoint has no moments {some}: they begin at zero", fresh)
    fit.tell(rank, "moments of {} are left out: they are not trained any more", left)
    fit.tell(rank, "the checkpoint is of a version without buffers: {} keep the values they have", kept)


def _refuse(problems: list[str], everyone: Axis) -> None:
    """Raises on every rank if any rank found a problem."""
    found = [problem for rank in collectives.exchange(problems, everyone) for problem in rank]
    if found:
        raise CheckpointError("; ".join(dict.fromkeys(found)))


def model_differences(manifest: Mapping[str, Any], config: Config) -> list[str]:
    """Returns what of the model's shape differs between a checkpoint and a configuration, one line each."""
    saved, wanted = manifest["config"]["model"], config.model.model_dump(mode="json")
    with suppress(ValueError):  # what keys mean that the version which saved it did not have; of a later one, as it is
        saved = resolve_model(ModelConfig.model_validate(saved)).model_dump(mode="json")
    state = manifest["state"]
    free = {"dropout"} | (set() if state["steps"] and "imported" not in state["extra"] else {"seq"})
    return [
        f"the checkpoint's model has {key} = {plain(saved.get(key))}, this run has {value}: resume with the same shape,"
        " or start anew with --checkpoint.resume none"
        for key, value in wanted.items()
        if key not in free and saved.get(key) != value
    ]


def optimizer_differences(manifest: Mapping[str, Any], config: Config, parts: Sequence[str]) -> list[str]:
    """Returns a line if the checkpoint is another optimizer's: Lion's momentum has the name of an Adam moment."""
    saved, wanted = manifest["config"]["optim"]["name"], config.optim.name
    kept = sorted(parts_of(manifest) - {WEIGHT, PREVIOUS})
    if saved == wanted or not (kept or manifest["state"]["steps"]):  # weights alone, of another format
        return []
    there, here = (", ".join(names) or "nothing" for names in (kept, parts))
    fix = f"resume with --optim.name {saved}, or start anew with --checkpoint.resume none"
    return [
        f"the checkpoint's optimizer is {saved}, which keeps {there}; this run has {wanted}, which keeps {here}: {fix}"
    ]


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
        [[r.piece.name, r.piece.shape, r.box.start, r.box.size] for r in some]
        for _, some in groupby(mine, key=lambda record: record.state)
    ]
    full: dict[str, Tensor] = {}
    for boxes in zip_longest(*collectives.exchange(about, everyone), fillvalue=[]):  # a bucket of each rank at a time
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
