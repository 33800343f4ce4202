"""Attention with low-rank keys and values, similar to multi-head latent attention in DeepSeek-V2.

python examples/latent_attention.py
torchrun --standalone --nproc-per-node 2 examples/latent_attention.py --parallel.tp 2

arXiv 2405.04434, section 2.1: the keys and values of all heads are computed from a small latent vector per position,
and all heads share one rotary key. Unlike in DeepSeek-V2, queries are not compressed. docs/guide/own_models.md explains
this example.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import threed
from threed import layers
from threed.config import ModelConfig


class LatentAttention(nn.Module):
    """x [s b h] -> [s b h] (both [s/t b h] if sequences are split).

    There are a heads. The queries and keys of a head have d dimensions without and r dimensions with rotary positions.
    Its values have d dimensions. rank is the size of the latent vector.
    """

    recompute = layers.Recompute()
    context = True  # supports context parallelism

    def __init__(
        self,
        name: str,
        hidden: int,
        heads: int,
        slicing: layers.Slicing,
        *,
        d: int,
        r: int,
        rank: int,
        theta: float,
    ) -> None:
        super().__init__()
        self.slicing, self.d, self.r, self.rank, self.theta = slicing, d, r, rank, theta
        query = [("query", heads * (d + r))]
        keys_values = [("key", heads * d), ("value", heads * d)]
        self.query = layers.ColumnLinear(name, hidden, query, slicing, bias=False, multiple=d + r)
        self.down = layers.ReplicatedLinear(f"{name}.down", hidden, rank + r, slicing, bias=False)
        self.norm = layers.RMSNorm(f"{name}.norm", rank, slicing)
        self.up = layers.ColumnLinear(
            name, rank, keys_values, slicing, bias=False, multiple=d, local=True
        )
        self.out = layers.RowLinear(
            f"{name}.out", heads * d, hidden, slicing, bias=False, multiple=d
        )

    def forward(self, x: Tensor) -> Tensor:
        latent, turned = self.down(x).split([self.rank, self.r], dim=-1)  # this rank's positions
        # f: all positions, for this rank's heads
        small = self.slicing.gather(torch.cat((self.norm(latent), turned), dim=-1))
        latent, turned = small.split([self.rank, self.r], dim=-1)
        return self.out(
            self.recompute.run("attention", self._attend, self.query(x), self.up(latent), turned)
        )

    def _attend(self, query: Tensor, keys_values: Tensor, turned: Tensor) -> Tensor:
        """query [s b a/t (d+r)], keys and values [s b 2 a/t d], turned [s b r] -> [s b (a/t d)]."""
        q = query.unflatten(-1, (-1, self.d + self.r))  # [s b a/t d+r]
        k, v = keys_values.unflatten(-1, (2, -1, self.d)).unbind(2)  # each [s b a/t d]
        positions = self.slicing.gathered_positions(query)
        part = layers.rotate(q[..., self.d :], self.theta, positions)
        q = torch.cat((q[..., : self.d], part), dim=-1)
        one = layers.rotate(turned.unsqueeze(2), self.theta, positions)
        k = torch.cat((k, one.expand(*k.shape[:3], self.r)), dim=-1)
        # over this rank's heads and the positions of all context ranks
        keep = self.recompute.keep  # keys of other context ranks travel once, also with recompute
        return self.slicing.context.attend(layers.Causal(), q, k, v, keep=keep).flatten(2)


class LatentModel:
    """A decoder with latent attention."""

    def __init__(self, config: ModelConfig, slicing: layers.Slicing) -> None:
        self.config, self.slicing, self.hidden = config, slicing, config.hidden

    def layers(self) -> list[nn.Module]:
        c, slicing = self.config, self.slicing
        embedding = layers.Embedding("embedding", c.vocab or 0, c.hidden, slicing)
        norm = layers.RMSNorm("head.norm", c.hidden, slicing)
        head = layers.LanguageModelHead(
            "head", "embedding.word.weight", norm, c.vocab or 0, c.hidden, slicing
        )
        return [embedding, *(self.block(f"blocks.{i}") for i in range(c.layers)), head]

    def block(self, name: str) -> nn.Module:
        c, slicing = self.config, self.slicing
        d = c.hidden // c.heads
        attention = LatentAttention(
            f"{name}.attention",
            c.hidden,
            c.heads,
            slicing,
            d=d,
            r=2 * (d // 4),
            rank=c.hidden // 4,
            theta=c.rope_theta,
        )
        norms = tuple(
            layers.RMSNorm(f"{name}.{part}_norm", c.hidden, slicing)
            for part in ("attention", "mlp")
        )
        return layers.Block(
            name,
            norms,
            attention,
            layers.MLP(f"{name}.mlp", c.hidden, 4 * c.hidden, slicing),
            slicing,
        )


# Defaults of this program; flags override them.
DEFAULTS = {
    "model": {"layers": 4, "hidden": 128, "heads": 4, "seq": 128},
    "train": {"steps": 20, "global_batch": 16},
    "optim": {"lr": 3e-3, "warmup": 5},
    "log": {"every": 1},
}

if __name__ == "__main__":
    threed.Trainer.from_command_line(LatentModel, DEFAULTS, about=__doc__).run()
