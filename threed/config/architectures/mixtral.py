"""Mixtral: Mistral with experts instead of MLPs (arXiv 2401.04088)."""

from __future__ import annotations

from threed.config.architectures import record
from threed.config.architectures.record import Architecture, Key

record.register(
    Architecture(
        "mixtral",
        "Mixtral",
        "mixtral",
        "MixtralForCausalLM",
        rules=(
            *record.EMBEDDING,
            *record.PRE_NORMS,
            *record.HEADS,
            *record.experts(f"{record.HF_BLOCK}.block_sparse_moe", "w1", "w3", "w2"),
            *record.HEAD,
        ),
        keys=record.decoder_keys(
            Key("sliding_window", "window", None),
            Key("num_local_experts", "experts", 8),
            Key("num_experts_per_tok", "experts_per_token", 2),
            num_key_value_heads=8,
            rms_norm_eps=1e-5,
        ),
        fixed={**record.SILU_GATES, "router_jitter_noise": 0.0},
        accepted=record.ROUTER_LOSS,
        takes=record.ROTARY | {"window", "experts", "experts_per_token"},
        defaults=record.EXPERTS,
        window="all",
        absent_theta=1000000.0,
    )
)
