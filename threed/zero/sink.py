"""Where a parameter's gradient goes: `threed.layers.slicing.GradSink`, contribution by contribution."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor

from threed.ops import matmul
from threed.zero.gradients import Gradients
from threed.zero.layout import Layout, Slot
from threed.zero.others import is_own

EVER = 2**62  # an unknown number of contributions: the parameter is complete when the round ends


class Collector(Protocol):
    """The part of `Reducer` that a sink uses."""

    layout: Layout
    memory: Gradients
    dynamic: bool
    listener: Callable[[Slot], None] | None

    def is_late(self, sink: Sink) -> bool: ...

    def keep_aside(self, slot: Slot, grad: Tensor) -> None: ...

    def arrived(self, slot: Slot) -> None: ...


class Sink:
    """Collects one parameter's gradient; the first contribution of a round overwrites the memory, later ones add."""

    def __init__(self, reducer: Collector, slot: Slot, uses: int) -> None:
        self.reducer, self.slot, self.uses = reducer, slot, uses
        self.expected = self.received = self.late = 0  # contributions: outstanding, in memory, set aside
        self.used = False  # in any step

    def begin(self, passes: int) -> None:
        """Begins a round of `passes` micro-batches."""
        self.expected, self.received, self.late = self.uses * passes, 0, 0

    def add(self, grad: Tensor) -> None:
        """Adds a whole gradient."""
        if self.reducer.is_late(self):
            self.reducer.keep_aside(self.slot, grad)
            return
        target = self._target()
        if self.received:
            target.add_(grad)
        else:
            target.copy_(grad)
        self._arrived()

    def add_product(self, a: Tensor, b: Tensor) -> None:
        """Adds the matrix product a @ b; in the buffer itself where the dtypes allow."""
        self.add_products([(a, b)])

    def add_products(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Adds matrix products a @ b, made one after the other, as one contribution."""
        target, total, dtype = None, None, self.reducer.layout.policy.grad_dtype
        for a, b in pairs:
            if target is None and (self.reducer.is_late(self) or not (a.dtype == dtype or matmul.widens(a, dtype))):
                total = torch.mm(a, b) if total is None else total.addmm_(a, b)
                continue
            first, target = target is None, self._target()
            matmul.add_product_(target, a, b, fresh=first and not self.received)
        if total is not None:
            self.add(total)
        else:
            self._arrived()

    def add_rows(self, index: Tensor, rows: Tensor) -> None:
        """Adds rows [n h] at row numbers [n]."""
        if self.reducer.is_late(self):
            whole = rows.new_zeros(self.slot.param.shape)
            return self.add(whole.index_add_(0, index, rows) if len(whole) else whole)
        target = self._target()
        if not self.received:
            target.zero_()
        if target.shape[0]:
            target.index_add_(0, index, rows.to(target.dtype))
        return self._arrived()

    def memory(self) -> tuple[Tensor, bool] | None:
        """Returns where the gradient is, in the parameter's shape, and whether to add to what is there; `arrived` is
        due when that was done. None where a gradient cannot be written there now: `add` it."""
        return None if self.reducer.is_late(self) else (self._target(), self.received > 0)

    def arrived(self) -> None:
        """Counts a contribution that was written into `memory`."""
        self._arrived()

    def take(self, param: Tensor) -> None:
        """Moves `param.grad` into the sink, when autograd calls its hook. In another engine's backward the gradient
        stays in `.grad`, and adds up, until it is dropped or the step ends."""
        if self.reducer.dynamic and not is_own(self.reducer, self.slot):
            if self.reducer.listener is not None:
                self.reducer.listener(self.slot)
            return
        if param.grad is not None:
            grad, param.grad = param.grad, None
            self.add(grad.to_dense() if grad.is_sparse else grad)

    def _target(self) -> Tensor:
        return self.reducer.memory.view(self.slot)

    def _arrived(self) -> None:
        self.used = True
        self.received += 1
        self.expected -= 1
        if self.expected == 0:
            self.reducer.arrived(self.slot)


def taken_by(sink: weakref.ref[Sink]) -> Callable[[Tensor], None]:
    """Returns a hook for autograd that calls `sink.take`. Python's garbage collector does not see autograd's hooks: a
    strong reference would keep the whole engine, with its drive, alive for ever."""

    def taken(param: Tensor) -> None:
        if (alive := sink()) is not None:
            alive.take(param)

    return taken


def too_late(sink: Sink) -> RuntimeError:
    """Returns the error for a gradient that comes after its bucket was sent, where that is not allowed."""
    return RuntimeError(
        f"{sink.slot.spec.name}: a gradient came after the {sink.uses} of a micro-batch that the first step had, and"
        " after its bucket was sent: how often this layer runs depends on the data; give the pipeline layer the"
        " attribute `runs_vary = True`"
    )
