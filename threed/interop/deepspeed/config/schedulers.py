"""DeepSpeed's learning rates as functions of the updates done, on tensors: a skipped step does not advance them.

    rate = learning_rate(reader, config.scheduler, lr=1e-3)
    rate(torch.tensor(0.0, dtype=torch.float64))   # of the first update

DeepSpeed steps its scheduler after an update, and starts it at -1: the first update runs at the warm-up's start (at 0
under WarmupCosineLR), and so does the second. Source: DeepSpeed 0.19.8, deepspeed/runtime/lr_schedules.py, classes
WarmupLR, WarmupDecayLR and WarmupCosineLR.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from threed.interop.deepspeed.config.keys import STEPS, Scheduler
from threed.interop.deepspeed.config.reader import Reader

LINEAR, COSINE = ("warmup_min_lr", "warmup_max_lr"), ("warmup_min_ratio", "cos_min_ratio")
# of each scheduler, the keys of SchedulerParams that it does not have
NOT_OF = {
    "warmuplr": (*COSINE, "total_num_steps"),
    "warmupdecaylr": COSINE,
    "warmupcosinelr": LINEAR,
}


@dataclass(frozen=True)
class Warmup:
    """The share of the way up, before step `steps` (at least 2)."""

    kind: str  # "log" or "linear"
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


def learning_rate(reader: Reader, found: Scheduler, lr: float) -> LearningRate | None:
    """Returns the schedule of a ds_config's "scheduler"; None for a constant rate, if there is no
    schedule.

    Args:
        lr: the optimizer's learning rate.
    """
    if not found.model_fields_set:
        return None
    if found.type is None:
        fix = "use WarmupLR, WarmupDecayLR or WarmupCosineLR"
        reader.problem("scheduler.type", f"not given: {fix}")
    name, params, path = found.type or "warmuplr", found.params, "scheduler.params"
    reader.refuse_keys(params, path, NOT_OF[name])
    total = params.total_num_steps
    warmup = Warmup(params.warmup_type, max(2, params.warmup_num_steps))
    if total is None and name != "warmuplr":
        reader.problem(f"{path}.total_num_steps", f"not given: {STEPS}")
    if name == "warmupcosinelr":
        fall = partial(decay_cosine, warmup.steps, total or 1, params.cos_min_ratio)
        return LearningRate(warmup, 0.0, params.warmup_min_ratio * lr, lr, fall, True)
    low, high = params.warmup_min_lr, params.warmup_max_lr
    if name == "warmuplr":
        high = lr if high is None else high
        return LearningRate(warmup, low, low, high, torch.ones_like, False)
    high = 0.001 if high is None else high
    fall = partial(decay_linear, warmup.steps, total or 1)
    return LearningRate(warmup, low, low, high, fall, False)


def decay_linear(warmup: int, total: int, step: Tensor) -> Tensor:
    """Returns the share of WarmupDecayLR: down to 0 at the last step, linearly."""
    return ((total - step) / max(1, total - warmup)).clamp(min=0)


def decay_cosine(warmup: int, total: int, end: float, step: Tensor) -> Tensor:
    """Returns the share of WarmupCosineLR: down to `end` at the last step, by a cosine."""
    progress = ((step - warmup + 1) / max(1, total - warmup)).clamp(max=1)
    return (end + (1 - end) * (1 + torch.cos(math.pi * progress)) / 2).clamp(min=0)
