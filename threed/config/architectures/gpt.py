"""GPT-2: LayerNorm, learned positions, GELU, biases, tied head (Radford et al. 2019)."""

from __future__ import annotations

from collections.abc import Iterator

from threed.config.architectures import record
from threed.config.architectures.record import (
    ATTENTION,
    BLOCK,
    MLP,
    Architecture,
    Key,
    Keys,
    linear,
    one,
)
from threed.core.messages import counted

_H = "transformer.h.{i}"


def _limits(keys: Keys) -> Iterator[str]:
    heads, kv_heads, head_dim = keys["heads"], keys["kv_heads"] or keys["heads"], keys["head_dim"]
    if kv_heads != heads:
        yield f"--model.kv-heads {kv_heads} for {counted(heads, 'head')}"
    if head_dim and head_dim * heads != keys["hidden"]:
        yield f"--model.head-dim {head_dim} for {counted(heads, 'head')} and width {keys['hidden']}"


record.register(
    Architecture(
        "gpt",
        "GPT-2",
        "gpt2",
        "GPT2LMHeadModel",
        rules=(
            one("transformer.wte.weight", "embedding.word.weight", "v h"),
            one("transformer.wpe.weight", "embedding.position.weight", "p h"),
            one(f"{_H}.ln_1.weight", f"{BLOCK}.attention_norm.weight", "h"),
            one(f"{_H}.ln_1.bias", f"{BLOCK}.attention_norm.bias", "h"),
            *linear(
                f"{_H}.attn.c_attn",
                {f"{ATTENTION}.query": "ad", f"{ATTENTION}.key": "kd", f"{ATTENTION}.value": "kd"},
                "h",
                bias="bias",
                conv1d=True,
            ),
            *linear(f"{_H}.attn.c_proj", {f"{ATTENTION}.out": "h"}, "ad", bias="bias", conv1d=True),
            one(f"{_H}.ln_2.weight", f"{BLOCK}.mlp_norm.weight", "h"),
            one(f"{_H}.ln_2.bias", f"{BLOCK}.mlp_norm.bias", "h"),
            *linear(f"{_H}.mlp.c_fc", {f"{MLP}.up": "f"}, "h", bias="mlp_bias", conv1d=True),
            *linear(f"{_H}.mlp.c_proj", {f"{MLP}.down": "h"}, "f", bias="mlp_bias", conv1d=True),
            one("transformer.ln_f.weight", "head.norm.weight", "h"),
            one("transformer.ln_f.bias", "head.norm.bias", "h"),
            one("lm_head.weight", "head.weight", "v h", "untied"),
        ),
        keys=(
            Key("n_embd", "hidden", 768),
            Key("n_layer", "layers", 12),
            Key("n_head", "heads", 12),
            Key("n_inner", "ffn", None),
            Key("n_positions", "positions", 1024),
            Key("layer_norm_epsilon", "norm_eps", 1e-5),
            Key("resid_pdrop", "dropout", 0.1),
            Key("embd_pdrop", "dropout", 0.1),
            Key("vocab_size", "vocab", 50257),
            Key("tie_word_embeddings", "tied", True),
        ),
        fixed={
            "activation_function": "gelu_new",
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
        written={"attn_pdrop": 0.0},  # Attention probabilities have no dropout.
        # reorder_and_upcast_attn only affects rounding; the summary_* keys configure other heads.
        accepted=frozenset(
            "_num_labels n_ctx reorder_and_upcast_attn summary_activation summary_first_dropout"
            " summary_proj_to_labels summary_type summary_use_proj task_specific_params".split()
        ),
        takes=frozenset({"bias", "mlp_bias"}),
        defaults={
            "ffn": lambda keys: 4 * keys["hidden"],
            "tied": True,
            "bias": True,
            "mlp_bias": lambda keys: keys["bias"],
        },
        limits=_limits,
        norm="layer",
        activation="gelu",
        gated=False,
        learned_positions=True,
        layer_pattern="f",
        buffers=(f"{_H}.attn.bias", f"{_H}.attn.masked_bias"),
    )
)
