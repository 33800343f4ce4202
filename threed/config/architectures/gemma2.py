"""Gemma 2 (arXiv 2408.00118).

Differences from Llama: RMSNorm with the scale (1 + weight) before and after each branch; GELU-gated
MLP; word embeddings multiplied by sqrt(hidden); soft caps on attention scores and logits; a sliding
window in every second layer; tied head.
"""

from __future__ import annotations

from threed.config.architectures import record
from threed.config.architectures.record import Architecture, Key

GEMMA2 = record.register(
    Architecture(
        "gemma2",
        "Gemma 2",
        "gemma2",
        "Gemma2ForCausalLM",
        rules=(
            *record.EMBEDDING,
            *record.SANDWICH_NORMS,
            *record.HEADS,
            *record.GATED_MLP,
            *record.HEAD,
        ),
        keys=(
            *record.GEMMA_KEYS,
            Key("attn_logit_softcapping", "attention_softcap", 50.0),
            Key("final_logit_softcapping", "logit_softcap", 30.0),
        ),
        fixed=record.GEMMA_FIXED,
        accepted=frozenset(
            {"hidden_act", "sliding_window_size"}
        ),  # transformers ignores these keys of early configurations
        takes=record.ROTARY | record.GEMMA | {"attention_softcap", "logit_softcap"},
        defaults=record.HEAD_SIZE
        | {"tied": True, "window": 4096, "attention_softcap": 50.0, "logit_softcap": 30.0},
        limits=record.no_fraction,
        norm_offset=1.0,
        post_norms=True,
        activation="gelu",
        scaled_embedding=True,
        layer_pattern="sf",
        window="layer_types",
    )
)
