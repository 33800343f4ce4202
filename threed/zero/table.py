"""Safe access to parameters that may be slices: a module's table of parameters that knows which of them are whole.

A parameter whose memory is away would be read out of bounds. Whoever takes one from its module meanwhile gets a
stand-in on the meta device: shape and dtype are right, and an attempt to read it is torch's error, not a crash.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from threed.sharding import attach, spec_of
from threed.zero.gather import Gatherer
from threed.zero.layout import Group, Layout


class Parameters(dict[str, Any]):
    """The `_parameters` of a module, some of them sliced; `taken` hears of every one that is asked for by name."""

    def __init__(
        self, table: dict[str, Any], groups: dict[str, Group], gatherer: Gatherer,
        taken: Callable[[Group], None] | None,
    ) -> None:  # fmt: skip
        super().__init__(table)
        self._groups, self._gatherer, self._taken = groups, gatherer, taken
        self._stand_ins = {name: _stand_in(table[name]) for name in groups}

    def __getitem__(self, name: str) -> Any:
        if name in self._groups and self._taken is not None:
            self._taken(self._groups[name])
        return self._safe(name)

    def items(self) -> Any:
        return {name: self._safe(name) for name in self}.items()

    def values(self) -> Any:
        return {name: self._safe(name) for name in self}.values()

    def _safe(self, name: str) -> Any:
        away = name in self._groups and not self._gatherer.is_open(self._groups[name])
        return self._stand_ins[name] if away else super().__getitem__(name)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self.items()),)


def _stand_in(param: nn.Parameter) -> nn.Parameter:
    values = torch.empty(param.shape, dtype=param.dtype, device="meta")
    return attach(nn.Parameter(values, param.requires_grad), spec_of(param))


def install(
    modules: Iterable[nn.Module], layout: Layout, gatherer: Gatherer, taken: Callable[[Group], None] | None = None
) -> None:
    """Gives every module that has sliced parameters such a table."""
    names: dict[int, dict[str, Group]] = {}
    for group in layout.groups:
        for slot in group.slots if group.slices is not None else ():
            for owner, attribute in slot.places:
                names.setdefault(id(owner), {})[attribute] = group
    for module in modules:
        if id(module) in names:
            module.__dict__["_parameters"] = Parameters(module._parameters, names[id(module)], gatherer, taken)
