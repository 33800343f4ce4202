"""A backward of our own: parts of a layer run one after the other without autograd, to which they are one function.

    def run(self, x, tape):                      # of a part: its forward, which notes its backward on the tape
        tape.note(self.back, x)
        return x * self.factor

    def back(self, dy, x): ...                   # dy, and what was noted: gets the gradient of x

    y = as_one(x, module.run)                    # autograd sees one function of x

For autograd a function written in Python costs the host 10 to 15 µs, forward and backward; a block has eight. What a
part computes, and in which order, is the same either way: so are the bits.

A part that can do so is of a class marked `@runs`, and says in `can_run` whether it can as it is set up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from threed.layers.slicing import sink_of

Back = Callable[..., Any]


class Tape:
    """The backwards of what ran, in order, and the tensors that they read."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []  # for `ctx.save_for_backward`
        self._steps: list[tuple[Back, int]] = []

    def __len__(self) -> int:
        return len(self._steps)

    def note(self, back: Back, *tensors: Tensor) -> None:
        """Appends a step: back(*gradients, *tensors) returns the gradient of its input."""
        self.tensors += tensors
        self._steps.append((back, len(tensors)))

    def rewind(self, saved: Sequence[Tensor]) -> Rewind:
        """Returns the tape from its end, with the tensors as autograd gives them back."""
        return Rewind(self._steps, saved)


class Rewind:
    """Runs backwards, the last step first."""

    def __init__(self, steps: list[tuple[Back, int]], saved: Sequence[Tensor]) -> None:
        self._steps, self._saved = steps, saved
        self._step, self._end = len(steps), len(saved)

    def step(self, *gradients: Tensor) -> Any:
        """The gradient that one step makes of these."""
        self._step -= 1
        back, count = self._steps[self._step]
        end = self._end
        self._end = end - count
        return back(*gradients, *self._saved[end - count : end])

    def to(self, length: int, dy: Tensor) -> Tensor:
        """The gradient that all steps make of dy, as far as where the tape had this length."""
        while self._step > length:
            dy = self.step(dy)
        return dy


class _AsOne(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Callable[[Tensor, Tape], Tensor]) -> Tensor:
        ctx.tape = tape = Tape()
        y = run(x, tape)
        ctx.save_for_backward(*tape.tensors)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return ctx.tape.rewind(ctx.saved_tensors).to(0, dy), None


def apply(function: Any, *arguments: Any) -> Any:
    """function.apply(...) past torch's look for functorch's wrappers, which costs 3 µs and has no part in this."""
    return super(torch.autograd.Function, function).apply(*arguments)


def as_one(x: Tensor, run: Callable[[Tensor, Tape], Tensor]) -> Tensor:
    """run(x, tape), whose backward is the tape's."""
    y: Tensor = apply(_AsOne, x, run)
    return y


# ----------------------------------------------------------------------------------------------------------- who may

_RUNS: set[type] = set()
_Class = TypeVar("_Class", bound=type)


def runs(cls: _Class) -> _Class:
    """Marks a class whose objects, and not those of classes derived from it, have `run` and `can_run`."""
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
    if around or not all(map(_goes_to_sink, dict.values(module._parameters))):
        return False
    can: bool = module.can_run()  # type: ignore[operator]
    return can


def watched() -> bool:
    """Returns whether hooks on all modules are set."""
    of = torch_modules
    return bool(
        of._global_forward_hooks or of._global_forward_pre_hooks or of._global_backward_hooks
        or of._global_backward_pre_hooks
    )  # fmt: skip


def _goes_to_sink(param: Tensor | None) -> bool:
    if param is None or not param.requires_grad:
        return True
    return sink_of(param) is not None and not param._backward_hooks


def wanted(x: Tensor) -> bool:
    """Returns whether a graph of x is being made, by autograd."""
    return x.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling()
