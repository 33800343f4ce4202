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
    its `carry` [k]."""

    grad_norm: Tensor
    clip: Tensor
    lr: Tensor
    loss_scale: Tensor
    skip: Tensor
    skips: Tensor
    sums: Tensor


@dataclass(frozen=True, eq=False)
class Before:
    """What an update begins with: learning rate, loss scale, steps skipped so far; grad_clip, 0 for no clipping."""

    lr: Tensor
    loss_scale: Tensor
    skips: Tensor
    grad_clip: float

    def with_sums(self, sums: Tensor) -> Update:
        """Returns the results where the sums over all ranks are these: the squared norm, gradients that are not finite,
        and the carry, fp64 [2 + k]."""
        norm = sums[0].sqrt() / self.loss_scale
        skip = ((sums[1] > 0) | ~torch.isfinite(norm)).double()
        clip = (self.grad_clip / (norm + 1e-6)).clamp(max=1.0) if self.grad_clip else torch.ones_like(norm)
        return Update(norm, clip, self.lr, self.loss_scale, skip, self.skips + skip, sums[2:])
