"""Llama: RMSNorm, rotary positions, SwiGLU, grouped-query attention, no biases (arXiv 2307.09288).

Rotary scaling: arXiv 2407.21783.

With the model key `qk_norm`, a Llama is the same model as a Qwen3 without windows. Configurations
that were written before threed had the architecture "qwen3" describe Qwen3 models in this way.
"""

from __future__ import annotations

from threed.config.architectures import record
from threed.config.architectures.record import Architecture, Key

record.register(
    Architecture(
        "llama",
        "Llama",
        "llama",
        "LlamaForCausalLM",
        rules=record.LLAMA_RULES,
        keys=record.decoder_keys(
            Key("attention_bias", "bias", False), Key("mlp_bias", "mlp_bias", False)
        ),
        fixed=record.SILU_GATES,
        accepted=frozenset({"pretraining_tp"}),
        takes=record.ROTARY | {"qk_norm", "bias", "mlp_bias"},
        defaults={"mlp_bias": lambda keys: keys["bias"]},
        limits=record.no_fraction,
    )
)
