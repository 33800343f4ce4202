"""DeepSpeed's learning rate schedules, as functions of the number of updates.

Skipped steps do not count as updates.

    rate = learning_rate(reader, config.scheduler, lr=1e-3)
    rate(torch.tensor(0.0, dtype=torch.float64))   # learning rate of the first update

DeepSpeed starts its scheduler at step -1 and advances it after each update. The first and the
second update therefore both have the learning rate at the start of the warm-up; with
WarmupCosineLR, the first update has the learning rate 0. Source: DeepSpeed 0.19.8,
deepspeed/runtime/lr_schedules.py, classes WarmupLR, WarmupDecayLR and WarmupCosineLR.
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
# For each scheduler, the keys of SchedulerParams that the scheduler does not have.
NOT_OF = {
    "warmuplr": (*COSINE, "total_num_steps"),
    "warmupdecaylr": COSINE,
    "warmupcosinelr": LINEAR,
}


@dataclass(frozen=True)
class LearningRate:
    """Maps the number of past updates (scalar fp64 tensor) to the learning rate of the next update.

    The schedule's step is the number of past updates minus 1. The rate rises from `low` to `high`
    during the warm-up. Then it is first + (high - first) * after(step), with first = 0 if the
    schedule is `relative`, and first = `low` otherwise. The rate at step -1 is `first`.

    Attributes:
        ramp: shape of the warm-up, "log" or "linear".
        steps: number of warm-up steps, at least 2.
        low: learning rate at the start of the warm-up.
        high: learning rate at the end of the warm-up.
        after: a function that returns the decay factor of a step after the warm-up.
        relative: whether the schedule scales the optimizer's learning rate; if so, parameter groups
            may have different learning rates.
    """

    ramp: str
    steps: int
    low: float
    high: float
    after: Callable[[Tensor], Tensor]
    relative: bool

    def __call__(self, done: Tensor) -> Tensor:
        step = done - 1
        share = step.clamp(min=0) / self.steps
        if self.ramp == "log":
            share = torch.log(step.clamp(min=0) + 1) * (1.0 / math.log(self.steps))
        rising = self.low + (self.high - self.low) * share
        first = 0.0 if self.relative else self.low
        falling = first + (self.high - first) * self.after(step)
        return torch.where(step < 0, first, torch.where(step < self.steps, rising, falling))


def learning_rate(reader: Reader, found: Scheduler, lr: float) -> LearningRate | None:
    """Returns the schedule of a ds_config's "scheduler"; None (constant rate) without a scheduler.

    Args:
        reader: collects problems.
        found: the group "scheduler".
        lr: the optimizer's learning rate.
    """
    if not found.model_fields_set:
        return None
    fix = "use WarmupLR, WarmupDecayLR or WarmupCosineLR"
    reader.check(found.type is not None, "scheduler.type", f"not given: {fix}")
    name, params, path = found.type or "warmuplr", found.params, "scheduler.params"
    reader.refuse_keys(params, path, NOT_OF[name])
    total, ramp, steps = params.total_num_steps, params.warmup_type, max(2, params.warmup_num_steps)
    needs_total = total is None and name != "warmuplr"
    reader.check(not needs_total, f"{path}.total_num_steps", f"not given: {STEPS}")
    if name == "warmupcosinelr":
        fall = partial(decay_cosine, steps, total or 1, params.cos_min_ratio)
        return LearningRate(ramp, steps, params.warmup_min_ratio * lr, lr, fall, True)
    low, high = params.warmup_min_lr, params.warmup_max_lr
    if name == "warmuplr":
        high = lr if high is None else high
        return LearningRate(ramp, steps, low, high, torch.ones_like, False)
    high = 0.001 if high is None else high
    fall = partial(decay_linear, steps, total or 1)
    return LearningRate(ramp, steps, low, high, fall, False)


def decay_linear(warmup: int, total: int, step: Tensor) -> Tensor:
    """Returns WarmupDecayLR's factor: linear from 1 at step `warmup` to 0 at step `total`."""
    return ((total - step) / max(1, total - warmup)).clamp(min=0)


def decay_cosine(warmup: int, total: int, end: float, step: Tensor) -> Tensor:
    """Returns WarmupCosineLR's factor at `step`.

    The factor follows a cosine from 1 at step `warmup` - 1 to `end` at step `total` - 1.
    """
    progress = ((step - warmup + 1) / max(1, total - warmup)).clamp(max=1)
    return (end + (1 - end) * (1 + torch.cos(math.pi * progress)) / 2).clamp(min=0)
