"""Llama and Qwen3: RMSNorm, rotary positions, SwiGLU, grouped-query attention, no biases (arXiv 2307.09288; Qwen3 adds
a norm over every query and key head, arXiv 2505.09388)."""

from __future__ import annotations

import math

from torch import nn

from threed.config import ModelConfig
from threed.layers import Attention, Block, Embedding, GatedMLP, LanguageModelHead, RMSNorm, Slicing
from threed.models.gpt import STD, WORD, vocab_of


class Llama:
    """A Llama style decoder as a list of pipeline layers; `qk_norm` makes it Qwen3's."""

    boundaries_replicated = True

    def __init__(self, config: ModelConfig, slicing: Slicing) -> None:
        self.config, self.slicing = config, slicing
        self.hidden = config.hidden

    def layers(self) -> list[nn.Module]:
        """The pipeline layers, in order."""
        c = self.config
        embedding = Embedding("embedding", vocab_of(c), c.hidden, self.slicing, dropout=c.dropout, std=STD)
        return [embedding, *(self._block(i) for i in range(c.layers)), self._head()]

    def _block(self, index: int) -> nn.Module:
        c, name, slicing = self.config, f"blocks.{index}", self.slicing
        bias, out_std = bool(c.bias), STD / math.sqrt(2 * c.layers)
        norms = (self._norm(f"{name}.attention_norm"), self._norm(f"{name}.mlp_norm"))
        attention = Attention(
            f"{name}.attention", c.hidden, c.heads, slicing, kv_heads=c.kv_heads, head_dim=c.head_dim, bias=bias,
            rotary=c.rope_theta, qk_norm=c.qk_norm, eps=c.norm_eps, std=STD, out_std=out_std,
        )  # fmt: skip
        if c.ffn is None:
            raise ValueError("model.ffn is not set: resolve the configuration first")
        mlp = GatedMLP(f"{name}.mlp", c.hidden, c.ffn, slicing, bias=bias, std=STD, out_std=out_std)
        return Block(name, norms, attention, mlp, slicing, dropout=c.dropout)

    def _head(self) -> nn.Module:
        c = self.config
        weight = WORD if c.tied else "head.weight"
        return LanguageModelHead("head", weight, self._norm("head.norm"), vocab_of(c), c.hidden, self.slicing, std=STD)

    def _norm(self, name: str) -> nn.Module:
        return RMSNorm(name, self.config.hidden, self.slicing, eps=self.config.norm_eps)
