"""The configuration keys of the model."""

from __future__ import annotations

from typing import Annotated

from threed.config import architectures
from threed.config.base import Group
from threed.config.schema import Field
from threed.config.values import (
    Architecture,
    Count,
    Fraction,
    LayerPattern,
    Natural,
    NonNegative,
    Positive,
    Scaling,
    Share,
    Switch,
)


class ModelConfig(Group):
    """Architecture and sizes of the transformer."""

    # The maximum sizes are larger than those of any real model. Without them, the plan of a mistyped
    # size would take hours, or more memory than the machine has.

    arch: Architecture = "gpt"
    """architecture of the transformer blocks"""
    layers: Annotated[Count, Field(le=2000)] = 6
    """transformer blocks, at most 2000"""
    hidden: Annotated[Count, Field(le=100_000)] = 256
    """width of the residual stream, at most 100000"""
    heads: Annotated[Count, Field(le=10_000)] = 8
    """attention heads, at most 10000"""
    kv_heads: Annotated[Count, Field(le=10_000)] | None = None
    """key and value heads, at most 10000; if not set, as many as heads"""
    head_dim: Annotated[Count, Field(le=100_000)] | None = None
    """size of an attention head, at most 100000; if not set, hidden / heads"""
    ffn: Annotated[Count, Field(le=1_000_000)] | None = None
    """inner width of the MLP, at most 1000000; if not set, 4 hidden (gpt) or 8/3 hidden (gated
    MLPs)"""
    vocab: Annotated[Count, Field(le=10_000_000)] | None = None
    """vocabulary size, at most 10000000; if not set, the tokenizer's"""
    seq: Count = 256
    """sequence length of training samples, in tokens"""
    positions: Annotated[Count, Field(le=100_000_000)] | None = None
    """maximum sequence length, at most 100000000: the number of learned positions, and the length
    that exports and rope-scaling assume; if not set, seq"""
    dropout: Share = 0.0
    """dropout rate"""
    tied: Switch | None = None
    """share one weight between head and embedding; if not set, true for gpt and gemma, else false"""
    bias: Switch | None = None
    """biases in linear layers; if not set, true for gpt, else false"""
    mlp_bias: Switch | None = None
    """biases in the MLP; if not set, the value of bias for gpt and llama, else false"""
    norm_eps: Positive = 1e-5
    """added to the variance in norms"""
    rope_theta: Positive = 10000.0
    """base of the rotary frequencies"""
    rope_local_theta: Positive | None = None
    """base of the rotary frequencies in sliding-window layers (gemma3); if not set, 10000 for
    gemma3"""
    rope_scaling: Scaling | None = None
    """rotary scaling for longer sequences: linear, llama3, yarn or longrope, with its keys"""
    partial_rotary_factor: Fraction = 1.0
    """fraction of each head that rotary positions rotate"""
    qk_norm: Switch = False
    """normalize queries and keys per head; only for llama, which becomes a Qwen3 model"""
    window: Natural | None = None
    """positions that a query attends to in sliding-window layers; 0: all; if not set, 4096 for
    gemma, else all"""
    layer_pattern: LayerPattern | None = None
    """kinds of successive layers, repeated: s (sliding window), f (full attention); if not set, the
    architecture's pattern, such as sf"""
    attention_softcap: NonNegative | None = None
    """bound on attention scores, by tanh; 0: no bound; if not set, 50 for gemma2, else no bound"""
    logit_softcap: NonNegative | None = None
    """bound on logits, by tanh; 0: no bound; if not set, 30 for gemma2, else no bound"""
    query_pre_attn_scalar: Positive | None = None
    """attention scores are divided by the square root of this number; if not set, the head size"""
    experts: Annotated[Count, Field(le=10_000)] | None = None
    """experts of a block, in place of its MLP, at most 10000; if not set, 8 for families with
    experts, else the MLPs are dense"""
    experts_per_token: Count | None = None
    """experts that compute each token; if not set, 2, or 1 of 1"""
    expert_ffn: Annotated[Count, Field(le=1_000_000)] | None = None
    """inner width of an expert, at most 1000000; if not set, ffn"""
    shared_experts: Natural = 0
    """experts of width expert-ffn that compute every token, in addition to the others"""
    expert_groups: Count = 1
    """groups of neighboring experts; a token's experts lie in groups-per-token of them"""
    groups_per_token: Count = 1
    """groups in which a token's experts lie"""
    expert_scale: Positive = 1.0
    """factor of the weights of a token's experts"""
    dense_layers: Natural = 0
    """number of first blocks with a dense MLP instead of experts"""
    expert_every: Count = 1
    """every n-th block has experts, the others have a dense MLP"""
    normalize_experts: Switch | None = None
    """divide the weights of a token's experts by their sum; if not set, false for deepseek_v2, else
    true"""
    kv_rank: Count | None = None
    """size of the latent vector of keys and values (latent attention); if not set, hidden / 4"""
    query_rank: Count | None = None
    """size of the latent vector of queries; if not set, queries are computed from the input"""
    nope_dim: Count | None = None
    """elements of a query or key head without rotary positions; if not set, head-dim"""
    rope_dim: Count | None = None
    """elements of a query or key head with rotary positions; if not set, an even half of head-dim"""
    value_dim: Count | None = None
    """size of a value head; if not set, head-dim"""
    mtp_depth: Natural = 0
    """layers that predict further tokens in training (multi-token prediction)"""
    mtp_loss: Positive = 0.3
    """coefficient of the mean loss of these layers, which is added to the loss that is trained"""

    @property
    def record(self) -> architectures.Architecture:
        """The properties of the architecture `arch`."""
        return architectures.record_of(self.arch)

    @property
    def layout(self) -> architectures.Architecture:
        """The architecture whose Hugging Face layout the model has.

        It is Qwen3 for a Llama with `qk_norm`, else `record`.
        """
        name = "qwen3" if self.arch == "llama" and self.qk_norm else self.arch
        return architectures.record_of(name)
