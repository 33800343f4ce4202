"""Learning rates as functions of the updates done so far, on tensors: a skipped step does not advance them."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Shape = Callable[[Tensor], Tensor]

# From progress after warm-up (0 to 1) to a share between 0 (min_lr) and 1 (lr).
SHAPES: dict[str, Shape] = {
    "constant": torch.ones_like,
    "linear": lambda done: 1 - done,
    "cosine": lambda done: 0.5 * (1 + torch.cos(math.pi * done)),
    "wsd": lambda done: ((1 - done) / 0.2).clamp(
        max=1.0
    ),  # warm-up, stable, decay over the last fifth
}


def schedule(
    name: str, lr: float, min_lr: float, warmup: int, steps: int
) -> Callable[[Tensor], Tensor]:
    """Returns a function from the updates done so far (a scalar tensor, fp64) to the learning rate of the next one.

    The rate rises linearly over `warmup` updates to `lr`, then follows the named shape down to `min_lr` at `steps`.
    """
    shape = SHAPES[name]

    def rate(done: Tensor) -> Tensor:
        rising = lr * (done + 1) / max(warmup, 1)
        progress = ((done - warmup) / max(steps - warmup, 1)).clamp(0, 1)
        return torch.where(done < warmup, rising, min_lr + (lr - min_lr) * shape(progress))

    return rate
