"""Sums of buckets over ranks: launched during the backward, waited for in order, and stored."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from threed import collectives
from threed.codecs import EXACT, Codec
from threed.collectives import Pending
from threed.device import start_copy_in
from threed.memory.tiers import InMemory, StagedBuffer, Storage, start_copy
from threed.planner.memory import BUCKETS_IN_FLIGHT
from threed.topology import Axis
from threed.zero.layout import Bucket, Layout
from threed.zero.norm import squares


@dataclass(eq=False)
class Gradient:
    """What this rank updates of a bucket's summed gradients, in its storage, and the sum of its
    squares."""

    storage: Storage
    squares: Tensor


@dataclass(frozen=True)
class GradientCodecs:
    """How gradients are encoded.

    Attributes:
        data: between data ranks.
        other: between ranks of other axes, which sum partial gradients and those of tied weights.
    """

    data: Codec = EXACT
    other: Codec = EXACT

    def of(self, axis: Axis) -> Codec:
        """Returns the codec of sums over an axis."""
        return self.data if axis.label == "dp" else self.other


PLAIN = GradientCodecs()


@dataclass(frozen=True, eq=False)
class InFlight:
    """A bucket whose gradients are being summed.

    Attributes:
        window: the gradients that are sent, None for the slice itself.
        staged: the buffer of the slice.
        add: whether to add to the sum of earlier rounds, which `staged` holds.
        complete: whether the slice is the whole sum afterwards.
    """

    bucket: Bucket
    window: Tensor | None
    pending: Pending
    staged: StagedBuffer
    add: bool
    complete: bool


class Reductions:
    """Launches the reductions of buckets, waits for them, and stores their slices.

    Args:
        layout: the parameters and their buckets.
        codecs: how gradients are encoded between ranks.
        release: called with a window of gradients after its reduction.
        update: called with a bucket and its complete slice before the slice is stored; returns
            whether it stores the slice itself.
    """

    def __init__(
        self,
        layout: Layout,
        codecs: GradientCodecs,
        release: Callable[[Tensor], None],
        update: Callable[[Bucket, StagedBuffer], bool],
    ) -> None:
        self.layout, self.codecs, self._release, self._update = layout, codecs, release, update
        self._in_flight = deque[InFlight]()
        self._copying = deque[tuple[InFlight, Pending]]()  # sums on their way to the slice
        self._squares: dict[Bucket, Tensor] = {}  # of complete slices

    def make_room(self, bucket: Bucket) -> None:
        """Waits until one more reduction may be in flight, and until none of this bucket is."""
        while len(self._in_flight) >= BUCKETS_IN_FLIGHT:
            self.wait_oldest()
        while any(reduction.bucket is bucket for reduction in self._in_flight):
            self.wait_oldest()
        while any(reduction.bucket is bucket for reduction, _ in self._copying):
            self._store_oldest()

    def launch(self, bucket: Bucket, window: Tensor, add: bool, complete: bool) -> None:
        """Launches the reduction of a window of gradients [last - first]; see `InFlight`."""
        shard = bucket.group.shard
        staged = bucket.grad.fetch() if add else bucket.grad.empty()
        into, codec = staged.values, self.codecs.of(shard)
        if shard.size == 1:
            pending = sum_over(window, early_sum(bucket), self.codecs)
        elif into.device != window.device:
            pending = collectives.start_reduce_scatter(window, shard, codec=codec)
        else:
            pending = collectives.start_reduce_scatter(
                window, shard, codec=codec, into=into, add=add
            )
        self._in_flight.append(InFlight(bucket, window, pending, staged, add, complete))
        at_hand = not add or isinstance(bucket.grad, InMemory)
        local = self.layout.policy.slices_gradients and shard.size == 1 and not early_sum(bucket)
        if local and at_hand:
            self.wait_oldest()  # without communication there is nothing to wait for

    def wait_oldest(self) -> None:
        """Waits for the oldest reduction, and begins to copy its sum to the slice's device."""
        reduction = self._in_flight.popleft()
        reduction.staged.wait()  # may hold the sum of earlier rounds
        total, device = reduction.pending.wait(), reduction.staged.values.device
        self._copying.append((reduction, start_copy(total, device)))
        while len(self._copying) > (BUCKETS_IN_FLIGHT if total.device != device else 0):
            self._store_oldest()

    def wait_all(self) -> None:
        """Waits for all reductions, and stores their slices."""
        while self._in_flight:
            self.wait_oldest()
        while self._copying:
            self._store_oldest()

    def _store_oldest(self) -> None:
        reduction, copy = self._copying.popleft()
        total, own = copy.wait(), reduction.staged.wait()
        if not collectives.same_start(total, own):
            own.add_(total) if reduction.add else own.copy_(total)
        self.store(reduction.bucket, reduction.staged, reduction.complete)
        if reduction.window is not None:
            self._release(reduction.window)

    def store(self, bucket: Bucket, staged: StagedBuffer, complete: bool) -> None:
        """Stores a slice, unless `update` does; computes its sum of squares first."""
        if complete:
            self._squares[bucket] = squares(staged.values)  # while it is in a cache
            if self._update(bucket, staged):
                return
        staged.store()

    def forget(self) -> None:
        """Waits for all reductions, and drops their results before a new step."""
        self.wait_all()
        self._squares.clear()

    def finish(self) -> list[Gradient]:
        """Sums slices over the remaining axes; waits, and returns the gradient of each bucket."""
        for bucket in in_order(self.layout):
            if later_sums(bucket):
                self.make_room(bucket)
                self._in_flight.append(self._start_later_sums(bucket))
        self.wait_all()
        return [self._gradient(bucket) for bucket in self.layout.buckets]

    def close(self) -> Callable[[], list[Gradient]]:
        """Launches the same sums; returns a function that waits for them and returns the gradients.

        The next step may launch reductions before that function is called.
        """
        before, self._squares = self._squares, {}
        later = [
            self._start_later_sums(bucket) for bucket in in_order(self.layout) if later_sums(bucket)
        ]

        def gradients() -> list[Gradient]:
            self._in_flight.extend(later)
            self.wait_all()
            self._squares = {**before, **self._squares}
            return [self._gradient(bucket) for bucket in self.layout.buckets]

        return gradients

    def _start_later_sums(self, bucket: Bucket) -> InFlight:
        staged = bucket.portion_grad.fetch()
        pending = sum_portion(bucket, staged.wait(), self.codecs)
        return InFlight(bucket, None, pending, staged, add=False, complete=True)

    def _gradient(self, bucket: Bucket) -> Gradient:
        if bucket not in self._squares:  # the step had fewer micro-batches than announced
            staged = bucket.portion_grad.fetch()
            self._squares[bucket] = squares(staged.wait())
            staged.drop()
        return Gradient(bucket.portion_grad, self._squares[bucket])


def early_sum(bucket: Bucket) -> tuple[Axis, ...]:
    """Returns the axis whose sum may begin while the backward runs: that of data ranks.

    They have the same buckets. Tensor ranks may have others (their vocabulary shards differ in
    size), and their layers communicate on the same axis during the backward: a sum that begins as
    soon as it is ready could pair with another collective there.
    """
    first = bucket.group.sums[:1]
    return first if bucket.group.shard.size == 1 and first and first[0].label == "dp" else ()


def later_sums(bucket: Bucket) -> tuple[Axis, ...]:
    """Returns the axes to sum over after `early_sum`."""
    return bucket.group.sums[len(early_sum(bucket)) :]


def in_order(layout: Layout) -> Iterator[Bucket]:
    """Yields the buckets in the order of groups, which is the same on all ranks that share one.

    In the order of completion, stages could deadlock.
    """
    return (bucket for group in layout.groups if group.key.trainable for bucket in group.buckets)


def sum_over(tensor: Tensor, axes: Sequence[Axis], codecs: GradientCodecs) -> Pending:
    """Begins to sum a tensor over the axes, one after the other."""
    if not axes:
        return collectives.done(tensor)
    for axis in axes[:-1]:
        tensor = collectives.start_all_reduce(tensor, axis, codec=codecs.of(axis)).wait()
    return collectives.start_all_reduce(tensor, axes[-1], codec=codecs.of(axes[-1]))


def sum_portion(bucket: Bucket, portion: Tensor, codecs: GradientCodecs) -> Pending:
    """Begins to sum what this rank updates of a bucket over its `later_sums`."""
    holders, axes = bucket.group.holders, later_sums(bucket)
    if holders.size == 1:
        return sum_over(start_copy_in(portion, bucket.group.params.device), axes, codecs)
    whole = sum_over(bucket.grad.fetch().wait(), axes[:-1], codecs).wait()
    codec = codecs.of(holders)
    return collectives.start_reduce_scatter(whole, holders, codec=codec, into=portion)
