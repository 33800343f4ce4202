"""Mistral: Llama with a sliding window in every layer or in no layer (arXiv 2310.06825)."""

from __future__ import annotations

from threed.config.architectures import record
from threed.config.architectures.record import Architecture, Key

record.register(
    Architecture(
        "mistral",
        "Mistral",
        "mistral",
        "MistralForCausalLM",
        rules=record.LLAMA_RULES,
        keys=record.decoder_keys(Key("sliding_window", "window", 4096), num_key_value_heads=8),
        fixed=record.SILU_GATES,
        takes=record.ROTARY | {"window"},
        window="all",
    )
)
