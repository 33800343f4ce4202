"""The global gradient norm: every real element once, over all axes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from threed.zero.layout import Bucket


def sum_of_squares(slices: Sequence[Tensor], buckets: Sequence[Bucket]) -> Tensor:
    """This rank's share of the squared norm, and whether any gradient it holds is not finite (1.0): fp64 [2].

    A bucket counts where its slice is the one copy that does: on the first of the ranks that replicate it, and on the
    first stage that holds a tied weight. A copy that does not count must be finite all the same. Padding is zero.
    """
    device = slices[0].device if slices else torch.device("cpu")
    total, others = torch.zeros(2, dtype=torch.float64, device=device).unbind()
    for part, bucket in zip(slices, buckets, strict=True):
        squares = torch.linalg.vector_norm(_rows(part), dim=1, dtype=_wide(part)).double().square().sum()
        total, others = (total + squares, others) if bucket.group.owned else (total, others + squares)
    return torch.stack((total, (~torch.isfinite(total + others)).double()))


def _rows(part: Tensor) -> Tensor:
    """A slice as rows of at most 1024: one fp32 sum over 16 million elements is off by 6e-4, sums of rows by 5e-10."""
    return part.reshape(-1, math.gcd(part.numel(), 1024))


def _wide(part: Tensor) -> torch.dtype:
    return part.dtype if part.dtype in (torch.float32, torch.float64) else torch.float32
