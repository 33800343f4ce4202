"""GPT models of megatron-core as a `Source`: names, layout of fused weights, and the folder of an iteration.

    checkpoint = MegatronCheckpoint(folder, args, tensors)     CheckpointError if the model is not supported

The layout is that of megatron/core/transformer/attention.py and mlp.py (NVIDIA/Megatron-LM, commit d98e8a64): the rows
of `linear_qkv` are, per query group, its queries, its key and its value; the rows of a gated `linear_fc1` are the gate
and then the other factor. Only weights are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from threed.checkpoint.files import CheckpointError, plain
from threed.checkpoint.lazy_tensors import LazyTensor, Shape, rows
from threed.config import ModelConfig
from threed.interop.huggingface.layouts import entries, name_problems, our_shapes
from threed.interop.megatron.model_args import model_of
from threed.parse import ParseError, read_file
from threed.zero.records import WEIGHT

WEIGHTS_ONLY = (
    "weights alone are imported, for states of Megatron-LM's optimizers are not read: a run begins at step 0, with"
    " moments of zero"
)
LAYER = re.compile(r"decoder\.layers\.(\d{1,9})\.(.+)")
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
Tensors = dict[str, LazyTensor]


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
    """Returns whether a folder has Megatron's legacy layout, one `mp_rank_*` folder per rank."""
    folder = step_folder(path) if path.is_dir() else None
    return folder is not None and any(folder.glob("mp_rank_*/model_optim_rng.pt"))


class MegatronCheckpoint:
    """The weights of a checkpoint as a `Source`.

    Args:
        path: the checkpoint's folder, for messages.
        args: Megatron's arguments, by name.
        tensors: tensors of the whole model by Megatron's names, with the layers' numbers.

    Raises:
        CheckpointError: the model cannot be expressed, or a tensor does not have the shape that it needs.
    """

    title = "Megatron-LM, torch_dist"

    def __init__(self, path: Path, args: Mapping[str, Any], tensors: Tensors) -> None:
        self.path, self.notes, self.state = path, [WEIGHTS_ONLY], dict[str, float]()
        self.model: ModelConfig = model_of(args, str(path))
        have = len({match[1] for name in tensors if (match := LAYER.fullmatch(name))})
        if self.model.layers > have:  # before shapes are computed for every layer
            raise CheckpointError(
                f"{path} does not fit its args: it has {have} of {self.model.layers} layers"
            )
        self.shapes: Mapping[str, Shape] = our_shapes(entries(self.model))
        self.parts = dict.fromkeys(self.shapes, (WEIGHT,))
        try:
            self._weights = ours(tensors, self.model)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from None

    def problems(self) -> Iterator[str]:
        """Yields the tensors that are missing, unexpected or of another shape."""
        found = {name: tuple(tensor.shape) for name, tensor in self._weights.items()}
        for problem in name_problems(found, self.shapes):
            yield f"{self.path} does not fit its args: {plain(problem, 3000)}"

    def tensor(self, part: str, name: str) -> LazyTensor:
        """Returns one of our tensors."""
        return self._weights[name]


# -------------------------------------------------------------------------------------------------------------- names


def ours(tensors: Tensors, model: ModelConfig) -> Tensors:
    """Returns tensors by our names; an unknown tensor keeps its own name, and is reported as unexpected.

    tensors: by Megatron's names, with the layers' numbers; a gated linear_fc1 has all gates first.
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
        del found["head.weight"]  # a copy of the embedding
    return found


def _in_layer(
    name: str, tensor: LazyTensor, model: ModelConfig
) -> Iterator[tuple[str, LazyTensor]]:
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
    kind: str, tensor: LazyTensor, model: ModelConfig
) -> Iterator[tuple[str, LazyTensor]]:
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
