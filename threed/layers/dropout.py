"""Dropout with a mask that depends only on (seed, step, global sample, layer name, element).

See `threed.core.rng`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from threed.layers.slicing import MicroBatch, Slicing
from threed.ops import dropout as ops


class Dropout(nn.Module):
    """Zeroes elements of an activation between blocks with probability p, and scales the others.

    The scale is 1 / (1 - p). x is [s b h], or this rank's [s/t b h] with sequence parallelism. Each
    rank's mask is its shard of one global mask.

    Args:
        name: global name. Layers with different names draw different masks.
        p: probability of zeroing an element.
        slicing: parallel layout and seed.
    """

    opaque: Any = None  # represents this layer in a graph of torch.compile (`layers.compiled`)

    def __init__(self, name: str, p: float, slicing: Slicing) -> None:
        super().__init__()
        self.name, self.p, self.slicing = name, p, slicing

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        """Returns x after dropout; x itself if p is 0 or `micro.training` is false.

        Args:
            x: [s b h]; with sequence parallelism [s/t b h].
            micro: the micro-batch; its samples and step seed the masks.
        """
        if self.p == 0 or not micro.training:
            return x
        samples = self._samples(micro)
        if self.opaque is not None and torch.compiler.is_compiling():
            traced: Tensor = torch.ops.threed.drop(x, samples, micro.step, self.opaque)
            return traced
        return self.drop(x, samples, micro.step)

    def _samples(self, micro: MicroBatch) -> Tensor:
        if micro.samples is None:
            raise ValueError(f"{self.name}: dropout needs the micro-batch's global sample indices")
        return micro.samples

    def drop(self, x: Tensor, samples: Tensor, step: int) -> Tensor:
        """Returns x after dropout.

        Args:
            x: [s b h].
            samples: global index of each sequence, int64 [b].
            step: number of the training step.
        """
        draw = self._draw(x, samples, step)
        return ops.fused(x, draw) if ops.fits(x) else x * draw.mask(x) * draw.scale

    def _draw(self, x: Tensor, samples: Tensor, step: int) -> ops.Draw:
        positions = self.slicing.positions_of(x)
        return ops.Draw(self.slicing.seed, self.name, step, samples, positions, self.p)
