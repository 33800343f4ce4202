"""A backward of our own: parts of a layer run one after the other without autograd, to which they are one function.

    def run(self, x, tape):                      # of a part: its forward, which notes its backward on the tape
        tape.note(self.back, x)
        return x * self.factor

    def back(self, dy, x): ...                   # dy, and what was noted: gets the gradient of x

    y = as_one(x, module.run)                    # autograd sees one function of x

For autograd a function written in Python costs the host 10 to 15 µs, forward and backward; a block has eight. What a
part computes, and in which order, is the same either way: so are the bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

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
