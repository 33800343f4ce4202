"""Number formats by their names in the configuration, and the rule for fp16 loss scaling."""

from __future__ import annotations

from dataclasses import dataclass

import torch

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}


def dtype(name: str) -> torch.dtype:
    """Returns the torch dtype for a configured name."""
    return DTYPES[name]


@dataclass(frozen=True)
class LossScale:
    """The rule for scaling the loss (arXiv 1710.03740, section 3.2).

    Attributes:
        initial: the first scale.
        window: number of updates without overflow after which the scale doubles.
        hysteresis: number of overflows until the first halving of the scale. Every further overflow
            halves the scale again. The count of overflows restarts when the scale doubles. If
            `consecutive`, it restarts after every update without overflow.
        consecutive: whether only consecutive overflows count.
        minimum: lower bound of the scale.
        dynamic: whether the scale changes; otherwise it stays `initial`.
    """

    initial: float = 2.0**16
    window: int = 1000
    hysteresis: int = 2
    consecutive: bool = False
    minimum: float = 1.0
    dynamic: bool = True
