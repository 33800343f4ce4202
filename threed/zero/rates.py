"""The learning rate of each parameter group: from a schedule, or set by the program."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from threed.config import Config, OptimConfig
from threed.config.resolution import default_warmup
from threed.core.device import start_copy_in

# Learning-rate schedules: functions from progress after warm-up (0 to 1) to a factor f (0 to 1).
# The learning rate is min_lr + f * (lr - min_lr).
RATES: dict[str, Callable[[Tensor], Tensor]] = {
    "constant": torch.ones_like,
    "linear": lambda done: 1 - done,
    "cosine": lambda done: 0.5 * (1 + torch.cos(math.pi * done)),
    # warm-up, stable, decay: f stays 1, then decreases linearly to 0 in the last fifth of progress
    "wsd": lambda done: ((1 - done) / 0.2).clamp(max=1.0),
}


class Rates:
    """The learning rates of the parameter groups, in the order of `GroupOptions.rate`.

    The rates follow the schedule until the program sets other rates.

    Args:
        schedule: function from the number of updates applied so far (fp64 scalar tensor) to the
            learning rate of the next update (scalar tensor).
        factors: per group, the factor by which the schedule's rate is multiplied. The first group
            contains the parameters that no group of the configuration matches; its factor is 1.
        device: device of the rates.
    """

    def __init__(
        self, schedule: Callable[[Tensor], Tensor], factors: Sequence[float], device: torch.device
    ) -> None:
        self.schedule = schedule
        self.factors = torch.tensor(factors, dtype=torch.float64, device=device)
        self._given: tuple[list[float], Tensor] | None = None

    def __call__(self, updates: Tensor) -> Tensor:
        """Returns the rates of the next update, fp64 [groups].

        Args:
            updates: number of updates applied so far, fp64 scalar tensor.
        """
        if self._given is not None:
            return self._given[1]
        rate = self.schedule(updates).view(1)
        return rate if len(self.factors) == 1 else rate * self.factors

    def set(self, rates: Sequence[float] | None) -> None:
        """Replaces the schedule by constant rates, or returns to the schedule.

        Args:
            rates: one rate per group; None to return to the schedule.

        Raises:
            ValueError: the number of rates is wrong, or a rate is negative or not finite.
        """
        if rates is not None and len(rates) != len(self.factors):
            raise ValueError(f"{len(rates)} learning rates for {len(self.factors)} groups")
        if bad := [rate for rate in rates or () if not 0 <= rate < math.inf]:
            raise ValueError(f"learning rate {bad[0]}: rates are at least 0 and finite")
        if rates is None:
            self._given = None
        elif self._given is None or self._given[0] != list(rates):
            values = torch.tensor(rates, dtype=torch.float64)
            self._given = list(rates), start_copy_in(values, self.factors.device)

    def state(self) -> dict[str, Any]:
        """Returns {"rates": rates set by the program} for a checkpoint; {} if it has set none."""
        return {} if self._given is None else {"rates": self._given[0]}

    def restore(self, state: dict[str, Any]) -> None:
        """Restores the rates that the program had set when a checkpoint was saved.

        The rates follow the schedule instead if the checkpoint has no such rates, or if their
        number differs from the number of groups.

        Args:
            state: the dict that `state()` returned.
        """
        rates = state.get("rates")
        self.set(rates if rates is not None and len(rates) == len(self.factors) else None)


def rate_schedule(optim: OptimConfig, steps: int) -> Callable[[Tensor], Tensor]:
    """Returns the learning-rate schedule of a run.

    The rate rises linearly to `optim.lr` during warm-up. Then it follows `optim.schedule`, which
    reaches its end after `steps` updates. Skipped steps do not advance the schedule, because they
    are not updates.

    Args:
        optim: the optimizer's options.
        steps: number of steps of the run.

    Returns:
        A function from the number of updates applied so far (fp64 scalar tensor) to the learning
        rate of the next update (scalar tensor).
    """
    shape, lr = RATES[optim.schedule], optim.lr
    min_lr, warmup = _end_and_warmup(optim, steps)

    def rate(done: Tensor) -> Tensor:
        rising = lr * (done + 1) / max(warmup, 1)
        progress = ((done - warmup) / max(steps - warmup, 1)).clamp(0, 1)
        return torch.where(done < warmup, rising, min_lr + (lr - min_lr) * shape(progress))

    return rate


def rate_factors(optim: OptimConfig) -> list[float]:
    """Returns the factor of each parameter group, by which the scheduled rate is multiplied.

    The first factor is 1, for parameters that no group of the configuration matches. Each further
    factor belongs to one group: its peak rate divided by `optim.lr`, or 1 if it sets no rate.
    """
    return [1.0, *(1.0 if group.lr is None else group.lr / optim.lr for group in optim.groups)]


def describe_rate(optim: OptimConfig, steps: int) -> str:
    """Returns a description of the learning-rate schedule for the log."""
    end, warmup = _end_and_warmup(optim, steps)
    warm = f"warm-up over {warmup} of {steps} steps to {optim.lr:g}" if warmup else f"{optim.lr:g}"
    return f"{warm}, then {optim.schedule}" + (
        "" if optim.schedule == "constant" else f" to {end:g}"
    )


def describe_rate_change(
    saved: Mapping[str, Any], config: Config, state: Mapping[str, Any]
) -> Iterator[str]:
    """Yields a line of text if the next step's learning rate differs from that of saved keys.

    If another version of threed saved keys that are not valid here, the rates are not compared.

    Args:
        saved: the configuration in a checkpoint, by group and key.
        config: the configuration of the run.
        state: the counters in the checkpoint.
    """
    done = torch.tensor(float(state["updates"]), dtype=torch.float64)
    with suppress(ValueError, KeyError, TypeError):
        optim, steps = OptimConfig.model_validate(saved["optim"]), int(saved["train"]["steps"])
        before = float(rate_schedule(optim, steps)(done))
        now = float(rate_schedule(config.optim, config.train.steps)(done))
        if abs(now - before) > 1e-9 * max(now, before):
            step, times = state["steps"] + 1, f", {now / before:.3g} times" if before else ""
            yield f"the learning rate of step {step} is {now:.4g}{times} the {before:.4g} of the checkpoint's keys"


def _end_and_warmup(optim: OptimConfig, steps: int) -> tuple[float, int]:
    end = optim.lr / 10 if optim.min_lr is None else optim.min_lr
    return end, default_warmup(steps) if optim.warmup is None else optim.warmup
