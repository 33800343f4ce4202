"""A decoder that begins with a causal convolution over positions, built directly from sharding records.

python examples/convolution_stem.py
torchrun --standalone --nproc-per-node 2 examples/convolution_stem.py --parallel.tp 2

The model reads bytes. The convolution (the stem) combines each byte with the bytes just before it, so that the first
blocks need not do this. Its channels are split over tensor ranks, and its weight has three dimensions.
docs/guide/own_models.md explains this example.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

import threed
from threed import layers
from threed.config import ModelConfig


class ConvolutionStem(nn.Module):
    """x + down(gelu(convolution(x))): [s b h] -> [s b h] (both [s/t b h] if sequences are split).

    Each position reads itself and the kernel - 1 positions before it, through `channels` features.
    """

    context = True  # supports context parallelism, because it gathers full sequences

    def __init__(
        self, name: str, hidden: int, channels: int, kernel: int, slicing: layers.Slicing
    ) -> None:
        super().__init__()
        self.name, self.slicing, self.kernel = name, slicing, kernel
        first, last = layers.split(channels, slicing.tp.size, slicing.tp.index)
        shape, mine = (channels, hidden, kernel), (last - first, hidden, kernel)
        init = layers.Init(std=0.02)
        weight = layers.Piece(f"{name}.convolution.weight", shape, (first, 0, 0), mine, init=init)
        self.weight = layers.parameter(layers.ShardSpec((weight,)), mine)
        bias = layers.vector(f"{name}.convolution.bias", channels, (first, last))
        self.bias = layers.parameter(layers.ShardSpec((bias,), decay=False), (last - first,))
        self.down = layers.RowLinear(f"{name}.down", channels, hidden, slicing)

    def forward(self, x: Tensor, micro: layers.MicroBatch) -> Tensor:
        # f: a position needs the positions before it, also those of other context ranks
        context = self.slicing.context
        full = context.gather(self.slicing.gather(x)).permute(1, 2, 0)  # [s b h] -> [b h s]
        y = F.conv1d(F.pad(full, (self.kernel - 1, 0)), self.weight, self.bias)
        y = context.own(layers.gelu(y).permute(2, 0, 1))  # [b c s] -> [s b c]
        return x + self.down(y)


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


# Defaults of this program; flags override them.
DEFAULTS = {
    "model": {"layers": 4, "hidden": 128, "heads": 4, "seq": 128},
    "train": {"steps": 20, "global_batch": 16},
    "optim": {"lr": 3e-3, "warmup": 5},
    "log": {"every": 1},
}

if __name__ == "__main__":
    threed.Trainer.from_command_line(ConvolutionModel, DEFAULTS, about=__doc__).run()
