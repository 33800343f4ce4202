"""Safe access to parameters: a replacement for a module's `_parameters` that checks which of them are whole.

Reading a sliced parameter whose memory is freed would be out of bounds, and one that stays whole may still be in flight
after the last step. Reading the latter from its module waits for it. The former is replaced by a stand-in on the meta
device with its shape and dtype: reading its values is an error of torch, not a crash, and changing them an error here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from threed.sharding import attach, spec_of
from threed.zero.gather import Gatherer
from threed.zero.layout import Group, Layout, Slot

Place = tuple[Group, Slot, nn.Parameter]  # a parameter's group and slot, and its stand-in


class StandIn(nn.Parameter):
    """Stands for a sliced parameter while its memory is freed: on the meta device, where a change would be lost
    silently, so it is refused. `requires_grad` and `grad` are those of the parameter."""

    stands_for: nn.Parameter | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        me = args[0] if args and isinstance(args[0], StandIn) else None
        name, real = getattr(func, "__name__", ""), None if me is None else me.stands_for
        if _changes(func, name, kwargs or {}):
            raise RuntimeError(
                f"{'a parameter' if real is None else spec_of(real).name} is kept as slices, and not whole now: read or"
                " change it in a forward, or between steps inside `with engine.gathered():`"
            )
        with torch._C.DisableTorchFunctionSubclass():
            if real is not None and (name == "requires_grad_" or func in _OF_THE_PARAMETER):
                out = func(real, *args[1:], **(kwargs or {}))
                return me if name == "requires_grad_" else out
            out = func(*args, **(kwargs or {}))
            if real is not None and (name == "detach" or func == Tensor.data.__get__):  # type: ignore[attr-defined]
                out = out.as_subclass(StandIn)
                out.stands_for = real
        return out


_ITS_OWN: list[Any] = [Tensor.grad, Tensor.requires_grad]
_OF_THE_PARAMETER = [access for own in _ITS_OWN for access in (own.__get__, own.__set__)]
_IN_PLACE = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "div", "pow", "and", "or", "xor")}


def _changes(func: Any, name: str, kwargs: dict[str, Any]) -> bool:
    """Returns whether a function of torch changes a tensor."""
    if name in ("requires_grad_", "detach_", "share_memory_"):
        return False
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in (*_IN_PLACE, "__setitem__") or "out" in kwargs or func == Tensor.data.__set__  # type: ignore[attr-defined]


class Parameters(dict[str, Any]):
    """The `_parameters` of a module; calls `taken` for every sliced one that is read by name."""

    def __init__(
        self, table: dict[str, Any], places: dict[str, Place], gatherer: Gatherer,
        taken: Callable[[Group], None] | None,
    ) -> None:  # fmt: skip
        super().__init__(table)
        self._places, self._gatherer, self._taken = places, gatherer, taken

    def __getitem__(self, name: str) -> Any:
        if self._taken is None and torch.compiler.is_dynamo_compiling():
            # A stage has gathered what its layer reads. torch must not trace the gatherer: it would guard its state,
            # and read parameters whose memory is freed.
            return super().__getitem__(name)
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
    stand_in = StandIn(torch.empty(slot.param.shape, dtype=slot.param.dtype, device="meta"), slot.param.requires_grad)
    stand_in.stands_for = slot.param
    return attach(stand_in, slot.spec)


def install(
    modules: Iterable[nn.Module], layout: Layout, gatherer: Gatherer, taken: Callable[[Group], None] | None = None
) -> None:
    """Installs such a table in every module whose parameters are sliced, or gathered after a step."""
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
