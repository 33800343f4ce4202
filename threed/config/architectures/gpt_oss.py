"""gpt-oss: experts with biases, attention sinks, a window in every second block (arXiv 2508.10925)."""

from __future__ import annotations

from threed.config.architectures import record
from threed.config.architectures.record import (
    ATTENTION,
    HF_BLOCK,
    MLP,
    Architecture,
    Key,
    Rule,
    one,
)

_HF, _EXPERT = f"{HF_BLOCK}.mlp.experts", f"{MLP}.experts.{{e}}"
_GATE_UP = ((f"{_EXPERT}.gate.weight", "x h"), (f"{_EXPERT}.up.weight", "x h"))
_GATE_UP_BIAS = ((f"{_EXPERT}.gate.bias", "x"), (f"{_EXPERT}.up.bias", "x"))

record.register(
    Architecture(
        "gpt_oss",
        "gpt-oss",
        "gpt_oss",
        "GptOssForCausalLM",
        rules=(
            *record.EMBEDDING,
            *record.PRE_NORMS,
            *record.HEADS,
            one(f"{HF_BLOCK}.self_attn.sinks", f"{ATTENTION}.sinks", "a"),
            one(f"{HF_BLOCK}.mlp.router.weight", f"{MLP}.router.weight", "e h"),
            one(f"{HF_BLOCK}.mlp.router.bias", f"{MLP}.router.bias", "e"),
            Rule(f"{_HF}.gate_up_proj", _GATE_UP, transposed=True, interleaved=True),
            Rule(f"{_HF}.gate_up_proj_bias", _GATE_UP_BIAS, interleaved=True),
            Rule(f"{_HF}.down_proj", ((f"{_EXPERT}.down.weight", "h x"),), transposed=True),
            Rule(f"{_HF}.down_proj_bias", ((f"{_EXPERT}.down.bias", "h"),)),
            *record.HEAD,
        ),
        keys=record.decoder_keys(
            Key("attention_bias", "bias", True),
            Key("sliding_window", "window", 128),
            Key("num_local_experts", "experts", 128, other="num_experts"),
            Key("num_experts_per_tok", "experts_per_token", 4, other="experts_per_token"),
            num_key_value_heads=8,
            head_dim=64,
            rms_norm_eps=1e-5,
        ),
        fixed={**record.SILU_GATES, "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        absent={
            "rope_parameters": {
                "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
        accepted=record.ROUTER_LOSS | {"initial_context_length"},
        takes=record.ROTARY | {"window", "layer_pattern", "bias", "experts", "experts_per_token"},
        defaults={**record.EXPERTS, "bias": True, "window": 128},
        activation="clamped_swiglu",
        routing={"after_top_k": True},
        expert_bias=True,
        sinks=True,
        layer_pattern="sf",
        window="layer_types",
        absent_theta=150000.0,
    )
)  # fmt: skip
