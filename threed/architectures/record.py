"""What an architecture is, as data: the blocks of its decoder, the keys of its models, and Hugging Face's layout of it.

    MISTRAL = register(Architecture("mistral", "Mistral", ...))      one file an architecture, beside this one

Nothing here computes: `models.Decoder` builds layers from a record, `interop.huggingface.layouts` moves tensors by its
rules, and `spelling` reads and writes configurations by its keys. Keys of a model are those of `config.ModelConfig`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Keys = Mapping[str, Any]  # of a model, by their names in Python


@dataclass(frozen=True)
class Rule:
    """One tensor of a Hugging Face layout: ours, as (name, shape) pairs, stacked along dimension 0.

    {i} in a name is the number of the block. A shape's words are dimensions, each a product of the legend's letters:
    "ad h" is [a·d h]; p is the number of learned positions. transposed: theirs is [in out]. needs: the property of the
    model (`properties`) without which we have no such tensor. zeros: without it their layout has the tensor, filled
    with zeros.
    """

    hf: str
    ours: tuple[tuple[str, str], ...]
    transposed: bool = False
    needs: str = ""
    zeros: bool = False


@dataclass(frozen=True)
class Key:
    """A key of their configuration and the model's that means the same.

    absent: what it means to leave theirs out; ... where it must be there.
    """

    theirs: str
    ours: str
    absent: Any = ...


Window = Literal["none", "all", "layer_types", "max_window_layers"]


@dataclass(frozen=True)
class Architecture:
    """A decoder, and how Hugging Face spells it.

    name: of `--model.arch`. title: in messages. model_type, hf_class: of their configurations. rules: their tensors.

    Blocks: norm (rms or layer) with an offset that is added to its weights; post_norms: a norm behind each branch too;
    activation (silu or gelu, in its tanh form) of the MLP, gated or not; learned or rotary positions; qk_norm: a norm
    of every query and key head; qkv_bias: biases of query, key and value whatever `bias` says; scaled_embedding: word
    vectors times sqrt(hidden). layer_pattern: layers with a sliding window (s) and without (f), repeated.

    Keys of a model: takes: those that not every architecture has. defaults: of keys that are none otherwise; a function
    gets all keys. limits: what of a model their layout cannot express.

    Their configuration: keys; fixed: what else it says, written as it is and refused where it says another thing;
    written: the same, but never refused; accepted: keys that do not change what is computed; window: how it says which
    layers have one; local: whether layers with a window have rotary angles of their own, and absent_theta the base of
    the others where it says none; scalings: other names of scalings of rotary angles; original_positions: of these,
    where it says none, if it says so beside the scaling. buffers: names of what old versions saved beside the weights,
    though models compute it.
    """

    name: str
    title: str
    model_type: str
    hf_class: str
    rules: tuple[Rule, ...]
    keys: tuple[Key, ...] = ()
    fixed: Keys = field(default_factory=dict)
    written: Keys = field(default_factory=dict)
    accepted: frozenset[str] = frozenset()
    takes: frozenset[str] = frozenset()
    defaults: Keys = field(default_factory=dict)
    limits: Callable[[Keys], Iterator[str]] = lambda keys: iter(())
    norm: Literal["rms", "layer"] = "rms"
    norm_offset: float = 0.0
    post_norms: bool = False
    activation: Literal["silu", "gelu"] = "silu"
    gated: bool = True
    learned_positions: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    scaled_embedding: bool = False
    layer_pattern: str = "s"
    window: Window = "none"
    local: bool = False
    absent_theta: float = 10000.0
    scalings: Mapping[str, str] = field(default_factory=dict)
    original_positions: int | None = None
    buffers: tuple[str, ...] = (
        "model.layers.{i}.self_attn.rotary_emb.inv_freq",
        "model.rotary_emb.inv_freq",
    )

    @property
    def prefix(self) -> str:
        """What their names begin with in a model that has a head; a base model's do without."""
        return self.rules[0].hf.partition(".")[0] + "."

    def resolved(self, keys: Keys) -> dict[str, Any]:
        """What keys mean that are none, those with a meaning, of the other keys."""
        found = dict[str, Any]()
        for key, value in {**DEFAULTS, **self.defaults}.items():
            if keys[key] is None:
                found[key] = value({**keys, **found}) if callable(value) else value
        return found

    def properties(self, keys: Keys) -> dict[str, bool]:
        """What tensors depend on (`Rule.needs`), of resolved keys."""
        bias = bool(keys["bias"])
        return {
            "": True, "untied": not keys["tied"], "qk_norm": self.qk_norm or keys["qk_norm"], "bias": bias,
            "qkv_bias": bias or self.qkv_bias, "mlp_bias": bool(keys["mlp_bias"]),
        }  # fmt: skip

    def has_window(self, keys: Keys, block: int) -> bool:
        """Whether a block is one of the layers with a window, of resolved keys."""
        pattern = keys["layer_pattern"] or self.layer_pattern
        return bool(pattern[block % len(pattern)] == "s")


def _gated_ffn(keys: Keys) -> int:
    """8/3 of the width, up to a multiple of 64: as many weights as 4 times the width without a gate."""
    return int(-(-8 * keys["hidden"] // (3 * 64)) * 64)


DEFAULTS: Keys = {
    "kv_heads": lambda keys: keys["heads"],
    "head_dim": lambda keys: keys["hidden"] // keys["heads"],
    "ffn": _gated_ffn,
    "positions": lambda keys: keys["seq"],
    "tied": False,
    "bias": False,
    "mlp_bias": False,
}
HEAD_SIZE = {
    "query_pre_attn_scalar": lambda keys: keys["head_dim"] or keys["hidden"] // keys["heads"]
}
ROTARY = frozenset({"rope_theta", "rope_scaling"})
GEMMA = frozenset({"window", "layer_pattern", "bias", "query_pre_attn_scalar"})
REGISTERED: dict[str, Architecture] = {}


def register(record: Architecture) -> Architecture:
    """Makes an architecture known by its name."""
    REGISTERED[record.name] = record
    return record


# -------------------------------------------------------------------------------------------------------------- keys

_DECODER_KEYS = (
    Key("vocab_size", "vocab"),
    Key("hidden_size", "hidden"),
    Key("intermediate_size", "ffn"),
    Key("num_hidden_layers", "layers"),
    Key("num_attention_heads", "heads"),
    Key("num_key_value_heads", "kv_heads", None),
    Key("head_dim", "head_dim", None),
    Key("max_position_embeddings", "positions"),
    Key("rms_norm_eps", "norm_eps", 1e-6),
    Key("tie_word_embeddings", "tied", False),
)


def decoder_keys(*more: Key, **absent: Any) -> tuple[Key, ...]:
    """The keys that all decoders since Llama have, and more; absent: what some of theirs mean where they are not."""
    return (
        tuple(replace(key, absent=absent.get(key.theirs, key.absent)) for key in _DECODER_KEYS)
        + more
    )


SILU_GATES: Keys = {"hidden_act": "silu", "attention_dropout": 0.0}
GEMMA_KEYS = decoder_keys(
    Key("attention_bias", "bias", False),
    Key("query_pre_attn_scalar", "query_pre_attn_scalar", 256),
    Key("sliding_window", "window", 4096),
    num_key_value_heads=4,
    head_dim=256,
    tie_word_embeddings=True,
)
GEMMA_FIXED: dict[str, Any] = {
    "hidden_activation": "gelu_pytorch_tanh", "attention_dropout": 0.0, "use_bidirectional_attention": False,
}  # fmt: skip


def no_fraction(keys: Keys) -> Iterator[str]:
    """What `transformers` refuses of several architectures, though heads have a size of their own."""
    if keys["hidden"] % keys["heads"]:
        yield f"--model.hidden {keys['hidden']}, which is no multiple of the number of heads ({keys['heads']})"


# ------------------------------------------------------------------------------------------------------------- rules


def linear(
    hf: str, outputs: Mapping[str, str], inputs: str, *, bias: str = "", conv1d: bool = False
) -> tuple[Rule, ...]:
    """The rules of a linear layer, whose outputs are stacked; bias: the property with which it has biases; conv1d:
    GPT-2's, which is transposed and always has a bias."""
    weights = tuple((f"{name}.weight", f"{out} {inputs}") for name, out in outputs.items())
    biases = tuple((f"{name}.bias", out) for name, out in outputs.items())
    weight = Rule(f"{hf}.weight", weights, conv1d)
    return (weight, Rule(f"{hf}.bias", biases, needs=bias, zeros=conv1d)) if bias else (weight,)


def one(hf: str, ours: str, shape: str, needs: str = "") -> Rule:
    """The rule of a tensor that is one of ours."""
    return Rule(hf, ((ours, shape),), needs=needs)


THEIRS, BLOCK = "model.layers.{i}", "blocks.{i}"
ATTENTION, MLP = f"{BLOCK}.attention", f"{BLOCK}.mlp"


def norms(**ours: str) -> tuple[Rule, ...]:
    """Norms of a block: Hugging Face's names, of ours."""
    return tuple(
        one(f"{THEIRS}.{theirs}.weight", f"{BLOCK}.{name}.weight", "h")
        for theirs, name in ours.items()
    )


EMBEDDING = (one("model.embed_tokens.weight", "embedding.word.weight", "v h"),)
PRE_NORMS = norms(input_layernorm="attention_norm", post_attention_layernorm="mlp_norm")
SANDWICH_NORMS = norms(
    input_layernorm="attention_norm", post_attention_layernorm="attention_post_norm",
    pre_feedforward_layernorm="mlp_norm", post_feedforward_layernorm="mlp_post_norm",
)  # fmt: skip
HEADS = (
    *linear(f"{THEIRS}.self_attn.q_proj", {f"{ATTENTION}.query": "ad"}, "h", bias="qkv_bias"),
    *linear(f"{THEIRS}.self_attn.k_proj", {f"{ATTENTION}.key": "kd"}, "h", bias="qkv_bias"),
    *linear(f"{THEIRS}.self_attn.v_proj", {f"{ATTENTION}.value": "kd"}, "h", bias="qkv_bias"),
    *linear(f"{THEIRS}.self_attn.o_proj", {f"{ATTENTION}.out": "h"}, "ad", bias="bias"),
)
HEAD_NORMS = (
    one(f"{THEIRS}.self_attn.q_norm.weight", f"{ATTENTION}.query_norm.weight", "d", "qk_norm"),
    one(f"{THEIRS}.self_attn.k_norm.weight", f"{ATTENTION}.key_norm.weight", "d", "qk_norm"),
)
GATED_MLP = (
    *linear(f"{THEIRS}.mlp.gate_proj", {f"{MLP}.gate": "f"}, "h", bias="mlp_bias"),
    *linear(f"{THEIRS}.mlp.up_proj", {f"{MLP}.up": "f"}, "h", bias="mlp_bias"),
    *linear(f"{THEIRS}.mlp.down_proj", {f"{MLP}.down": "h"}, "f", bias="mlp_bias"),
)
HEAD = (
    one("model.norm.weight", "head.norm.weight", "h"),
    one("lm_head.weight", "head.weight", "v h", "untied"),
)
LLAMA_RULES = (*EMBEDDING, *PRE_NORMS, *HEADS, *GATED_MLP, *HEAD)
