"""Gemma 3, its text model: Gemma 2 with norms of query and key heads in place of soft caps, a window in five of six
layers, and rotary angles of their own in these (arXiv 2503.19786)."""

from __future__ import annotations

from threed.architectures import record
from threed.architectures.record import Architecture, Key

record.register(
    Architecture(
        "gemma3",
        "Gemma 3",
        "gemma3_text",
        "Gemma3ForCausalLM",
        rules=(
            *record.EMBEDDING,
            *record.SANDWICH_NORMS,
            *record.HEADS,
            *record.HEAD_NORMS,
            *record.GATED_MLP,
            *record.HEAD,
        ),
        keys=record.decoder_keys(
            *record.GEMMA_KEYS,
            Key("final_logit_softcapping", "logit_softcap", None),
            num_key_value_heads=4,
            head_dim=256,
            tie_word_embeddings=True,
        ),
        fixed=record.GEMMA_FIXED
        | {"attn_logit_softcapping": None},  # transformers would not use it
        takes=record.ROTARY | record.GEMMA | {"logit_softcap", "rope_local_theta"},
        defaults=record.HEAD_SIZE | {"tied": True, "window": 4096, "rope_local_theta": 10000.0},
        limits=record.no_fraction,
        norm_offset=1.0,
        post_norms=True,
        activation="gelu",
        qk_norm=True,
        scaled_embedding=True,
        layer_pattern="sssssf",
        window="layer_types",
        local=True,
        absent_theta=1000000.0,
    )
)
