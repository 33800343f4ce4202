"""Gradient buffers: where gradients accumulate before they are reduced, for the whole group or bucket by bucket.

Both classes have the same methods: `view`, the memory of a parameter's gradient; `missing`, for a parameter that gets
none; `leave`, the window of a bucket to be sent; `left`, when that window is not needed any more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from threed import collectives
from threed.codecs import EXACT, Codec
from threed.collectives import Pending
from threed.device import start_copy_in
from threed.memory.tiers import StagedBuffer, Storage
from threed.topology import Axis
from threed.zero.layout import Bucket, Layout, Slot


@dataclass(eq=False)
class Gradient:
    """What this rank updates of a bucket's summed gradients, in its storage, and the sum of its squares."""

    storage: Storage
    squares: Tensor


@dataclass(frozen=True, eq=False)
class InFlight:
    """A bucket whose gradients are being summed. window: what is sent, None for the slice itself. add: to the sum of
    earlier rounds, which `staged` holds. complete: the slice is the whole sum afterwards."""

    bucket: Bucket
    window: Tensor | None
    pending: Pending
    staged: StagedBuffer
    add: bool
    complete: bool


class Gradients(Protocol):
    """The memory of gradients until they are reduced."""

    def view(self, slot: Slot) -> Tensor:
        """Returns the memory of a parameter's gradient, in its shape; undefined until the first contribution."""

    def missing(self, slot: Slot, bucket: Bucket) -> None:
        """Sets the gradient of a parameter that got none to zero in this bucket."""

    def leave(self, bucket: Bucket) -> Tensor:
        """Returns the bucket's gradients [last - first]; padding is zero. Later ones belong to the next round."""

    def left(self, window: Tensor) -> None:
        """Releases a window that was sent."""

    def reset(self) -> None:
        """Discards what was written, after an aborted step."""

    def trim(self) -> None:
        """Frees buffers that are not in use."""


class FullGradients:
    """All gradients in full, in the group's flat buffer (stages 0 and 1)."""

    def __init__(self, layout: Layout) -> None:
        groups = [group for group in layout.groups if group.key.trainable]
        self._views = {
            slot: group.view(slot, group.grads) for group in groups for slot in group.slots
        }

    def view(self, slot: Slot) -> Tensor:
        return self._views[slot]

    def missing(self, slot: Slot, bucket: Bucket) -> None:
        first, last = max(slot.first, bucket.first), min(slot.last, bucket.last)
        bucket.group.grads[first:last].zero_()

    def leave(self, bucket: Bucket) -> Tensor:
        return bucket.group.grads[bucket.first : bucket.last]

    def left(self, window: Tensor) -> None:
        """Does nothing: the buffer stays."""

    def reset(self) -> None:
        """Does nothing: the first contribution overwrites."""

    def trim(self) -> None:
        """Does nothing: all of it is in use."""


class BucketGradients:
    """Gradients in full for the buckets that are being filled or reduced only (stages 2 and 3).

    A bucket takes a buffer when its first gradient comes, and releases it after it was sent; buffers are reused. A
    parameter that lies in several buckets gets a buffer of its own, from which its buckets take their parts when they
    are sent. So memory is that of the open buckets and of the largest single gradient, however large the model. With
    an arena (see `Policy`) the large buffers are reused too: after every bucket was in use once, nothing is allocated.
    """

    def __init__(self, layout: Layout) -> None:
        self.dtype, self.arena = layout.policy.grad_dtype, layout.policy.arena
        self._buckets_of: dict[Slot, list[Bucket]] = {}
        for bucket in layout.buckets:
            for slot in bucket.slots():
                self._buckets_of.setdefault(slot, []).append(bucket)
        self._gaps = {bucket: _gaps(bucket) for bucket in layout.buckets}
        self._cut_slots = {
            b: [s for s in b.slots() if len(self._buckets_of[s]) > 1] for b in layout.buckets
        }
        self._open: dict[Bucket, Tensor] = {}
        self._cut: dict[Slot, Tensor] = {}
        self._to_leave: dict[Slot, int] = {}  # of a cut gradient: buckets not sent yet
        self._free: list[Tensor] = []
        self._temporary: set[int] = set()  # buffers that are not reused
        self._users: dict[
            int, int
        ] = {}  # of a buffer: who fills it, and its windows not released yet

    def view(self, slot: Slot) -> Tensor:
        buckets = self._buckets_of.get(slot, [])
        if len(buckets) == 1:
            at = slot.first - buckets[0].first
            return self._window(buckets[0])[at : at + slot.param.numel()].view(slot.param.shape)
        if slot not in self._cut:
            self._cut[slot] = self._take(
                slot.param.numel(), slot.param.device, temporary=not self.arena
            )
            self._to_leave[slot] = len(buckets)
        return self._cut[slot][: slot.param.numel()].view(slot.param.shape)

    def missing(self, slot: Slot, bucket: Bucket) -> None:
        first, last = max(slot.first, bucket.first), min(slot.last, bucket.last)
        self._window(bucket)[first - bucket.first : last - bucket.first].zero_()

    def leave(self, bucket: Bucket) -> Tensor:
        window: Tensor | None = None
        for slot in self._cut_slots[bucket]:
            if slot not in self._cut:
                continue
            first, last = max(slot.first, bucket.first), min(slot.last, bucket.last)
            buffer = self._cut[slot]
            part = buffer[first - slot.first : last - slot.first]
            if (first, last) == (bucket.first, bucket.last):
                window = part  # nothing else lies in the bucket
                self._users[id(buffer)] += 1
            else:
                self._window(bucket)[first - bucket.first : last - bucket.first].copy_(part)
            self._to_leave[slot] -= 1
            if not self._to_leave[slot]:
                self.left(self._cut.pop(slot))
        if window is None:
            window = self._window(bucket)
            del self._open[bucket]
        return window

    def left(self, window: Tensor) -> None:
        buffer = window if window._base is None else window._base
        self._users[id(buffer)] -= 1
        if not self._users[id(buffer)]:
            del self._users[id(buffer)]
            if id(buffer) not in self._temporary:
                self._free.append(buffer)
            self._temporary.discard(id(buffer))

    def reset(self) -> None:
        for window in (*self._open.values(), *self._cut.values()):
            self.left(window)
        self._open.clear()
        self._cut.clear()

    def trim(self) -> None:
        if not self.arena:
            self._free.clear()

    def _window(self, bucket: Bucket) -> Tensor:
        if bucket not in self._open:
            size = bucket.last - bucket.first
            window = self._take(size, bucket.group.params.device)[:size]
            for first, last in self._gaps[bucket]:
                window[first:last].zero_()
            self._open[bucket] = window
        return self._open[bucket]

    def _take(self, size: int, device: torch.device, temporary: bool = False) -> Tensor:
        """Returns the smallest free buffer that is large enough, or a new one."""
        fitting = [
            n for n, buffer in enumerate(self._free) if len(buffer) >= size and not temporary
        ]
        if fitting:
            buffer = self._free.pop(min(fitting, key=lambda n: len(self._free[n])))
        else:
            buffer = torch.empty(size, dtype=self.dtype, device=device)
        self._users[id(buffer)] = 1
        if temporary:
            self._temporary.add(id(buffer))
        return buffer


def _gaps(bucket: Bucket) -> list[tuple[int, int]]:
    """Returns the ranges of a bucket's window that no parameter covers."""
    gaps, at = [], bucket.first
    for slot in bucket.slots():
        if slot.first > at:
            gaps.append((at - bucket.first, slot.first - bucket.first))
        at = max(at, slot.last)
    if at < bucket.last:
        gaps.append((at - bucket.first, bucket.last - bucket.first))
    return gaps


def window_of(bucket: Bucket, gradients: Mapping[Slot, Tensor], dtype: torch.dtype) -> Tensor:
    """Returns the gradients of some parameters in a bucket's window [last - first], with zeros elsewhere."""
    window = torch.zeros(bucket.last - bucket.first, dtype=dtype, device=bucket.group.params.device)
    for slot in bucket.slots():
        if slot in gradients:
            first, last = max(slot.first, bucket.first), min(slot.last, bucket.last)
            part = gradients[slot].view(-1)[first - slot.first : last - slot.first]
            window[first - bucket.first : last - bucket.first].copy_(part)
    return window


def early_sum(bucket: Bucket) -> tuple[Axis, ...]:
    """Returns the axis whose sum may begin while backward runs: that of data ranks, which have the same buckets.

    Tensor ranks may have other buckets (their vocabulary shards differ in size), and their layers communicate on the
    same axis during backward: a sum that begins as soon as it is ready could pair with another collective there.
    """
    first = bucket.group.sums[:1]
    return first if bucket.group.shard.size == 1 and first and first[0].label == "dp" else ()


def later_sums(bucket: Bucket) -> tuple[Axis, ...]:
    """Returns the axes to sum over after `early_sum`."""
    return bucket.group.sums[len(early_sum(bucket)) :]


def in_order(layout: Layout) -> Iterator[Bucket]:
    """The buckets in the order of groups, the same on all ranks that share one; in the order of completion stages could
    deadlock."""
    return (bucket for group in layout.groups if group.key.trainable for bucket in group.buckets)


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


def sum_over(tensor: Tensor, axes: Sequence[Axis], codecs: GradientCodecs) -> Pending:
    """Begins to sum a tensor over the axes, one after the other."""
    if not axes:
        return collectives.done(tensor)
    for axis in axes[:-1]:
        tensor = collectives.start_all_reduce(tensor, axis, codec=codecs.of(axis)).wait()
    return collectives.start_all_reduce(tensor, axes[-1], codec=codecs.of(axes[-1]))


def sum_portion(
    bucket: Bucket, portion: Tensor, axes: Sequence[Axis], codecs: GradientCodecs
) -> Pending:
    """Begins to sum what this rank updates of a bucket over the axes."""
    holders = bucket.group.holders
    if holders.size == 1:
        return sum_over(start_copy_in(portion, bucket.group.params.device), axes, codecs)
    whole = sum_over(bucket.grad.fetch().wait(), axes[:-1], codecs).wait()
    codec = codecs.of(holders)
    return collectives.start_reduce_scatter(whole, holders, codec=codec, into=portion)
