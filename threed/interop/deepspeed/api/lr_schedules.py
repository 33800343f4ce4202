"""deepspeed.runtime.lr_schedules: schedulers of a torch optimizer, with DeepSpeed's formulas.

    scheduler = WarmupLR(optimizer, warmup_max_lr=1e-3, warmup_num_steps=100)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, ...)

`threed.interop.deepspeed.config.schedulers` has the formulas.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from threed.interop.deepspeed.config.optimizers import set_rate
from threed.interop.deepspeed.config.schedulers import LearningRate, decay_cosine, decay_linear

LR_RANGE_TEST, ONE_CYCLE = "LRRangeTest", "OneCycle"
WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR = "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"
VALID_LR_SCHEDULES = [LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR]
WARMUP_MIN_LR, WARMUP_MAX_LR = "warmup_min_lr", "warmup_max_lr"
WARMUP_NUM_STEPS, WARMUP_TYPE = "warmup_num_steps", "warmup_type"
WARMUP_LOG_RATE, WARMUP_LINEAR_RATE = "log", "linear"
WARMUP_MIN_RATIO, COS_MIN_RATIO = "warmup_min_ratio", "cos_min_ratio"
TOTAL_NUM_STEPS = "total_num_steps"


class _Schedule:
    """A scheduler that writes learning rates to the groups of an optimizer.

    Args:
        optimizer: the optimizer.
        rates: for each parameter group, the function from the number of past updates to the
            learning rate.
        last_batch_iteration: the index of the last step; -1 before the first step.

    Attributes:
        optimizer: the optimizer.
        last_batch_iteration: the index of the last step.
    """

    def __init__(
        self, optimizer: Any, rates: Sequence[LearningRate], last_batch_iteration: int
    ) -> None:
        self.optimizer, self.last_batch_iteration = optimizer, last_batch_iteration
        self._rates = rates
        if last_batch_iteration == -1:
            self._write()

    def get_lr(self) -> list[float]:
        """Returns the learning rates at the current step, one per parameter group."""
        done = torch.tensor(self.last_batch_iteration + 1, dtype=torch.float64)
        return [float(rate(done)) for rate in self._rates]

    def get_last_lr(self) -> list[float]:
        """Returns the learning rates that this scheduler has set, one per parameter group."""
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Sets the learning rates of the next step.

        Args:
            last_batch_iteration: the index of the step; None means the index after the last one.
        """
        if last_batch_iteration is None:
            last_batch_iteration = self.last_batch_iteration + 1
        self.load_state_dict({"last_batch_iteration": last_batch_iteration})

    def state_dict(self) -> dict[str, Any]:
        """Returns the index of the last step."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        """Sets the index of the last step, and the learning rates, from a `state_dict`."""
        self.last_batch_iteration = sd["last_batch_iteration"]
        self._write()

    def _write(self) -> None:
        self._last_lr = self.get_lr()
        for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            set_rate(group, rate)


class WarmupLR(_Schedule):
    """Increases the learning rate from a minimum to a maximum, where it stays.

    Args:
        optimizer: a torch optimizer.
        warmup_min_lr: learning rate at the start, for all groups or one per group.
        warmup_max_lr: learning rate after the warm-up; None means the learning rate of each group.
        warmup_num_steps: number of steps of the warm-up.
        warmup_type: "log" or "linear".
        last_batch_iteration: the index of the last step.

    Raises:
        ValueError: if `warmup_num_steps` is not a positive integer, or `warmup_type` is unknown.
    """

    def __init__(
        self, optimizer: Any, warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = None, warmup_num_steps: int = 1000,
        warmup_type: str = "log", last_batch_iteration: int = -1,
    ) -> None:  # fmt: skip
        steps = _steps(warmup_num_steps, warmup_type)
        if warmup_max_lr is None:
            warmup_max_lr = [float(group["lr"]) for group in optimizer.param_groups]
        lows = _per_group(optimizer, warmup_min_lr)
        highs = _per_group(optimizer, warmup_max_lr)
        rates = [
            LearningRate(warmup_type, steps, low, high, self._after(steps), False)
            for low, high in zip(lows, highs, strict=True)
        ]
        super().__init__(optimizer, rates, last_batch_iteration)

    def _after(self, steps: int) -> Callable[[Tensor], Tensor]:
        """Returns the function from a step after the warm-up to the decay factor."""
        return torch.ones_like


class WarmupDecayLR(WarmupLR):
    """Increases the learning rate as `WarmupLR`, then decreases it linearly.

    Args:
        optimizer: a torch optimizer.
        total_num_steps: number of steps at which the learning rate reaches the minimum.
        warmup_min_lr: see `WarmupLR`.
        warmup_max_lr: see `WarmupLR`.
        warmup_num_steps: see `WarmupLR`.
        warmup_type: see `WarmupLR`.
        last_batch_iteration: see `WarmupLR`.
    """

    def __init__(
        self, optimizer: Any, total_num_steps: int,
        warmup_min_lr: float | Sequence[float] = 0.0, warmup_max_lr: float | Sequence[float] = 0.001,
        warmup_num_steps: int = 1000, warmup_type: str = "log", last_batch_iteration: int = -1,
    ) -> None:  # fmt: skip
        self.total_num_steps = total_num_steps
        super().__init__(
            optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type,
            last_batch_iteration,
        )  # fmt: skip

    def _after(self, steps: int) -> Callable[[Tensor], Tensor]:
        return partial(decay_linear, steps, self.total_num_steps)


class WarmupCosineLR(_Schedule):
    """Increases the learning rate to the group's rate, then decreases it along a cosine.

    Args:
        optimizer: a torch optimizer, whose learning rates are the maxima.
        total_num_steps: number of steps at which the learning rate reaches its minimum.
        warmup_min_ratio: learning rate at the start, relative to the maximum.
        warmup_num_steps: number of steps of the warm-up.
        cos_min_ratio: learning rate at the end, relative to the maximum.
        warmup_type: "log" or "linear".
        last_batch_iteration: the index of the last step.

    Raises:
        ValueError: if `warmup_num_steps` is not a positive integer, or `warmup_type` is unknown.
    """

    def __init__(
        self, optimizer: Any, total_num_steps: int, warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000, cos_min_ratio: float = 0.0001, warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:  # fmt: skip
        steps = _steps(warmup_num_steps, warmup_type)
        after = partial(decay_cosine, steps, total_num_steps, cos_min_ratio)
        tops = [float(group["lr"]) for group in optimizer.param_groups]
        rates = [
            LearningRate(warmup_type, steps, warmup_min_ratio * top, top, after, True)
            for top in tops
        ]
        super().__init__(optimizer, rates, last_batch_iteration)


def _steps(given: int, ramp: str) -> int:
    if not isinstance(given, int) or given < 1:
        raise ValueError(f"warmup_num_steps {given!r}: give a positive integer")
    if ramp not in (WARMUP_LOG_RATE, WARMUP_LINEAR_RATE):
        raise ValueError(f"warmup_type {ramp!r}: use log or linear")
    return max(2, given)


def _per_group(optimizer: Any, value: float | Sequence[float]) -> list[float]:
    count = len(optimizer.param_groups)
    if not isinstance(value, list | tuple):
        return [float(value)] * count  # type: ignore[arg-type]
    if len(value) != count:
        raise ValueError(f"{len(value)} learning rates for {count} parameter groups")
    return [float(rate) for rate in value]


# option -> default, as in DeepSpeed
_OPTIONS: dict[str, Any] = {
    "lr_schedule": None, "lr_range_test_min_lr": 0.001, "lr_range_test_step_rate": 1.0,
    "lr_range_test_step_size": 1000, "lr_range_test_staircase": False, "cycle_first_step_size": 1000,
    "cycle_first_stair_count": -1, "cycle_second_step_size": -1, "cycle_second_stair_count": -1,
    "decay_step_size": 1000, "cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "decay_lr_rate": 0.0,
    "cycle_momentum": False, "cycle_min_mom": 0.8, "cycle_max_mom": 0.9, "decay_mom_rate": 0.0,
    "warmup_min_lr": 0.0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000, "warmup_type": "log",
    "warmup_min_ratio": 0.01, "cos_min_ratio": 0.01,
}  # fmt: skip


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the options of all schedules to a parser, and returns it."""
    group = parser.add_argument_group("Convergence Tuning", "options of learning rate schedules")
    for name, default in _OPTIONS.items():
        if default is False:
            group.add_argument(f"--{name}", default=False, action="store_true")
        else:
            kind = str if default is None else type(default)
            group.add_argument(f"--{name}", default=default, type=kind)
    return parser
