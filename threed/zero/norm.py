"""The global gradient norm: every real element once, over all axes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from threed.zero.layout import Bucket


def squares(part: Tensor) -> Tensor:
    """The sum of the squares of a slice of gradients, fp64 scalar."""
    return torch.linalg.vector_norm(_rows(part), dim=1, dtype=_wide(part)).double().square().sum()


def sum_of_squares(parts: Sequence[Tensor], buckets: Sequence[Bucket], device: torch.device) -> Tensor:
    """This rank's share of the squared norm, and whether any gradient it holds is not finite (1.0): fp64 [2].

    parts: the squares of each bucket's slice. A bucket counts where its slice is the one copy that does: on the first
    of the ranks that replicate it, and on the first stage that holds a tied weight. A copy that does not count must be
    finite all the same. Padding is zero.
    """
    total, others = torch.zeros(2, dtype=torch.float64, device=device).unbind()
    for part, bucket in zip(parts, buckets, strict=True):
        part = part.to(device)
        total, others = (total + part, others) if bucket.group.owned else (total, others + part)
    return torch.stack((total, (~torch.isfinite(total + others)).double()))


def _rows(part: Tensor) -> Tensor:
    """A slice as rows of at most 1024: one fp32 sum over 16 million elements is off by 6e-4, sums of rows by 5e-10."""
    return part.reshape(-1, math.gcd(part.numel(), 1024))


def _wide(part: Tensor) -> torch.dtype:
    return part.dtype if part.dtype in (torch.float32, torch.float64) else torch.float32
