"""Qwen3: Llama with a norm on each query and key head and any head size (arXiv 2505.09388)."""

from __future__ import annotations

from collections.abc import Iterator

from threed.config.architectures import record
from threed.config.architectures.record import Architecture, Key, Keys


def _limits(keys: Keys) -> Iterator[str]:
    if keys["mlp_bias"] or (keys["mlp_bias"] is None and keys["bias"] and keys["arch"] == "llama"):
        yield "--model.bias true with --model.qk-norm true, because its MLP has no biases (--model.mlp-bias false)"


record.register(
    Architecture(
        "qwen3",
        "Qwen3",
        "qwen3",
        "Qwen3ForCausalLM",
        rules=(*record.LLAMA_RULES, *record.HEAD_NORMS),
        keys=record.decoder_keys(
            Key("attention_bias", "bias", False),
            Key("sliding_window", "window", 4096),
            num_key_value_heads=32,
            head_dim=128,
        ),
        fixed=record.SILU_GATES,
        takes=record.ROTARY | {"window", "layer_pattern", "bias"},
        limits=_limits,
        qk_norm=True,
        window="max_window_layers",
    )
)
