"""Gradient reduction: sums buckets of gradients over ranks while the backward runs.

Four steps:

    add     a layer adds to a gradient by the parameter's `Sink`, autograd by the sink's hook
    ready   a bucket is, when its gradients have the expected number of contributions (`counting`)
    launch  the reductions of ready buckets, in one fixed order on all ranks (`reductions`)
    wait    for the reductions, whose slices are stored, at the latest in `finish`

This happens in rounds. A round is a step where gradients are kept in full (ZeRO stages 0 and 1),
and a micro-batch where they are slices (stages 2 and 3): then the sum of each round is added to
this rank's slice. If all micro-batches of a layer run before the next layer (`whole_step`), a
round is a step under every stage.

A gradient that comes after the launch of its bucket is kept, and reduced at the end of the step
(`late`): none is lost, and none is counted twice.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any

from torch import Tensor

from threed import collectives
from threed.layers.slicing import ForwardScope, add_to
from threed.memory.tiers import StagedBuffer
from threed.ops.matmul import NATIVE, Matmul
from threed.topology import Axis
from threed.zero.counting import Contributions, Deferral, LaunchQueue, is_own
from threed.zero.early import Early
from threed.zero.gather import Gatherer
from threed.zero.late import LateGradients
from threed.zero.layout import Bucket, Layout, Slot
from threed.zero.reductions import (
    PLAIN,
    BucketGradients,
    FullGradients,
    Gradient,
    GradientCodecs,
    Gradients,
    Reductions,
    later_sums,
)
from threed.zero.unused import Unused, warn_of_unused


class StepState(enum.Enum):
    """The state of a reducer's step."""

    ENDED = enum.auto()
    RUNNING = enum.auto()
    ABORTED = enum.auto()  # its gradients are to be discarded


class Reducer:
    """Sums the gradients of every bucket over the ranks that share it.

    Call begin(microbatches) before the first backward, pass_ended(chunk) after each, and finish()
    after the last. With `whole_step` call unit_ended(unit) after the last backward of each unit.

    Args:
        layout: the parameters and their buckets.
        codecs: how gradients are encoded between ranks.
        dynamic: whether the parameters are those of a wrapped module, which may use them
            differently in every step. Its backwards run inside `own_backward`.
        whole_step: whether all micro-batches of a layer run before the next layer.
        early: updates complete slices while the backward runs, except in the first step.
        unused: tracks which parameters of a wrapped module were used.
        warns: whether this rank warns of unused parameters, as one of the tensor ranks does.
        gatherer: gathers the parameters; is told when a gradient is complete.
    """

    def __init__(
        self,
        layout: Layout,
        codecs: GradientCodecs = PLAIN,
        dynamic: bool = False,
        whole_step: bool = False,
        *,
        early: Early | None = None,
        unused: Unused | None = None,
        warns: bool = True,
        gatherer: Gatherer | None = None,
    ) -> None:
        self.layout, self.early, self.unused, self.warns = layout, early, unused, warns
        self.gatherer = gatherer
        sliced = layout.policy.slices_gradients
        self.rounds = sliced and not whole_step  # several in a step
        self.dynamic = dynamic
        self._first_step = True
        self.memory: Gradients = BucketGradients(layout) if sliced else FullGradients(layout)
        self.reductions = Reductions(
            layout, codecs, self.memory.release_window,
            None if early is None else self._update_in_backward,
        )  # fmt: skip
        self.late = LateGradients(layout, codecs, gatherer)
        self.deferral = Deferral()
        self.scope = ForwardScope()  # shared with the stages
        self._queues: list[LaunchQueue] = []
        self._sinks: dict[Slot, Sink] = {}
        for chunks in dict.fromkeys(group.key.chunks for group in layout.groups):
            self._add_queue(chunks)
        self.sinks = [self._sinks[slot] for slot in layout.slots if slot in self._sinks]
        self._sinks_of = [[self._sinks[s] for s in bucket.slots()] for bucket in layout.buckets]
        self._state = StepState.ENDED
        self._passes = 1  # of a round
        self._passes_ended = 0  # of the step
        self._observer: Callable[[Tensor], None] | None = None

    @contextmanager
    def observed(self, observer: Callable[[Tensor], None]) -> Iterator[None]:
        """Calls `observer` with this rank's gradients of each bucket that is reduced inside the block."""
        self._observer = observer
        try:
            yield
        finally:
            self._observer = None

    def _add_queue(self, chunks: tuple[int, ...]) -> None:
        """Adds the launch queue of some chunks of the model, and the sinks of their parameters."""
        groups = [g for g in self.layout.groups if g.key.trainable and g.key.chunks == chunks]
        split = self.rounds and len(chunks) > 1  # each chunk's round gets some contributions
        counts = {
            slot: Contributions(1) if self.dynamic
            else Contributions(len(slot.places), known=not (split or slot.varies))
            for group in groups for slot in group.slots
        }  # fmt: skip
        buckets = {
            number: [counts[slot] for slot in bucket.slots()]
            for number, bucket in enumerate(self.layout.buckets)
            if bucket.group.key.chunks == chunks
        }
        queue = LaunchQueue(chunks, list(counts.values()), buckets)
        self._queues.append(queue)
        self._sinks |= {slot: Sink(self, slot, count, queue) for slot, count in counts.items()}

    def sink_of(self, slot: Slot) -> Sink:
        """Returns the sink of a trainable parameter."""
        return self._sinks[slot]

    # ------------------------------------------------------------------------ add, ready, launch

    def mark_complete(self, sink: Sink) -> None:
        """Marks a gradient as complete, and launches the buckets that are ready, in order."""
        if self.gatherer is not None:
            self.gatherer.gradient_complete(sink.slot)
        if not sink.counts.positions:  # an empty shard of the vocabulary
            return
        sink.queue.mark_complete(sink.counts)
        while sink.queue.is_ready:
            self._launch(sink.queue)

    def _launch(self, queue: LaunchQueue) -> None:
        """Launches the reduction of a queue's next bucket; absent gradients count as zero."""
        number = queue.take()
        bucket = self.layout.buckets[number]
        for sink in self._sinks_of[number]:
            if not sink.counts.added:
                self.memory.set_zero(sink.slot, bucket)
        self.reductions.make_room(bucket)
        window = self.memory.take_window(bucket)
        if self._observer is not None:
            self._observer(window)
        last = not self.rounds or queue.backwards <= 1
        self.reductions.launch(
            bucket,
            window,
            add=self.rounds and queue.rounds > 0,
            complete=last and not later_sums(bucket),
        )

    def _launch_all(self, queue: LaunchQueue) -> None:
        while not queue.is_done:
            self._launch(queue)

    def _end_round(self, queue: LaunchQueue) -> None:
        """Launches the remaining buckets of a round; counts what to expect in the next one."""
        self._launch_all(queue)
        if self._counts_change:
            queue.learn(self._passes, self.dynamic)

    @property
    def _counts_change(self) -> bool:
        """Whether gradients may get more contributions, or fewer, than expected."""
        return self.dynamic or self._first_step

    def add_late(self, sink: Sink, grad: Tensor) -> None:
        """Keeps a gradient that came after the launch of its bucket."""
        if not self._counts_change:
            raise RuntimeError(
                f"{sink.slot.spec.name}: a gradient came after the {sink.counts.per_pass} of a"
                " micro-batch that the first step had, and after its bucket was sent: how often this"
                " layer runs depends on the data; give the pipeline layer the attribute"
                " `runs_vary = True`"
            )
        sink.counts.add_late()
        self.late.add(sink.slot, grad)

    def _update_in_backward(self, bucket: Bucket, gradient: StagedBuffer) -> bool:
        """Has a complete slice updated now, if that is possible; returns whether it is."""
        if self.early is None or self._first_step:  # its late gradients are not added yet
            return False
        return self.early.take(bucket, gradient)

    # ------------------------------------------------------------------------- the course of a step

    def begin(self, microbatches: int) -> None:
        """Begins a step. Discards the gradients of an unfinished step, which is collective."""
        for sink in self.sinks:
            sink.run_last(microbatches)
        self._abort()
        self.recover()
        self._passes = 1 if self.rounds else microbatches
        for queue in self._queues:
            queue.begin(microbatches * len(queue.chunks))
        self._restart()
        self._state = StepState.RUNNING

    def _restart(self) -> None:
        """Discards all gradients of the step, and begins its first round."""
        self._passes_ended = 0
        self.reductions.forget()
        self.memory.reset()
        self.late.clear()
        if self.early is not None:
            self.early.begin()
        for queue in self._queues:
            queue.restart(self._passes)

    def pass_ended(self, chunk: int = 0) -> None:
        """Ends the backward of one micro-batch on a chunk, and the round if it has no other."""
        self._passes_ended += 1
        for queue in self._queues if self.rounds else ():
            if chunk in queue.chunks:
                self._end_round(queue)
                queue.next_round(self._passes)
        if self.gatherer is not None:
            self.gatherer.pass_ended()

    def unit_ended(self, unit: int) -> None:
        """Ends all backwards of a unit and of the units behind it; launches their buckets."""
        for queue in self._queues:
            while not queue.is_done and self.layout.buckets[queue.next].earliest_unit >= unit:
                self._launch(queue)

    def all_passes_ended(self, chunk: int | None = None) -> None:
        """Ends the backwards of the step, or those of one chunk, and so the round of the step."""
        for queue in self._queues if not self.rounds else ():
            if chunk is None or queue.chunks == (chunk,):
                self._end_round(queue)

    def finish(self) -> list[Gradient]:
        """Ends the step: returns what this rank updates of the summed gradients, per bucket."""
        self._end_backwards()
        return self.reductions.finish()

    def close(self) -> Callable[[], list[Gradient]]:
        """Ends the step as `finish` does, without waiting for other stages.

        The next step may begin before the result is called; it must not end before. Slices need
        memory of their own.

        Returns:
            A function that waits, and returns the gradients.
        """
        self._end_backwards()
        return self.reductions.close()

    def _end_backwards(self) -> None:
        self.all_passes_ended()
        for queue in self._queues:
            if queue.is_untouched:  # no micro-batch came to its chunk: gradients of zero
                self._launch_all(queue)
        self.reductions.wait_all()
        if self.layout.slices_parameters:
            self.memory.trim()  # the next to need memory are gathered parameters
        if self._counts_change:
            self._end_counting()
        self._passes_ended, self._first_step, self._state = 0, False, StepState.ENDED

    def _end_counting(self) -> None:
        """Adds the gradients that came late, and finds the parameters that were not used."""
        for slot, grad in self.foreign if self.dynamic else ():
            slot.param.grad = None
            self.add_late(self._sinks[slot], grad.to_dense() if grad.is_sparse else grad)
        for bucket, staged in self.late.reduce():
            self.reductions.store(bucket, staged, complete=not later_sums(bucket))
        if self.unused is not None:
            self.unused.agree({sink.slot for sink in self.sinks if sink.counts.used})
        elif self._first_step:
            never = {sink.slot for sink in self.sinks if not sink.counts.used}
            warn_of_unused(self.layout, never, self.warns)

    @property
    def foreign(self) -> list[tuple[Slot, Tensor]]:
        """The gradients of other engines' backwards, with their parameters."""
        return [(s, s.param.grad) for s in self._sinks if s.param.grad is not None]

    # --------------------------------------------------------------------- steps that are discarded

    def give_up(self) -> None:
        """Discards the step after an error.

        Calls `recover` at once, since the program may call collectives next. With sliced
        parameters the engine calls it later, since another rank may wait for a gather.
        """
        self._abort()
        if not self.layout.slices_parameters:
            with suppress(RuntimeError):  # so that the first error is raised
                self.recover()

    def _abort(self) -> None:
        if self._state is StepState.RUNNING:
            self._state = StepState.ABORTED

    def recover(self) -> None:
        """Launches the remaining buckets of a discarded step of a wrapped module.

        Ranks that failed at different points have then called the same collectives. Call it before
        any other collective. Does nothing with `early`, which would apply the gradients.
        """
        if self._state is not StepState.ABORTED or not self.dynamic or self.early is not None:
            return
        self._state = StepState.ENDED
        for queue in self._queues:
            for _ in range(queue.backwards if self.rounds else 1):
                self._launch_all(queue)
                queue.next_round(self._passes)

    def drop(self) -> None:
        """Discards all gradients so far, also of other engines' backwards, as `zero_grad` does.

        Those of a step that an error broke off are discarded by `begin`.
        """
        self.recover()
        for sink in self.sinks:
            sink.slot.param.grad = None
        if not self._passes_ended or self._state is not StepState.RUNNING:
            return
        if not self.rounds:
            for queue in self._queues:  # other ranks may have launched more, or less
                self._launch_all(queue)
            self._passes = max(1, self._passes - self._passes_ended)
        self._restart()

    # ------------------------------------------------------------------------ counts in checkpoints

    def state(self, stages: Axis) -> dict[str, Any]:
        """Returns the state for a checkpoint: which parameters are unused, and the contributions of
        a micro-batch that are not one for each module. Collective over the pipeline stages."""
        own = {sink.slot.spec.name: sink.counts.counted for sink in self.sinks}
        own = {name: count for name, count in own.items() if count is not None}
        state: dict[str, Any] = {"uses": {}}
        for uses in collectives.exchange(own, stages):
            state["uses"] |= uses
        if self.unused is not None:
            state["unused"] = self.unused.state()
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores the state of a checkpoint, so that this run sums in the same order."""
        for sink in self.sinks:
            sink.counts.restore(state.get("uses", {}).get(sink.slot.spec.name))
        if self.unused is not None:
            self.unused.restore(state.get("unused"))


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
        self, reducer: Reducer, slot: Slot, counts: Contributions, queue: LaunchQueue
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
        if self._deferred(self.add_product, a, b, by):
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
        if self.reducer.scope.active:
            raise RuntimeError(
                f"{self.slot.spec.name}: a gradient came while a layer ran its forward:"
                " torch.autograd.grad there must not go through a layer of threed.layers, which"
                " adds to the loss's gradient; use torch's own modules"
            )

    def _deferred(self, add: Callable[..., None], *arguments: Any) -> bool:
        """Returns whether contributions wait for a W now; then this one is set aside."""
        waiting = self.reducer.deferral.waiting
        if waiting is None:
            return False
        waiting.append((add, arguments))
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
