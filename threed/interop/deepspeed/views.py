"""Read-only views that take the place of DeepSpeed's optimizer and scheduler; changes are refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from torch import nn

from threed.engine import ModuleEngine
from threed.zero.layout import GroupOptions


def _refuse(name: str) -> Callable[..., NoReturn]:
    def method(self: Any, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(
            f"optimizer.param_groups is read-only ({name}): it shows values of the engine; set learning rates with"
            ' the config\'s "scheduler", and rates and decays of groups with model_parameters'
        )

    return method


class ParamGroup(dict[str, Any]):
    """A parameter group that is read-only: methods that change a dict raise TypeError."""

    __setitem__ = __delitem__ = _refuse("item assignment")
    __ior__ = _refuse("|=")
    update, setdefault = _refuse("update"), _refuse("setdefault")
    pop, popitem, clear = _refuse("pop"), _refuse("popitem"), _refuse("clear")

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


class ReadOnlyList(list[Any]):
    """A list that is read-only: methods that change a list raise TypeError."""

    __setitem__ = __delitem__ = _refuse("item assignment")
    __iadd__, __imul__ = _refuse("+="), _refuse("*=")
    append, extend, insert = _refuse("append"), _refuse("extend"), _refuse("insert")
    pop, remove, clear = _refuse("pop"), _refuse("remove"), _refuse("clear")
    sort, reverse = _refuse("sort"), _refuse("reverse")

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)


class OptimizerView:
    """A view of the optimizer; the engine does the steps."""

    def __init__(self, engine: ModuleEngine, zero_grad: Callable[[], None]) -> None:
        self._engine, self._zero_grad = engine, zero_grad

    @property
    def param_groups(self) -> list[Any]:
        """One group for each learning rate and decay: its params, the next update's lr, weight_decay and the rest."""
        optim, steps = self._engine.config.optim, self._engine.optimizer
        lr = float(steps.learning_rate(steps.updates))
        rest: dict[str, Any] = (
            {"momentum": optim.momentum} if optim.name == "sgd" else {"betas": optim.betas}
        )
        rest |= {"eps": optim.eps} if optim.name == "adamw" else {}
        groups = [group for group in self._engine.layout.groups if group.key.trainable]
        rates_of = {slot.spec.name: group.key.options for group in groups for slot in group.slots}
        found: dict[GroupOptions, list[nn.Parameter]] = {}
        for (
            name,
            param,
        ) in self._engine.module.named_parameters():  # safe to read while they are slices
            if name in rates_of:
                found.setdefault(rates_of[name], []).append(param)
        return ReadOnlyList(
            ParamGroup(
                params=ReadOnlyList(params), lr=lr * rates.factor, weight_decay=rates.decay, **rest
            )
            for rates, params in found.items()
        )

    add_param_group = _refuse("add_param_group")

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
        raise NotImplementedError(
            "a rank holds slices only: use engine.save_checkpoint(), which loads on any ranks"
        )

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
