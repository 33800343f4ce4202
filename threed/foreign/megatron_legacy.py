"""Megatron-LM's older checkpoints, files of torch.save: weights, and what its optimizer has.

    checkpoint = open_legacy(folder)                a `Source`; CheckpointError for what is not read, by name

A folder (`iter_0000100`, `release`, or the one above with `latest_checkpointed_iteration.txt`) has
`mp_rank_TT[_PPP]/model_optim_rng.pt` of tensor rank T and pipeline rank P (megatron/training/checkpointing.py,
get_checkpoint_name), a dictionary with `args`, and `model`, or `model0`, `model1`, ... of the virtual stages. States
of the optimizer are in its `optimizer`, or, of the distributed one, in `distrib_optim.pt` beside it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from threed.checkpoint.files import CheckpointError, plain
from threed.foreign.megatron import (
    FILE,
    Chunks,
    MegatronCheckpoint,
    Rank,
    joined,
    joined_parts,
    step_folder,
)
from threed.foreign.megatron_optim import (
    LeftOut,
    Parts,
    States,
    add_counters,
    buffers_of,
    certain,
    flat_states,
    grouped_states,
)
from threed.foreign.outlines import Job, Place, Thing, outline
from threed.foreign.spread import Boxes, Spread

DISTRIBUTED = "distrib_optim.pt"
RANK = re.compile(r"mp_rank_(\d+)(?:_(\d+))?(_\d+)?")


def open_legacy(path: Path) -> MegatronCheckpoint:
    """Returns what is in a folder of files of torch.save. Raises CheckpointError."""
    folder = step_folder(path)
    assert folder is not None
    places = _places(folder)
    found = dict(zip(places, outline([Job(file) for file in places.values()]), strict=True))
    first = found[0, 0]
    if not isinstance(first, dict) or not all(isinstance(file, dict) for file in found.values()):
        raise CheckpointError(f"{folder} is not as Megatron writes it")
    args = first.get("args")
    table = args.state if isinstance(args, Thing) and isinstance(args.state, dict) else {}
    tp, pp = (1 + max(rank[axis] for rank in places) for axis in (0, 1))
    if len(places) != tp * pp:
        raise CheckpointError(
            f"{folder} has {len(places)} of {tp * pp} files of tp {tp} and pp {pp}"
        )
    _check_iterations(folder, found)
    chunks = [
        key
        for key in (["model"] if "model" in first else [f"model{n}" for n in range(1000)])
        if key in first
    ]
    weights = {
        rank: [_named(file.get(chunk), folder) for chunk in chunks] for rank, file in found.items()
    }
    gated = bool(table.get("swiglu"))
    tensors = joined(weights, gated, folder)
    if not tensors:
        raise CheckpointError(
            f"{folder} has no model that is read: it may be older than megatron-core's models"
        )
    states = _states(folder, places, found, weights, gated, table)
    version = plain(first.get("checkpoint_version", ""))
    return MegatronCheckpoint(
        path, f"Megatron-LM, checkpoint version {version}", args, tensors, states
    )


def _check_iterations(folder: Path, found: Mapping[Rank, Any]) -> None:
    if len({str(file.get("iteration")) for file in found.values()}) > 1:
        said = {rank: file.get("iteration") for rank, file in found.items()}
        raise CheckpointError(
            f"{folder}: its files are of several iterations ({plain(sorted(set(map(str, said.values()))))})"
        )


def _places(folder: Path) -> dict[Rank, Path]:
    """Returns the file of every (tensor rank, pipeline rank)."""
    found: dict[Rank, Path] = {}
    for file in sorted(folder.glob(f"mp_rank_*/{FILE}")):
        match = RANK.fullmatch(file.parent.name)
        if match is None or match[3]:
            raise CheckpointError(
                f"{folder} has {file.parent.name}: expert parallelism is not read"
            )
        found[int(match[1]), int(match[2] or 0)] = file
    if (0, 0) not in found:
        raise CheckpointError(
            f"{folder} has no file of the first rank: copy those of all machines together"
        )
    return found


def _named(model: Any, folder: Path) -> dict[str, Boxes]:
    """Returns the tensors of a stage; what Transformer Engine keeps beside them is none of the model."""
    if not isinstance(model, dict):
        raise CheckpointError(f"{folder}: a rank has other virtual stages than the first one")
    if "language_model" in model:
        raise CheckpointError(
            f"{folder} is of a model from before megatron-core: convert it with Megatron's own tools"
        )
    some = {name: value for name, value in model.items() if not str(name).endswith("_extra_state")}
    if unknown := [name for name, value in some.items() if not isinstance(value, Place)]:
        raise CheckpointError(f"{folder}: {plain(unknown[0])} is no tensor")
    return {
        str(name).removeprefix("module."): Spread(value.shape, value)
        for name, value in some.items()
    }


# ------------------------------------------------------------------------------------------------- optimizer's states


def _states(
    folder: Path, places: Mapping[Rank, Path], found: Mapping[Rank, Any], weights: Mapping[Rank, Chunks], gated: bool,
    args: Mapping[str, Any],
) -> States:  # fmt: skip
    """Returns what the optimizer has, of whole tensors; what is not certain is left out, and said."""

    def read() -> States:
        states = States(joined_parts(_own_states(folder, places, found, weights), gated, folder))
        add_counters(states, found[0, 0], args, found[0, 0].get("optimizer"))
        return states

    return certain(read, folder)


def _own_states(
    folder: Path,
    places: Mapping[Rank, Path],
    found: Mapping[Rank, Any],
    weights: Mapping[Rank, Chunks],
) -> dict[Rank, list[dict[str, Parts]]]:
    """Returns what each rank has of its parameters, by virtual stage."""
    files = {rank: file.with_name(DISTRIBUTED) for rank, file in places.items()}
    have = [file.is_file() for file in files.values()]
    if any(have):
        if not all(have):
            raise CheckpointError(
                f"{folder} has {sum(have)} of {len(have)} files {DISTRIBUTED}: copy those of all machines together"
            )
        outlines = dict(zip(files, outline([Job(file) for file in files.values()]), strict=True))
        return {rank: _flat(weights[rank], outlines[rank]) for rank in files}
    if not all(file.get("optimizer") for file in found.values()):
        raise LeftOut("it was saved without its optimizer, or its distrib_optim.pt are elsewhere")
    return {rank: _grouped(weights[rank], file["optimizer"]) for rank, file in found.items()}


def _flat(chunks: Chunks, state: Any) -> list[dict[str, Parts]]:
    buffers = buffers_of(state)
    if len(buffers) != len(chunks):
        raise LeftOut(
            f"its optimizer has {len(buffers)} flat buffers for {len(chunks)} virtual stages"
        )
    return [flat_states(some, buffer, None) for some, buffer in zip(chunks, buffers, strict=True)]


def _grouped(chunks: Chunks, state: Any) -> list[dict[str, Parts]]:
    if not isinstance(state, Mapping) or not isinstance(
        state.get("optimizer", state).get("state"), Mapping
    ):
        raise LeftOut(
            "its optimizer is several ones, or a distributed one whose distrib_optim.pt are elsewhere"
        )
    names: Iterable[tuple[int, str]] = (
        (index, name) for index, some in enumerate(chunks) for name in some
    )
    found = grouped_states({f"{index}.{name}": chunks[index][name] for index, name in names}, state)
    return [{name: found[f"{index}.{name}"] for name in some} for index, some in enumerate(chunks)]
