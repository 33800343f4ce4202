"""DeepSpeed's learning rates as functions of the updates done, on tensors: a skipped step does not advance them.

    rate = learning_rate(section, lr=1e-3)         # of the section "scheduler"
    rate(torch.tensor(0.0, dtype=torch.float64))   # of the first update

DeepSpeed steps its scheduler after an update, and starts it at -1: the first update runs at the warm-up's start (at 0
under WarmupCosineLR), and so does the second. Source: DeepSpeed 0.19.8, deepspeed/runtime/lr_schedules.py, classes
WarmupLR, WarmupDecayLR and WarmupCosineLR.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from threed.interop.deepspeed.config import keys
from threed.interop.deepspeed.config.section import Auto, Section

NAMES, REFUSED = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR"), ("onecycle", "lrrangetest")
AGAIN = Auto(instead="write the number of optimizer steps")


@dataclass(frozen=True)
class Warmup:
    """The share of the way up, before step `steps` (at least 2)."""

    kind: Literal["log", "linear"]
    steps: int

    def share(self, step: Tensor) -> Tensor:
        """From DeepSpeed's step count (updates done - 1) to a share from 0 to 1."""
        if self.kind == "log":
            return torch.log(step.clamp(min=0) + 1) * (1.0 / math.log(self.steps))
        return step.clamp(min=0) / self.steps


@dataclass(frozen=True)
class LearningRate:
    """From the number of updates done (scalar tensor, fp64) to the next update's learning rate.

    Rises from `low` to `high`, then is `high` times `after(step)`; `start` is the rate of the first update.
    relative: whether rates are shares of the optimizer's, of which parameter groups may have their own; else `after`
    counts from `low` upwards.
    """

    warmup: Warmup
    start: float
    low: float
    high: float
    after: Callable[[Tensor], Tensor]
    relative: bool

    def __call__(self, done: Tensor) -> Tensor:
        step = done - 1
        rising = self.low + (self.high - self.low) * self.warmup.share(step)
        floor = 0.0 if self.relative else self.low
        falling = floor + (self.high - floor) * self.after(step)
        return torch.where(
            step < 0, self.start, torch.where(step < self.warmup.steps, rising, falling)
        )


def learning_rate(scheduler: Section, lr: float) -> LearningRate | None:
    """The schedule of a ds_config's section; None without one, for a constant rate. lr: the optimizer's."""
    if not scheduler.values:
        return None
    name = scheduler.word("type", None, NAMES, named=False, refused=REFUSED)
    scheduler.need("type", "use WarmupLR, WarmupDecayLR or WarmupCosineLR")
    params = scheduler.section("params")
    scheduler.close()
    if name is None:
        return None
    warmup = Warmup(
        params.word("warmup_type", "log", ("log", "linear")),
        max(2, params.whole("warmup_num_steps", 1000, least=1, auto=AGAIN)),
    )
    total = 0
    if name != "warmuplr":
        params.need("total_num_steps", AGAIN.instead)
        total = params.whole("total_num_steps", 0, least=1, auto=AGAIN, named=False)
    rate = (
        cosine(params, warmup, total, lr)
        if name == "warmupcosinelr"
        else linear(params, warmup, total, lr, name)
    )
    params.close(keys.SCHEDULER)
    return rate


def linear(params: Section, warmup: Warmup, total: int, lr: float, name: str) -> LearningRate:
    """WarmupLR: constant after the warm-up. WarmupDecayLR: down to the warm-up's start, linearly."""
    low = params.number(
        "warmup_min_lr", 0.0, least=0, auto=Auto(0.0, "as Hugging Face fills it in")
    )
    peak = lr if name == "warmuplr" else 0.001
    high = params.number(
        "warmup_max_lr", peak, least=0, auto=Auto(lr, "the optimizer's lr, as Hugging Face does")
    )

    def decay(step: Tensor) -> Tensor:
        return ((total - step) / max(1, total - warmup.steps)).clamp(min=0)

    return LearningRate(
        warmup, low, low, high, torch.ones_like if name == "warmuplr" else decay, False
    )


def cosine(params: Section, warmup: Warmup, total: int, lr: float) -> LearningRate:
    """WarmupCosineLR: shares of the optimizer's learning rate."""
    low = params.number("warmup_min_ratio", 0.0, least=0)
    end = params.number("cos_min_ratio", 0.0001, least=0)

    def fall(step: Tensor) -> Tensor:
        progress = ((step - warmup.steps + 1) / max(1, total - warmup.steps)).clamp(max=1)
        return (end + (1 - end) * (1 + torch.cos(math.pi * progress)) / 2).clamp(min=0)

    return LearningRate(warmup, 0.0, low * lr, lr, fall, True)
