"""The learning rate of each parameter group: from a schedule, or set by the program."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from threed.core.device import start_copy_in


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
