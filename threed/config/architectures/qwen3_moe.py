"""Qwen3 with experts in all blocks or in some (arXiv 2505.09388)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from threed.config.architectures import record
from threed.config.architectures.record import Architecture, Key, Keys


def _count(blocks: Any) -> int:
    """Returns the number of first blocks without experts, from a list of such blocks."""
    blocks = list(blocks or ())
    if blocks != list(range(len(blocks))):
        raise ValueError("only the first blocks can be without experts, such as [0, 1]")
    return len(blocks)


def _limits(keys: Keys) -> Iterator[str]:
    if keys["shared_experts"]:
        yield f"--model.shared-experts {keys['shared_experts']}"


record.register(
    Architecture(
        "qwen3_moe",
        "Qwen3 with experts",
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        rules=(
            *record.EMBEDDING,
            *record.PRE_NORMS,
            *record.HEADS,
            *record.HEAD_NORMS,
            *record.DENSE_MLP,
            *record.experts(f"{record.HF_BLOCK}.mlp", "gate_proj", "up_proj", "down_proj"),
            *record.HEAD,
        ),
        keys=record.decoder_keys(
            Key("attention_bias", "bias", False),
            Key("num_experts", "experts", 128, other="num_local_experts"),
            Key("num_experts_per_tok", "experts_per_token", 8),
            Key("moe_intermediate_size", "expert_ffn", 768),
            Key("norm_topk_prob", "normalize_experts", False),
            Key("decoder_sparse_step", "expert_every", 1),
            Key("mlp_only_layers", "dense_layers", (), _count, lambda count: list(range(count))),
            num_key_value_heads=4,
        ),
        fixed={**record.SILU_GATES, "use_sliding_window": False},
        written={"sliding_window": None},
        accepted=record.ROUTER_LOSS | {"max_window_layers"},
        takes=record.ROTARY
        | {"bias", "experts", "experts_per_token", "expert_ffn", "shared_experts"}
        | {"dense_layers", "expert_every", "normalize_experts"},
        defaults=record.EXPERTS,
        limits=_limits,
        qk_norm=True,
    )
)
