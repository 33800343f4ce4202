"""Where a parameter's gradient is added, and how it is known to be complete.

Layers add to a parameter's `Sink` (`threed.layers.slicing.GradSink`), autograd by the sink's hook. A
gradient is complete when it has the expected number of contributions in a round, and a bucket is
ready when its gradients are complete. `Reducer` says what a round is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor

from threed.layers.slicing import ForwardScope, add_to
from threed.ops.matmul import NATIVE, Matmul
from threed.zero.foreign_gradients import is_own
from threed.zero.gather import Gatherer
from threed.zero.layout import Slot
from threed.zero.reductions import Gradients

# What adds a contribution, and with what.
Contribution = tuple[Callable[..., None], tuple[Tensor, ...]]


class Contributions:
    """Counts the contributions to the gradient of one parameter.

    Args:
        uses: the places in the model that use the parameter, and so contribute in a micro-batch.
        known: whether that number can be expected. If not, the gradient is complete when the round
            ends.

    Attributes:
        per_pass: the number expected in the backward of a micro-batch, None if it is unknown.
        remaining: expected contributions of the round that were not added yet.
        added: contributions of the round in the gradient's buffer.
        late: contributions of the round that came after the launch of a bucket of the gradient.
        used: whether there was a contribution in any step.
        positions: of the gradient's buckets in their `LaunchQueue`, in ascending order.
    """

    def __init__(self, uses: int = 1, known: bool = True) -> None:
        self._uses = uses
        self.per_pass = uses if known else None
        self.remaining = self.added = self.late = 0
        self.used = False
        self.positions: list[int] = []

    @property
    def counted(self) -> int | None:
        """The expected number, if it was counted, and is not that of the places."""
        return None if self.per_pass == self._uses else self.per_pass

    def restore(self, counted: int | None) -> None:
        """Restores `counted` of an earlier run, and forgets whether there was a contribution."""
        if self.per_pass is not None:
            self.per_pass = self._uses if counted is None else counted
        self.used = False

    def begin_round(self, passes: int) -> bool:
        """Begins a round of `passes` micro-batches; returns whether contributions are expected."""
        self.remaining, self.added, self.late = (self.per_pass or 0) * passes, 0, 0
        return self.per_pass is None or self.remaining > 0

    def add(self) -> bool:
        """Counts a contribution in the buffer; returns whether the gradient is complete now."""
        self.used = True
        self.added += 1
        self.remaining -= 1
        return self.remaining == 0

    def add_late(self) -> None:
        """Counts a contribution that came too late."""
        self.used = True
        self.late += 1

    def learn(self, passes: int, dynamic: bool) -> None:
        """Sets the expected number after a round; it decreases only if `dynamic`."""
        if self.per_pass is not None:
            counted = -(-(self.added + self.late) // passes)
            self.per_pass = counted if dynamic else max(self.per_pass, counted)


class LaunchQueue:
    """The buckets of one chunk of the model, or of parameters that several chunks share.

    They are launched in one order, the same on every rank, and every bucket once in a round.

    Args:
        chunks: the chunks of the model that use the parameters.
        parameters: the counts of all their gradients.
        buckets: for each bucket, by its number and in launch order, the counts of its gradients.

    Attributes:
        backwards: backwards of the chunks that have not ended in this step.
        rounds: rounds of this step that have ended.
        launched: buckets launched in this round.
    """

    def __init__(
        self,
        chunks: tuple[int, ...],
        parameters: Sequence[Contributions],
        buckets: Mapping[int, Sequence[Contributions]],
    ) -> None:
        self.chunks, self._parameters, self._buckets = chunks, parameters, list(buckets)
        for position, counts in enumerate(buckets.values()):
            for count in counts:
                count.positions.append(position)
        self._incomplete = [0] * len(buckets)  # gradients of each bucket
        self.backwards, self.rounds, self.launched = 1, 0, 0

    @property
    def next(self) -> int:
        """The number of the bucket to launch next, unless `is_done`."""
        return self._buckets[self.launched]

    @property
    def is_done(self) -> bool:
        """Whether all buckets were launched in this round."""
        return self.launched == len(self._buckets)

    @property
    def is_ready(self) -> bool:
        """Whether all gradients of the next bucket are complete."""
        return not self.is_done and self._incomplete[self.launched] == 0

    @property
    def is_untouched(self) -> bool:
        """Whether no bucket was launched in this step."""
        return self.rounds == self.launched == 0

    def begin(self, backwards: int) -> None:
        """Begins a step of so many backwards; `restart` begins its first round."""
        self.backwards = backwards

    def mark_launched(self) -> None:
        """Marks the next bucket as launched."""
        self.launched += 1

    def restart(self, passes: int) -> None:
        """Begins the first round of a step, of `passes` micro-batches."""
        self.rounds = 0
        self._begin_round(passes)

    def next_round(self, passes: int) -> None:
        """Begins the next round, of `passes` micro-batches, after a backward has ended."""
        self.rounds += 1
        self.backwards -= 1
        self._begin_round(passes)

    def _begin_round(self, passes: int) -> None:
        self.launched = 0
        self._incomplete = [0] * len(self._buckets)
        for count in self._parameters:
            if count.begin_round(passes):
                for position in count.positions:
                    self._incomplete[position] += 1

    def learn(self, passes: int, dynamic: bool) -> None:
        """Sets the expected numbers of contributions; see `Contributions.learn`."""
        for count in self._parameters:
            count.learn(passes, dynamic)

    def mark_complete(self, count: Contributions) -> None:
        """Marks a gradient as complete in its buckets."""
        for position in count.positions:
            self._incomplete[position] -= 1

    def is_late(self, count: Contributions) -> bool:
        """Returns whether a bucket of the gradient was launched in this round."""
        return bool(count.positions) and count.positions[0] < self.launched


class Deferral:
    """Defers contributions to weight gradients, for split backwards (arXiv 2401.10241, section 2).

    with deferral.defer() as waiting: ...   # I: the input's gradient
    deferral.add_deferred(waiting)          # W: the weights' gradients
    """

    def __init__(self) -> None:
        self.waiting: list[Contribution] | None = None

    @contextmanager
    def defer(self) -> Iterator[list[Contribution]]:
        """Yields a list to which sinks append contributions in the block, instead of adding them.

        Of a product only the factors are kept. A round of reductions is that of the micro-batch
        whose contributions are added, so the schedule decides how long they wait.
        """
        self.waiting = waiting = list[Contribution]()
        try:
            yield waiting
        finally:
            self.waiting = None

    @torch.no_grad()
    def add_deferred(self, waiting: list[Contribution]) -> None:
        """Adds the contributions of the list, in order, and removes each from it."""
        waiting.reverse()
        while waiting:
            add, tensors = waiting.pop()
            add(*tensors)


class Collector(Protocol):
    """The part of `Reducer` that a sink uses."""

    memory: Gradients
    deferral: Deferral
    scope: ForwardScope
    dynamic: bool
    gatherer: Gatherer | None

    def mark_complete(self, sink: Sink) -> None: ...

    def add_late(self, sink: Sink, grad: Tensor) -> None: ...


class Sink:
    """Collects the gradient of one parameter.

    The first contribution of a round overwrites the memory, later ones add to it.

    Args:
        reducer: reduces the gradient.
        slot: the parameter.
        counts: counts the contributions.
        queue: holds the parameter's buckets.
    """

    def __init__(
        self, reducer: Collector, slot: Slot, counts: Contributions, queue: LaunchQueue
    ) -> None:
        self.reducer, self.slot, self.counts, self.queue = reducer, slot, counts, queue
        slot.param.sink = self  # type: ignore[attr-defined]
        taken = _taken_by(weakref.ref(self))
        self._hook = slot.param.register_post_accumulate_grad_hook(taken)

    def run_last(self, microbatches: int) -> None:
        """Moves the sink's hook behind the user's post-accumulate hooks, which use `param.grad`.

        Raises:
            RuntimeError: there are such hooks and several micro-batches, whose sum `param.grad`
                never has.
        """
        hooks = self.slot.param._post_accumulate_grad_hooks
        if hooks is None or len(hooks) < 2:
            return
        if microbatches > 1:
            raise RuntimeError(
                f"{self.slot.spec.name}: register_post_accumulate_grad_hook with {microbatches}"
                " micro-batches per step: .grad holds the gradient of one micro-batch, not the sum"
                " so far; use register_hook, which gets the gradient of one micro-batch in plain"
                " PyTorch too"
            )
        hooks[self._hook.id] = hooks.pop(self._hook.id)

    def add(self, grad: Tensor) -> None:
        """Adds a whole gradient."""
        if self._deferred(self.add, grad):
            return
        if self.is_late():
            self.reducer.add_late(self, grad)
            return
        target = self._target()
        if self.counts.added:
            target.add_(grad)
        else:
            target.copy_(grad)
        self.mark_added()

    def add_product(self, a: Tensor, b: Tensor, by: Matmul = NATIVE) -> None:
        """Adds the matrix product a @ b; in the buffer itself, unless its reduction was launched."""
        self._check_loss()
        if self._deferred(partial(self.add_product, by=by), a, b):
            return None
        if self.is_late():
            return self.add(by.product(a, b))
        by.add_product_(self._target(), a, b, fresh=not self.counts.added)
        return self.mark_added()

    def add_products(self, pairs: Iterable[tuple[Tensor, Tensor]], by: Matmul = NATIVE) -> None:
        """Adds matrix products a @ b, made one after the other, as one contribution.

        If contributions are deferred, a single pair is; of several pairs only the sum is, since
        they are made one after the other to save memory.
        """
        self._check_loss()
        total, fresh = None, not self.counts.added
        pairs = iter(pairs)
        if self.defers():
            first, second = next(pairs, None), next(pairs, None)
            if first is not None and second is None:
                return self.add_product(*first, by)
            pairs = chain((pair for pair in (first, second) if pair is not None), pairs)
        direct = not (self.defers() or self.is_late())
        for a, b in pairs:
            if direct:
                by.add_product_(self._target(), a, b, fresh=fresh)
                fresh = False
            else:
                total = add_to(total, a, b, by)
        self.mark_added() if total is None else self.add(total)

    def _check_loss(self) -> None:
        """Raises RuntimeError for a gradient that a layer computes in its forward."""
        if self.in_forward():
            raise RuntimeError(
                f"{self.slot.spec.name}: a gradient came while a layer ran its forward:"
                " torch.autograd.grad there must not go through a layer of threed.layers, which"
                " adds to the loss's gradient; use torch's own modules"
            )

    def _deferred(self, add: Callable[..., None], *tensors: Tensor) -> bool:
        """Returns whether contributions wait for a W now; then this one is set aside."""
        waiting = self.reducer.deferral.waiting
        if waiting is None:
            return False
        waiting.append((add, tensors))
        return True

    def add_rows(self, index: Tensor, rows: Tensor) -> None:
        """Adds rows [n h] at row numbers [n]."""
        self._check_loss()
        if self._deferred(self.add_rows, index, rows):
            return None
        if self.is_late():
            whole = rows.new_zeros(self.slot.param.shape)
            return self.add(whole.index_add_(0, index, rows) if len(whole) else whole)
        target = self._target()
        if not self.counts.added:
            target.zero_()
        if target.shape[0]:
            target.index_add_(0, index, rows.to(target.dtype))
        return self.mark_added()

    def memory(self) -> tuple[Tensor, bool] | None:
        """Returns the gradient's memory, in the parameter's shape, and whether to add to it.

        Call `mark_added` after that. Returns None if the memory must not be written now: use `add`.
        """
        self._check_loss()
        if self.defers() or self.is_late():
            return None
        return self._target(), self.counts.added > 0

    def mark_added(self) -> None:
        """Counts a contribution that is in the memory now."""
        if self.counts.add():
            self.reducer.mark_complete(self)

    def is_late(self) -> bool:
        """Returns whether the reduction of a part of the gradient was launched in this round."""
        return self.queue.is_late(self.counts)

    def in_forward(self) -> bool:
        """Returns whether a forward is running, during which the sink takes no gradients."""
        return self.reducer.scope.active

    def defers(self) -> bool:
        """Returns whether contributions are kept and added later, as in a split backward."""
        return self.reducer.deferral.waiting is not None

    def take(self, param: Tensor) -> None:
        """Moves `param.grad` into the sink, when autograd calls its hook.

        In another engine's backward the gradient stays in `.grad`, and adds up, until it is dropped
        or the step ends.
        """
        if self.reducer.dynamic and not is_own(self.reducer, self.slot):
            if self.reducer.gatherer is not None:
                self.reducer.gatherer.gradient_complete(self.slot)
            return
        if param.grad is not None:
            grad, param.grad = param.grad, None
            self.add(grad.to_dense() if grad.is_sparse else grad)

    def _target(self) -> Tensor:
        return self.reducer.memory.view(self.slot)


def _taken_by(sink: weakref.ref[Sink]) -> Callable[[Tensor], None]:
    """Returns a hook for autograd that calls `sink.take`.

    Python's garbage collector does not see autograd's hooks: a strong reference would keep the
    whole engine, with its drive, alive forever.
    """

    def taken(param: Tensor) -> None:
        if (alive := sink()) is not None:
            alive.take(param)

    return taken


def too_late(sink: Sink) -> RuntimeError:
    """Returns the error for a gradient that must not come after the launch of its bucket."""
    return RuntimeError(
        f"{sink.slot.spec.name}: a gradient came after the {sink.counts.per_pass} of a micro-batch"
        " that the first step had, and after its bucket was sent: how often this layer runs depends"
        " on the data; give the pipeline layer the attribute `runs_vary = True`"
    )
