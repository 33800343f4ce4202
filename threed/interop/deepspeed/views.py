"""The optimizer and the scheduler that `initialize` returns.

A program reads and sets the learning rates of the engine's parameter groups through the optimizer.
The scheduler shows the learning rates of the configuration's schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from threed.distributed.sharding import spec_of
from threed.engine import ModuleEngine
from threed.interop.deepspeed.api.zero import ParameterOffload
from threed.interop.deepspeed.config.optimizers import NO_HOOKS, has_hooks, plain_value, set_rate
from threed.interop.deepspeed.names import Refused, not_offered

OPTIMIZER_STATE = (
    "use param_groups, engine.get_global_grad_norm(), and safe_get_full_fp32_param or"
    " safe_get_full_optimizer_state of deepspeed.utils"
)
# Keys of a parameter group whose values `_kept` does not return: the learning rates, because they
# may change, and the parameters, because `_kept` returns their ids instead.
RATE = {"params", "lr", "initial_lr"}


_refuse_step = Refused("step() of an optimizer of threed.initialize", "call engine.step()")
_refuse_state = Refused(
    "states of an optimizer of threed.initialize",
    "use engine.save_checkpoint() and load_checkpoint(), which work on any number of ranks",
)


class EngineOptimizer(torch.optim.Optimizer):
    """The engine's optimizer as a torch optimizer, whose learning rates can be read and set.

    A program or a scheduler sets `param_groups[i]["lr"]`, and the next update uses that learning
    rate. Before a learning rate is set, all learning rates follow the configuration's schedule. The
    engine runs the updates, so `step` of this class raises an error.

    Args:
        engine: the engine that runs the updates.
        zero_grad: the method `zero_grad` of the `DeepSpeedEngine`.
        skipped: returns whether the last step was skipped; called only with fp16.
        passed: the optimizer that was passed to `initialize`; None if the configuration defines the
            optimizer. A passed optimizer and this optimizer share the same `param_groups`.
        scheduled: whether the configuration has a learning rate schedule.
        indices: for each group, the index of its learning rate in `Engine.learning_rates`, or None
            for a group of frozen parameters.
    """

    def __init__(
        self, engine: ModuleEngine, zero_grad: Callable[[], None], skipped: Callable[[], bool],
        passed: torch.optim.Optimizer | None, scheduled: bool, indices: Sequence[int | None],
    ) -> None:  # fmt: skip
        self._engine, self._zero_grad, self._skipped = engine, zero_grad, skipped
        self._scaled = engine.config.precision.dtype == "fp16"
        self._groups: list[dict[str, Any]] = []
        self._complete = False
        used = [index for index in indices if index is not None]
        self._index = used if passed is None else indices
        super().__init__(
            _engine_groups(engine, used) if passed is None else passed.param_groups, {}
        )
        self._complete = True
        self._rates: list[float] = self._read()  # learning rates at the last read or change
        self._kept = [_kept(group) for group in self._groups]
        self._members = list(map(id, self._groups))
        if passed is not None and not scheduled:
            self._apply(self._rates)
        self._hooks = [
            (optimizer, optimizer.register_step_pre_hook(_refuse_step))
            for optimizer in (self, *(() if passed is None else (passed,)))
        ]
        self._state_hooks = [] if passed is None else [
            passed.register_state_dict_pre_hook(_refuse_state),
            passed.register_load_state_dict_pre_hook(_refuse_state),
        ]  # fmt: skip

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(not_offered(f"engine.optimizer.{name}", OPTIMIZER_STATE))

    def remove(self) -> None:
        """Removes the hooks from the passed optimizer."""
        for handle in (*(handle for _, handle in self._hooks), *self._state_hooks):
            handle.remove()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups, with the learning rates of the next update."""
        if self._complete:
            self._check_groups()
            self._take_rates()
            self.show()
        return self._groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._groups = groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises RuntimeError, because all groups must be passed to `initialize`."""
        if self._complete:
            raise RuntimeError("add_param_group: pass all groups to initialize")
        super().add_param_group(param_group)

    def synchronize(self) -> None:
        """Sets the engine's learning rates to those that the program has set in the groups.

        Raises:
            RuntimeError: if groups were replaced or added, if a value other than the learning rate
                was changed, or if step hooks were added.
        """
        self._check_groups()
        for number, (group, kept) in enumerate(zip(self._groups, self._kept, strict=True)):
            now = _kept(group)
            changed = [key for key in kept if key not in now or now[key] != kept[key]]
            if changed:
                what = f"param_groups[{number}] has another {', '.join(changed)} than at the start"
                cycles = {"betas", "momentum"} & {*changed}
                hint = " (OneCycleLR: cycle_momentum=False)" if cycles else ""
                raise RuntimeError(f"{what}: only lr may change{hint}")
        self._take_rates()

    def _check_groups(self) -> None:
        """Raises RuntimeError if groups were replaced or added, or if step hooks were added."""
        for optimizer, own in self._hooks:
            groups = self._groups if optimizer is self else optimizer.param_groups
            if list(map(id, groups)) != self._members:
                fix = "pass all groups to initialize, and load states with engine.load_checkpoint()"
                raise RuntimeError(f"the optimizer has other groups: {fix}")
            if has_hooks(optimizer, own.id):
                what = "the optimizer has new hooks for its steps, which the engine does not call"
                raise RuntimeError(f"{what}: {NO_HOOKS}")

    def _take_rates(self) -> None:
        """Sets the engine's learning rates to those in the groups, if they have changed."""
        if (rates := self._read()) != self._rates:
            self._apply(rates)

    def stepped(self) -> None:
        """Records that an update was done.

        Without this record, torch's schedulers warn that they are stepped before the optimizer.
        """
        for optimizer, _ in self._hooks:
            optimizer._opt_called = True

    def show(self) -> None:
        """Writes the learning rates of the next update to the groups.

        A group of frozen parameters has no updates. The learning rate of such a group follows the
        configuration's schedule until the program sets the learning rate of any group. Afterwards,
        it keeps its value unless the program sets it.
        """
        rates = self._engine.learning_rates
        scheduled = not self._engine.optimizer.rates.state()
        for group, index in zip(self._groups, self._index, strict=True):
            if index is None and not scheduled:
                continue
            set_rate(group, rates[index or 0])
        self._rates = self._read()

    def rates(self) -> list[float]:
        """Returns the learning rates of the next update, one per group."""
        return [float(group["lr"]) for group in self.param_groups]

    def _read(self) -> list[float]:
        if missing := [number for number, group in enumerate(self._groups) if "lr" not in group]:
            raise RuntimeError(f"param_groups[{missing[0]}] has no lr: set it")
        return [float(group["lr"]) for group in self._groups]

    def _apply(self, rates: list[float]) -> None:
        """Sets the learning rates of the next update.

        Args:
            rates: one learning rate per group.
        """
        # The engine may have learning rates that belong to none of these groups. No parameter uses
        # them, so they get an arbitrary value. Reading their current values from the engine would
        # make the host wait for the device.
        values = [rates[0]] * (1 + len(self._engine.config.optim.groups))
        for index, rate in zip(self._index, rates, strict=True):
            if index is not None:
                values[index] = rate
        self._engine.set_learning_rates(values)
        self._rates = rates

    @property
    def parameter_offload(self) -> ParameterOffload:
        """An object without hooks, because trl removes DeepSpeed's hooks during `generate`."""
        return ParameterOffload(self._engine.module)

    @property
    def loss_scale(self) -> float:
        """The scale of the next loss; 1 unless the dtype is fp16."""
        return float(self._engine.optimizer.scaler.scale)

    @property
    def cur_scale(self) -> float:
        """The same as `loss_scale`."""
        return self.loss_scale

    @property
    def bit16_groups_flat(self) -> list[Tensor]:
        """The flat buffers of the trained parameters, in the compute dtype; only at ZeRO-1 and 2.

        There is one buffer per group of the engine's layout, not one per entry of `param_groups`.
        """
        if (stage := self._engine.config.zero.stage) not in (1, 2):
            refused = f"engine.optimizer.bit16_groups_flat at ZeRO-{stage}"
            raise AttributeError(not_offered(refused, OPTIMIZER_STATE))
        groups = self._engine.layout.groups
        return [group.params for group in groups if group.key.trainable]

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped because of its gradients; False unless fp16 is used."""
        return self._scaled and self._skipped()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Calls the engine's `zero_grad`."""
        self._zero_grad()

    step = _refuse_step
    state_dict = load_state_dict = _refuse_state


def _kept(group: dict[str, Any]) -> dict[str, Any]:
    """Returns the values of a group that must not change, with ids in place of parameters."""
    kept = {key: plain_value(value) for key, value in group.items() if key not in RATE}
    return {**kept, "params": list(map(id, group.get("params", ())))}


def _engine_groups(engine: ModuleEngine, indices: Sequence[int]) -> list[dict[str, Any]]:
    """Returns the engine's parameter groups.

    Args:
        engine: the engine.
        indices: for each group, the index of its learning rate in `Engine.learning_rates`.
    """
    optim, rates = engine.config.optim, engine.learning_rates
    constants: dict[str, Any] = {"betas": optim.betas}
    if optim.name == "sgd":
        constants = {"momentum": optim.momentum}
    constants |= {"eps": optim.eps} if optim.name == "adamw" else {}
    found: dict[int, dict[str, Any]] = {}
    for index in indices:
        given = optim.groups[index - 1].weight_decay if index else None
        decay = optim.weight_decay if given is None else given
        found[index] = {"params": [], "lr": rates[index], "weight_decay": decay, **constants}
    trained = [group for group in engine.layout.groups if group.key.trainable]
    index_of = {slot.spec.name: group.key.options.rate for group in trained for slot in group.slots}
    # The parameters' names and records are read, not their values, so sharded parameters need not be
    # gathered.
    for param in engine.module.parameters():
        if (name := spec_of(param).name) in index_of:
            found[index_of[name]]["params"].append(param)
    return [*found.values()]


class SchedulerView:
    """The configuration's learning rate schedule, with the methods of a torch scheduler.

    The engine computes the learning rates from the number of updates. This class only shows them.

    Args:
        optimizer: the optimizer whose groups have the learning rates.
    """

    def __init__(self, optimizer: EngineOptimizer) -> None:
        self._optimizer = optimizer

    def get_last_lr(self) -> list[float]:
        """Returns the learning rates of the next update, one per parameter group."""
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    get_lr = get_last_lr

    def step(self, *_: Any) -> None:
        """Has no effect, because the schedule follows the engine's number of updates.

        A skipped step is not an update, so it does not advance the schedule.
        """

    def state_dict(self) -> dict[str, Any]:
        """Returns an empty dict, because the engine's checkpoint has the number of updates."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Has no effect, because `state_dict` returns no state."""
