"""Dropout with a mask that depends only on (seed, step, global sample, layer name, element).

See `threed.core.rng`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from threed.layers.slicing import MicroBatch, Slicing
from threed.ops import dropout as ops
from threed.ops import launch


def _plus(x: Tensor, residual: Tensor | None) -> Tensor:
    return x if residual is None else residual + x


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

    def forward(self, x: Tensor, micro: MicroBatch, residual: Tensor | None = None) -> Tensor:
        """Returns residual + x after dropout; without dropout if p is 0 or `micro.training` is false.

        Args:
            x: [s b h]; with sequence parallelism [s/t b h].
            micro: the micro-batch; its samples and step seed the masks.
            residual: tensor to add, in the shape of x; None to add nothing.
        """
        if self.p == 0 or not micro.training:
            return _plus(x, residual)
        samples = self._samples(micro)
        if self.opaque is not None and torch.compiler.is_compiling():
            traced: Tensor = torch.ops.threed.drop(x, samples, micro.step, self.opaque)
            return _plus(traced, residual)
        return self.drop(x, samples, micro.step, residual)

    def _samples(self, micro: MicroBatch) -> Tensor:
        if micro.samples is None:
            raise ValueError(f"{self.name}: dropout needs the micro-batch's global sample indices")
        return micro.samples

    def drop(
        self, x: Tensor, samples: Tensor, step: int | Tensor, residual: Tensor | None = None
    ) -> Tensor:
        """Returns residual + x after dropout, by one kernel if possible.

        Args:
            x: [s b h].
            samples: global index of each sequence, int64 [b].
            step: number of the training step, or an int64 scalar tensor with it.
            residual: [s b h]; None to add nothing.
        """
        draw = self._draw(x, samples, step)
        if ops.fits(x) and (residual is None or launch.packed(residual)):
            return ops.fused(x, draw, residual)
        return _plus(x * draw.mask(x) * draw.scale, residual)

    def _draw(self, x: Tensor, samples: Tensor, step: int | Tensor) -> ops.Draw:
        positions = self.slicing.positions_of(x)
        return ops.Draw(self.slicing.seed, self.name, step, samples, positions, self.p)
