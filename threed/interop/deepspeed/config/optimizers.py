"""Reads torch optimizers and parameter groups that are passed to `initialize`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from threed.config import ConfigError
from threed.distributed.sharding import few
from threed.interop.deepspeed.config.keys import Params
from threed.interop.deepspeed.config.reader import value_of

NO_HOOKS = "remove them, and call your function before or after engine.step()"
SUPPORTED = "pass torch's AdamW, Adam or SGD, or use the config's"
DECOUPLED = "decoupled_weight_decay"
# Hyper-parameters that must be equal in all groups. If a ds_config does not set a hyper-parameter,
# the hyper-parameter has its default value in `Params`, or False if `Params` does not have it.
HYPER = frozenset({"betas", "eps", "momentum", "dampening", "nesterov", "amsgrad", "maximize"})
# For each supported class: (name of the optimizer in a ds_config, hyper-parameters to read).
READ = {
    torch.optim.AdamW: ("AdamW", ("betas", "eps", "amsgrad", "maximize")),
    torch.optim.Adam: ("Adam", ("betas", "eps", "amsgrad", "maximize")),
    torch.optim.SGD: ("SGD", ("momentum", "dampening", "nesterov", "maximize")),
}


class DeepSpeedOptimizer(torch.optim.Optimizer):
    """Base class of DeepSpeed's optimizer classes, such as `DeepSpeedCPUAdam`.

    The engine runs the updates, so these classes only have parameter groups. `read_optimizer` reads
    their update rule from the method `deepspeed_section`.
    """

    def deepspeed_section(self) -> dict[str, Any]:
        """Returns the group "optimizer" of a ds_config that defines the same update.

        Returns:
            A dict with "type", the name of the optimizer, and "params", its hyper-parameters. The
            keys "lr" and "weight_decay" may be missing: they are read from the parameter groups.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Group:
    """A parameter group: names of its parameters, its learning rate and its weight decay.

    A group with None for lr or weight_decay uses the optimizer's value.
    """

    names: tuple[str, ...]
    lr: float | None = None
    weight_decay: float | None = None


def read_optimizer(optimizer: object) -> tuple[dict[str, Any], str]:
    """Converts a torch optimizer to the group "optimizer" of a ds_config.

    The first nonzero learning rate of a parameter group becomes the key "lr". If a scheduler has
    changed this learning rate, the value before the change (`initial_lr`) is used.

    Args:
        optimizer: a torch AdamW, Adam or SGD, or a `DeepSpeedOptimizer`.

    Returns:
        (keys and values of the group "optimizer", note for the user that lists the values).

    Raises:
        ConfigError: if the optimizer is of any other class; if it has states, which means that it
            has made steps; if it has step hooks; if no group has a nonzero lr; or if groups differ
            in values other than lr and weight_decay.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError([f"optimizer: {type(optimizer).__name__} is not supported: {SUPPORTED}"])
    name, params, keys = _update_rule(optimizer)
    if problem := _problem(optimizer, keys):
        raise ConfigError([f"optimizer: {problem}"])
    rates = [rate_of(group) for group in optimizer.param_groups]
    decay = optimizer.param_groups[0].get("weight_decay", 0.0)
    params |= {"lr": next(rate for rate in rates if rate), "weight_decay": decay}
    values = ", ".join(f"{key} {value}" for key, value in params.items())
    own = isinstance(optimizer, DeepSpeedOptimizer)
    kind = type(optimizer).__name__ if own else f"torch.optim.{name}"
    note = f"optimizer: {kind} as passed, with {values}"
    return {"type": name, "params": params}, note


def _update_rule(
    optimizer: torch.optim.Optimizer,
) -> tuple[str, dict[str, Any], Sequence[str]]:
    """Returns (name in a ds_config, hyper-parameters, values that must be equal in all groups).

    Raises:
        ConfigError: if the class of the optimizer is not supported.
    """
    first = optimizer.param_groups[0]
    if isinstance(optimizer, DeepSpeedOptimizer):
        section = optimizer.deepspeed_section()
        return section["type"], dict(section["params"]), sorted(HYPER.intersection(first))
    if type(optimizer) not in READ:
        raise ConfigError([f"optimizer: {type(optimizer).__name__} is not supported: {SUPPORTED}"])
    name, keys = READ[type(optimizer)]
    params = {key: first[key] for key in keys if first[key] is not False}
    if name == "Adam":
        params["adam_w_mode"] = bool(first.get(DECOUPLED))
    return name, params, (*keys, DECOUPLED)


def _problem(optimizer: torch.optim.Optimizer, keys: Sequence[str]) -> str | None:
    """Returns the first reason why an optimizer is not supported, or None.

    Args:
        optimizer: the optimizer.
        keys: names of the values that must be equal in all parameter groups.
    """
    first, *others = optimizer.param_groups
    if optimizer.state:
        return "has made steps, and its moments would be lost: pass a new optimizer"
    if has_hooks(optimizer):
        return f"it has hooks for its steps, which the engine would not call: {NO_HOOKS}"
    differ = [key for key in keys if any(group.get(key) != first.get(key) for group in others)]
    if differ:
        return f"groups differ in {', '.join(differ)}: only lr and weight_decay may"
    if not any(map(rate_of, optimizer.param_groups)):
        return "lr is 0 in every group, so training would have no effect: set the learning rate"
    return None


def rate_of(group: Mapping[str, Any]) -> float:
    """Returns a parameter group's learning rate, as it was before any scheduler changed it."""
    return float(group.get("initial_lr", group["lr"]))


def has_hooks(optimizer: torch.optim.Optimizer, own: int | None = None) -> bool:
    """Returns whether an optimizer has step hooks, apart from the hook with the id `own`."""
    before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    return bool({*before, *after} - {own})


def set_rate(group: dict[str, Any], rate: float) -> None:
    """Sets a parameter group's learning rate; a tensor is changed in place."""
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def plain_value(value: Any) -> Any:
    """Converts a value of a parameter group to a value that can be compared by `==`.

    Tensors of one element become floats, and lists become tuples.
    """
    if isinstance(value, torch.Tensor):
        return float(value)
    return tuple(value) if isinstance(value, list) else value


def find_groups(
    model: nn.Module, given: Iterable[Any] | None, params: Mapping[str, Any] | None = None
) -> tuple[Group, ...]:
    """Returns the parameter groups that a program passes, with the names of their parameters.

    The result is empty if `given` has parameters instead of groups, or a single group without lr
    and weight_decay.

    Args:
        model: the module that has the parameters.
        given: parameters, or parameter groups (dicts with "params"); None means one group of all
            parameters.
        params: the optimizer's hyper-parameters, as in a ds_config. The hyper-parameters in a group
            must have the same values, except for lr and weight_decay.

    Raises:
        ConfigError: if the groups do not contain each parameter that requires gradients exactly
            once, or a group has different hyper-parameters than the optimizer.
    """
    if given is None:
        return ()
    names = {id(param): name for name, param in model.named_parameters()}
    required = {name for name, param in model.named_parameters() if param.requires_grad}
    groups, dicts, unknown, problems = [], 0, 0, list[str]()
    for number, item in enumerate(given):
        which = f"model_parameters[{number}]"
        dicts += isinstance(item, Mapping)
        group = item if isinstance(item, Mapping) else {"params": [item]}
        if "params" not in group:
            fix = "a group is a dict of its parameters and values"
            raise ConfigError([f"{which}: no 'params': {fix}"])
        members = group["params"]
        members = [members] if isinstance(members, torch.Tensor) else list(members)
        unknown += sum(id(param) not in names for param in members)
        own = tuple(names[id(p)] for p in members if id(p) in names and p.requires_grad)
        lr = rate_of(group) if "lr" in group else None
        groups.append(Group(own, lr, plain_value(group.get("weight_decay"))))
        problems += [f"{which}: {text}" for text in _differing_values(group, params or {})]
    counts = Counter(name for group in groups for name in group.names)
    if unknown:
        problems.append(f"model_parameters: {unknown} of them are not the model's")
    if missing := few(sorted(required - set(counts))):
        fix = "set requires_grad_(False) on them, or add them"
        problems.append(f"model_parameters: missing {missing}: {fix}")
    if twice := few(sorted(name for name, count in counts.items() if count > 1)):
        problems.append(f"model_parameters: {twice} in more than one group, or twice in one")
    if problems:
        raise ConfigError(problems)
    own_values = any((group.lr, group.weight_decay) != (None, None) for group in groups)
    return tuple(groups) if own_values or dicts > 1 else ()


def _differing_values(group: Mapping[str, Any], params: Mapping[str, Any]) -> Iterator[str]:
    """Yields an error text for each value of a group that differs from the optimizer's value.

    Learning rate and weight decay are not compared, because they may differ between groups.
    """
    for key in HYPER.intersection(group):
        own, common = plain_value(group[key]), params.get(key, "auto")
        common = getattr(Params(), key, False) if common == "auto" else plain_value(common)
        if own != common:
            fix = "only lr and weight_decay may differ between groups"
            yield f"{key} {own}, but the optimizer's is {common}: {fix}"


def hyper_parameters(ds: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns optimizer.params of a ds_config; empty if invalid (`translate` raises the error)."""
    params = value_of(ds, "optimizer.params")
    return params if isinstance(params, Mapping) else {}
