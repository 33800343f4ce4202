"""Megatron-LM's `torch_dist` checkpoints: a folder of torch.distributed.checkpoint, with names and shapes of the whole.

    checkpoint = open_dist(folder)                  a `Source`; CheckpointError for what is not read, by name

`.metadata` (a pickle) says of each tensor its shape, its boxes, and where in a `__R_N.distcp` file each box is, as
torch.save writes it. Layers are stacked along a first dimension, or have numbers; a gated `linear_fc1` has all gates
first, or two tensors, `_w` and `_v` (megatron/core/dist_checkpointing/strategies/torch.py, transformer_block.py,
mlp.py). `args` are in `common.pt`, or among the entries.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from threed.checkpoint import coverage
from threed.checkpoint.files import CheckpointError, plain
from threed.foreign.megatron import MegatronCheckpoint, Tensors, step_folder
from threed.foreign.outlines import Job, Place, outline
from threed.foreign.spread import At, Boxed, Boxes, Spread, stack
from threed.parse import ParseError, read_json

STACKED = re.compile(r"decoder\.layers\.(?!\d+\.)(.+)")
PREFIXES = ("model.module.module.", "model.module.", "model.", "")
WORD = "embedding.word_embeddings.weight"
OTHERS = ("optimizer.", "rng_state", "rerun_state_machine")
MOST_LAYERS = 100_000


def is_dist(path: Path) -> bool:
    """Returns whether a folder is one, by its files."""
    folder = step_folder(path) if path.is_dir() else None
    return folder is not None and (folder / ".metadata").is_file()


def open_dist(path: Path) -> MegatronCheckpoint:
    """Returns what is in a folder. Raises CheckpointError."""
    folder = step_folder(path)
    assert folder is not None
    _check_kind(folder)
    common = folder / "common.pt"
    jobs = [Job(folder / ".metadata", kind="pickle"), *([Job(common)] if common.is_file() else [])]
    metadata, *rest = outline(jobs)
    try:
        state = metadata.state
        places = {(key.state["fqn"], tuple(key.state.get("offset") or ())): info.state
                  for key, info in state["storage_data"].items()}  # fmt: skip
        args = rest[0].get("args") if rest else _entry(folder, places, "args")
        tensors = _layers(_tensors(folder, state["state_dict_metadata"], places))
    except (KeyError, TypeError, AttributeError, ValueError, IndexError, OverflowError) as error:
        text = f"{type(error).__name__}: {plain(error)}"
        raise CheckpointError(f"{folder} is not as torch.distributed.checkpoint writes it ({text})") from None
    notes = ["weights alone are read: moments, masters and steps are left out, a run begins at step 0"]
    return MegatronCheckpoint(path, "Megatron-LM, torch_dist", args, tensors, notes)


def _check_kind(folder: Path) -> None:
    try:
        kind = read_json(folder / "metadata.json").get("sharded_backend")
    except ParseError as error:
        raise CheckpointError(f"{error}: Megatron says there of which kind a checkpoint is") from None
    if kind != "torch_dist":
        raise CheckpointError(f"{folder} is of kind {plain(kind)}: torch_dist and the legacy one are read")


def _entry(folder: Path, places: Mapping[Any, Any], name: str) -> Any:
    """Returns an object that is an entry of its own."""
    if (name, ()) not in places:
        return None
    return outline([_job(folder, places[name, ()])])[0]


def _job(folder: Path, info: Mapping[str, Any]) -> Job:
    file, first, length = info["relative_path"], info["offset"], info["length"]
    if Path(file).name != file or not file.isprintable():
        raise CheckpointError(f"{folder} names {plain(file)}, which is no file of it")
    if info.get("transform_descriptors"):
        raise CheckpointError(f"{folder} has files that are compressed or encrypted: that is not read")
    return Job(folder / file, first, first + length)


def _tensors(folder: Path, about: Mapping[str, Any], places: Mapping[Any, Any]) -> Tensors:
    """Returns the tensors of the model, by their names without what is before all of them."""
    prefix = next((some for some in PREFIXES if some + WORD in about), None)
    if prefix is None:
        raise CheckpointError(f"{folder} has no {WORD}: it is none of a GPT model of megatron-core")
    wanted = {
        name: entry.state for name, entry in about.items()
        if entry.name.endswith(".TensorStorageMetadata") and name.startswith(prefix) and not name.startswith(OTHERS)
        and "_extra_state" not in name
    }  # fmt: skip
    boxes = {name: [(tuple(c.state["offsets"]), tuple(c.state["sizes"])) for c in entry["chunks"]]
             for name, entry in wanted.items()}  # fmt: skip
    listed = [["weight", name, list(wanted[name]["size"]), *map(list, box)] for name in wanted for box in boxes[name]]
    for problem in coverage.of_boxes([{"boxes": listed}]):
        raise CheckpointError(f"{folder}: {plain(problem)}")
    keys = [(name, first) for name in wanted for first, _ in boxes[name]]
    found = dict(zip(keys, outline([_job(folder, places[key]) for key in keys]), strict=True))
    tensors: Tensors = {}
    for name, entry in wanted.items():
        parts: list[tuple[tuple[int, ...], Boxes]] = []
        for first, size in boxes[name]:
            place = found[name, first]
            if not isinstance(place, Place) or place.shape != size:
                raise CheckpointError(f"{folder}: a box of {plain(name)} has another shape than its list says")
            parts.append((first, Spread(place.shape, place)))
        tensors[name.removeprefix(prefix)] = Boxed(entry["size"], parts)
    return tensors


def _layers(tensors: Tensors) -> Tensors:
    """Returns tensors by the numbers of layers, and halves of one layer together."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        match = STACKED.fullmatch(name)
        if match is None:
            found[name] = tensor
            continue
        if not tensor.shape or tensor.shape[0] > MOST_LAYERS:
            raise CheckpointError(f"{plain(name)} has no layers, or more than any model")
        found |= {f"decoder.layers.{n}.{match[1]}": At(tensor, n) for n in range(tensor.shape[0])}
    for name in [name for name in found if name.endswith("_w") and name[:-1] + "v" in found]:
        found[name[:-2]] = stack([found.pop(name), found.pop(name[:-1] + "v")])
    return found
