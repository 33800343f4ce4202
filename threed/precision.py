"""Number formats by their names in the configuration, and the rule of the loss scale that fp16 needs."""

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
    """The torch dtype of a configured name."""
    return DTYPES[name]


@dataclass(frozen=True)
class LossScale:
    """How the loss is scaled (arXiv 1710.03740, section 3.2): a constant, or growing and shrinking with what overflows.

    window: updates without overflow after which the scale doubles. hysteresis: overflows before it is halved; refilled
    when it doubles, or with `consecutive` by every update. minimum: it never falls below.
    """

    initial: float = 2.0**16
    window: int = 1000
    hysteresis: int = 2
    consecutive: bool = False
    minimum: float = 1.0
    dynamic: bool = True
