"""Read-only views that take the place of DeepSpeed's optimizer and scheduler; changes are refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from torch import nn

from threed.engine import Engine
from threed.zero.layout import GroupOptions


class ParamGroup(dict[str, Any]):
    """A parameter group that is read only."""

    def __setitem__(self, key: str, value: Any) -> NoReturn:
        raise TypeError(f"{key} of a parameter group is not set from outside: write the config's scheduler")


class OptimizerView:
    """A view of the optimizer; the engine does the steps."""

    def __init__(self, engine: Engine, zero_grad: Callable[[], None]) -> None:
        self._engine, self._zero_grad = engine, zero_grad

    @property
    def param_groups(self) -> list[ParamGroup]:
        """One group for each learning rate and decay: its params, the next update's lr, weight_decay and the rest."""
        optim, steps = self._engine.config.optim, self._engine.optimizer
        lr = float(steps.learning_rate(steps.updates))
        rest: dict[str, Any] = {"momentum": optim.momentum} if optim.name == "sgd" else {"betas": optim.betas}
        rest |= {"eps": optim.eps} if optim.name == "adamw" else {}
        groups = [group for group in self._engine.layout.groups if group.key.trainable]
        rates_of = {slot.spec.name: group.key.options for group in groups for slot in group.slots}
        found: dict[GroupOptions, list[nn.Parameter]] = {}
        for name, param in self._engine.module.named_parameters():  # safe to read while they are slices
            if name in rates_of:
                found.setdefault(rates_of[name], []).append(param)
        return [
            ParamGroup(params=params, lr=lr * rates.factor, weight_decay=rates.decay, **rest)
            for rates, params in found.items()
        ]

    @property
    def loss_scale(self) -> float:
        """The factor of the next loss; 1 unless fp16."""
        return float(self._engine.optimizer.scaler.scale)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Calls the engine's `zero_grad`."""
        self._zero_grad()

    def step(self, *_: Any) -> NoReturn:
        """Raises an error: not available here."""
        raise NotImplementedError("call engine.step()")

    def state_dict(self) -> NoReturn:
        """Raises an error: not available here."""
        raise NotImplementedError("a rank holds slices only: use engine.save_checkpoint(), which loads on any ranks")

    def load_state_dict(self, state: Any) -> NoReturn:
        """Raises an error: not available here."""
        raise NotImplementedError("use engine.load_checkpoint()")


class SchedulerView:
    """A view of the scheduler; the learning rate is a function of the updates done, and advances with them."""

    def __init__(self, optimizer: OptimizerView) -> None:
        self._optimizer = optimizer

    def get_last_lr(self) -> list[float]:
        """Returns the learning rate of the next update, of every parameter group."""
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    get_lr = get_last_lr

    def step(self, *_: Any) -> None:
        """Does nothing: an update advances the schedule, a skipped step does not."""

    def state_dict(self) -> dict[str, Any]:
        """Returns an empty dict: the number of updates is in the engine's checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Does nothing: see `state_dict`."""
