"""Safe access to parameters: a module's table of parameters that knows which of them are whole.

A sliced parameter whose memory is away would be read out of bounds, and one that stays whole may still be on its way
from the last step. Whoever takes a parameter from its module waits for the latter; in place of the former they get a
stand-in on the meta device: shape and dtype are right, and an attempt to read it is torch's error, not a crash.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from threed.sharding import attach
from threed.zero.gather import Gatherer
from threed.zero.layout import Group, Layout, Slot

Place = tuple[Group, Slot, nn.Parameter]  # where a parameter lies, and its stand-in


class Parameters(dict[str, Any]):
    """The `_parameters` of a module; `taken` hears of every sliced one that is asked for by name."""

    def __init__(
        self, table: dict[str, Any], places: dict[str, Place], gatherer: Gatherer,
        taken: Callable[[Group], None] | None,
    ) -> None:  # fmt: skip
        super().__init__(table)
        self._places, self._gatherer, self._taken = places, gatherer, taken

    def __getitem__(self, name: str) -> Any:
        if self._taken is not None and name in self._places and self._places[name][0].sliced:
            self._taken(self._places[name][0])
        return self._safe(name)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401  this is `get`

    def items(self) -> Any:
        return self.copy().items()

    def values(self) -> Any:
        return self.copy().values()

    def copy(self) -> dict[str, Any]:
        return {name: self[name] for name in self}

    def _safe(self, name: str) -> Any:
        if name in self._places:
            group, slot, stand_in = self._places[name]
            if not group.sliced:
                self._gatherer.wait_for(slot)
            elif not self._gatherer.is_open(group):
                return stand_in
            else:
                self._gatherer.wait(group)
        return super().__getitem__(name)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self.items()),)


def _stand_in(slot: Slot) -> nn.Parameter:
    values = torch.empty(slot.param.shape, dtype=slot.param.dtype, device="meta")
    return attach(nn.Parameter(values, slot.param.requires_grad), slot.spec)


def install(
    modules: Iterable[nn.Module], layout: Layout, gatherer: Gatherer, taken: Callable[[Group], None] | None = None
) -> None:
    """Gives every module whose parameters are sliced, or gathered after a step, such a table."""
    places: dict[int, dict[str, Place]] = {}
    for group in layout.groups:
        if group.shard.size == 1 and not group.sliced:
            continue
        for slot in group.slots:
            stand_in = _stand_in(slot)
            for owner, attribute in slot.places:
                places.setdefault(id(owner), {})[attribute] = (group, slot, stand_in)
    for module in modules:
        if id(module) in places and not isinstance(module._parameters, Parameters):  # a layer may be listed twice
            module.__dict__["_parameters"] = Parameters(module._parameters, places[id(module)], gatherer, taken)
