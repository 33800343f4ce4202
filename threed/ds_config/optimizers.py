"""What the objects passed to `initialize` tell: a torch optimizer's hyper-parameters, and parameter groups by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from threed.config import ConfigError

READ = {
    torch.optim.AdamW: ("AdamW", ("betas", "eps", "amsgrad", "maximize")),
    torch.optim.Adam: ("Adam", ("betas", "eps", "amsgrad", "maximize")),
    torch.optim.SGD: ("SGD", ("momentum", "dampening", "nesterov", "maximize")),
}


@dataclass(frozen=True)
class Group:
    """Parameters, by name, with a learning rate and decay of their own; None: the optimizer's."""

    names: tuple[str, ...]
    lr: float | None = None
    weight_decay: float | None = None


def read_optimizer(optimizer: object) -> tuple[dict[str, Any], str]:
    """A torch AdamW, Adam or SGD as a ds_config's "optimizer", and a note that names what was read.

    ConfigError for other classes, for one that has made steps, and for groups that differ in more than lr and decay.
    """
    if not isinstance(optimizer, torch.optim.Optimizer) or type(optimizer) not in READ:
        name = type(optimizer).__name__
        raise ConfigError([f"optimizer: {name} is not there: pass torch's AdamW, Adam or SGD, or use the config's"])
    if optimizer.state:
        raise ConfigError(["optimizer: has made steps, and its moments would be lost: pass a fresh one"])
    name, keys = READ[type(optimizer)]
    first, *others = optimizer.param_groups
    if differ := [key for key in keys if any(group[key] != first[key] for group in others)]:
        raise ConfigError([f"optimizer: groups differ in {', '.join(differ)}: only lr and weight_decay may"])
    params = {key: first[key] for key in keys if first[key] is not False}
    params |= {"lr": float(first["lr"]), "weight_decay": first["weight_decay"]}
    if name == "Adam":
        params["adam_w_mode"] = False
    said = ", ".join(f"{key} {value}" for key, value in params.items())
    return {"type": name, "params": params}, f"optimizer: torch.optim.{name} as passed, with {said}"


def find_groups(model: nn.Module, given: Iterable[Any] | None) -> tuple[Group, ...]:
    """Parameter groups, by name, from parameters or from dicts with 'params'; none where all are alike.

    ConfigError when they are not exactly the model's parameters that require gradients.
    """
    if given is None:
        return ()
    names = {id(param): name for name, param in model.named_parameters()}
    wanted = {names[id(param)] for param in model.parameters() if param.requires_grad}
    items = list(given)
    dicts: list[Mapping[str, Any]] = [item if isinstance(item, Mapping) else {"params": [item]} for item in items]
    groups, unknown = [], 0
    for item in dicts:
        params = [item["params"]] if isinstance(item["params"], torch.Tensor) else list(item["params"])
        unknown += sum(id(param) not in names for param in params)
        own = tuple(names[id(p)] for p in params if id(p) in names and p.requires_grad)
        lr = item.get("lr")
        groups.append(Group(own, None if lr is None else float(lr), item.get("weight_decay")))
    problems = [f"model_parameters: {unknown} of them are not the model's"] if unknown else []
    if missing := sorted(wanted - {name for group in groups for name in group.names}):
        problems.append(f"model_parameters: without {_few(missing)}: set requires_grad_(False) on what is not trained")
    if problems:
        raise ConfigError(problems)
    return tuple(groups) if len({(group.lr, group.weight_decay) for group in groups}) > 1 else ()


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
