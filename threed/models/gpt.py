"""GPT-2: LayerNorm, learned positions, GELU, biases, tied head (Radford et al. 2019).

model = GPT(config.model, slicing)
model.layers()    # embedding, blocks.0 ... blocks.l-1, head: each on the meta device until its stage is built
"""

from __future__ import annotations

import math

from torch import nn

from threed.config import ModelConfig
from threed.layers import MLP, Attention, Block, Embedding, LanguageModelHead, LayerNorm, Slicing

WORD = "embedding.word.weight"
STD = 0.02


class GPT:
    """A GPT-2 style decoder as a list of pipeline layers.

    Outputs onto the residual stream start smaller, by 1 / sqrt(2 l) with the global number of layers l.
    """

    boundaries_replicated = True

    def __init__(self, config: ModelConfig, slicing: Slicing) -> None:
        self.config, self.slicing = config, slicing
        self.hidden = config.hidden

    def layers(self) -> list[nn.Module]:
        """The pipeline layers, in order."""
        return [self._embedding(), *(self._block(i) for i in range(self.config.layers)), self._head()]

    def _embedding(self) -> nn.Module:
        c = self.config
        return Embedding("embedding", vocab_of(c), c.hidden, self.slicing, positions=c.seq, dropout=c.dropout, std=STD)

    def _block(self, index: int) -> nn.Module:
        c, name, slicing = self.config, f"blocks.{index}", self.slicing
        bias, out_std = c.bias is not False, STD / math.sqrt(2 * c.layers)
        norms = (self._norm(f"{name}.attention_norm"), self._norm(f"{name}.mlp_norm"))
        attention = Attention(
            f"{name}.attention", c.hidden, c.heads, slicing, kv_heads=c.kv_heads, head_dim=c.head_dim, bias=bias,
            std=STD, out_std=out_std,
        )  # fmt: skip
        mlp = MLP(f"{name}.mlp", c.hidden, c.ffn or 4 * c.hidden, slicing, bias=bias, std=STD, out_std=out_std)
        return Block(name, norms, attention, mlp, slicing, dropout=c.dropout)

    def _head(self) -> nn.Module:
        c = self.config
        weight = "head.weight" if c.tied is False else WORD
        return LanguageModelHead("head", weight, self._norm("head.norm"), vocab_of(c), c.hidden, self.slicing, std=STD)

    def _norm(self, name: str) -> nn.Module:
        return LayerNorm(name, self.config.hidden, self.slicing, eps=self.config.norm_eps)


def vocab_of(config: ModelConfig) -> int:
    """The vocabulary size; ValueError while it is still open."""
    if config.vocab is None:
        raise ValueError("model.vocab is not set: resolve the configuration with the tokenizer's vocabulary first")
    return config.vocab
