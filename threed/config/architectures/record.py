"""Data structures that describe an architecture.

    MISTRAL = register(Architecture("mistral", "Mistral", ...))      one module per architecture

The records are pure data. `models.Decoder` builds layers from a record,
`interop.huggingface.layouts` converts tensors with the rules of the record, and `spelling` reads
and writes Hugging Face configurations with the keys of the record. "Model keys" below are the
fields of `config.ModelConfig`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Keys = Mapping[str, Any]  # values of a `ModelConfig`, by field name


@dataclass(frozen=True)
class Rule:
    """One tensor of a Hugging Face layout, and the native tensors that it consists of.

    In names, {i} is the block number, and {e} the number of an expert. If only native names have
    {e}, the Hugging Face tensor is a stack of the experts' tensors, with a dimension of experts in
    front.

    In shapes, each word is a dimension, the product of its letters: h is the hidden size, a the
    number of query heads, k the number of key/value heads, d the head dimension, f the MLP width, e
    the number of experts, x the width of an expert, s the width of all shared experts, v the
    vocabulary size, p the number of learned positions, and j = 2h. So "ad h" is the shape [a·d h]. With
    latent attention, q is the size of a query head, w that of a value head, u that of a head's key
    without rotary positions and its value together, r the size of the queries' latent vector, c
    that of keys and values, and g = c + the size of the rotary key.

    Attributes:
        hf: the name of the Hugging Face tensor.
        native: (name, shape) pairs of the native tensors. The Hugging Face tensor is their
            concatenation along dimension 0.
        transposed: whether the Hugging Face tensor is [in out] instead of [out in].
        interleaved: whether the rows of the native tensors alternate, instead of a concatenation.
        needs: the property (`Architecture.properties`) of the models that have the native tensors;
            "" if every model has them.
        zeros: whether the Hugging Face layout also has the tensor, filled with zeros, in models
            without the property.
        copy: whether the tensor is a copy of a tensor with another rule. It is written, but need not
            be in files that are read; if it is, it must have the same values.
        live: the parameter of the model in memory that contains the tensor, if it is another than
            `hf`. Tensors with the same parameter are concatenated along dimension 0, expert by
            expert.
    """

    hf: str
    native: tuple[tuple[str, str], ...]
    transposed: bool = False
    needs: str = ""
    zeros: bool = False
    copy: bool = False
    live: str = ""
    interleaved: bool = False

    @property
    def stacked(self) -> bool:
        """Whether the Hugging Face tensor contains the tensors of all experts of a block."""
        return "{e}" in self.native[0][0] and "{e}" not in self.hf


@dataclass(frozen=True)
class Key:
    """A key of Hugging Face's configuration with an equivalent model key.

    Attributes:
        hf: the key in Hugging Face's configuration.
        native: the model key.
        absent: the value if the Hugging Face key is missing; ... (Ellipsis) if the key is required.
        read: function from the Hugging Face value to the model key's; raises ValueError for a value
            that is not supported.
        write: the inverse of `read`.
        other: another name of the Hugging Face key, which is read, but not written.
    """

    hf: str
    native: str
    absent: Any = ...
    read: Callable[[Any], Any] = lambda value: value
    write: Callable[[Any], Any] = lambda value: value
    other: str = ""


Window = Literal["none", "all", "layer_types", "max_window_layers"]


@dataclass(frozen=True)
class Architecture:
    """A decoder architecture and its Hugging Face layout.

    Attributes:
        name: the value of `--model.arch`.
        title: the name in messages.
        model_type: `model_type` in the Hugging Face configuration.
        hf_class: the class in `architectures` of the Hugging Face configuration.
        rules: the tensors of the Hugging Face layout.
        keys: Hugging Face configuration keys that have an equivalent model key.
        fixed: Hugging Face configuration keys with a required value, or with a function from the
            model keys to this value. The value is written; a file with another value cannot be
            read.
        absent: values of Hugging Face configuration keys that a configuration lacks, for keys that
            are not in `keys`.
        written: Hugging Face configuration keys that are written with a fixed value, and ignored
            when read.
        accepted: Hugging Face configuration keys that are ignored when read, because they do not
            change the computation.
        takes: model keys that this architecture supports, but some other architectures do not.
        defaults: values that replace None, by model key, in addition to `DEFAULTS`. A function is
            called with all keys and returns the value.
        limits: function that is called with the model keys, and yields a description of each
            setting that the Hugging Face layout cannot express.
        norm: "rms" (RMSNorm) or "layer" (LayerNorm).
        norm_offset: constant added to the weights of norms.
        post_norms: whether each branch also has a norm after it.
        activation: the activation of the MLP, "silu", "gelu" (tanh approximation), or
            "clamped_swiglu".
        gated: whether the MLP is gated.
        learned_positions: whether positions are learned embeddings, instead of rotary.
        latent: whether attention is latent (`layers.LatentAttention`).
        routing: arguments of `layers.Routing` for which there are no model keys.
        expert_bias: whether routers and experts have biases.
        sinks: whether every query head has an attention sink.
        qk_norm: whether every query and key head has a norm.
        qkv_bias: whether query, key and value have biases even if the model key `bias` is False.
        scaled_embedding: whether word embeddings are multiplied by sqrt(hidden).
        layer_pattern: layers with a sliding window ("s") and with full attention ("f"), repeated
            over the depth.
        window: the Hugging Face configuration key that selects the layers with a sliding window:
            "layer_types" or "max_window_layers"; "all" if all layers have one; "none" if windows
            are not supported.
        local: whether layers with a sliding window have a separate rotary base.
        absent_theta: the rotary base if the Hugging Face configuration has none; if `local`, this
            is the base of the layers without a window.
        scalings: further names of rotary scaling in Hugging Face configurations, each with its type
            in `rope_scaling.KINDS`.
        original_positions: default of `original_max_position_embeddings`, for Hugging Face
            configurations with this key at top level; None if the key is part of the rotary
            scaling.
        buffers: names of tensors that old versions of transformers saved although the model
            computes them; they are not loaded.
    """

    name: str
    title: str
    model_type: str
    hf_class: str
    rules: tuple[Rule, ...]
    keys: tuple[Key, ...] = ()
    fixed: Keys = field(default_factory=dict)
    absent: Keys = field(default_factory=dict)
    written: Keys = field(default_factory=dict)
    accepted: frozenset[str] = frozenset()
    takes: frozenset[str] = frozenset()
    defaults: Keys = field(default_factory=dict)
    limits: Callable[[Keys], Iterator[str]] = lambda keys: iter(())
    norm: Literal["rms", "layer"] = "rms"
    norm_offset: float = 0.0
    post_norms: bool = False
    activation: Literal["silu", "gelu", "clamped_swiglu"] = "silu"
    gated: bool = True
    learned_positions: bool = False
    latent: bool = False
    routing: Keys = field(default_factory=dict)
    expert_bias: bool = False
    sinks: bool = False
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
        """Prefix of the tensor names in a Hugging Face model with a head.

        In a base model, which has no head, the names lack this prefix.
        """
        return self.rules[0].hf.partition(".")[0] + "."

    def resolved(self, keys: Keys) -> dict[str, Any]:
        """Returns default values for the model keys whose value is not set (None).

        Keys without a default are omitted.
        """
        found = dict[str, Any]()
        for key, value in {**DEFAULTS, **self.defaults}.items():
            if keys[key] is None:
                found[key] = value({**keys, **found}) if callable(value) else value
        return found

    def inexpressible(self, keys: Keys) -> Iterator[str]:
        """Yields a description of each setting that the Hugging Face layout cannot express.

        Args:
            keys: model keys.
        """
        yield from self.limits(keys)
        if keys["mtp_depth"] and not any(rule.needs == "mtp" for rule in self.rules):
            yield f"--model.mtp-depth {keys['mtp_depth']}"

    def properties(self, keys: Keys, block: int) -> dict[str, bool]:
        """Returns which properties (`Rule.needs`) a block has; they determine its tensors.

        Args:
            keys: resolved model keys.
            block: number of the block. Properties of the model are the same in all blocks. The blocks
                of multi-token prediction follow those of the model.
        """
        bias, experts = bool(keys["bias"]), self.has_experts(keys, block)
        mtp, tied = block >= keys["layers"], bool(keys["tied"])
        return {
            "": True, "experts": experts, "dense": not experts,
            "shared_experts": experts and bool(keys["shared_experts"]),
            "query_rank": keys["query_rank"] is not None, "no_query_rank": keys["query_rank"] is None,
            "mtp": mtp, "mtp_tied": mtp and tied, "mtp_untied": mtp and not tied,
            "untied": not tied, "qk_norm": self.qk_norm or keys["qk_norm"], "bias": bias,
            "qkv_bias": bias or self.qkv_bias, "mlp_bias": bool(keys["mlp_bias"]),
        }  # fmt: skip

    def has_window(self, keys: Keys, block: int) -> bool:
        """Returns whether a block has a sliding window.

        Args:
            keys: resolved model keys.
            block: number of the block.
        """
        pattern = keys["layer_pattern"] or self.layer_pattern
        return bool(pattern[block % len(pattern)] == "s")

    def has_experts(self, keys: Keys, block: int) -> bool:
        """Returns whether a block has experts instead of a dense MLP.

        Args:
            keys: resolved model keys.
            block: number of the block.
        """
        later = block >= keys["dense_layers"] and (block + 1) % keys["expert_every"] == 0
        return keys["experts"] is not None and later


DEFAULTS: Keys = {
    "kv_heads": lambda keys: keys["heads"],
    "head_dim": lambda keys: keys["hidden"] // keys["heads"] or None,
    # 8/3 of the hidden size, rounded up to a multiple of 64: a gated MLP then has about as many
    # weights as an MLP of width 4·hidden without a gate.
    "ffn": lambda keys: int(-(-8 * keys["hidden"] // (3 * 64)) * 64),
    "positions": lambda keys: keys["seq"],
    "tied": False,
    "bias": False,
    "mlp_bias": False,
    "normalize_experts": True,
}
HEAD_SIZE = {
    "query_pre_attn_scalar": lambda keys: keys["head_dim"] or keys["hidden"] // keys["heads"]
}
ROTARY = frozenset({"rope_theta", "rope_scaling", "mtp_depth", "mtp_loss"})  # all but GPT-2
EXPERTS: Keys = {
    "experts": 8,
    "experts_per_token": lambda keys: min(2, keys["experts"]),
    "expert_ffn": lambda keys: keys["ffn"],
}
LATENT: Keys = {
    "kv_rank": lambda keys: -(-keys["hidden"] // 4),
    "nope_dim": lambda keys: keys["head_dim"],
    "rope_dim": lambda keys: max(keys["head_dim"] // 4, 1) * 2,
    "value_dim": lambda keys: keys["head_dim"],
}
GEMMA = frozenset({"window", "layer_pattern", "bias", "query_pre_attn_scalar"})
REGISTERED: dict[str, Architecture] = {}


def register(record: Architecture) -> Architecture:
    """Adds an architecture to `REGISTERED`, and returns it."""
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
    """Returns the Hugging Face keys that all decoders since Llama have, followed by `more`.

    Args:
        more: further keys of the architecture.
        absent: for common keys, values of `Key.absent` that differ in this architecture, by
            Hugging Face name.
    """
    return (
        tuple(replace(key, absent=absent.get(key.hf, key.absent)) for key in _DECODER_KEYS) + more
    )


# Training with `transformers` reads these keys of models with experts; inference does not.
ROUTER_LOSS = frozenset({"router_aux_loss_coef", "output_router_logits"})
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
    """Yields an error text, for `Architecture.limits`, if `hidden` is not a multiple of `heads`.

    Some models in `transformers` require this, even if `head_dim` is given.
    """
    if keys["hidden"] % keys["heads"]:
        yield f"--model.hidden {keys['hidden']}, which is not a multiple of the number of heads ({keys['heads']})"


# ------------------------------------------------------------------------------------------------------------- rules


def linear(
    hf: str, outputs: Mapping[str, str], inputs: str, *, bias: str = "", conv1d: bool = False
) -> tuple[Rule, ...]:
    """Returns the rules of a Hugging Face linear layer, which may combine several native layers.

    Args:
        hf: the name of the Hugging Face layer.
        outputs: output dimension of each native layer, by name of the layer. The outputs are
            concatenated in this order.
        inputs: the input dimension. For the notation of dimensions, see `Rule`.
        bias: the property (`Rule.needs`) of models in which the layer has a bias; empty if it never
            has a bias.
        conv1d: whether the Hugging Face layer is a Conv1D of GPT-2. Its weight is transposed, and
            it always has a bias.
    """
    weights = tuple((f"{name}.weight", f"{out} {inputs}") for name, out in outputs.items())
    biases = tuple((f"{name}.bias", out) for name, out in outputs.items())
    weight = Rule(f"{hf}.weight", weights, conv1d)
    return (weight, Rule(f"{hf}.bias", biases, needs=bias, zeros=conv1d)) if bias else (weight,)


def one(hf: str, native: str, shape: str, needs: str = "") -> Rule:
    """Returns the rule of a Hugging Face tensor that equals one native tensor."""
    return Rule(hf, ((native, shape),), needs=needs)


HF_BLOCK, BLOCK = "model.layers.{i}", "blocks.{i}"
ATTENTION, MLP = f"{BLOCK}.attention", f"{BLOCK}.mlp"


def norms(**native: str) -> tuple[Rule, ...]:
    """Returns the rules of a block's norms.

    Args:
        native: the native name of each norm, by its Hugging Face name.
    """
    return tuple(
        one(f"{HF_BLOCK}.{hf}.weight", f"{BLOCK}.{name}.weight", "h") for hf, name in native.items()
    )


EMBEDDING = (one("model.embed_tokens.weight", "embedding.word.weight", "v h"),)
PRE_NORMS = norms(input_layernorm="attention_norm", post_attention_layernorm="mlp_norm")
SANDWICH_NORMS = norms(
    input_layernorm="attention_norm", post_attention_layernorm="attention_post_norm",
    pre_feedforward_layernorm="mlp_norm", post_feedforward_layernorm="mlp_post_norm",
)  # fmt: skip
HEADS = (
    *linear(f"{HF_BLOCK}.self_attn.q_proj", {f"{ATTENTION}.query": "ad"}, "h", bias="qkv_bias"),
    *linear(f"{HF_BLOCK}.self_attn.k_proj", {f"{ATTENTION}.key": "kd"}, "h", bias="qkv_bias"),
    *linear(f"{HF_BLOCK}.self_attn.v_proj", {f"{ATTENTION}.value": "kd"}, "h", bias="qkv_bias"),
    *linear(f"{HF_BLOCK}.self_attn.o_proj", {f"{ATTENTION}.out": "h"}, "ad", bias="bias"),
)
HEAD_NORMS = (
    one(f"{HF_BLOCK}.self_attn.q_norm.weight", f"{ATTENTION}.query_norm.weight", "d", "qk_norm"),
    one(f"{HF_BLOCK}.self_attn.k_norm.weight", f"{ATTENTION}.key_norm.weight", "d", "qk_norm"),
)
GATED_MLP = (
    *linear(f"{HF_BLOCK}.mlp.gate_proj", {f"{MLP}.gate": "f"}, "h", bias="mlp_bias"),
    *linear(f"{HF_BLOCK}.mlp.up_proj", {f"{MLP}.up": "f"}, "h", bias="mlp_bias"),
    *linear(f"{HF_BLOCK}.mlp.down_proj", {f"{MLP}.down": "h"}, "f", bias="mlp_bias"),
)
DENSE_MLP = tuple(replace(rule, needs="dense") for rule in GATED_MLP if not rule.needs)


def experts(hf: str, gate: str, up: str, down: str) -> tuple[Rule, ...]:
    """Returns the rules of a block's experts and their router.

    Args:
        hf: the name of the Hugging Face module.
        gate: the name of an expert's gate projection.
        up: the name of an expert's up projection.
        down: the name of an expert's down projection.
    """
    live = f"{HF_BLOCK}.mlp"

    def expert(name: str, native: str, shape: str, packed: str) -> Rule:
        own = ((f"{MLP}.experts.{{e}}.{native}.weight", shape),)
        where = f"{live}.experts.{packed}"
        return Rule(f"{hf}.experts.{{e}}.{name}.weight", own, needs="experts", live=where)

    return (
        replace(
            one(f"{hf}.gate.weight", f"{MLP}.router.weight", "e h", "experts"),
            live=f"{live}.gate.weight",
        ),
        expert(gate, "gate", "x h", "gate_up_proj"),
        expert(up, "up", "x h", "gate_up_proj"),
        expert(down, "down", "h x", "down_proj"),
    )


MTP_COPIES = {
    "mtp": ("embed_tokens", "embedding.word"),
    "mtp_untied": ("shared_head.head", "head"),
    "mtp_tied": ("shared_head.head", "embedding.word"),
}
# the layers of multi-token prediction (`layers.MultiTokenPrediction`), besides their blocks
MTP = (
    *(
        replace(one(f"{HF_BLOCK}.{hf}.weight", f"{native}.weight", "v h", needs), copy=True)
        for needs, (hf, native) in MTP_COPIES.items()
    ),
    one(f"{HF_BLOCK}.enorm.weight", f"{BLOCK}.embedding_norm.weight", "h", "mtp"),
    one(f"{HF_BLOCK}.hnorm.weight", f"{BLOCK}.hidden_norm.weight", "h", "mtp"),
    one(f"{HF_BLOCK}.eh_proj.weight", f"{BLOCK}.join.weight", "h j", "mtp"),
    one(f"{HF_BLOCK}.shared_head.norm.weight", f"{BLOCK}.head_norm.weight", "h", "mtp"),
)
HEAD = (
    one("model.norm.weight", "head.norm.weight", "h"),
    one("lm_head.weight", "head.weight", "v h", "untied"),
)
LLAMA_RULES = (*EMBEDDING, *PRE_NORMS, *HEADS, *GATED_MLP, *HEAD)
