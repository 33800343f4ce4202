"""A backward of our own: parts of a layer run one after the other without autograd, to which they are one function.

    def run(self, x, tape):                      # of a part: its forward, which notes its backward on the tape
        tape.note(self.back, x)
        return x * self.factor

    def back(self, dy, x): ...                   # dy, and what was noted: gets the gradient of x

    y = as_one(x, module.run)                    # autograd sees one function of x

For autograd a function written in Python costs the host 10 to 15 µs, forward and backward; a block has eight. What a
part computes, and in which order, is the same either way: so are the bits, but for the backward of short attention in
bf16 on processors with tiles, which is our own on a tape alone (`ops.fused_cpu`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Back = Callable[..., Any]


class Tape:
    """The backwards of what ran, in order, and the tensors that they read."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._steps: list[tuple[Back, int]] = []

    def __len__(self) -> int:
        return len(self._steps)

    def note(self, back: Back, *tensors: Tensor) -> None:
        """Appends a step: back(*gradients, *tensors) returns the gradient of its input."""
        self.tensors += tensors
        self._steps.append((back, len(tensors)))

    def keep(self, ctx: Any) -> None:
        """Gives the tensors to autograd, at the end of a forward."""
        ctx.save_for_backward(*self.tensors)
        self.tensors, ctx.tape = [], self


class Rewind:
    """The tape of a function whose backward runs, from its end: runs steps, the last one first, and lets go of their
    tensors one after the other."""

    def __init__(self, ctx: Any) -> None:
        self._steps, self._saved = list(ctx.tape._steps), list(ctx.saved_tensors)
        ctx.maybe_clear_saved_tensors()  # else they stay to the function's end; no graph is retained by this

    def step(self, *gradients: Tensor) -> Any:
        """The gradient that one step makes of these."""
        back, count = self._steps.pop()
        end = len(self._saved) - count
        own = self._saved[end:]
        del self._saved[end:]
        return back(*gradients, *own)

    def to(self, length: int, dy: Tensor) -> Tensor:
        """The gradient that all steps make of dy, as far as where the tape had this length."""
        while len(self._steps) > length:
            dy = self.step(dy)
        return dy


class _AsOne(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Callable[[Tensor, Tape], Tensor]) -> Tensor:
        y = run(x, tape := Tape())
        tape.keep(ctx)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return Rewind(ctx).to(0, dy), None


def apply(function: Any, *arguments: Any) -> Any:
    """function.apply(...) past torch's look for functorch's wrappers, which costs 3 µs and has no part in this."""
    if torch.compiler.is_compiling():
        return function.apply(*arguments)
    return super(torch.autograd.Function, function).apply(*arguments)


def as_one(x: Tensor, run: Callable[[Tensor, Tape], Tensor]) -> Tensor:
    """run(x, tape), whose backward is the tape's."""
    y: Tensor = apply(_AsOne, x, run)
    return y
