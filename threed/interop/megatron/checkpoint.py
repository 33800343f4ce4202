"""Megatron-LM's `torch_dist` checkpoints: a folder of torch.distributed.checkpoint, with names and shapes of the whole.

    checkpoint = open_dist(folder)                  a `Source`; CheckpointError for what is not read, by name

Layers are stacked along a first dimension, or have numbers; a gated `linear_fc1` has all gates first, or two tensors,
`_w` and `_v` (megatron/core/dist_checkpointing/strategies/torch.py, transformer_block.py, mlp.py). What all ranks have,
such as `args`, is in `common.pt`, or an entry (core_v0.19: serialization.py, save, `common_state`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from threed.checkpoint.files import CheckpointError, plain
from threed.checkpoint.lazy_tensors import Slice, concatenate
from threed.interop.megatron.weights import MegatronCheckpoint, Tensors, step_folder
from threed.interop.pickle_reader import PickleReader, Thing
from threed.interop.torch_dist import DistFolder
from threed.parse import ParseError, read_json

STACKED = re.compile(r"decoder\.layers\.(?!\d+\.)(.+)")
PREFIXES = ("model.module.module.", "model.module.", "model.", "")
WORD = "embedding.word_embeddings.weight"
OTHERS = ("optimizer.", "chained_", "rng_state", "rerun_state_machine")
MOST_LAYERS = 10_000


def is_dist(path: Path) -> bool:
    """Returns whether a folder is one, by its files."""
    folder = step_folder(path) if path.is_dir() else None
    return folder is not None and (folder / ".metadata").is_file()


def open_dist(path: Path) -> MegatronCheckpoint:
    """Returns what is in a folder. Raises CheckpointError."""
    folder = step_folder(path)
    assert folder is not None
    _check_kind(folder)
    reader = PickleReader()
    dist = DistFolder(folder, reader)
    common = _common(dist, reader)
    args = common.get("args")
    table = args.state if isinstance(args, Thing) and isinstance(args.state, dict) else None
    if table is None:
        raise CheckpointError(
            f"{path} has no args: of what model it is cannot be known (common.pt has them)"
        )
    prefix = next((some for some in PREFIXES if some + WORD in dist.shapes), None)
    if prefix is None:
        raise CheckpointError(f"{folder} has no {WORD}: it is none of a GPT model of megatron-core")
    names = {name.removeprefix(prefix): name for name in dist.shapes
             if name.startswith(prefix) and not name.startswith(OTHERS) and "_extra_state" not in name}  # fmt: skip
    found = dist.tensors(list(names.values()))
    tensors = unstacked({name: found[key] for name, key in names.items()})
    return MegatronCheckpoint(path, table, tensors)


def _check_kind(folder: Path) -> None:
    try:
        kind = read_json(folder / "metadata.json").get("sharded_backend")
    except (ParseError, AttributeError) as error:
        raise CheckpointError(
            f"{error}: Megatron says there of which kind a checkpoint is"
        ) from None
    if kind != "torch_dist":
        raise CheckpointError(f"{folder} is of kind {plain(kind)}: torch_dist is read")


def _common(dist: DistFolder, reader: PickleReader) -> Mapping[str, Any]:
    """Returns what is not of some rank: args, the iteration, the optimizer's groups."""
    file = dist.path / "common.pt"
    found = reader.torch_file(file) if file.is_file() else dist.entry("common_state/shard_0_1")
    found = found[0] if isinstance(found, list) and len(found) == 1 else found
    if found is None:
        found = {"args": dist.entry("args")}
    if not isinstance(found, dict):
        raise CheckpointError(
            f"{dist.path}: what is common to all ranks is not as Megatron writes it"
        )
    return found


def unstacked(tensors: Tensors) -> Tensors:
    """Returns tensors by the numbers of layers, and halves of one layer together."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        match = STACKED.fullmatch(name)
        if match is None:
            found[name] = tensor
            continue
        if not tensor.shape or tensor.shape[0] > MOST_LAYERS:
            raise CheckpointError(f"{plain(name)} has no layers, or more than any model")
        count, *shape = tensor.shape
        at = {n: (n, *(0 for _ in shape)) for n in range(count)}
        found |= {f"decoder.layers.{n}.{match[1]}": Slice(tensor, at[n], tuple(shape)) for n in at}
    for name in [name for name in found if name.endswith("_w") and name[:-1] + "v" in found]:
        found[name[:-2]] = concatenate([found.pop(name), found.pop(name[:-1] + "v")])
    return found
