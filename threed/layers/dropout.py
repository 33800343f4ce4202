"""Dropout whose mask is a function of (seed, step, global sample, layer name, element): see `threed.rng`."""

from __future__ import annotations

from torch import Tensor, nn

from threed import rng
from threed.layers.slicing import MicroBatch, Slicing
from threed.ops import dropout as ops


class Dropout(nn.Module):
    """Zeroes elements of an activation between blocks with probability p and scales the rest by 1 / (1 - p).

    x: [s b h], or this rank's [s/t b h]: the mask is the same part of the same global one.
    """

    def __init__(self, name: str, p: float, slicing: Slicing) -> None:
        super().__init__()
        self.name, self.p, self.slicing = name, p, slicing

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        if self.p == 0 or not micro.training:
            return x
        if micro.samples is None:
            raise ValueError(f"{self.name}: dropout needs the micro-batch's global sample indices")
        length = x.shape[0] * (self.slicing.tp.size if self.slicing.sequence_parallel else 1)
        width = x.shape[-1]
        if ops.fits(x):
            first, _ = self.slicing.sequence_range(length)
            return ops.fused(x, ops.Draw(self.slicing.seed, self.name, micro.step, micro.samples, first, self.p))
        keep = rng.keep_mask(
            self.slicing.seed,
            self.name,
            micro.step,
            micro.samples,
            self.slicing.sequence_range(length),
            (0, width),
            width,
            self.p,
        )
        return x * keep * (1.0 / (1.0 - self.p))
