"""A decoder of any architecture in `threed.config.architectures`.

The architecture's record (`Architecture`) determines which parts the decoder's blocks have.

    model = Decoder(config.model, slicing)
    model.layers()       # embedding, blocks.0 ... blocks.l-1, head

Layers of multi-token prediction are before the head, with the names blocks.l, blocks.l+1, ...

Each layer is on the meta device until its pipeline stage is built.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from threed.config import ModelConfig
from threed.config.resolution import resolve_model
from threed.layers import (
    MLP,
    Attention,
    Block,
    Causal,
    Embedding,
    GatedMLP,
    LanguageModelHead,
    LatentAttention,
    LayerNorm,
    MixtureOfExperts,
    MultiTokenPrediction,
    RMSNorm,
    Routing,
    Slicing,
    clamped_swiglu,
    gelu,
)
from threed.ops.frequencies import Theta, frequencies

WORD = "embedding.word.weight"
STD = 0.02
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": gelu,
    "clamped_swiglu": clamped_swiglu,
}


class Decoder:
    """A decoder as a list of pipeline layers.

    The initial values of projections onto the residual stream are smaller by the factor
    1 / sqrt(2 l), where l is the number of blocks in the full model.

    Args:
        config: the model configuration; missing values get the architecture's defaults.
        slicing: how layers are sharded over tensor ranks.

    Attributes:
        config: the resolved model configuration.
        hidden: width of the activations between layers.
        slicing: how layers are sharded over tensor ranks.
        record: the architecture's record, an `Architecture`.
    """

    boundaries_replicated = True

    def __init__(self, config: ModelConfig, slicing: Slicing) -> None:
        self.config, self.slicing = resolve_model(config), slicing
        self.record, self.hidden = config.record, config.hidden

    def layers(self) -> list[nn.Module]:
        """Returns the pipeline layers, in order."""
        return [
            self._embedding("embedding"),
            *(self._block(i) for i in range(self.config.layers)),
            *(self._multi_token(depth) for depth in range(1, self.config.mtp_depth + 1)),
            self._head("head", "head.norm"),
        ]

    def _embedding(self, name: str) -> Embedding:
        c, record = self.config, self.record
        return Embedding(
            name, vocab_of(c), c.hidden, self.slicing, dropout=c.dropout, std=STD,
            positions=c.positions if record.learned_positions else None,
            scale=math.sqrt(c.hidden) if record.scaled_embedding else 1.0, word=WORD.removesuffix(".weight"),
        )  # fmt: skip

    def _block(self, index: int) -> Block:
        c, name = self.config, f"blocks.{index}"
        norms = (self._norm(f"{name}.attention_norm"), self._norm(f"{name}.mlp_norm"))
        post_norm_names = None
        if self.record.post_norms:
            post_norm_names = (f"{name}.attention_post_norm", f"{name}.mlp_post_norm")
        attention = self._attention(f"{name}.attention", self.record.has_window(dict(c), index))
        return Block(
            name, norms, attention, self._mlp(f"{name}.mlp", index), self.slicing, dropout=c.dropout,
            post_norms=post_norm_names and (self._norm(post_norm_names[0]), self._norm(post_norm_names[1])),
        )  # fmt: skip

    def _attention(self, name: str, window: bool) -> nn.Module:
        c, record = self.config, self.record
        if record.latent:
            rope = c.rope_dim or 0  # resolved, as the other sizes
            theta = frequencies(
                c.rope_theta, rope, scaling=c.rope_scaling, positions=c.positions or c.seq
            )
            return LatentAttention(
                name, c.hidden, c.heads, self.slicing, kv_rank=c.kv_rank or 0, nope_dim=c.nope_dim or 0,
                rope_dim=rope, value_dim=c.value_dim or 0, query_rank=c.query_rank, rotary=theta, std=STD,
                out_std=self._out_std(),
            )  # fmt: skip
        return Attention(
            name, c.hidden, c.heads, self.slicing, kv_heads=c.kv_heads, head_dim=c.head_dim,
            bias=bool(c.bias) or record.qkv_bias, out_bias=bool(c.bias),
            rotary=None if record.learned_positions else self._theta(window),
            qk_norm=record.qk_norm or c.qk_norm, norm_offset=record.norm_offset, eps=c.norm_eps,
            sinks=record.sinks, core=self._core(window), std=STD, out_std=self._out_std(),
        )  # fmt: skip

    def _mlp(self, name: str, index: int) -> nn.Module:
        c, record = self.config, self.record
        kind = GatedMLP if record.gated else MLP
        activation = ACTIVATIONS[record.activation]
        if record.has_experts(dict(c), index):
            sizes = (c.expert_ffn or 0, c.experts or 0, c.experts_per_token or 0)  # resolved
            return MixtureOfExperts(
                name, c.hidden, *sizes, self.slicing, routing=self._routing(),
                shared_ffn=c.shared_experts * sizes[0], biases=record.expert_bias, activation=activation, std=STD,
                out_std=self._out_std(),
            )  # fmt: skip
        assert c.ffn is not None
        return kind(
            name, c.hidden, c.ffn, self.slicing, bias=bool(c.mlp_bias), std=STD, out_std=self._out_std(),
            activation=activation,
        )  # fmt: skip

    def _routing(self) -> Routing:
        c = self.config
        return Routing(
            normalize=bool(c.normalize_experts), scale=c.expert_scale, groups=c.expert_groups,
            groups_per_token=c.groups_per_token, **self.record.routing,
        )  # fmt: skip

    def _head(self, name: str, norm: str) -> LanguageModelHead:
        c = self.config
        return LanguageModelHead(
            name, WORD if c.tied else "head.weight", self._norm(norm), vocab_of(c), c.hidden, self.slicing,
            std=STD, softcap=c.logit_softcap or 0.0,
        )  # fmt: skip

    def _multi_token(self, depth: int) -> nn.Module:
        """Returns the layer of multi-token prediction of a depth, 1 or more."""
        c, index = self.config, self.config.layers + depth - 1
        name = f"blocks.{index}"
        # Inference engines, for which DeepSeek published its layer, pass on hidden states after the
        # norm of the head.
        previous = "head.norm" if depth == 1 else f"blocks.{index - 1}.head_norm"
        norms = (self._norm(previous), self._norm(f"{name}.hidden_norm"))
        return MultiTokenPrediction(
            name, c.hidden, self._embedding(f"{name}.embedding"), norms, self._norm(f"{name}.embedding_norm"),
            self._block(index), self._head(f"{name}.head", f"{name}.head_norm"), self.slicing, depth=depth,
            depths=c.mtp_depth, factor=c.mtp_loss, std=STD,
        )  # fmt: skip

    def _norm(self, name: str) -> nn.Module:
        c, record = self.config, self.record
        if record.norm == "layer":
            return LayerNorm(name, c.hidden, self.slicing, eps=c.norm_eps)
        return RMSNorm(name, c.hidden, self.slicing, eps=c.norm_eps, offset=record.norm_offset)

    def _out_std(self) -> float:
        return STD / math.sqrt(2 * self.config.layers)

    def _theta(self, window: bool) -> Theta:
        """Returns the base or the frequencies of rotary positions in a block.

        Args:
            window: whether the block's attention has a window. Blocks with a window may have
                another base (`rope_local_theta`).
        """
        c = self.config
        d = c.head_dim or c.hidden // c.heads
        if window and c.rope_local_theta is not None:
            return c.rope_local_theta
        return frequencies(
            c.rope_theta,
            d,
            part=c.partial_rotary_factor,
            scaling=c.rope_scaling,
            positions=c.positions or c.seq,
        )

    def _core(self, window: bool) -> Causal:
        c = self.config
        scale = None
        if c.query_pre_attn_scalar not in (None, c.head_dim):
            scale = float(c.query_pre_attn_scalar) ** -0.5
        return Causal((c.window or 0) if window else 0, c.attention_softcap or 0.0, scale)


def vocab_of(config: ModelConfig) -> int:
    """Returns the vocabulary size.

    Raises:
        ValueError: if it is not set yet.
    """
    if config.vocab is None:
        raise ValueError(
            "model.vocab is not set: resolve the configuration with the tokenizer's vocabulary first"
        )
    return config.vocab
