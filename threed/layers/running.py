"""Which layers run on a tape (`ops.tape`) while a stage runs them: those whose `run` does what a call of them would."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from threed.layers.slicing import sink_of

_FORWARDS: dict[
    type, Callable[..., Any]
] = {}  # of the classes that have `run`, as they were defined
_Class = TypeVar("_Class", bound=type)
_staged = _lent = False


def runs(cls: _Class) -> _Class:
    """Marks a class whose objects, and not those of classes derived from it, have `run`. Where one has `can_run`, that
    says whether it can as it is set up."""
    _FORWARDS[cls] = cls.forward  # type: ignore[attr-defined]
    return cls


class OnTape(nn.Module):
    """A pipeline layer whose parts run on a tape, where they may."""

    def look(self, shared: Set[Tensor]) -> None:
        """Sees whether they may, in the step that begins. shared: parameters that the stage has at several places."""
        raise NotImplementedError


@contextmanager
def staged(looked: bool) -> Iterator[None]:
    """In the block, layers are called by a stage, which has let them look; or not."""
    global _staged
    before, _staged = _staged, looked
    try:
        yield
    finally:
        _staged = before


def in_forward() -> bool:
    """Returns whether a stage runs a forward now: a backward that runs meanwhile is a layer's own."""
    return _staged


@contextmanager
def lent() -> Iterator[None]:
    """In the block, what a layer hands to sinks is a compiler's memory, which writes into it afterwards."""
    global _lent
    before, _lent = _lent, True
    try:
        yield
    finally:
        _lent = before


def is_lent() -> bool:
    """Returns whether who keeps a tensor that a layer hands out now must keep a copy."""
    return _lent


def wanted(x: Tensor) -> bool:
    """Returns whether a stage makes a graph of x, by autograd alone."""
    plain = _staged and x.requires_grad and torch.is_grad_enabled()
    return plain and not (torch.compiler.is_compiling() or torch._C._is_any_autocast_enabled())


def may_run(module: Any, *kinds: type[nn.Module]) -> bool:
    """Returns whether `run` does what a call of the module would: it is of one of these classes, which has it, nobody
    has put anything around it, and the gradients of its own parameters go to sinks."""
    if not isinstance(module, kinds) or _FORWARDS.get(type(module)) is not type(module).forward:
        return False
    around = (
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
        or module._buffers or module._compiled_call_impl or "forward" in module.__dict__
        or any(isinstance(module.__dict__.get(name), Tensor) for name in ("weight", "bias"))
    )  # fmt: skip
    if around or not all(map(goes_to_sink, module._parameters.values())):
        return False
    return bool(getattr(module, "can_run", lambda: True)())


def watched() -> bool:
    """Returns whether hooks on all modules are set."""
    of = torch_modules
    return bool(
        of._global_forward_hooks or of._global_forward_pre_hooks or of._global_backward_hooks
        or of._global_backward_pre_hooks
    )  # fmt: skip


def shares(shared: Set[Any], *modules: nn.Module) -> bool:
    """Returns whether some of these modules' parameters are shared. Through autograd all uses of a norm or of a bias
    behind a sum arrive as one gradient, on a tape one by one; reductions count them."""
    return not all(shared.isdisjoint(module._parameters.values()) for module in modules)


def held(module: nn.Module, name: str) -> Tensor | None:
    """Returns a parameter of a module, which may be sharded: its values must not be read."""
    return module._parameters.get(name)


def goes_to_sink(param: Tensor | None) -> bool:
    """Returns whether a parameter has no gradient, or its gradient goes to a sink and to no hook of the user."""
    return param is None or not param.requires_grad or sink_of(param) is not None
