"""Tensors of GPT models of megatron-core by its names, and as a `Source`: of any tensor and pipeline parallelism.

    checkpoint = MegatronCheckpoint(folder, title, args, tensors, states)    CheckpointError for what is not read
    tensors = joined(ranks, gated, folder)                                   of what each rank has of each stage

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
from threed.foreign.megatron_optim import MOMENTS, LeftOut, Parts, States
from threed.foreign.outlines import Thing
from threed.foreign.spread import Boxes, Columns, Rows, Shape, SideBySide, rows, stack
from threed.parse import ParseError, read_file
from threed.zero.records import WEIGHT

FILE = "model_optim_rng.pt"
LAYER = re.compile(r"decoder\.layers\.(\d{1,9})\.(.+)")
ROW_PARALLEL = ("self_attention.linear_proj.weight", "mlp.linear_fc2.weight")
COLUMN_PARALLEL = (
    "self_attention.linear_qkv.",
    "mlp.linear_fc1.",
    "word_embeddings.weight",
    "output_layer.weight",
)
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
Rank = tuple[int, int]  # of tensors and of the pipeline
Chunks = list[dict[str, Boxes]]  # a rank's tensors, by virtual stage


def step_folder(path: Path) -> Path | None:
    """Returns the folder of an iteration: `path`, or the one below that the tracker names; None: neither.

    Raises CheckpointError where the tracker names one that is not there.
    """
    tracker = path / "latest_checkpointed_iteration.txt"
    if tracker.is_file():
        try:
            text = read_file(tracker, 2**12).decode("utf-8").strip()
        except (ParseError, ValueError):
            return None
        name = (
            text
            if text == "release"
            else f"iter_{int(text):07d}"
            if text.isdecimal() and len(text) < 12
            else ""
        )
        if name and not (path / name).is_dir():
            raise CheckpointError(
                f"{tracker} names {name}, which is not there: give the folder of an iteration itself"
            )
        return path / name if name else None
    return path


def is_legacy(path: Path) -> bool:
    """Returns whether a folder is one, by its files."""
    folder = step_folder(path) if path.is_dir() else None
    return folder is not None and any(folder.glob(f"mp_rank_*/{FILE}"))


class MegatronCheckpoint:
    """Tensors by Megatron's names, whole, as a `Source`; states: of their optimizer, masters in the weights' stead."""

    def __init__(self, path: Path, title: str, args: Any, tensors: Tensors, states: States) -> None:
        self.path, self.title, self.progress, self.scale = (
            path,
            title,
            states.progress,
            states.scale,
        )
        self.notes = [states.note] if states.note else []
        table = args.state if isinstance(args, Thing) and isinstance(args.state, dict) else None
        if table is None:
            raise CheckpointError(f"{path} has no args: of what model it is cannot be known")
        self.model: ModelConfig = model_of(table, str(path))
        have = len({match[1] for name in tensors if (match := LAYER.fullmatch(name))})
        if self.model.layers > have:  # before each of them is made
            raise CheckpointError(
                f"{path} does not fit its args: it has {have} of {self.model.layers} layers"
            )
        self.shapes: Mapping[str, Shape] = our_shapes(entries(self.model))
        masters = {name: some[WEIGHT] for name, some in states.parts.items() if WEIGHT in some}
        try:
            self._parts = {WEIGHT: ours(tensors | masters, self.model)}
            for part in MOMENTS:
                self._parts[part] = ours(
                    {name: s[part] for name, s in states.parts.items() if part in s}, self.model
                )
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from None

    def problems(self) -> Iterator[str]:
        """Yields what of its tensors is missing, unexpected and misshaped."""
        found = {name: tuple(tensor.shape) for name, tensor in self._parts[WEIGHT].items()}
        for problem in name_problems(found, self.shapes):
            yield f"{self.path} does not fit its args: {plain(problem, 3000)}"
        for part in MOMENTS:
            for name, tensor in self._parts[part].items():
                if tuple(tensor.shape) != self.shapes.get(name):
                    yield f"{self.path}: {part} of {plain(name)} is {list(tensor.shape)}, unlike its weight"
                    return

    def parts(self, name: str) -> Sequence[str]:
        """Returns what there is of one of our tensors: the weight, and both moments or none."""
        return (
            [WEIGHT, *MOMENTS] if all(name in self._parts[part] for part in MOMENTS) else [WEIGHT]
        )

    def part_dtype(self, name: str, part: str) -> torch.dtype:
        """Returns the format of a part."""
        return self._parts[part][name].dtype

    def part_box(self, name: str, part: str, start: Shape, size: Shape) -> Tensor:
        """Returns a box [*size] of a part."""
        return self._parts[part][name].box(start, size)


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


def _queries_keys_values(
    kind: str, tensor: Boxes, model: ModelConfig
) -> Iterator[tuple[str, Boxes]]:
    """Yields the rows of queries, keys and values, group by group."""
    groups = model.kv_heads or model.heads
    each, head = model.heads // groups, model.head_dim or model.hidden // model.heads
    if tensor.shape[:1] != (groups * (each + 2) * head,):
        raise CheckpointError(
            f"linear_qkv.{kind} is {list(tensor.shape)}, and needs {groups * (each + 2) * head} rows"
        )
    firsts = [group * (each + 2) * head for group in range(groups)]
    yield f"attention.query.{kind}", rows(tensor, *((at, at + each * head) for at in firsts))
    yield (
        f"attention.key.{kind}",
        rows(tensor, *((at + each * head, at + (each + 1) * head) for at in firsts)),
    )
    yield (
        f"attention.value.{kind}",
        rows(tensor, *((at + (each + 1) * head, at + (each + 2) * head) for at in firsts)),
    )


# ------------------------------------------------------------------------------------------------------------- stages


def joined(ranks: Mapping[Rank, Chunks], gated: bool, folder: Path) -> Tensors:
    """Returns whole tensors, of what each rank has of each virtual stage; layers by their number in the model."""
    tensors: Tensors = {}
    tp, pp, layers = 1 + max(rank for rank, _ in ranks), 1 + max(stage for _, stage in ranks), 0
    for chunk in range(len(ranks[0, 0])):
        for stage in range(pp):
            layers = _add(
                tensors, [ranks[rank, stage][chunk] for rank in range(tp)], layers, gated, folder
            )
    return tensors


def joined_parts(
    ranks: Mapping[Rank, Sequence[Mapping[str, Parts]]], gated: bool, folder: Path
) -> dict[str, Parts]:
    """Returns parts of whole tensors, of what each rank has of each virtual stage. LeftOut where ranks differ."""
    if (
        len(
            {
                frozenset(parts)
                for chunks in ranks.values()
                for some in chunks
                for parts in some.values()
            }
        )
        > 1
    ):
        raise LeftOut(
            "some of its ranks have other parts of the optimizer than others"
        )  # and layers are counted
    found: dict[str, Parts] = {}
    for part in (WEIGHT, *MOMENTS):
        one = {rank: [{name: parts[part] for name, parts in some.items() if part in parts} for some in chunks]
               for rank, chunks in ranks.items()}  # fmt: skip
        for name, tensor in joined(one, gated, folder).items():
            found.setdefault(name, {})[part] = tensor
    return found


def _add(
    tensors: Tensors, ranks: Sequence[Mapping[str, Boxes]], layers: int, gated: bool, folder: Path
) -> int:
    """Adds a stage's tensors, joined over its tensor ranks; returns how many layers there are then.

    layers: how many there are before.
    """
    if any(rank.keys() != ranks[0].keys() for rank in ranks):
        raise CheckpointError(f"{folder}: tensor ranks have different tensors")
    end = layers
    for name in ranks[0]:
        parts = [rank[name] for rank in ranks]
        match, key = LAYER.fullmatch(name), name
        if match is not None:
            number = layers + int(match[1])
            key, end = f"decoder.layers.{number}.{match[2]}", max(end, number + 1)
        try:
            tensors.setdefault(key, _side_by_side(name, parts, gated))
        except (CheckpointError, IndexError) as error:
            raise CheckpointError(f"{folder}: {plain(name)}: {error}") from None
    return end


def _side_by_side(name: str, parts: list[Boxes], gated: bool) -> Boxes:
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


def share(name: str, whole: Boxes, rank: int, tp: int, gated: bool) -> Boxes:
    """Returns what a tensor rank has of a whole tensor. CheckpointError where it does not divide."""
    row = name.endswith(ROW_PARALLEL)
    if "layer_norm_" in name or not (row or any(key in name for key in COLUMN_PARALLEL)):
        return whole
    halves = 2 if gated and "mlp.linear_fc1." in name else 1
    size, rest = divmod(whole.shape[1 if row else 0], tp * halves)
    if rest:
        raise CheckpointError(f"{plain(name)} does not divide by {tp} tensor ranks")
    if row:
        return Columns(whole, rank * size, (rank + 1) * size)
    return rows(
        whole,
        *(((half * tp + rank) * size, (half * tp + rank + 1) * size) for half in range(halves)),
    )
