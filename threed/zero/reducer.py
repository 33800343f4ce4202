"""Gradients on their way: from the layers into buckets, and bucket by bucket over the ranks.

Every trainable parameter gets a `Sink`. Linear layers and embeddings write into it while backward computes; the rest
comes through autograd's post-accumulate hook. A bucket is ready by count: when every parameter in it has had as many
contributions as it gets in a round. Ready buckets leave in one fixed order, the same on every rank, while the backward
of the layers before them goes on. A round is a step where gradients are kept in full (stages 0 and 1), and a
micro-batch where they are slices (stages 2 and 3): there each round's sum is added to this rank's slice.

How many contributions a parameter gets is what it got last time; in the beginning, one for each place it sits in. In a
wrapped module (`dynamic`) that may change from step to step, in a model of `threed.layers` it is learnt in the first
one. What comes after its bucket has left is kept aside, and follows at the end of the step: no gradient is lost, and
none is counted twice.
"""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from threed import collectives
from threed.collectives import Pending
from threed.memory.tiers import InMemory, StagedBuffer, start_copy
from threed.planner.memory import BUCKETS_IN_FLIGHT
from threed.topology import Axis
from threed.zero.gradients import BucketGradients, FullGradients, Gradient, Gradients, InFlight, early_sum, later_sums
from threed.zero.layout import Bucket, Group, Layout, Slot
from threed.zero.norm import squares
from threed.zero.others import left
from threed.zero.sink import EVER, Sink, taken_by, too_late
from threed.zero.unused import Unused


@dataclass(eq=False)
class Queue:
    """Buckets that leave in this order: of one chunk of the model, or of parameters that several chunks share.

    begun: how many of them have left in this round. passes: backwards of these chunks that are still to end.
    """

    chunks: tuple[int, ...]
    buckets: list[int] = field(default_factory=list)
    sinks: list[Sink] = field(default_factory=list)
    begun: int = 0
    passes: int = 1


class Reducer:
    """Sums every bucket's gradients over the ranks that share it.

    begin(microbatches) before the first backward, `pass_ended(chunk)` after each; finish() after the last gives each
    bucket's slice of the sum. wire: the dtype gradients travel in, by default their own. dynamic: see above; its
    backwards run as its `own_backward`.
    """

    def __init__(self, layout: Layout, wire: torch.dtype | None = None, dynamic: bool = False) -> None:
        self.layout, self.wire, self.dynamic = layout, wire, dynamic
        self._learning = True  # until the first step is over
        self.speaks = True  # of the tensor ranks that hold the same, one names what is unused
        self.rounds = layout.policy.slices_gradients
        self.memory: Gradients = BucketGradients(layout) if self.rounds else FullGradients(layout)
        self._sinks: dict[Slot, Sink] = {}
        self._buckets_of: dict[Slot, list[int]] = {}
        self._queues: dict[tuple[int, ...], Queue] = {}
        for group in layout.groups:
            queue = self._queues.setdefault(group.key.chunks, Queue(group.key.chunks))
            for slot in group.slots if group.key.trainable else ():
                sink = Sink(self, slot, self._expected(slot, group))
                queue.sinks.append(sink)
                slot.param.sink = sink  # type: ignore[attr-defined]
                slot.param.register_post_accumulate_grad_hook(taken_by(weakref.ref(sink)))
                self._sinks[slot] = sink
        self.sinks = list(self._sinks.values())
        self._slots = [bucket.slots() for bucket in layout.buckets]
        for number, slots in enumerate(self._slots):
            self._queue_of(number).buckets.append(number)
            for slot in slots:
                self._buckets_of.setdefault(slot, []).append(number)
        self._passes = 1  # of a round
        self._ended = 0  # passes of this step
        self._missing = [0] * len(layout.buckets)
        self._left: set[int] = set()  # buckets that have left in this round
        self._summed: set[int] = set()  # and those in this step
        self._in_flight: deque[InFlight] = deque()
        self._returning: deque[tuple[InFlight, Pending]] = deque()  # summed, and on their way to the host
        self._squares: dict[Bucket, Tensor] = {}  # of complete slices
        self._aside: dict[Slot, Tensor] = {}
        self.gather_order: Callable[[], int] = lambda: 0  # what a step gathered, when that must be the same everywhere
        self.unused: Unused | None = None  # hears of what was used
        self.listener: Callable[[Slot], None] | None = None  # told of every parameter whose gradient is complete

    def sink_of(self, slot: Slot) -> Sink:
        """The sink of a trainable parameter."""
        return self._sinks[slot]

    def learnt(self) -> dict[str, int]:
        """How often parameters are used in a micro-batch, where that is not once for each place they sit in."""
        return {s.slot.spec.name: s.uses for s in self.sinks if s.uses not in (EVER, self._places(s.slot))}

    def restore(self, learnt: Mapping[str, int]) -> None:
        """Takes up what a checkpoint's run had learnt, so that sums are made as there. What was used so far, the
        checkpoint knows, not this run."""
        for sink in self.sinks:
            sink.uses = sink.uses if sink.uses == EVER else learnt.get(sink.slot.spec.name, self._places(sink.slot))
            sink.used = False

    def _expected(self, slot: Slot, group: Group) -> int:
        """Contributions in a micro-batch. What several chunks share gets some in each one's round."""
        unknown = slot.varies or (self.rounds and len(group.key.chunks) > 1)
        return EVER if unknown and not self.dynamic else self._places(slot)

    def _queue_of(self, number: int) -> Queue:
        return self._queues[self.layout.buckets[number].group.key.chunks]

    def _places(self, slot: Slot) -> int:
        return 1 if self.dynamic else len(slot.places)

    def begin(self, microbatches: int) -> None:
        """Expects the gradients of a step; what is left of one that was given up is forgotten."""
        self._passes, self._ended = 1 if self.rounds else microbatches, 0
        for queue in self._queues.values():
            queue.passes = microbatches * len(queue.chunks)
        self._begin_anew()

    def drop(self) -> None:
        """Forgets all gradients so far, as `zero_grad` does: what passes of this step, and other engines, brought."""
        for sink in self.sinks:
            sink.slot.param.grad = None
        if not self._ended:
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
        for queue in self._queues.values():
            self._begin_round(queue)

    def _begin_round(self, queue: Queue) -> None:
        for sink in queue.sinks:
            sink.begin(self._passes)
        due = {sink.slot for sink in queue.sinks if sink.expected}
        for number in queue.buckets:
            self._missing[number] = sum(slot in due for slot in self._slots[number])
        self._left.difference_update(queue.buckets)
        queue.begun = 0

    def arrived(self, slot: Slot) -> None:
        """A parameter's gradient is complete; starts what has become ready, in the fixed order."""
        if self.listener is not None:
            self.listener(slot)
        numbers = self._buckets_of.get(slot)
        if not numbers:  # a vocabulary shard of nothing may lie in no bucket
            return
        for number in numbers:
            self._missing[number] -= 1
        queue = self._queue_of(numbers[0])
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
        self._left.add(number)
        self._limit_in_flight(bucket)
        window, add = self.memory.leave(bucket), self.rounds and number in self._summed
        self._summed.add(number)
        staged = bucket.grad.fetch() if add else bucket.grad.empty()
        shard, into = bucket.group.shard, staged.values
        if shard.size == 1:
            pending = self._sum_over(window, early_sum(bucket))
        elif into.device != window.device:
            pending = collectives.start_reduce_scatter(window, shard, wire=self.wire)
        else:
            pending = collectives.start_reduce_scatter(window, shard, wire=self.wire, into=into, add=add)
        complete = (queue.passes <= 1 or not self.rounds) and not later_sums(bucket)
        self._in_flight.append(InFlight(bucket, window, pending, staged, add, complete))
        at_hand = not add or isinstance(bucket.grad, InMemory)
        if self.rounds and at_hand and shard.size == 1 and not early_sum(bucket):
            self._complete_oldest()  # there is nothing to wait for

    def _limit_in_flight(self, bucket: Bucket) -> None:
        """Lands what is too much under way, for its buffers, and what an earlier round sent of this bucket: it is about
        to be read."""
        while len(self._in_flight) >= BUCKETS_IN_FLIGHT:
            self._complete_oldest()
        while any(t.bucket is bucket for t in self._in_flight):
            self._complete_oldest()
        while any(t.bucket is bucket for t, _ in self._returning):
            self._store_oldest()

    def _complete_oldest(self) -> None:
        """Waits for the bucket that has been on its way longest."""
        t = self._in_flight.popleft()
        t.staged.wait()  # what the sum may be added to
        total = t.pending.wait()
        self._returning.append((t, start_copy(total, t.staged.values.device)))
        while len(self._returning) > (BUCKETS_IN_FLIGHT if total.device != t.staged.values.device else 0):
            self._store_oldest()

    def _complete_all(self) -> None:
        while self._in_flight:
            self._complete_oldest()
        while self._returning:
            self._store_oldest()

    def _store_oldest(self) -> None:
        """Waits for the slice that has been on its way storage longest."""
        t, copy = self._returning.popleft()
        total, own = copy.wait(), t.staged.wait()
        if not collectives.same_start(total, own):
            own.add_(total) if t.add else own.copy_(total)
        self._store(t.bucket, t.staged, t.complete)
        if t.window is not None:
            self.memory.left(t.window)

    def _store(self, bucket: Bucket, staged: StagedBuffer, complete: bool) -> None:
        """A bucket's slice goes storage; what the norm needs of it is found while it is here, and in a cache."""
        if complete:
            self._squares[bucket] = squares(staged.values)
        staged.store()

    def pass_ended(self, chunk: int = 0) -> None:
        """A chunk's backward of a micro-batch is over; where that is a round, what is left of it leaves."""
        self._ended += 1
        for queue in self._queues.values() if self.rounds else ():
            if chunk in queue.chunks:
                self._flush(queue)
                queue.passes -= 1
                self._begin_round(queue)

    def _flush(self, queue: Queue) -> None:
        """No more gradients will come in this round: what never got one counts as zero, and every bucket leaves."""
        self._start_all(queue)
        for sink in queue.sinks if self.dynamic or self._learning else ():
            uses = -(-(sink.received + sink.late) // self._passes)
            sink.uses = uses if self.dynamic else max(sink.uses, uses)

    def all_passes_ended(self, chunk: int | None = None) -> None:
        """The step's backwards, or those of one chunk, are over; gradients that are kept in full leave."""
        for queue in self._queues.values() if not self.rounds else ():
            if chunk is None or queue.chunks == (chunk,):
                self._flush(queue)

    def finish(self) -> list[Gradient]:
        """Each bucket's slice of the summed gradients, in bucket order."""
        self.all_passes_ended()
        self._complete_all()
        if any(group.sliced for group in self.layout.groups):
            self.memory.trim()  # gathered parameters are the next to need memory
        if self.dynamic:
            self._keep_what_others_left()
        if self.dynamic or self._learning:
            self._send_what_was_late()
        if self.unused is not None:
            self.unused.agree({sink.slot for sink in self.sinks if sink.used})
        elif self._learning:
            self._name_unused()
        self._ended, self._learning = 0, False
        return self._sum_rest()

    def _sum_rest(self) -> list[Gradient]:
        """Each bucket's slice, summed over the axes that are left: one after the other, in the order of groups, which
        ranks have in common where they share a group. In the order of completion stages would wait in a circle."""
        for bucket in (bucket for group in self.layout.groups if group.key.trainable for bucket in group.buckets):
            if axes := later_sums(bucket):
                self._limit_in_flight(bucket)
                staged = bucket.grad.fetch()
                pending = self._sum_over(staged.wait().to(bucket.group.params.device), axes)
                self._in_flight.append(InFlight(bucket, None, pending, staged, add=False, complete=True))
        self._complete_all()
        return [self._gradient(bucket) for bucket in self.layout.buckets]

    def _gradient(self, bucket: Bucket) -> Gradient:
        if bucket not in self._squares:  # the step had fewer micro-batches than announced
            staged = bucket.grad.fetch()
            self._squares[bucket] = squares(staged.wait())
            staged.drop()
        return Gradient(bucket.grad, self._squares[bucket])

    def _sum_over(self, tensor: Tensor, axes: tuple[Axis, ...]) -> Pending:
        for axis in axes[:-1]:
            tensor = collectives.start_all_reduce(tensor, axis, wire=self.wire).wait()
        return collectives.start_all_reduce(tensor, axes[-1], wire=self.wire) if axes else collectives.done(tensor)

    # ------------------------------------------------------------------------------------- gradients that came too late

    def is_late(self, sink: Sink) -> bool:
        """Whether a contribution would come after its parameter, or a part of it, has left."""
        return any(number in self._left for number in self._buckets_of.get(sink.slot, ()))

    def _keep_what_others_left(self) -> None:
        for slot, grad in left(self._sinks):
            slot.param.grad = None
            self.keep_aside(slot, grad.to_dense() if grad.is_sparse else grad)

    def _name_unused(self) -> None:
        """Names the parameters that no rank has used in the first step."""
        policy = self.layout.policy
        own = {slot for group in self.layout.groups if not group.key.tied for slot in group.slots}
        never = {sink.slot.spec.name for sink in self.sinks if not sink.used and sink.slot in own}
        for axis in (policy.shard, policy.replicas):
            never.intersection_update(*collectives.exchange(sorted(never), axis))
        if never and self.speaks and policy.shard.index == policy.replicas.index == 0:
            names = ", ".join(sorted(never))
            warnings.warn(
                f"no gradient came to {names} in the first step: they change by weight decay only", stacklevel=2
            )

    def keep_aside(self, slot: Slot, grad: Tensor) -> None:
        """Adds up what came too late in this step."""
        if not (self.dynamic or self._learning):
            raise too_late(self.sink_of(slot))
        self.sink_of(slot).late += 1
        self.sink_of(slot).used = True
        if slot in self._aside:
            self._aside[slot].add_(grad)
        else:
            self._aside[slot] = grad.to(self.layout.policy.grad_dtype, copy=True)

    def _send_what_was_late(self) -> None:
        """Sums again the buckets for which any rank kept something aside."""
        policy = self.layout.policy
        mine = sorted({number for slot in self._aside for number in self._buckets_of.get(slot, ())})
        order = self.gather_order()
        told = collectives.exchange([order, mine], policy.shard)
        if any(other != order for other, _ in told):
            raise RuntimeError(
                "ranks used different parameters in this step, or in another order: ZeRO-3 gathers a parameter on all"
                " ranks at once; route alike on all ranks, or use --zero.stage 2"
            )
        late = {number for _, numbers in told for number in numbers}
        if any(early_sum(bucket) for bucket in self.layout.buckets):  # stage 0, whose sums are over the replicas
            late.update(number for numbers in collectives.exchange(mine, policy.replicas) for number in numbers)
        for number in sorted(late):
            bucket = self.layout.buckets[number]
            device = bucket.group.params.device
            window = torch.zeros(bucket.last - bucket.first, dtype=policy.grad_dtype, device=device)
            for slot in self._slots[number]:
                if slot in self._aside:
                    first, last = max(slot.first, bucket.first), min(slot.last, bucket.last)
                    grad = self._aside[slot].view(-1)[first - slot.first : last - slot.first]
                    window[first - bucket.first : last - bucket.first].copy_(grad)
            total = collectives.start_reduce_scatter(window, policy.shard, wire=self.wire)
            staged = bucket.grad.fetch()
            own = staged.wait()
            own.add_(self._sum_over(total.wait(), early_sum(bucket)).wait().to(own.device))
            self._store(bucket, staged, complete=not later_sums(bucket))
        self._aside.clear()
