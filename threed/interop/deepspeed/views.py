"""Read-only views that take the place of DeepSpeed's optimizer and scheduler; changes are refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import nn

from threed.engine import ModuleEngine
from threed.interop.deepspeed.config.optimizers import NO_HOOKS, has_hooks, plain_value
from threed.zero.layout import GroupOptions


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise TypeError(
        "optimizer.param_groups is read-only, also by add_param_group: the engine makes the steps; for learning rates"
        ' write the config\'s "scheduler" (WarmupLR, WarmupDecayLR or WarmupCosineLR), and pass groups with their own'
        " rates or decays to initialize"
    )


refuse: Callable[..., Any] = _refuse


class ParamGroup(dict[str, Any]):
    """A parameter group that is read-only: methods that change a dict raise TypeError."""

    __setitem__ = __delitem__ = __ior__ = update = setdefault = pop = popitem = clear = refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


class ReadOnlyList(list[Any]):
    """A list that is read-only: methods that change a list raise TypeError."""

    __setitem__ = __delitem__ = __iadd__ = __imul__ = append = extend = insert = refuse
    pop = remove = clear = sort = reverse = refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)


class PassedOptimizer:
    """An optimizer that was passed to `initialize`, which has read its values.

    From then on its groups are read-only, and its `step` raises RuntimeError.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        groups = ([(key, plain_value(v)) for key, v in g.items()] for g in optimizer.param_groups)
        self._groups = [ParamGroup(group) for group in groups]
        optimizer.param_groups[:] = self._groups
        self._own = optimizer.register_step_pre_hook(_refuse_step).id

    def check(self) -> None:
        """Raises RuntimeError if the optimizer has other groups, or hooks for its steps."""
        if list(map(id, self._optimizer.param_groups)) != list(map(id, self._groups)):
            fix = "pass all groups to initialize, and load states with engine.load_checkpoint()"
            raise RuntimeError(f"the passed optimizer has other groups: {fix}")
        if has_hooks(self._optimizer, self._own):
            what = "new hooks for its steps, which the engine does not call"
            raise RuntimeError(f"the passed optimizer has {what}: {NO_HOOKS}")


def _refuse_step(*_: Any) -> NoReturn:
    what = "step() of an optimizer that was passed to threed.initialize"
    raise RuntimeError(f"{what}: call engine.step()")


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
        # safe to read while they are slices
        for name, param in self._engine.module.named_parameters():
            if name in rates_of:
                found.setdefault(rates_of[name], []).append(param)
        return ReadOnlyList(
            ParamGroup(
                params=ReadOnlyList(params), lr=lr * rates.factor, weight_decay=rates.decay, **rest
            )
            for rates, params in found.items()
        )

    add_param_group = refuse

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
        fix = "use engine.save_checkpoint(), which loads on any ranks"
        raise NotImplementedError(f"a rank holds slices only: {fix}")

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
