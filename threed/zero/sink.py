"""Where a parameter's gradient goes: `threed.layers.slicing.GradSink`, contribution by contribution."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from threed.layers.slicing import ForwardScope
from threed.ops import matmul
from threed.zero.deferral import Deferral
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
    deferral: Deferral
    scope: ForwardScope

    def is_late(self, sink: Sink) -> bool: ...

    def keep_aside(self, slot: Slot, grad: Tensor) -> None: ...

    def arrived(self, slot: Slot) -> None: ...


class Sink:
    """Collects one parameter's gradient; the first contribution of a round overwrites the memory, later ones add."""

    def __init__(self, reducer: Collector, slot: Slot, uses: int) -> None:
        self.reducer, self.slot, self.uses = reducer, slot, uses
        self.expected = self.received = self.late = (
            0  # contributions: outstanding, in memory, set aside
        )
        self.used = False  # in any step
        self.hook: RemovableHandle | None = (
            None  # the parameter's post-accumulate hook that calls `take`
        )
        self._dtype = reducer.layout.policy.grad_dtype

    def begin(self, passes: int) -> None:
        """Begins a round of `passes` micro-batches."""
        self.expected, self.received, self.late = self.uses * passes, 0, 0

    def run_last(self, microbatches: int) -> None:
        """Moves the sink's hook behind the post-accumulate hooks of the user, which read and change `param.grad`.

        Raises:
            RuntimeError: there are such hooks and several micro-batches, whose sum `param.grad` never has.
        """
        hooks = self.slot.param._post_accumulate_grad_hooks
        if self.hook is None or hooks is None or len(hooks) < 2:
            return
        if microbatches > 1:
            raise RuntimeError(
                f"{self.slot.spec.name}: register_post_accumulate_grad_hook with {microbatches} micro-batches per step:"
                " .grad holds the gradient of one micro-batch, not the sum so far; use register_hook, which gets the"
                " gradient of one micro-batch in plain PyTorch too"
            )
        hooks[self.hook.id] = hooks.pop(self.hook.id)

    def add(self, grad: Tensor) -> None:
        """Adds a whole gradient."""
        if self._deferred(self.add, grad):
            return
        if self.reducer.is_late(self):
            self.reducer.keep_aside(self.slot, grad)
            return
        target = self._target()
        if self.received:
            target.add_(grad)
        else:
            target.copy_(grad)
        self.arrived()

    def add_product(self, a: Tensor, b: Tensor) -> None:
        """Adds the matrix product a @ b; in the buffer itself where the dtypes allow."""
        self._check_loss()
        if self._deferred(self.add_product, a, b):
            return None
        if not self._takes_products(a, b):
            return self.add(torch.mm(a, b))
        matmul.add_product_(self._target(), a, b, fresh=not self.received)
        return self.arrived()

    def add_products(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Adds matrix products a @ b, made one after the other, as one contribution.

        Where contributions wait, a single pair does; of several only their sum, for all of them at once are what is
        made one after the other to save memory.
        """
        self._check_loss()
        total, fresh, direct = None, not self.received, False
        pairs = iter(pairs)
        if self.defers():
            first, second = next(pairs, None), next(pairs, None)
            if first is not None and second is None:
                return self.add_product(*first)
            pairs = chain((pair for pair in (first, second) if pair is not None), pairs)
        for a, b in pairs:
            direct = direct or (total is None and self._takes_products(a, b))
            if direct:
                matmul.add_product_(self._target(), a, b, fresh=fresh)
                fresh = False
            else:
                total = torch.mm(a, b) if total is None else total.addmm_(a, b)
        self.arrived() if total is None else self.add(total)

    def _check_loss(self) -> None:
        """Raises RuntimeError for a gradient that a layer's own torch.autograd.grad computes in its forward."""
        if self.in_forward():
            raise RuntimeError(
                f"{self.slot.spec.name}: a gradient came while a layer ran its forward: torch.autograd.grad there must"
                " not go through a layer of threed.layers, which adds to the loss's gradient; use torch's own modules"
            )

    def _deferred(self, add: Callable[..., None], *tensors: Tensor) -> bool:
        """Returns whether contributions wait for a W now; then this one is set aside."""
        waiting = self.reducer.deferral.waiting
        if waiting is None:
            return False
        waiting.append((add, tensors))
        return True

    def _takes_products(self, a: Tensor, b: Tensor) -> bool:
        if self.defers():
            return False
        return not self.reducer.is_late(self) and (
            a.dtype == self._dtype or matmul.widens(a, b, self._dtype)
        )

    def add_rows(self, index: Tensor, rows: Tensor) -> None:
        """Adds rows [n h] at row numbers [n]."""
        self._check_loss()
        if self._deferred(self.add_rows, index, rows):
            return None
        if self.reducer.is_late(self):
            whole = rows.new_zeros(self.slot.param.shape)
            return self.add(whole.index_add_(0, index, rows) if len(whole) else whole)
        target = self._target()
        if not self.received:
            target.zero_()
        if target.shape[0]:
            target.index_add_(0, index, rows.to(target.dtype))
        return self.arrived()

    def memory(self) -> tuple[Tensor, bool] | None:
        """Returns where the gradient is, in the parameter's shape, and whether to add to what is there; `arrived` is
        due when that was done. None where a gradient cannot be written there now: `add` it."""
        self._check_loss()
        if self.defers() or self.reducer.is_late(self):
            return None
        return self._target(), self.received > 0

    def arrived(self) -> None:
        """Counts a contribution that is in memory now."""
        self.used = True
        self.received += 1
        self.expected -= 1
        if self.expected == 0:
            self.reducer.arrived(self.slot)

    def in_forward(self) -> bool:
        """Returns whether a stage is running a forward, during which the sink takes no gradients."""
        return self.reducer.scope.active

    def defers(self) -> bool:
        """Returns whether contributions are kept and added later, as in a split backward."""
        return self.reducer.deferral.waiting is not None

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


@dataclass(eq=False)
class Queue:
    """The buckets of one chunk of the model, or of parameters that several chunks share, in the order of sending.

    begun: the number sent in this round. passes: backwards of these chunks that have not ended yet.
    """

    chunks: tuple[int, ...]
    buckets: list[int] = field(default_factory=list)
    sinks: list[Sink] = field(default_factory=list)
    begun: int = 0
    passes: int = 1


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
