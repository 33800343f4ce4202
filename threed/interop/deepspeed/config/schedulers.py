"""DeepSpeed's learning rate schedules, as functions of the number of past updates.

Skipped steps do not count as updates.

    rate = learning_rate(reader, config.scheduler, lr=1e-3)
    rate(torch.tensor(0.0, dtype=torch.float64))   # learning rate of the first update

DeepSpeed starts its scheduler at step -1 and advances the scheduler after each update. So the first
update has step -1, the second update has step 0, and the warm-up begins at step 0. With WarmupLR
and WarmupDecayLR, the learning rate at step -1 is the same as at step 0. With WarmupCosineLR, it is
0. Source: DeepSpeed 0.19.8, deepspeed/runtime/lr_schedules.py, classes WarmupLR, WarmupDecayLR and
WarmupCosineLR.
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
# For each scheduler, the keys of `SchedulerParams` that DeepSpeed's scheduler does not have.
NOT_OF = {
    "warmuplr": (*COSINE, "total_num_steps"),
    "warmupdecaylr": COSINE,
    "warmupcosinelr": LINEAR,
}


@dataclass(frozen=True)
class LearningRate:
    """Maps the number of past updates (scalar fp64 tensor) to the learning rate of the next update.

    The step is the number of past updates minus 1. The learning rate of the first update (step -1)
    is called `first` here. It is 0 if the schedule is `relative`, and `low` otherwise.

        step = -1            first
        0 <= step < steps    rises from low to high (warm-up)
        steps <= step        first + (high - first) * after(step)

    Attributes:
        ramp: how the learning rate rises in the warm-up: "log" or "linear".
        steps: number of warm-up steps, at least 2.
        low: learning rate at the start of the warm-up.
        high: learning rate at the end of the warm-up.
        after: a function from a step after the warm-up to the decay factor at this step.
        relative: whether the schedule multiplies the optimizer's learning rate by a factor. If so,
            parameter groups may have different learning rates.
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
    """Returns the learning rate schedule that the keys of "scheduler" in a ds_config define.

    Args:
        reader: the reader, to which problems of the keys are added.
        found: values of the group "scheduler".
        lr: the optimizer's learning rate.

    Returns:
        The schedule; None if the ds_config has no scheduler, so that the learning rate is constant.
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
    """Returns WarmupDecayLR's factor: it falls linearly from 1 at step `warmup` to 0 at `total`."""
    return ((total - step) / max(1, total - warmup)).clamp(min=0)


def decay_cosine(warmup: int, total: int, end: float, step: Tensor) -> Tensor:
    """Returns WarmupCosineLR's factor at `step`.

    The factor falls along a cosine from 1 at step `warmup` - 1 to `end` at step `total` - 1.
    """
    progress = ((step - warmup + 1) / max(1, total - warmup)).clamp(max=1)
    return (end + (1 - end) * (1 + torch.cos(math.pi * progress)) / 2).clamp(min=0)
