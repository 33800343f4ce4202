"""Small models with mixtures of experts, as `--model.arch tests/expert_models.py:NAME` would name them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from threed import layers
from threed.config import ModelConfig
from threed.layers import LossFactors, MixtureOfExperts, Routing, Slicing, clamped_swiglu

STD, OUT = 0.3, 0.05  # STD: so that the scores of experts differ


class First(Routing):
    """Chooses the first experts for every token."""

    def choose(self, scores: Tensor, bias: Tensor | None, count: int) -> Tensor:
        return torch.arange(count).expand(*scores.shape[:-1], count).contiguous()


class Softmax:
    """Experts in every block; softmax, both losses of the router."""

    dense = ()
    routing = Routing()
    experts, per_token, shared, ffn = 8, 2, 0, 12
    losses = LossFactors(0.02, 0.01)
    biases, activation = False, staticmethod(F.silu)

    def __init__(self, config: ModelConfig, slicing: Slicing) -> None:
        self.config, self.slicing, self.hidden = config, slicing, config.hidden

    def layers(self) -> list[nn.Module]:
        """Returns embedding, blocks and head."""
        c, h, slicing = self.config, self.hidden, self.slicing
        vocab = c.vocab or 0
        norm = layers.RMSNorm("head.norm", h, slicing)
        head = layers.LanguageModelHead("head", "embedding.word.weight", norm, vocab, h, slicing)
        embedding = layers.Embedding("embedding", vocab, h, slicing, dropout=c.dropout)
        return [embedding, *map(self.block, range(c.layers)), head]

    def block(self, index: int) -> nn.Module:
        """Returns a block, with a dense MLP or experts."""
        c, h, slicing, name = self.config, self.hidden, self.slicing, f"blocks.{index}"
        norms = [layers.RMSNorm(f"{name}.{part}_norm", h, slicing) for part in ("attention", "mlp")]
        attention = layers.Attention(
            f"{name}.attention", h, c.heads, slicing, kv_heads=2, rotary=1e4, std=OUT, out_std=OUT
        )
        mlp: nn.Module = (
            layers.GatedMLP(f"{name}.mlp", h, 40, slicing, std=OUT, out_std=OUT)
            if index in self.dense
            else self.mixture(f"{name}.mlp")
        )
        return layers.Block(name, (norms[0], norms[1]), attention, mlp, slicing, dropout=c.dropout)

    def mixture(self, name: str) -> MixtureOfExperts:
        """Returns the experts of a block."""
        return MixtureOfExperts(
            name, self.hidden, self.ffn, self.experts, self.per_token, self.slicing, routing=self.routing,
            shared_ffn=self.shared, losses=self.losses, biases=self.biases, activation=self.activation, std=STD, out_std=OUT,
        )  # fmt: skip


class Biased(Softmax):
    """As in DeepSeek-V3: a dense block first, sigmoid, groups, selection biases, a shared expert."""

    dense = (0,)
    routing = Routing("sigmoid", scale=2.5, groups=4, groups_per_token=2, bias=True, epsilon=1e-20)
    shared, ffn = 20, 16
    losses = LossFactors(aux=0.02)


class Chosen(Softmax):
    """As in gpt-oss: the softmax of the chosen logits, biases; one expert per rank, experts in some blocks."""

    dense = (1,)
    routing = Routing(after_top_k=True)
    experts, per_token, ffn = 4, 3, 16
    losses = LossFactors(z=0.01)
    biases, activation = True, staticmethod(clamped_swiglu)


class Single(Softmax):
    """One expert per token, weighted by its score, as in Switch Transformers."""

    routing = Routing(normalize=False)
    experts, per_token = 4, 1


class Lopsided(Softmax):
    """All tokens go to the first experts; the others, and the ranks that hold them, have no token."""

    routing = First()
