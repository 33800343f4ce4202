"""Number formats by their names in the configuration, and the loss scale that keeps fp16 gradients above zero."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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


class Scaler:
    """The loss scale of a run, as scalar tensors (fp64): nothing here is read on the host."""

    def __init__(self, rule: LossScale, device: torch.device) -> None:
        self.rule = rule
        self.scale = torch.full((), rule.initial, dtype=torch.float64, device=device)
        # updates since the last overflow
        self.good = torch.zeros((), dtype=torch.float64, device=device)
        self.left = torch.full((), float(rule.hysteresis), dtype=torch.float64, device=device)

    def update(self, skipped: Tensor) -> None:
        """Updates the scale after a step: `skipped` is 1.0 where it overflowed, else 0.0. Call it after unscaling."""
        if not self.rule.dynamic:
            return
        bad, full = skipped != 0, float(self.rule.hysteresis)
        self.good.copy_(torch.where(bad, 0.0, self.good + 1))
        halve = bad & (self.left <= 1)
        double = ~bad & (self.good % self.rule.window == 0)
        halved = (self.scale / 2).clamp(min=self.rule.minimum)
        self.scale.copy_(
            torch.where(halve, halved, torch.where(double, self.scale * 2, self.scale))
        )
        refill = ~bad if self.rule.consecutive else double
        spent = torch.where(bad & ~halve, self.left - 1, self.left)
        self.left.copy_(torch.where(refill, full, spent))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What an update changes."""
        return self.scale, self.good, self.left

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps of it; of a constant scale nothing, it is the configuration's."""
        if not self.rule.dynamic:
            return {}
        return {
            "loss_scale": float(self.scale),
            "good_steps": float(self.good),
            "hysteresis_left": float(self.left),
        }

    def restore(self, state: dict[str, float]) -> None:
        """Restores the scale of a checkpoint; for a checkpoint without a loss scale, the initial one."""
        if self.rule.dynamic:
            self.scale.fill_(state.get("loss_scale", self.rule.initial))
            self.good.fill_(state.get("good_steps", 0.0))
            self.left.fill_(state.get("hysteresis_left", float(self.rule.hysteresis)))
