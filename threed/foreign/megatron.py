"""Megatron-LM's checkpoints of GPT models of megatron-core: weights, of any tensor and pipeline parallelism.

    checkpoint = LegacyCheckpoint(folder)           a `Source`; CheckpointError for what is not read, by name

A folder (`iter_0000100`, `release`, or the one above with `latest_checkpointed_iteration.txt`) has
`mp_rank_TT[_PPP]/model_optim_rng.pt` of tensor rank T and pipeline rank P (megatron/training/checkpointing.py,
get_checkpoint_name), a dictionary with `args`, and `model`, or `model0`, `model1`, ... of the virtual stages.

How tensors are laid out, say megatron/core/transformer/attention.py and mlp.py, and tools/checkpoint/schema_core.py
(NVIDIA/Megatron-LM, 2026-08-22): rows of `linear_qkv` are, for each group of queries, its queries, its key and its
value; those of a gated `linear_fc1` are gates and then the other factor, on each tensor rank; layers count from 0 on
each stage, and stages follow one another, first the first virtual one of every rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from threed.checkpoint.files import CheckpointError, plain
from threed.checkpoint.layouts import entries, name_problems, our_shapes
from threed.config import ModelConfig
from threed.foreign.megatron_args import model_of
from threed.foreign.outlines import Job, Place, Thing, outline
from threed.foreign.source import Progress
from threed.foreign.spread import Boxes, Rows, Shape, SideBySide, Spread, rows, stack
from threed.parse import ParseError, read_file
from threed.zero.records import WEIGHT

FILE = "model_optim_rng.pt"
RANK = re.compile(r"mp_rank_(\d+)(?:_(\d+))?(_\d+)?")
LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
ROW_PARALLEL = ("self_attention.linear_proj.weight", "mlp.linear_fc2.weight")
COLUMN_PARALLEL = ("self_attention.linear_qkv.", "mlp.linear_fc1.", "word_embeddings.weight", "output_layer.weight")
FUSED = {  # norms that are part of the layer behind them, with Transformer Engine
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
TOP = {
    "embedding.word_embeddings.weight": "embedding.word.weight",
    "embedding.position_embeddings.weight": "embedding.position.weight",
    "decoder.final_layernorm.weight": "head.norm.weight",
    "decoder.final_layernorm.bias": "head.norm.bias",
    "output_layer.weight": "head.weight",
}
IN_LAYER = {
    "input_layernorm.": "attention_norm.", "pre_mlp_layernorm.": "mlp_norm.", "mlp.linear_fc2.": "mlp.down.",
    "self_attention.linear_proj.": "attention.out.", "self_attention.q_layernorm.": "attention.query_norm.",
    "self_attention.k_layernorm.": "attention.key_norm.",
}  # fmt: skip
Tensors = dict[str, Boxes]


def step_folder(path: Path) -> Path | None:
    """Returns the folder of an iteration: `path`, or the one below that the tracker names; None: neither."""
    tracker = path / "latest_checkpointed_iteration.txt"
    if tracker.is_file():
        try:
            text = read_file(tracker, 2**12).decode("utf-8").strip()
        except (ParseError, ValueError):
            return None
        name = text if text == "release" else f"iter_{int(text):07d}" if text.isdecimal() and len(text) < 12 else ""
        return path / name if name and (path / name).is_dir() else None
    return path


def is_legacy(path: Path) -> bool:
    """Returns whether a folder is one, by its files."""
    folder = step_folder(path) if path.is_dir() else None
    return folder is not None and any(folder.glob(f"mp_rank_*/{FILE}"))


class MegatronCheckpoint:
    """Tensors by Megatron's names, whole, as a `Source`: weights alone."""

    def __init__(self, path: Path, title: str, args: Any, tensors: Tensors, notes: Sequence[str]) -> None:
        self.path, self.title, self.progress, self.notes = path, title, Progress(), list(notes)
        table = args.state if isinstance(args, Thing) and isinstance(args.state, dict) else None
        if table is None:
            raise CheckpointError(f"{path} has no args: of what model it is cannot be known")
        self.model: ModelConfig = model_of(table, str(path))
        self.shapes: Mapping[str, Shape] = our_shapes(entries(self.model))
        try:
            self._tensors = ours(tensors, self.model)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from None

    def problems(self) -> Iterator[str]:
        """Yields what of its tensors is missing, unexpected and misshaped."""
        found = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}
        for problem in name_problems(found, self.shapes):
            yield f"{self.path} does not fit its args: {plain(problem, 3000)}"

    def parts(self, name: str) -> Sequence[str]:
        """Returns what there is of one of our tensors: the weight."""
        return [WEIGHT]

    def part_dtype(self, name: str, part: str) -> torch.dtype:
        """Returns the format of a weight."""
        return self._tensors[name].dtype

    def part_box(self, name: str, part: str, start: Shape, size: Shape) -> Tensor:
        """Returns a box [*size] of a weight."""
        return self._tensors[name].box(start, size)


# -------------------------------------------------------------------------------------------------------------- names


def ours(tensors: Tensors, model: ModelConfig) -> Tensors:
    """Returns whole tensors by our names; what is not known keeps its own, and is then unexpected.

    tensors: by Megatron's names, layers by their number in the model; a gated linear_fc1 has all gates first.
    """
    found: Tensors = {}
    for name, tensor in tensors.items():
        match = LAYER.fullmatch(name)
        if match is None:
            found[TOP.get(name, name)] = tensor
            continue
        inside = match[2]
        for fused, alone in FUSED.items():
            inside = inside.replace(fused, alone)
        for key, part in _in_layer(inside, tensor, model):
            found[f"blocks.{match[1]}.{key}" if key != inside else name] = part
    if model.tied and "head.weight" in found:
        del found["head.weight"]  # stages have a copy of the embedding each
    return found


def _in_layer(name: str, tensor: Boxes, model: ModelConfig) -> Iterator[tuple[str, Boxes]]:
    module, _, kind = name.rpartition(".")
    if module == "self_attention.linear_qkv":
        yield from _queries_keys_values(kind, tensor, model)
    elif module == "mlp.linear_fc1" and model.arch != "gpt":
        middle = model.ffn or 0
        yield f"mlp.gate.{kind}", rows(tensor, (0, middle))
        yield f"mlp.up.{kind}", rows(tensor, (middle, 2 * middle))
    elif module == "mlp.linear_fc1":
        yield f"mlp.up.{kind}", tensor
    else:
        yield IN_LAYER.get(f"{module}.", f"{module}.") + kind, tensor


def _queries_keys_values(kind: str, tensor: Boxes, model: ModelConfig) -> Iterator[tuple[str, Boxes]]:
    """Yields the rows of queries, keys and values, group by group."""
    groups = model.kv_heads or model.heads
    each, head = model.heads // groups, model.head_dim or model.hidden // model.heads
    firsts = [group * (each + 2) * head for group in range(groups)]
    if tensor.shape[0] != groups * (each + 2) * head:
        raise CheckpointError(f"linear_qkv.{kind} has {tensor.shape[0]} rows, not {groups * (each + 2) * head}")
    yield f"attention.query.{kind}", rows(tensor, *((at, at + each * head) for at in firsts))
    yield f"attention.key.{kind}", rows(tensor, *((at + each * head, at + (each + 1) * head) for at in firsts))
    yield f"attention.value.{kind}", rows(tensor, *((at + (each + 1) * head, at + (each + 2) * head) for at in firsts))


# ------------------------------------------------------------------------------------------------------------- legacy


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
        raise CheckpointError(f"{folder} has {len(places)} of {tp * pp} files of tp {tp} and pp {pp}")
    chunks = [key for key in (["model"] if "model" in first else [f"model{n}" for n in range(1000)]) if key in first]
    tensors: Tensors = {}
    layers = 0
    for chunk in chunks:
        for stage in range(pp):
            ranks = [_named(found[rank, stage].get(chunk), folder) for rank in range(tp)]
            layers = _add(tensors, ranks, layers, bool(table.get("swiglu")), folder)
    if not chunks or not tensors:
        raise CheckpointError(f"{folder} has no model that is read: it may be older than megatron-core's models")
    notes = ["weights alone are read: moments, masters and steps are left out, a run begins at step 0"]
    version = plain(first.get("checkpoint_version", ""))
    return MegatronCheckpoint(path, f"Megatron-LM, checkpoint version {version}", args, tensors, notes)


def _places(folder: Path) -> dict[tuple[int, int], Path]:
    """Returns the file of every (tensor rank, pipeline rank)."""
    found: dict[tuple[int, int], Path] = {}
    for file in sorted(folder.glob(f"mp_rank_*/{FILE}")):
        match = RANK.fullmatch(file.parent.name)
        if match is None or match[3]:
            raise CheckpointError(f"{folder} has {file.parent.name}: expert parallelism is not read")
        found[int(match[1]), int(match[2] or 0)] = file
    if (0, 0) not in found:
        raise CheckpointError(f"{folder} has no file of the first rank: copy those of all machines together")
    return found


def _named(model: Any, folder: Path) -> dict[str, Place]:
    """Returns the tensors of a stage; what Transformer Engine keeps beside them is none of the model."""
    if not isinstance(model, dict):
        raise CheckpointError(f"{folder}: a rank has other virtual stages than the first one")
    if "language_model" in model:
        raise CheckpointError(f"{folder} is of a model from before megatron-core: convert it with Megatron's own tools")
    some = {name: value for name, value in model.items() if not str(name).endswith("_extra_state")}
    if unknown := [name for name, value in some.items() if not isinstance(value, Place)]:
        raise CheckpointError(f"{folder}: {plain(unknown[0])} is no tensor")
    return {str(name).removeprefix("module."): value for name, value in some.items()}


def _add(tensors: Tensors, ranks: Sequence[Mapping[str, Place]], layers: int, gated: bool, folder: Path) -> int:
    """Adds a stage's tensors, joined over its tensor ranks; returns how many layers there are so far."""
    if any(rank.keys() != ranks[0].keys() for rank in ranks):
        raise CheckpointError(f"{folder}: tensor ranks have different tensors")
    end = layers
    for name in ranks[0]:
        parts: list[Boxes] = [Spread(rank[name].shape, rank[name]) for rank in ranks]
        match, key = LAYER.fullmatch(name), name
        if match is not None:
            number = layers + int(match[1])
            key, end = f"decoder.layers.{number}.{match[2]}", max(end, number + 1)
        try:
            tensors.setdefault(key, _joined(name, parts, gated))
        except (CheckpointError, IndexError) as error:
            raise CheckpointError(f"{folder}: {plain(name)}: {error}") from None
    return end


def _joined(name: str, parts: list[Boxes], gated: bool) -> Boxes:
    """Returns what tensor ranks hold as one."""
    if name.endswith(ROW_PARALLEL):
        return SideBySide(parts)
    if "layer_norm_" in name or not any(key in name for key in COLUMN_PARALLEL):
        return parts[0]
    if gated and "mlp.linear_fc1." in name:
        half = [part.shape[0] // 2 for part in parts]
        gates = [(part, 0, n) for part, n in zip(parts, half, strict=True)]
        return Rows(gates + [(part, n, 2 * n) for part, n in zip(parts, half, strict=True)])
    return stack(parts)
