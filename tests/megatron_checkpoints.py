"""Writes checkpoints in Megatron-LM's format, for tests of `threed convert --allow-pickle`.

Megatron-LM itself needs a GPU to train. The layouts follow its sources, which
`threed.interop.megatron.checkpoint` names.
"""

from __future__ import annotations

import argparse
import enum
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from threed.config import ModelConfig
from threed.config.resolution import resolve_model
from threed.interop.huggingface.layouts import entries, native_shapes

LLAMA = {
    "num_layers": 4, "hidden_size": 24, "num_attention_heads": 6, "group_query_attention": True, "num_query_groups": 2,
    "kv_channels": 4, "ffn_hidden_size": 20, "padded_vocab_size": 52, "max_position_embeddings": 32, "swiglu": True,
    "normalization": "RMSNorm", "position_embedding_type": "rope", "rotary_base": 50000, "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True, "norm_epsilon": 1e-6, "num_experts": None, "spec": None,
}  # fmt: skip
GPT = {
    "num_layers": 4, "hidden_size": 24, "num_attention_heads": 6, "group_query_attention": False,
    "num_query_groups": 1, "kv_channels": 4, "ffn_hidden_size": 20, "padded_vocab_size": 52, "swiglu": False,
    "max_position_embeddings": 32, "normalization": "LayerNorm", "position_embedding_type": "learned_absolute",
    "add_bias_linear": True, "untie_embeddings_and_output_weights": False, "norm_epsilon": 1e-5,
    "bias_gelu_fusion": True,
}  # fmt: skip


class AttnBackend(enum.Enum):
    """An enumeration like those in Megatron-LM's settings."""

    auto = 5


def model_of(args: dict[str, Any]) -> ModelConfig:
    """Returns the threed configuration for Megatron-LM's `args`, without using the importer."""
    gated = args["swiglu"]
    keys = {
        "arch": "llama" if gated else "gpt", "layers": 4, "hidden": 24, "heads": 6, "kv_heads": 2 if gated else 6,
        "head_dim": 4, "ffn": 20, "vocab": 52, "seq": 32, "positions": 32, "norm_eps": args["norm_epsilon"],
        "tied": not args["untie_embeddings_and_output_weights"], "bias": args["add_bias_linear"],
        "mlp_bias": args["add_bias_linear"],
    }  # fmt: skip
    if gated:
        keys |= {
            "rope_theta": float(args["rotary_base"]),
            "qk_norm": bool(args.get("qk_layernorm")),
        }
        if args.get("add_qkv_bias"):
            keys = {
                key: value
                for key, value in keys.items()
                if key not in ("bias", "mlp_bias", "qk_norm")
            }
            keys["arch"] = "qwen2"
    return resolve_model(ModelConfig.model_validate(keys))


def weights_of(model: ModelConfig) -> dict[str, Tensor]:
    """Returns random bf16 weights under threed's names."""
    draw = torch.Generator().manual_seed(1)
    shapes = native_shapes(entries(model))
    return {name: torch.randn(shape, generator=draw).bfloat16() for name, shape in shapes.items()}


def whole(weights: dict[str, Tensor], model: ModelConfig, engine: bool) -> dict[str, Tensor]:
    """Returns the full model's tensors under Megatron-LM's names.

    Args:
        weights: weights under threed's names.
        model: the configuration.
        engine: whether norms have the names of Transformer Engine.
    """
    attention, mlp = ("self_attention.linear_qkv.layer_norm_", "mlp.linear_fc1.layer_norm_")
    norms = (attention, mlp) if engine else ("input_layernorm.", "pre_mlp_layernorm.")
    groups, head = model.kv_heads or model.heads, model.head_dim
    names = {"attention_norm.": norms[0], "mlp_norm.": norms[1], "attention.out.": "self_attention.linear_proj.",
             "attention.query_norm.": "self_attention.q_layernorm.", "mlp.down.": "mlp.linear_fc2.",
             "attention.key_norm.": "self_attention.k_layernorm."}  # fmt: skip
    found = {"embedding.word_embeddings.weight": weights["embedding.word.weight"]}
    for ours, theirs in (("embedding.position.weight", "embedding.position_embeddings.weight"),
                         ("head.norm.weight", "decoder.final_layernorm.weight"), ("head.weight", "output_layer.weight"),
                         ("head.norm.bias", "decoder.final_layernorm.bias")):  # fmt: skip
        found |= {theirs: weights[ours]} if ours in weights else {}
    for layer in range(model.layers):
        block = {name.removeprefix(f"blocks.{layer}."): w for name, w in weights.items()
                 if name.startswith(f"blocks.{layer}.")}  # fmt: skip
        put = f"decoder.layers.{layer}."
        for kind in ("weight", "bias"):
            if f"attention.query.{kind}" in block:
                parts = [block[f"attention.{part}.{kind}"] for part in ("query", "key", "value")]
                by_group = [part.reshape(groups, -1, *part.shape[1:]) for part in parts]
                found[f"{put}self_attention.linear_qkv.{kind}"] = torch.cat(by_group, 1).flatten(
                    0, 1
                )
            if f"mlp.up.{kind}" in block:
                gate = [block[f"mlp.gate.{kind}"]] if model.arch != "gpt" else []
                found[f"{put}mlp.linear_fc1.{kind}"] = torch.cat([*gate, block[f"mlp.up.{kind}"]])
            for ours, theirs in names.items():
                found |= {put + theirs + kind: block[ours + kind]} if ours + kind in block else {}
    assert head == 4
    return found


def write_dist(
    out: Path, args: dict[str, Any], weights: dict[str, Tensor], numbered: bool = False, engine: bool = True,
    entry: bool = False, more: dict[str, Tensor] | None = None,
) -> Path:  # fmt: skip
    """Writes a `torch_dist` checkpoint with one tensor rank per rank. Collective.

    Each rank has its share of a tensor's columns or rows, and every other layer of the tensors that all ranks hold.

    Args:
        numbered: whether names contain the number of the layer, and the two halves of a gated
            linear_fc1 have separate names.
        engine: whether norms have the names of Transformer Engine.
        entry: whether `common_state` is an entry, as in core 0.19, and not the file common.pt.
        more: tensors to add, or to use instead of others.
    """
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    model, state, rank = model_of(args), dict[str, Any](), dist.get_rank()
    for key, parts, size in pieces(whole(weights, model, engine), args["swiglu"], numbered):
        state[key] = sharded(
            [(first, own.clone()) for first, own in parts], size, rank, torch.bfloat16
        )
    state |= more or {}
    state["optimizer.state.exp_avg.decoder.final_layernorm.weight"] = torch.zeros(model.hidden)
    settings = argparse.Namespace(
        **args, attention_backend=AttnBackend.auto, consumed_train_samples=3200
    )
    common: dict[str, Any] = {"args": settings, "iteration": 100}
    if numbered:
        state["args"] = settings
    elif entry:
        state["common_state/shard_0_1"] = [common]
    # like Megatron-LM, which does not flatten lists
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(out), planner=planner)
    if rank == 0:
        if not numbered and not entry:
            torch.save(common, out / "common.pt")
        (out / "metadata.json").write_text(
            '{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'
        )
    dist.barrier()
    return out


Pieces = list[tuple[list[int], Tensor]]  # for each box: its start per dimension, and its values


def pieces(
    tensors: dict[str, Tensor], gated: bool, numbered: bool = False
) -> Iterator[tuple[str, Pieces, torch.Size]]:
    """Yields this rank's part of each tensor: its key, its boxes, and the full tensor's shape."""
    import torch.distributed as dist

    rank, tp = dist.get_rank(), dist.get_world_size()
    for name, layers in by_layer(tensors, numbered).items():
        split = 1 if "linear_proj.weight" in name or "linear_fc2.weight" in name else 0
        copies = "layer_norm" in name or not any(
            key in name
            for key in (
                "qkv",
                "proj.weight",
                "fc1",
                "fc2.weight",
                "word_embeddings",
                "output_layer",
            )
        )
        stacked = "layers." in name and not numbered
        parts = []
        for number, layer in enumerate(layers):
            halves = (
                layer.chunk(2) if gated and "fc1." in name and "layer_norm" not in name else [layer]
            )
            names = [
                name + ("_w", "_v")[i] * (numbered and len(halves) > 1) for i in range(len(halves))
            ]
            at = 0
            for key, half in zip(names, halves, strict=True):
                at = 0 if numbered else at
                own = half if copies else half.chunk(tp, split)[rank]
                first = [0] * half.dim()
                first[0] = at
                if not copies:
                    first[split] += rank * own.shape[split]
                at += half.shape[0]
                parts.append(
                    (key, [number] * stacked + first, own[None] if stacked else own, number)
                )
        for key in dict.fromkeys(part[0] for part in parts):
            mine = [
                part for part in parts if part[0] == key and (not copies or part[3] % tp == rank)
            ]
            rows = layers[0].shape[0] // (2 if key.endswith(("_w", "_v")) else 1)
            size = torch.Size([len(layers)] * stacked + [rows, *layers[0].shape[1:]])
            yield key, [(first, own) for _, first, own, _ in mine], size


def by_layer(tensors: dict[str, Tensor], numbered: bool) -> dict[str, list[Tensor]]:
    """Groups tensors: those of all layers under one key."""
    found: dict[str, list[Tensor]] = {}
    for name, tensor in tensors.items():
        words = name.split(".")
        if words[1] == "layers" and not numbered:
            del words[2]
        found.setdefault(".".join(words), []).append(tensor)
    return found


def sharded(parts: Pieces, size: torch.Size, rank: int, dtype: torch.dtype) -> Any:
    """Returns a sharded tensor with this rank's boxes, as Megatron-LM creates it for torch."""
    import torch.distributed as dist
    from torch.distributed._shard.sharded_tensor import (
        Shard,
        ShardedTensor,
        ShardedTensorMetadata,
        TensorProperties,
    )
    from torch.distributed._shard.sharding_spec import ShardMetadata

    mine = [ShardMetadata(first, list(part.shape), f"rank:{rank}/cpu") for first, part in parts]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    about = ShardedTensorMetadata(
        [box for some in everyone for box in some], size, TensorProperties(dtype)
    )
    shards = [Shard(part, box) for (_, part), box in zip(parts, mine, strict=True)]
    return ShardedTensor._init_from_local_shards_and_global_metadata(shards, about)
