"""Gradient reduction: collects gradients in buckets while backward runs, and sums each bucket over the ranks.

Every trainable parameter gets a `Sink`. Linear layers and embeddings write their gradients into it; all others come
through autograd's post-accumulate hook. A bucket is ready when every parameter in it has received the number of
contributions expected in a round. The reduction of ready buckets begins in one fixed order, the same on every rank,
while backward continues with earlier layers. A round is a step where gradients are kept in full (stages 0 and 1), and
a micro-batch where they are slices (stages 2 and 3): there each round's sum is added to this rank's slice. Where all
micro-batches of a layer run before the next layer's (`whole_step`), a round is a step under every stage.

The expected number of contributions is the one of the last round; at first, one for each module that has the
parameter. In a wrapped module (`dynamic`) it may change from step to step; in a model of `threed.layers` it is learnt
in the first step. A gradient that comes after its bucket was sent is set aside and summed at the end of the step: none
is lost, and none is counted twice.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress

from torch import Tensor

from threed import collectives
from threed.collectives import Pending
from threed.memory.tiers import InMemory, StagedBuffer, start_copy
from threed.planner.memory import BUCKETS_IN_FLIGHT
from threed.topology import Axis
from threed.zero import gradients as sums
from threed.zero.agreement import check_gathers
from threed.zero.deferral import Deferral
from threed.zero.early import Early
from threed.zero.gradients import (
    PLAIN,
    BucketGradients,
    FullGradients,
    Gradient,
    GradientCodecs,
    Gradients,
    InFlight,
    early_sum,
    later_sums,
)
from threed.zero.layout import Bucket, Group, Layout, Slot
from threed.zero.norm import squares
from threed.zero.others import left
from threed.zero.sink import EVER, Queue, Sink, taken_by, too_late
from threed.zero.unused import Unused, warn_of_unused


class Reducer:
    """Sums every bucket's gradients over the ranks that share it.

    Call begin(microbatches) before the first backward, pass_ended(chunk) after each, and finish() after the last: it
    returns each bucket's slice of the sum. codecs: how gradients are encoded between ranks. dynamic: of a
    wrapped module, see above; its backwards run inside `own_backward`. whole_step: see above; call unit_ended(unit)
    after the last backward of each unit.
    """

    def __init__(
        self,
        layout: Layout,
        codecs: GradientCodecs = PLAIN,
        dynamic: bool = False,
        whole_step: bool = False,
    ) -> None:
        self.layout, self.codecs, self.dynamic = layout, codecs, dynamic
        self._learning = True  # until the first step is over
        self.warns = True  # one of the tensor ranks warns of unused parameters
        self.sliced = layout.policy.slices_gradients
        self.rounds = self.sliced and not whole_step  # several in a step
        self.memory: Gradients = BucketGradients(layout) if self.sliced else FullGradients(layout)
        self._sinks: dict[Slot, Sink] = {}
        self._buckets_of: dict[Slot, list[int]] = {}
        self._queues: dict[tuple[int, ...], Queue] = {}
        for group in layout.groups:
            queue = self._queues.setdefault(group.key.chunks, Queue(group.key.chunks))
            for slot in group.slots if group.key.trainable else ():
                sink = Sink(self, slot, self._expected(slot, group))
                queue.sinks.append(sink)
                slot.param.sink = sink  # type: ignore[attr-defined]
                sink.hook = slot.param.register_post_accumulate_grad_hook(
                    taken_by(weakref.ref(sink))
                )
                self._sinks[slot] = sink
        self.sinks = list(self._sinks.values())
        self._slots = [bucket.slots() for bucket in layout.buckets]
        self._earliest = [
            min((min(slot.units) for slot in slots), default=-1) for slots in self._slots
        ]
        self._queue_of = [self._queues[bucket.group.key.chunks] for bucket in layout.buckets]
        for number, slots in enumerate(self._slots):
            self._queue_of[number].buckets.append(number)
            for slot in slots:
                self._buckets_of.setdefault(slot, []).append(number)
        self._passes = 1  # of a round
        self._ended = 0  # passes of this step
        self._unfinished = self._given_up = (
            False  # a step has begun and not ended; it is to be discarded
        )
        self._missing = [0] * len(layout.buckets)
        self._sent: set[int] = set()  # buckets sent in this round
        self._summed: set[int] = set()  # and in this step
        self._in_flight: deque[InFlight] = deque()
        self._returning: deque[tuple[InFlight, Pending]] = (
            deque()
        )  # summed, being copied to the host
        self._squares: dict[Bucket, Tensor] = {}  # of complete slices
        self._aside: dict[Slot, Tensor] = {}
        self.gather_order: Callable[[], int] = lambda: (
            0
        )  # a hash of what a step gathered, where ranks must agree
        self.deferral = Deferral()
        self.early: Early | None = None  # takes complete gradients
        self.unused: Unused | None = None  # tracks which parameters were used
        self.listener: Callable[[Slot], None] | None = (
            None  # called with every parameter whose gradient is complete
        )

    def sink_of(self, slot: Slot) -> Sink:
        """Returns the sink of a trainable parameter."""
        return self._sinks[slot]

    def learnt(self) -> dict[str, int]:
        """Returns how often parameters are used in a micro-batch, if not once for each module that has them."""
        return {
            s.slot.spec.name: s.uses
            for s in self.sinks
            if s.uses not in (EVER, self._places(s.slot))
        }

    def restore(self, learnt: Mapping[str, int]) -> None:
        """Restores the numbers of uses that a checkpoint's run had learnt, so that this run sums in the same order.
        `Unused` restores which parameters were used so far."""
        for sink in self.sinks:
            sink.uses = (
                sink.uses
                if sink.uses == EVER
                else learnt.get(sink.slot.spec.name, self._places(sink.slot))
            )
            sink.used = False

    def _expected(self, slot: Slot, group: Group) -> int:
        """Returns the contributions in a micro-batch. A parameter shared by chunks gets some in each chunk's round."""
        unknown = slot.varies or (self.rounds and len(group.key.chunks) > 1)
        return EVER if unknown and not self.dynamic else self._places(slot)

    def _places(self, slot: Slot) -> int:
        return 1 if self.dynamic else len(slot.places)

    def begin(self, microbatches: int) -> None:
        """Begins a step. Discards the gradients of a step that did not end, which is collective."""
        for sink in self.sinks:
            sink.run_last(microbatches)
        self._given_up = self._unfinished
        self.recover()
        self._passes, self._ended = 1 if self.rounds else microbatches, 0
        for queue in self._queues.values():
            queue.passes = microbatches * len(queue.chunks)
        self._begin_anew()
        self._unfinished = True

    def give_up(self) -> None:
        """Discards the current step after an error. Calls `recover` at once, since the program may call collectives
        next; with sliced parameters the engine calls it later, since another rank may wait for a gather."""
        self._given_up = self._unfinished
        if not self.layout.slices_parameters:
            with suppress(RuntimeError):  # so that the first error is raised
                self.recover()

    def recover(self) -> None:
        """Sends the remaining buckets of a discarded step of a wrapped module, so that ranks that failed at different
        points have called the same collectives. Call it before any other. Not with `early`, which would apply them."""
        if not (self._given_up and self.dynamic and self.early is None):
            return
        self._given_up = self._unfinished = False
        for queue in self._queues.values():
            for _ in range(queue.passes if self.rounds else 1):
                self._start_all(queue)
                queue.passes -= 1
                self._begin_round(queue)

    def drop(self) -> None:
        """Discards all gradients so far, of this step and of other engines' backwards, as `zero_grad` does."""
        self.recover()
        for sink in self.sinks:
            sink.slot.param.grad = None
        if not (self._ended and self._unfinished):
            return
        if not self.rounds:
            for queue in self._queues.values():  # other ranks may have sent more, or less
                self._start_all(queue)
            self._passes = max(1, self._passes - self._ended)
        self._ended = 0
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._complete_all()
        self.memory.reset()
        self._aside.clear()
        self._squares.clear()
        self._summed.clear()
        if self.early is not None:
            self.early.begin()
        for queue in self._queues.values():
            self._begin_round(queue)

    def _begin_round(self, queue: Queue) -> None:
        for sink in queue.sinks:
            sink.begin(self._passes)
        due = {sink.slot for sink in queue.sinks if sink.expected}
        for number in queue.buckets:
            self._missing[number] = len(due.intersection(self._slots[number]))
        self._sent.difference_update(queue.buckets)
        queue.begun = 0

    def arrived(self, slot: Slot) -> None:
        """Counts a complete gradient, and begins the reduction of buckets that are ready, in the fixed order."""
        if self.listener is not None:
            self.listener(slot)
        numbers = self._buckets_of.get(slot)
        if not numbers:  # an empty vocabulary shard may lie in no bucket
            return
        for number in numbers:
            self._missing[number] -= 1
        queue = self._queue_of[numbers[0]]
        while queue.begun < len(queue.buckets) and self._missing[queue.buckets[queue.begun]] == 0:
            self._start(queue)

    def _start_all(self, queue: Queue) -> None:
        while queue.begun < len(queue.buckets):
            self._start(queue)

    def _start(self, queue: Queue) -> None:
        number = queue.buckets[queue.begun]
        bucket = self.layout.buckets[number]
        for slot in self._slots[number]:
            if not self.sink_of(slot).received:
                self.memory.missing(slot, bucket)
        queue.begun += 1
        self._sent.add(number)
        self._limit_in_flight(bucket)
        window, add = self.memory.leave(bucket), self.rounds and number in self._summed
        self._summed.add(number)
        staged = bucket.grad.fetch() if add else bucket.grad.empty()
        shard, into = bucket.group.shard, staged.values
        if shard.size == 1:
            pending = sums.sum_over(window, early_sum(bucket), self.codecs)
        elif into.device != window.device:
            pending = collectives.start_reduce_scatter(window, shard, codec=self.codecs.of(shard))
        else:
            pending = collectives.start_reduce_scatter(
                window, shard, codec=self.codecs.of(shard), into=into, add=add
            )
        complete = (queue.passes <= 1 or not self.rounds) and not later_sums(bucket)
        self._in_flight.append(InFlight(bucket, window, pending, staged, add, complete))
        at_hand = not add or isinstance(bucket.grad, InMemory)
        if self.sliced and at_hand and shard.size == 1 and not early_sum(bucket):
            self._complete_oldest()  # no communication, nothing to wait for

    def _limit_in_flight(self, bucket: Bucket) -> None:
        """Completes the oldest reductions until there is room for one more, and all of this bucket's, whose slice is
        about to be read."""
        while len(self._in_flight) >= BUCKETS_IN_FLIGHT:
            self._complete_oldest()
        while any(t.bucket is bucket for t in self._in_flight):
            self._complete_oldest()
        while any(t.bucket is bucket for t, _ in self._returning):
            self._store_oldest()

    def _complete_oldest(self) -> None:
        """Waits for the oldest reduction in flight, and begins to copy its sum to where the slice is stored."""
        t = self._in_flight.popleft()
        t.staged.wait()  # may hold the sum of earlier rounds
        total = t.pending.wait()
        self._returning.append((t, start_copy(total, t.staged.values.device)))
        while len(self._returning) > (
            BUCKETS_IN_FLIGHT if total.device != t.staged.values.device else 0
        ):
            self._store_oldest()

    def _complete_all(self) -> None:
        while self._in_flight:
            self._complete_oldest()
        while self._returning:
            self._store_oldest()

    def _store_oldest(self) -> None:
        """Waits for the oldest copy of a sum, and stores it."""
        t, copy = self._returning.popleft()
        total, own = copy.wait(), t.staged.wait()
        if not collectives.same_start(total, own):
            own.add_(total) if t.add else own.copy_(total)
        self._store(t.bucket, t.staged, t.complete)
        if t.window is not None:
            self.memory.left(t.window)

    def _store(self, bucket: Bucket, staged: StagedBuffer, complete: bool) -> None:
        """Stores a bucket's slice, or has it updated; computes its share of the norm first, while it is in a cache."""
        if complete:
            self._squares[bucket] = squares(staged.values)
            if self.early is not None and not self._learning and self.early.take(bucket, staged):
                return
        staged.store()

    def pass_ended(self, chunk: int = 0) -> None:
        """Ends a chunk's backward of one micro-batch; where that is a round, sends the remaining buckets."""
        self._ended += 1
        for queue in self._queues.values() if self.rounds else ():
            if chunk in queue.chunks:
                self._flush(queue)
                queue.passes -= 1
                self._begin_round(queue)

    def unit_ended(self, unit: int) -> None:
        """Ends all backwards of a unit, and so of those behind it: sends their remaining buckets."""
        for queue in self._queues.values():
            while (
                queue.begun < len(queue.buckets)
                and self._earliest[queue.buckets[queue.begun]] >= unit
            ):
                self._start(queue)

    def _flush(self, queue: Queue) -> None:
        """Ends a round: sends every remaining bucket; parameters without a gradient count as zero."""
        self._start_all(queue)
        for sink in queue.sinks if self.dynamic or self._learning else ():
            uses = -(-(sink.received + sink.late) // self._passes)
            sink.uses = uses if self.dynamic else max(sink.uses, uses)

    def all_passes_ended(self, chunk: int | None = None) -> None:
        """Ends the step's backwards, or those of one chunk: sends the gradients that are kept in full."""
        for queue in self._queues.values() if not self.rounds else ():
            if chunk is None or queue.chunks == (chunk,):
                self._flush(queue)

    def _send_idle(self) -> None:
        """Sends what had no round in this step, for no micro-batch came to its chunk: gradients of zero."""
        for queue in self._queues.values():
            if self._summed.isdisjoint(queue.buckets):
                self._start_all(queue)

    def finish(self) -> list[Gradient]:
        """Ends the step: returns what this rank updates of the summed gradients, bucket by bucket."""
        self._end_passes()
        for bucket in sums.in_order(self.layout):
            if axes := later_sums(bucket):
                self._limit_in_flight(bucket)
                self._in_flight.append(self._in_flight_over(bucket, axes))
        self._complete_all()
        return [self._gradient(bucket) for bucket in self.layout.buckets]

    def close(self) -> Callable[[], list[Gradient]]:
        """Ends the step as `finish` does, but waits for no other stage: returns what waits, and gives the slices. The
        next step may `begin` before that is called; it must not end before, and slices need memory of their own."""
        self._end_passes()
        squares, self._squares = self._squares, {}
        order = sums.in_order(self.layout)
        rest = [
            self._in_flight_over(bucket, axes) for bucket in order if (axes := later_sums(bucket))
        ]

        def gradients() -> list[Gradient]:
            self._in_flight.extend(rest)
            self._complete_all()
            self._squares = {**squares, **self._squares}
            return [self._gradient(bucket) for bucket in self.layout.buckets]

        return gradients

    def _end_passes(self) -> None:
        self.all_passes_ended()
        self._send_idle()
        self._complete_all()
        if self.layout.slices_parameters:
            self.memory.trim()  # the next to need memory are gathered parameters
        if self.dynamic:
            self._set_aside_gradients_of_others()
        if self.dynamic or self._learning:
            self._reduce_late()
        if self.unused is not None:
            self.unused.agree({sink.slot for sink in self.sinks if sink.used})
        elif self._learning:
            warn_of_unused(
                self.layout, {sink.slot for sink in self.sinks if not sink.used}, self.warns
            )
        self._ended, self._learning, self._unfinished = 0, False, False

    def _in_flight_over(self, bucket: Bucket, axes: tuple[Axis, ...]) -> InFlight:
        """Begins to sum a bucket's slice over the remaining axes."""
        staged = bucket.portion_grad.fetch()
        pending = sums.sum_portion(bucket, staged.wait(), axes, self.codecs)
        return InFlight(bucket, None, pending, staged, add=False, complete=True)

    def _gradient(self, bucket: Bucket) -> Gradient:
        if bucket not in self._squares:  # the step had fewer micro-batches than announced
            staged = bucket.portion_grad.fetch()
            self._squares[bucket] = squares(staged.wait())
            staged.drop()
        return Gradient(bucket.portion_grad, self._squares[bucket])

    # ------------------------------------------------------------------------------------- gradients that came late

    def is_late(self, sink: Sink) -> bool:
        """Returns whether a bucket of the parameter was sent in this round already."""
        return bool(self._sent) and not self._sent.isdisjoint(self._buckets_of.get(sink.slot, ()))

    def _set_aside_gradients_of_others(self) -> None:
        for slot, grad in left(self._sinks):
            slot.param.grad = None
            self.keep_aside(slot, grad.to_dense() if grad.is_sparse else grad)

    def keep_aside(self, slot: Slot, grad: Tensor) -> None:
        """Adds a late gradient to those set aside in this step."""
        if not (self.dynamic or self._learning):
            raise too_late(self.sink_of(slot))
        self.sink_of(slot).late += 1
        self.sink_of(slot).used = True
        if slot in self._aside:
            self._aside[slot].add_(grad)
        else:
            self._aside[slot] = grad.to(self.layout.policy.grad_dtype, copy=True)

    def _reduce_late(self) -> None:
        """Reduces once more the buckets for which any rank set gradients aside."""
        policy = self.layout.policy
        mine = sorted({number for slot in self._aside for number in self._buckets_of.get(slot, ())})
        answers = collectives.exchange([self.gather_order(), mine], policy.shard)
        check_gathers([order for order, _ in answers])
        late = {number for _, numbers in answers for number in numbers}
        if any(
            early_sum(bucket) for bucket in self.layout.buckets
        ):  # stage 0, whose sums are over the replicas
            late.update(
                number
                for numbers in collectives.exchange(mine, policy.replicas)
                for number in numbers
            )
        for number in sorted(late):
            bucket = self.layout.buckets[number]
            window = sums.window_of(bucket, self._aside, policy.grad_dtype)
            codec = self.codecs.of(policy.shard)
            total = collectives.start_reduce_scatter(window, policy.shard, codec=codec)
            staged = bucket.grad.fetch()
            own = staged.wait()
            own.add_(
                sums.sum_over(total.wait(), early_sum(bucket), self.codecs).wait().to(own.device)
            )
            self._store(bucket, staged, complete=not later_sums(bucket))
        self._aside.clear()
