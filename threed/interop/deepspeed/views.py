"""Read-only views that replace DeepSpeed's optimizer and scheduler; changing them raises errors."""

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
        "optimizer.param_groups is read-only, also by add_param_group: the engine does the updates; for learning rates"
        ' write the config\'s "scheduler" (WarmupLR, WarmupDecayLR or WarmupCosineLR), and pass groups with their own'
        " rates or decays to initialize"
    )


refuse: Callable[..., Any] = _refuse


class ParamGroup(dict[str, Any]):
    """A read-only parameter group: the mutating methods of a dict raise TypeError.

    Its pickle contains a plain dict.
    """

    __setitem__ = __delitem__ = __ior__ = update = setdefault = pop = popitem = clear = refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


class ReadOnlyList(list[Any]):
    """A read-only list: the mutating methods of a list raise TypeError.

    Its pickle contains a plain list.
    """

    __setitem__ = __delitem__ = __iadd__ = __imul__ = append = extend = insert = refuse
    pop = remove = clear = sort = reverse = refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)


class PassedOptimizer:
    """Makes the optimizer that was passed to `initialize` read-only.

    `initialize` reads the optimizer's values only once, so later changes would have no effect.
    Therefore its parameter groups become read-only, and its `step` raises RuntimeError.

    Args:
        optimizer: the passed optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        groups = ([(key, plain_value(v)) for key, v in g.items()] for g in optimizer.param_groups)
        self._groups = [ParamGroup(group) for group in groups]
        optimizer.param_groups[:] = self._groups
        self._own = optimizer.register_step_pre_hook(_refuse_step).id

    def check(self) -> None:
        """Raises RuntimeError if parameter groups were replaced, or step hooks were added."""
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
    """A read-only view of the engine's optimizer.

    Args:
        engine: the engine, which runs the updates.
        zero_grad: the `zero_grad` of the `DeepSpeedEngine`.
    """

    def __init__(self, engine: ModuleEngine, zero_grad: Callable[[], None]) -> None:
        self._engine, self._zero_grad = engine, zero_grad

    @property
    def param_groups(self) -> list[Any]:
        """Parameter groups for the next update: params, lr, weight_decay, betas, eps or momentum.

        Which of the last three a group has depends on the optimizer. There is one group per
        combination of learning rate and weight decay.
        """
        optim, steps = self._engine.config.optim, self._engine.optimizer
        lr = float(steps.learning_rate(steps.updates))
        rest: dict[str, Any] = (
            {"momentum": optim.momentum} if optim.name == "sgd" else {"betas": optim.betas}
        )
        rest |= {"eps": optim.eps} if optim.name == "adamw" else {}
        groups = [group for group in self._engine.layout.groups if group.key.trainable]
        rates_of = {slot.spec.name: group.key.options for group in groups for slot in group.slots}
        found: dict[GroupOptions, list[nn.Parameter]] = {}
        # named_parameters reads no values, so released parameters (slices only) need no gather
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
        """The scale of the next loss; 1 unless the dtype is fp16."""
        return float(self._engine.optimizer.scaler.scale)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Calls the engine's `zero_grad`."""
        self._zero_grad()

    def step(self, *_: Any) -> NoReturn:
        """Raises NotImplementedError: `engine.step` runs the update."""
        raise NotImplementedError("call engine.step()")

    def state_dict(self) -> NoReturn:
        """Raises NotImplementedError: checkpoints are saved by the engine."""
        fix = "use engine.save_checkpoint(), which loads on any number of ranks"
        raise NotImplementedError(f"a rank has slices only: {fix}")

    def load_state_dict(self, state: Any) -> NoReturn:
        """Raises NotImplementedError: checkpoints are loaded by the engine."""
        raise NotImplementedError("use engine.load_checkpoint()")


class SchedulerView:
    """A view of the learning rate schedule, which is a function of the number of updates.

    Args:
        optimizer: the view of the optimizer.
    """

    def __init__(self, optimizer: OptimizerView) -> None:
        self._optimizer = optimizer

    def get_last_lr(self) -> list[float]:
        """Returns the learning rates of the next update, one per parameter group."""
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    get_lr = get_last_lr

    def step(self, *_: Any) -> None:
        """Has no effect, because each update advances the schedule.

        A skipped step does not advance it.
        """

    def state_dict(self) -> dict[str, Any]:
        """Returns an empty dict, because the engine's checkpoint has the number of updates."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Has no effect; see `state_dict`."""
