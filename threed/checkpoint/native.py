"""Loads native checkpoints: one safetensors file per rank, and a manifest that locates every value.

    step-40/manifest.json            format, configuration, counters, sections, hashes of files
    step-40/rank-00000.safetensors   rank 0's weights, moments, buffers and generator states

The module `saving` writes checkpoints; this module loads them in any topology. Each rank reads the
manifest, and then only the values that it needs from the files. No pickle is used. A checkpoint is
complete if its manifest exists, because the manifest is written last. All other files are first
written into `step-40.tmp` and flushed to disk. At the end, the folder is renamed to `step-40`.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from threed.checkpoint import compatibility, finite
from threed.checkpoint.files import CheckpointError, plain
from threed.checkpoint.lazy_tensors import TensorSource
from threed.checkpoint.manifest import MANIFEST as MANIFEST
from threed.checkpoint.manifest import did_you_mean as did_you_mean
from threed.checkpoint.manifest import missing
from threed.checkpoint.manifest import read_manifest as read_manifest
from threed.checkpoint.manifest import verified as verified
from threed.checkpoint.manifest import verify as verify
from threed.checkpoint.reading import Reader
from threed.checkpoint.run_folder import model_differences, optimizer_differences
from threed.checkpoint.saving import Extras
from threed.config import Config
from threed.core.device import rng_states, set_rng_states
from threed.distributed import collectives
from threed.distributed.collectives import attempt_together, raise_together
from threed.distributed.sharding import slices
from threed.distributed.topology import Axis, Topology
from threed.models.buffers import dtype_name
from threed.zero.optimizer import Optimizer
from threed.zero.state import (
    PREVIOUS,
    WEIGHT,
    fill_states,
    initialize_states,
    read_records,
    records,
    states_of,
)

T = TypeVar("T")

# ---------------------------------------------------------------------------------------------------------- reading


def load(
    path: Path, optimizer: Optimizer, topology: Topology, config: Config, extras: Extras,
    hashed: Collection[str] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Fills the optimizer and the buffers from a checkpoint of any topology. Collective.

    The hashes of all files are checked before anything is overwritten.

    Args:
        path: folder of the checkpoint.
        optimizer: the optimizer, whose weights and states are overwritten.
        topology: the parallel axes of the run, and this rank's position on them.
        config: configuration of the run.
        extras: buffers and random generators to restore.
        hashed: names of the files whose hashes this rank checks. By default, the files are divided
            between all ranks. For a copy in memory, names must be given, because each machine has
            different files.

    Returns:
        The counters of the run at the checkpoint (`state` in the manifest).

    Raises:
        CheckpointError: on every rank if any rank fails. The engine is unchanged if a file is
            missing or damaged, or if the checkpoint is of a different model or optimizer. Values
            that are not finite are found only while states are overwritten. In this case, an engine
            that had its initial weights gets these weights again, and any other engine is marked
            as inconsistent.
    """
    everyone = topology.axis("world")

    def together(act: Callable[[], T]) -> T:
        return attempt_together(act, everyone, CheckpointError, describe, catch=Exception)

    # Returns the text of the CheckpointError that `attempt_together` raises in place of `error`.
    # Errors of all types are converted, because a caller that resumes a run catches only
    # CheckpointError, and then tries an older checkpoint.
    def describe(error: Exception) -> str:
        return f"{path} cannot be read: {type(error).__name__}: {plain(error)}"

    trains = optimizer.layout.policy.trains
    manifest = together(lambda: _checked_manifest(path, config, trains))
    share = _share(manifest, everyone, hashed)
    together(lambda: _refuse(missing(path, share)))
    reader = together(lambda: Reader(path, manifest))
    here = compatibility.expected(optimizer, extras.buffers, topology)
    together(lambda: _refuse_model(path, reader, here))
    kept = {name: parts - {PREVIOUS} for name, parts in reader.parts.items()}
    without_moments = {name for name in here.with_moments if kept[name] == {WEIGHT}}
    same = manifest["topology"] == topology.sizes
    together(lambda: _refuse(verify(path, share)))
    rank = everyone.index if same else None
    together(lambda: _refuse_unreadable(path, reader, without_moments, optimizer, extras, rank))
    _overwrite(path, reader, here.trained, optimizer, everyone)

    extras.buffers.restore(reader.buffers, reader.buffer)
    state = dict(manifest["state"])
    # Before its first update, a run has moments of zero, so missing moments need no warning.
    if trains:
        new = without_moments if state["updates"] else set()
        _warn_not_restored(topology.rank, reader, here, new)
    seed = f"{config.train.seed}/{state['steps']}"
    states = reader.generators(topology.rank) if same or topology.rank == 0 else {}
    if extras.generators:
        _restore_generators(topology, states, same, seed)
    optimizer.updates.fill_(state["updates"])
    optimizer.rates.restore(state)
    optimizer.bad.restore(state)
    optimizer.scaler.restore(state)
    reader.close()
    return state


def _checked_manifest(path: Path, config: Config, trains: bool) -> dict[str, Any]:
    manifest = read_manifest(path)
    problems = model_differences(manifest, config)
    _refuse(problems or (optimizer_differences(manifest, config) if trains else []))
    return manifest


def _refuse(problems: Sequence[str]) -> None:
    """Raises CheckpointError if there are problems."""
    if problems:
        raise CheckpointError("; ".join(problems))


def _refuse_model(path: Path, reader: Reader, here: compatibility.Expected) -> None:
    """Raises CheckpointError if names or shapes of tensors differ from the model's."""
    found = {name: shape for name, (*_, shape) in reader.buffers.items()}
    problems = compatibility.differences(reader.shapes, here.weights, "weights")
    problems += compatibility.differences(found, here.buffers, "buffers")
    if problems:
        fix = "build the model as it was saved, or pass its tensors to Engine.load_full_state_dict"
        raise CheckpointError(f"{path} is another model's: {'; '.join(problems)}: {fix}")


def _share(
    manifest: Mapping[str, Any], everyone: Axis, hashed: Collection[str] | None
) -> dict[str, Any]:
    """Returns an excerpt of the manifest: the entries of the files that this rank checks."""
    files = manifest["files"]
    if hashed is None:
        return {"files": files[everyone.index :: everyone.size]}
    return {"files": [entry for entry in files if entry["file"] in hashed]}


def _refuse_unreadable(
    path: Path,
    reader: Reader,
    without_moments: Collection[str],
    optimizer: Optimizer,
    extras: Extras,
    rank: int | None,
) -> None:
    """Checks that all states, buffers and generator states can be read from the checkpoint.

    Args:
        path: folder of the checkpoint.
        reader: the open checkpoint.
        without_moments: names of the tensors for which the checkpoint has weights and no moments.
            The moments of these tensors start at zero, so they are not required.
        optimizer: the optimizer, whose states will be loaded.
        extras: buffers and random generators that will be loaded.
        rank: saved rank whose generator states will be loaded; None for no generators.

    Raises:
        CheckpointError: if a state, buffer or generator state is missing or does not fit, or its
            file cannot be read.
    """
    try:
        for record in records(optimizer):
            part, name = record.part, record.piece.name
            is_new = name in without_moments and part not in (WEIGHT, PREVIOUS)
            if not is_new and reader.saved_part(part, name) is None:
                raise CheckpointError(f"the checkpoint has no {part} of {name}")
        names = extras.buffers.persistent()
        for file in reader.files_of(records(optimizer), names, rank):
            reader.file(file)
        _refuse(_extras_problems(extras, reader, {} if rank is None else reader.generators(rank)))
    except CheckpointError as error:
        raise CheckpointError(
            str(error) if str(path) in str(error) else f"{path}: {error}"
        ) from None


def _overwrite(
    path: Path, source: TensorSource, trained: Collection[str], optimizer: Optimizer, everyone: Axis
) -> None:
    """Sets all states from a checkpoint. Collective.

    Args:
        path: folder of the checkpoint, for messages.
        source: tensors of the checkpoint.
        trained: names of the tensors whose values must be finite.
        optimizer: the optimizer, whose states are overwritten.
        everyone: axis of all ranks.

    Raises:
        CheckpointError: on every rank, if a tensor in `trained` is not finite, a value cannot be
            read, or a weight overflows an fp16 parameter. An optimizer that had its initial weights
            then gets these weights again; any other optimizer is marked as inconsistent.
    """
    initial, restore = optimizer.consistency.initial, finite.Restore(source, trained)
    try:
        with optimizer.consistency.changing():
            fill_states(optimizer, restore)
            why = "so training cannot go on from it"
            problems = [f"{path}: {problem}, {why}" for problem in restore.problems]
            raise_together(problems, everyone, CheckpointError)
            # The saved dtype may be wider than fp16, so a finite saved weight may overflow in fp16.
            if optimizer.layout.policy.param_dtype == torch.float16:
                raise_together([_overflow(path, optimizer)], everyone, CheckpointError)
    except CheckpointError:  # the error is raised on every rank
        if initial is not None:
            initialize_states(optimizer, initial, again=True, everything=True)
        raise


def _overflow(path: Path, optimizer: Optimizer) -> str:
    """Returns an error text if a weight of this rank overflows `param_dtype`, or ""."""
    dtype = optimizer.layout.policy.param_dtype
    try:
        for state in states_of(optimizer):
            parts = [part for part in (WEIGHT,) if part in state.storages]
            with optimizer.staged(state, parts) as values:
                for record in state.records((WEIGHT,)):
                    finite.narrowed(record.piece.name, record.of(values[WEIGHT]), dtype)
    except CheckpointError as error:
        return f"{path}: {error}"
    return ""


def _warn_not_restored(
    rank: int, reader: Reader, here: compatibility.Expected, without_moments: set[str]
) -> None:
    """Warns on rank 0 of moments that start at zero, and of saved moments that are not loaded.

    Args:
        rank: this rank.
        reader: the open checkpoint.
        here: names and shapes of the model's tensors.
        without_moments: names of the trained tensors for which the checkpoint has weights and no
            moments.
    """
    untrained = {
        name for name, parts in reader.parts.items() if parts - {PREVIOUS} > {WEIGHT}
    } - here.trained
    some = "of {}, which were frozen" if without_moments < here.trained else "at all, only weights"
    compatibility.tell(
        rank, f"the checkpoint has no moments {some}: they begin at zero", without_moments
    )
    compatibility.tell(rank, "moments of {} are left out: they are not trained any more", untrained)


# ------------------------------------------------------------------------------------------ buffers and generators


def _extras_problems(extras: Extras, reader: Reader, states: Mapping[str, Tensor]) -> list[str]:
    """Returns the reasons why buffers or generator states cannot be restored on this rank.

    Args:
        extras: buffers and random generators that will be loaded.
        reader: the open checkpoint.
        states: saved generator states by name; empty if they are not restored.
    """
    saved, places = reader.buffers, extras.buffers.persistent().items()
    found = [(name, place.value, saved[name][1]) for name, place in places if name in saved]
    problems = [
        f"buffer {name} is {dtype} in the checkpoint and {dtype_name(value)} in the model"
        for name, value, dtype in found
        if value is not None
        and value.is_floating_point() != getattr(torch, dtype).is_floating_point
    ]
    checked = extras.generators and states
    return problems + (_state_problems(states, extras.topology.device) if checked else [])


def _state_problems(states: Mapping[str, Tensor], device: torch.device) -> list[str]:
    """Returns a list with an error text if torch rejects the states, else an empty list.

    To test the given generator states, this function sets them, and then sets the current states
    again.
    """
    before = rng_states(device)
    if not set(states) >= set(before):
        return []
    try:
        set_rng_states(states, device)
    except (RuntimeError, TypeError) as error:
        return [f"the states of its generators are not valid: {error}"]
    finally:
        set_rng_states(before, device)
    return []


def _restore_generators(
    topology: Topology, saved: Mapping[str, Tensor], same: bool, seed: str
) -> None:
    """Restores the generators, or seeds them if the checkpoint has a different topology.

    Args:
        topology: the parallel axes of the run, and this rank's position on them.
        saved: saved generator states by name: of this rank if the topology is the same, else of
            rank 0.
        same: whether the checkpoint was saved in this run's topology.
        seed: text from which each rank derives a different seed if states are not restored.
    """
    device, rank = topology.device, topology.rank
    now = rng_states(device)
    if same and set(saved) >= set(now):
        set_rng_states(saved, device)
        return
    # If rank 0 has the same states as the saved rank 0, no forward of the saved run has drawn
    # random numbers, unless the program seeds its generators otherwise.
    unused = all(name in saved and torch.equal(saved[name], now[name]) for name in now)
    digest = hashlib.sha256(f"{seed}/{rank}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:7], "little"))
    if rank == 0 and not unused:
        warnings.warn(
            "the checkpoint has no generator states for this topology: dropout masks of a wrapped module"
            " differ from those of the saved run",
            stacklevel=5,
        )


# ------------------------------------------------------------------------------------------------------- collecting


def collect(optimizer: Optimizer, topology: Topology, part: str = WEIGHT) -> dict[str, Tensor]:
    """Gathers the full tensors of one part of the state on rank 0. Collective.

    Args:
        optimizer: the optimizer, whose states are gathered.
        topology: the parallel axes of the run, and this rank's position on them.
        part: "weight" for the master weights, or the name of a tensor that the optimizer's rule
            keeps, such as "exp_avg".

    Returns:
        On rank 0, the full tensors by global name, on the CPU, in fp32, or fp64 if the model uses
        fp64. On other ranks, an empty dict.
    """
    everyone = topology.axis("world")
    owned = [record for record in records(optimizer, (part,)) if record.owned]
    wide = torch.float64 if optimizer.layout.policy.param_dtype == torch.float64 else torch.float32
    empty = torch.empty(0, dtype=wide)
    buckets = (
        torch.cat([values.reshape(-1).to("cpu", wide, copy=True) for _, values in some])
        for _, some in groupby(read_records(optimizer, owned), key=lambda both: both[0].state)
    )
    about = [
        [[r.piece.name, r.piece.shape, r.piece.start, r.piece.size] for r in some]
        for _, some in groupby(owned, key=lambda record: record.state)
    ]
    full: dict[str, Tensor] = {}
    # Each iteration gathers one bucket of every rank.
    for boxes in zip_longest(*collectives.exchange(about, everyone), fillvalue=[]):
        flat = next(buckets, empty)
        flat = flat if everyone.size == 1 else flat.to(topology.device)
        for values, some in zip(collectives.gather_to_first(flat, everyone), boxes, strict=False):
            _copy_boxes(values, some, full)
    return full


def _copy_boxes(values: Tensor, boxes: Sequence[Any], full: dict[str, Tensor]) -> None:
    """Copies values to boxes (blocks) of full tensors.

    Args:
        values: flat values [n] of all boxes, one box after another.
        boxes: one tuple per box: (name of the full tensor, shape of the full tensor, start of the
            box, size of the box).
        full: full tensors by global name. A tensor that is not in the dict is allocated and added.
    """
    at = 0
    for name, shape, start, size in boxes:
        n = math.prod(size)
        target = full.setdefault(name, values.new_empty(shape))
        target[slices(start, size)] = values[at : at + n].view(size)
        at += n
