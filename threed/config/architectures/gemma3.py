"""Gemma 3, text model (arXiv 2503.19786).

Gemma 2 with norms on query and key heads instead of soft caps on attention scores. Five of six
layers have a sliding window; these layers have a separate rotary base.
"""

from __future__ import annotations

from dataclasses import replace

from threed.config.architectures import record
from threed.config.architectures.gemma2 import GEMMA2
from threed.config.architectures.record import Key

record.register(
    replace(
        GEMMA2,
        name="gemma3",
        title="Gemma 3",
        model_type="gemma3_text",
        hf_class="Gemma3ForCausalLM",
        rules=(*GEMMA2.rules, *record.HEAD_NORMS),
        keys=(*record.GEMMA_KEYS, Key("final_logit_softcapping", "logit_softcap", None)),
        # attn_logit_softcapping must be null, because transformers ignores it in Gemma 3
        fixed=record.GEMMA_FIXED | {"attn_logit_softcapping": None},
        accepted=frozenset(),
        takes=record.ROTARY | record.GEMMA | {"logit_softcap", "rope_local_theta"},
        defaults=record.HEAD_SIZE | {"tied": True, "window": 4096, "rope_local_theta": 10000.0},
        qk_norm=True,
        layer_pattern="sssssf",
        local=True,
        absent_theta=1000000.0,
    )
)
