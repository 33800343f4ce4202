"""Phi-3 and Phi-4-mini (arXiv 2404.14219; longrope: arXiv 2402.13753).

Llama with packed projections. Rotary positions apply to a part of each head's dimensions, and can
be scaled for long sequences.
"""

from __future__ import annotations

from collections.abc import Iterator

from threed.config.architectures import record
from threed.config.architectures.record import (
    ATTENTION,
    HF_BLOCK,
    MLP,
    Architecture,
    Key,
    Keys,
    linear,
)
from threed.core.messages import counted


def _limits(keys: Keys) -> Iterator[str]:
    heads, head_dim, hidden = keys["heads"], keys["head_dim"], keys["hidden"]
    if (head_dim or hidden // heads) * heads != hidden:
        yield f"--model.head-dim {head_dim} for {counted(heads, 'head')} and width {hidden}"
    if (scaling := keys["rope_scaling"]) is not None and scaling.rope_type != "longrope":
        yield f"--model.rope-scaling {scaling.rope_type}, only longrope"


record.register(
    Architecture(
        "phi3",
        "Phi-3",
        "phi3",
        "Phi3ForCausalLM",
        rules=(
            *record.EMBEDDING,
            *record.PRE_NORMS,
            *linear(
                f"{HF_BLOCK}.self_attn.qkv_proj",
                {f"{ATTENTION}.query": "ad", f"{ATTENTION}.key": "kd", f"{ATTENTION}.value": "kd"},
                "h",
            ),
            *linear(f"{HF_BLOCK}.self_attn.o_proj", {f"{ATTENTION}.out": "h"}, "ad"),
            *linear(f"{HF_BLOCK}.mlp.gate_up_proj", {f"{MLP}.gate": "f", f"{MLP}.up": "f"}, "h"),
            *linear(f"{HF_BLOCK}.mlp.down_proj", {f"{MLP}.down": "h"}, "f"),
            *record.HEAD,
        ),
        keys=record.decoder_keys(
            Key("sliding_window", "window", None),
            Key("resid_pdrop", "dropout", 0.0),
            Key("embd_pdrop", "dropout", 0.0),
            rms_norm_eps=1e-5,
        ),
        fixed=record.SILU_GATES,
        # keys for Phi's custom model code, which transformers does not run
        accepted=frozenset({"full_attn_mod", "interpolate_factor"}),
        takes=record.ROTARY | {"window", "partial_rotary_factor"},
        limits=_limits,
        window="all",
        scalings={"su": "longrope", "yarn": "longrope"},
        original_positions=4096,
    )
)
