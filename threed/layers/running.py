"""Which layers run on a tape (`ops.tape`): those whose `run` does what a call of them would."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from threed.layers.slicing import sink_of

_RUNS: set[type] = set()
_Class = TypeVar("_Class", bound=type)


def runs(cls: _Class) -> _Class:
    """Marks a class whose objects, and not those of classes derived from it, have `run`. Where one has `can_run`, that
    says whether it can as it is set up."""
    _RUNS.add(cls)
    return cls


def may_run(module: nn.Module | None) -> bool:
    """Returns whether `run` does what a call of the module would: it is of a class that has it, nobody has put anything
    around it, and the gradients of its own parameters go to sinks."""
    if type(module) not in _RUNS:
        return False
    assert module is not None
    around = (
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
        or "forward" in module.__dict__ or module._compiled_call_impl
    )  # fmt: skip
    if around or not all(map(goes_to_sink, dict.values(module._parameters))):
        return False
    return bool(getattr(module, "can_run", lambda: True)())


def watched() -> bool:
    """Returns whether hooks on all modules are set."""
    of = torch_modules
    return bool(
        of._global_forward_hooks or of._global_forward_pre_hooks or of._global_backward_hooks
        or of._global_backward_pre_hooks
    )  # fmt: skip


def held(module: nn.Module, name: str) -> Tensor:
    """Returns a parameter of a module's, which need not be whole (`zero.table`): its values must not be read."""
    param: Tensor = dict.__getitem__(module._parameters, name)  # type: ignore[assignment]
    return param


def goes_to_sink(param: Tensor | None) -> bool:
    """Returns whether a parameter has no gradient, or a sink takes it and no hook of another's."""
    if param is None or not param.requires_grad:
        return True
    return sink_of(param) is not None and not param._backward_hooks


def wanted(x: Tensor) -> bool:
    """Returns whether a graph of x is being made, by autograd."""
    return x.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling()
