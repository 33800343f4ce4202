"""Qwen2 and Qwen2.5 (arXiv 2407.10671).

Llama with biases of query, key and value, and optionally a sliding window in the last layers.
"""

from __future__ import annotations

from threed.config.architectures import record
from threed.config.architectures.record import Architecture, Key

record.register(
    Architecture(
        "qwen2",
        "Qwen2",
        "qwen2",
        "Qwen2ForCausalLM",
        rules=record.LLAMA_RULES,
        keys=record.decoder_keys(Key("sliding_window", "window", 4096), num_key_value_heads=32),
        fixed=record.SILU_GATES,
        takes=record.ROTARY | {"window", "layer_pattern"},
        qkv_bias=True,
        window="max_window_layers",
    )
)
