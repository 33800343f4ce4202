"""Dropout whose mask is a function of (seed, step, global sample, layer name, element): see `threed.rng`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from threed import rng
from threed.layers.slicing import MicroBatch, Slicing
from threed.ops import dropout as ops


class Dropout(nn.Module):
    """Zeroes elements of an activation between blocks with probability p and scales the rest by 1 / (1 - p).

    x: [s b h], or this rank's [s/t b h]: the mask is the same part of the same global one.
    """

    opaque: Any = None  # stands for this layer in a graph of torch.compile (`layers.compiled`)

    def __init__(self, name: str, p: float, slicing: Slicing) -> None:
        super().__init__()
        self.name, self.p, self.slicing = name, p, slicing

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        if self.p == 0 or not micro.training:
            return x
        if micro.samples is None:
            raise ValueError(f"{self.name}: dropout needs the micro-batch's global sample indices")
        if self.opaque is not None and torch.compiler.is_compiling():
            traced: Tensor = torch.ops.threed.drop(x, micro.samples, micro.step, self.opaque)
            return traced
        return self.drop(x, micro.samples, micro.step)

    def drop(self, x: Tensor, samples: Tensor, step: int) -> Tensor:
        """Dropout of x, whose columns [b] are these global samples (int64)."""
        length = x.shape[0] * (self.slicing.tp.size if self.slicing.sequence_parallel else 1)
        rows, width = self.slicing.sequence_range(length), x.shape[-1]
        if ops.fits(x):
            return ops.fused(x, ops.Draw(self.slicing.seed, self.name, step, samples, rows[0], self.p))
        keep = rng.keep_mask(self.slicing.seed, self.name, step, samples, rows, (0, width), width, self.p)
        return x * keep * (1.0 / (1.0 - self.p))
