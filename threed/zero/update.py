"""What an update begins with, and what it finds out, as scalar tensors.

update = before.with_sums(sums)       once the sums over all ranks are known; or guessed
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Update:
    """The results of a step: the gradient norm before clipping, the factor that clips it, the learning rate used, the
    loss scale of its backward, whether the step is skipped (1.0), how many were so far; and the sums over all ranks of
    its `carry` [k].

    overflow: whether it is skipped because its loss or norm is not finite (1.0), and not as a spike or for its data.
    in_a_row: skipped steps that count (`threed.zero.bad_steps`) since the last one that was not.
    """

    grad_norm: Tensor
    clip: Tensor
    lr: Tensor
    loss_scale: Tensor
    skip: Tensor
    skips: Tensor
    sums: Tensor
    overflow: Tensor
    in_a_row: Tensor


@dataclass(frozen=True, eq=False)
class Before:
    """What an update begins with: learning rate, loss scale, steps skipped so far; grad_clip, 0 for no clipping;
    skipped steps in a row so far; the loss scale up to which such a step counts; the largest norm that is no spike."""

    lr: Tensor
    loss_scale: Tensor
    skips: Tensor
    grad_clip: float
    in_a_row: Tensor
    counts_from: float
    limit: Tensor | None = None

    def with_sums(self, sums: Tensor) -> Update:
        """Returns the results of a step.

        Args:
            sums: over all ranks, fp64 [3 + k]: the squared norm, ranks with gradients that are not finite, the loss,
                and k flags of invalid data, which skip the step if they are not 0.
        """
        norm = sums[0].sqrt() / self.loss_scale
        finite = (sums[1] == 0) & torch.isfinite(norm) & torch.isfinite(sums[2])
        invalid = (sums[3:] != 0).any()
        spike = torch.zeros_like(finite) if self.limit is None else finite & (norm > self.limit)
        skip, overflow = (~finite | spike | invalid).double(), (~finite & ~invalid).double()
        counts = spike | invalid | (~finite & (self.loss_scale <= self.counts_from))
        row = torch.where(skip == 0, 0.0, self.in_a_row + counts)
        clip = (
            (self.grad_clip / (norm + 1e-6)).clamp(max=1.0)
            if self.grad_clip
            else torch.ones_like(norm)
        )
        return Update(
            norm, clip, self.lr, self.loss_scale, skip, self.skips + skip, sums[2:], overflow, row
        )
