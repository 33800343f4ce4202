"""Reads the weights of Megatron-LM's `torch_dist` checkpoints of GPT models, as a `Source`.

    checkpoint = MegatronCheckpoint(folder)         raises CheckpointError if not supported

The folder is written by torch.distributed.checkpoint. Its tensors have the names and shapes of the
unsharded model. The tensors of the layers are either stacked along an additional first dimension,
or saved separately with the number of the layer in their names. A gated `linear_fc1` is saved as
one tensor with the gate's rows first, or as two tensors whose names end in `_w` (gate) and `_v` (up
projection). See megatron/core/dist_checkpointing/strategies/torch.py, transformer_block.py and
mlp.py. State common to all ranks, such as the arguments `args` of the run, is in the file
`common.pt`. Megatron-Core 0.19 instead writes it as the entry `common_state` of the checkpoint
(serialization.py, save).

Fused weights have the layout of megatron/core/transformer/attention.py and mlp.py
(NVIDIA/Megatron-LM, commit d98e8a64). `linear_qkv` consists of one block of rows per query group. A
block has the rows of the group's queries, followed by the rows of its key and of its value. A gated
`linear_fc1` has the rows of the gate, followed by the rows of the up projection.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from threed.checkpoint.files import CheckpointError, plain
from threed.checkpoint.lazy_tensors import LazyTensor, Slice, concatenate, rows
from threed.config import ModelConfig
from threed.core.messages import counted
from threed.core.parse import ParseError, read_file, read_json
from threed.interop.huggingface.layouts import entries, name_problems, native_shapes
from threed.interop.megatron.model_args import model_of
from threed.interop.pickles.pickle_reader import PickledObject, PickleReader
from threed.interop.pickles.torch_dist import DistFolder
from threed.zero.state import WEIGHT

WEIGHTS_ONLY = (
    "only weights are imported, because states of Megatron-LM's optimizers are not supported: a run starts at step 0"
    " with zero moments"
)
PREFIXES = ("model.module.module.", "model.module.", "model.", "")
WORD = "embedding.word_embeddings.weight"
NOT_MODEL = ("optimizer.", "chained_", "rng_state", "rerun_state_machine")
MOST_LAYERS = 10_000
LAYER = re.compile(r"decoder\.layers\.(\d{1,9})\.(.+)")
STACKED = re.compile(r"decoder\.layers\.(?!\d+\.)(.+)")
FUSED = {  # Transformer Engine fuses a norm with the linear layer that follows it
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
    "input_layernorm": "attention_norm", "pre_mlp_layernorm": "mlp_norm", "mlp.linear_fc2": "mlp.down",
    "self_attention.linear_proj": "attention.out", "self_attention.q_layernorm": "attention.query_norm",
    "self_attention.k_layernorm": "attention.key_norm",
}  # fmt: skip
Tensors = dict[str, LazyTensor]


def step_folder(path: Path) -> Path | None:
    """Returns the folder of one iteration, which contains the checkpoint.

    Args:
        path: this folder itself, or its parent folder. The parent folder contains the tracker file
            (latest_checkpointed_iteration.txt), which names the iteration.

    Returns:
        The folder; None if the tracker file is invalid or `path` is not a folder.

    Raises:
        CheckpointError: if the tracker file names a missing folder.
    """
    tracker = path / "latest_checkpointed_iteration.txt"
    if not tracker.is_file():
        return path if path.is_dir() else None
    try:
        name = read_file(tracker, 2**12).decode("utf-8").strip()
    except (ParseError, ValueError):
        return None
    if name.isdecimal() and len(name) < 12:
        name = f"iter_{int(name):07d}"
    elif name != "release":
        return None
    if not (path / name).is_dir():
        fix = "give the folder of an iteration itself"
        raise CheckpointError(f"{tracker} names {name}, which does not exist: {fix}")
    return path / name


def is_legacy(path: Path) -> bool:
    """Returns whether a folder has Megatron-LM's legacy layout, one `mp_rank_*` folder per rank."""
    folder = step_folder(path)
    return folder is not None and any(folder.glob("mp_rank_*/model_optim_rng.pt"))


def is_dist(path: Path) -> bool:
    """Returns whether a folder has the files of a `torch_dist` checkpoint."""
    folder = step_folder(path)
    return folder is not None and (folder / ".metadata").is_file()


class MegatronCheckpoint:
    """The weights of a Megatron-LM checkpoint, as a `Source`.

    Args:
        path: the folder of an iteration, or its parent folder, which contains the tracker file (see
            `step_folder`).

    Raises:
        CheckpointError: if the kind of the checkpoint or its model is not supported, or a fused
            tensor has a wrong shape.
    """

    title = "Megatron-LM, torch_dist"

    def __init__(self, path: Path) -> None:
        self.path, self.notes, self.state = path, [WEIGHTS_ONLY], dict[str, float]()
        folder = step_folder(path)
        assert folder is not None
        _check_kind(folder)
        reader = PickleReader()
        dist = DistFolder(folder, reader)
        self.model = model_of(_args(dist, reader), str(path))
        tensors = unstacked(_of_model(dist))
        present = len({match[1] for name in tensors if (match := LAYER.fullmatch(name))})
        # Checked before the shapes of all tensors are computed, because these shapes would fill the
        # memory if a malformed checkpoint claimed a huge number of layers.
        if self.model.layers > present:
            problem = f"it has {present} of {counted(self.model.layers, 'layer')}"
            raise CheckpointError(f"{path} does not fit its args: {problem}")
        self.shapes = native_shapes(entries(self.model))
        self.parts = dict.fromkeys(self.shapes, (WEIGHT,))
        try:
            self._weights = to_native(tensors, self.model)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from None

    def problems(self) -> Iterator[str]:
        """Yields a message for each tensor that is missing or unexpected, or has a wrong shape."""
        found = {name: tuple(tensor.shape) for name, tensor in self._weights.items()}
        for problem in name_problems(found, self.shapes):
            yield f"{self.path} does not fit its args: {plain(problem, 3000)}"

    def tensor(self, part: str, name: str) -> LazyTensor:
        """Returns the weight `name` (a global name of threed); `part` is always "weight"."""
        return self._weights[name]


# --------------------------------------------------------------------------------------------------------------- files


def _check_kind(folder: Path) -> None:
    try:
        kind = read_json(folder / "metadata.json").get("sharded_backend")
    except ParseError as error:
        why = "Megatron-LM records the kind of a checkpoint there"
        raise CheckpointError(f"{error}: {why}") from None
    if kind != "torch_dist":
        raise CheckpointError(f"{folder} is of kind {plain(kind)}: only torch_dist is supported")


def _args(dist: DistFolder, reader: PickleReader) -> Mapping[str, Any]:
    """Returns the arguments of the Megatron-LM run that wrote the checkpoint."""
    file = dist.path / "common.pt"
    common = reader.torch_file(file) if file.is_file() else dist.entry("common_state/shard_0_1")
    if isinstance(common, list) and len(common) == 1:
        common = common[0]
    args = common.get("args") if isinstance(common, dict) else dist.entry("args")
    if not isinstance(args, PickledObject) or not isinstance(args.state, dict):
        what = "they are normally in common.pt, and describe the model"
        raise CheckpointError(f"{dist.path} has no args: {what}")
    return args.state


def _of_model(dist: DistFolder) -> Tensors:
    """Returns the model's tensors by Megatron-LM name, without the prefix of wrapper modules."""
    prefix = next((some for some in PREFIXES if some + WORD in dist.shapes), None)
    if prefix is None:
        problem = f"has no {WORD}: it is not a checkpoint of a megatron-core GPT model"
        raise CheckpointError(f"{dist.path} {problem}")
    names = [name for name in dist.shapes if name.startswith(prefix) and "_extra_state" not in name]
    names = [name for name in names if not name.removeprefix(prefix).startswith(NOT_MODEL)]
    return {name.removeprefix(prefix): tensor for name, tensor in dist.tensors(names).items()}


# --------------------------------------------------------------------------------------------------------------- names


def unstacked(tensors: Tensors) -> Tensors:
    """Returns the tensors with the layout that `to_native` reads: one set of tensors per layer.

    A tensor of stacked layers is split into one tensor per layer. Two tensors whose names differ
    only in the endings `_w` and `_v` (gate and up projection of an MLP) are concatenated into one
    tensor.

    Args:
        tensors: tensors by Megatron-LM name, without prefix.

    Raises:
        CheckpointError: if a stacked tensor has no layer dimension or too many layers.
    """
    found: Tensors = {}
    for name, tensor in tensors.items():
        match = STACKED.fullmatch(name)
        if match is None:
            found[name] = tensor
            continue
        if not tensor.shape or tensor.shape[0] > MOST_LAYERS:
            raise CheckpointError(
                f"{plain(name)} has no layer dimension, or more layers than any model"
            )
        count, *shape = tensor.shape
        for number in range(count):
            start = (number, *(0 for _ in shape))
            found[f"decoder.layers.{number}.{match[1]}"] = Slice(tensor, start, tuple(shape))
    for name in [name for name in found if name.endswith("_w") and name[:-1] + "v" in found]:
        found[name[:-2]] = concatenate([found.pop(name), found.pop(name[:-1] + "v")])
    return found


def to_native(tensors: Tensors, model: ModelConfig) -> Tensors:
    """Splits fused weights, and returns all tensors by their global names in threed.

    A tensor with an unknown name keeps its Megatron-LM name, so that `problems` reports it as
    unexpected.

    Args:
        tensors: the result of `unstacked`: tensors by Megatron-LM name, with layer numbers. The
            rows of a gated linear_fc1 begin with the gate's rows.
        model: the model configuration.
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
    if model.tied:
        found.pop("head.weight", None)  # a tied head is the same weight as the embedding
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
        yield f"{IN_LAYER.get(module, module)}.{kind}", tensor


def _queries_keys_values(
    kind: str, tensor: LazyTensor, model: ModelConfig
) -> Iterator[tuple[str, LazyTensor]]:
    """Splits linear_qkv, and yields (name, tensor) for the query, key and value projections.

    Args:
        kind: "weight" or "bias".
        tensor: the weight or bias of linear_qkv.
        model: the model configuration.
    """
    groups = model.kv_heads or model.heads
    each, head = model.heads // groups, model.head_dim or model.hidden // model.heads
    size = (each + 2) * head
    if tensor.shape[:1] != (groups * size,):
        problem = f"linear_qkv.{kind} is {list(tensor.shape)}, and needs {groups * size} rows"
        raise CheckpointError(problem)
    bounds = {"query": (0, each), "key": (each, each + 1), "value": (each + 1, each + 2)}
    for part, (first, last) in bounds.items():
        ranges = [(at + first * head, at + last * head) for at in range(0, groups * size, size)]
        yield f"attention.{part}.{kind}", rows(tensor, *ranges)
