"""A decoder that begins with a causal convolution over positions, built directly from sharding records.

python examples/convolution_stem.py
torchrun --standalone --nproc-per-node 2 examples/convolution_stem.py --parallel.tp 2

The model reads bytes. The stem combines each byte with the bytes just before it, so that the first blocks need not do
this. Its channels are split over tensor ranks, and its weight has three dimensions. docs/guide/own_models.md explains it.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

import threed
from threed import layers
from threed.config import ModelConfig
from threed.core.packages import needed
from threed.layers import Init, Piece, ShardSpec, parameter, split, vector

rearrange = needed("einops", "this example").rearrange


class ConvolutionStem(nn.Module):
    """x + down(gelu(convolution(x))): [s b h] -> [s b h] (both [s/t b h] if sequences are split).

    Each position reads itself and the kernel - 1 positions before it, through `channels` features.
    """

    def __init__(
        self, name: str, hidden: int, channels: int, kernel: int, slicing: layers.Slicing
    ) -> None:
        super().__init__()
        self.name, self.slicing, self.kernel = name, slicing, kernel
        first, last = split(channels, slicing.tp.size, slicing.tp.index)
        shape, mine = (channels, hidden, kernel), (last - first, hidden, kernel)
        weight = Piece(
            f"{name}.convolution.weight", shape, (first, 0, 0), mine, init=Init(std=0.02)
        )
        self.weight = parameter(ShardSpec((weight,)), mine)
        bias = vector(f"{name}.convolution.bias", channels, (first, last))
        self.bias = parameter(ShardSpec((bias,), decay=False), (last - first,))
        self.down = layers.RowLinear(f"{name}.down", channels, hidden, slicing)

    def forward(self, x: Tensor, micro: layers.MicroBatch) -> Tensor:
        # f: a position needs the positions before it
        whole = rearrange(self.slicing.gather(x), "s b h -> b h s")
        y = F.conv1d(F.pad(whole, (self.kernel - 1, 0)), self.weight, self.bias)
        return x + self.down(rearrange(layers.gelu(y), "b c s -> s b c"))


class ConvolutionModel:
    """Embedding, stem, blocks and head. The stem is a separate pipeline layer."""

    def __init__(self, config: ModelConfig, slicing: layers.Slicing) -> None:
        self.config, self.slicing, self.hidden = config, slicing, config.hidden

    def layers(self) -> list[nn.Module]:
        c, slicing = self.config, self.slicing
        embedding = layers.Embedding("embedding", c.vocab or 0, c.hidden, slicing)
        stem = ConvolutionStem("stem", c.hidden, 2 * c.hidden, 4, slicing)
        norm = layers.RMSNorm("head.norm", c.hidden, slicing)
        head = layers.LanguageModelHead(
            "head", "embedding.word.weight", norm, c.vocab or 0, c.hidden, slicing
        )
        return [embedding, stem, *(self.block(f"blocks.{i}") for i in range(c.layers)), head]

    def block(self, name: str) -> nn.Module:
        c, slicing = self.config, self.slicing
        norms = tuple(
            layers.RMSNorm(f"{name}.{part}_norm", c.hidden, slicing)
            for part in ("attention", "mlp")
        )
        attention = layers.Attention(
            f"{name}.attention", c.hidden, c.heads, slicing, rotary=c.rope_theta
        )
        return layers.Block(
            name,
            norms,
            attention,
            layers.MLP(f"{name}.mlp", c.hidden, 4 * c.hidden, slicing),
            slicing,
        )


def main() -> None:
    from custom_model import configure, train  # in the same folder

    config, data = configure()
    topology = threed.Topology(pp=config.parallel.pp, tp=config.parallel.tp)
    slicing = threed.Slicing(
        topology.axis("tp"), bool(config.parallel.sequence), config.train.seed, config.zero.tile
    )
    train(threed.Engine(ConvolutionModel(config.model, slicing), topology, config), data)


if __name__ == "__main__":
    main()
