"""Where gradients gather before they leave: the whole flat buffer, or one bucket at a time.

Both answer the same questions: where a parameter's gradient goes (`view`), what to do when it gets nothing,
and what leaves as a bucket's window (`leave`, and `left` when it is needed no more).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from threed.collectives import Pending
from threed.memory.tiers import StagedBuffer, Storage
from threed.topology import Axis
from threed.zero.layout import Bucket, Layout, Slot


@dataclass(eq=False)
class Gradient:
    """A bucket's slice of the summed gradients: on staged from where it lives, when asked for, and its squares' sum."""

    storage: Storage
    squares: Tensor


@dataclass(frozen=True, eq=False)
class InFlight:
    """A bucket whose gradients are being summed. window: of what leaves, unless it is the slice itself. add: to what
    earlier rounds left at storage, which is on staged. complete: its slice is the whole sum then."""

    bucket: Bucket
    window: Tensor | None
    pending: Pending
    staged: StagedBuffer
    add: bool
    complete: bool


class Gradients(Protocol):
    """The memory of gradients on their way."""

    def view(self, slot: Slot) -> Tensor:
        """Where the parameter's gradient goes, in its shape; undefined until the first contribution is written."""

    def missing(self, slot: Slot, bucket: Bucket) -> None:
        """The parameter gets no gradient: in this bucket it counts as zero."""

    def leave(self, bucket: Bucket) -> Tensor:
        """The bucket's gradients [last - first]; padding is zero. What comes for the bucket now is the next round's."""

    def left(self, window: Tensor) -> None:
        """A window that has left is needed no more."""

    def reset(self) -> None:
        """Forgets what was written: a step was given up."""

    def trim(self) -> None:
        """Frees what is not in use."""


class FullGradients:
    """All gradients in full, in the group's flat buffer (stages 0 and 1)."""

    def __init__(self, layout: Layout) -> None:
        groups = [group for group in layout.groups if group.key.trainable]
        self._views = {slot: group.view(slot, group.grads) for group in groups for slot in group.slots}

    def view(self, slot: Slot) -> Tensor:
        return self._views[slot]

    def missing(self, slot: Slot, bucket: Bucket) -> None:
        first, last = max(slot.first, bucket.first), min(slot.last, bucket.last)
        bucket.group.grads[first:last].zero_()

    def leave(self, bucket: Bucket) -> Tensor:
        return bucket.group.grads[bucket.first : bucket.last]

    def left(self, window: Tensor) -> None:
        """Nothing: the buffer stays."""

    def reset(self) -> None:
        """Nothing: the first contribution overwrites."""

    def trim(self) -> None:
        """Nothing: all of it is."""


class BucketGradients:
    """Gradients in full for the buckets that are under way only (stages 2 and 3).

    A bucket's buffer is taken when the first gradient for it comes, and given back when it has left; buffers are used
    again. A parameter that lies in several buckets gets a buffer of its own, and its buckets get their parts as they
    leave. So memory is the open buckets and the largest single gradient, however large the model. With an arena (see
    `Policy`) those large ones are used again too: once every bucket was under way, nothing is allocated any more.
    """

    def __init__(self, layout: Layout) -> None:
        self.dtype, self.arena = layout.policy.grad_dtype, layout.policy.arena
        self._storages: dict[Slot, list[Bucket]] = {}
        for bucket in layout.buckets:
            for slot in bucket.slots():
                self._storages.setdefault(slot, []).append(bucket)
        self._gaps = {bucket: _gaps(bucket) for bucket in layout.buckets}
        self._cut_slots = {b: [s for s in b.slots() if len(self._storages[s]) > 1] for b in layout.buckets}
        self._open: dict[Bucket, Tensor] = {}
        self._cut: dict[Slot, Tensor] = {}
        self._to_leave: dict[Slot, int] = {}  # of a cut gradient: buckets that have not left
        self._free: list[Tensor] = []
        self._passing: set[int] = set()  # buffers that are not used again
        self._users: dict[int, int] = {}  # of a buffer: whoever fills it, and windows of it that have not left

    def view(self, slot: Slot) -> Tensor:
        storages = self._storages.get(slot, [])
        if len(storages) == 1:
            at = slot.first - storages[0].first
            return self._window(storages[0])[at : at + slot.param.numel()].view(slot.param.shape)
        if slot not in self._cut:
            self._cut[slot] = self._take(slot.param.numel(), slot.param.device, passing=not self.arena)
            self._to_leave[slot] = len(storages)
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
            if id(buffer) not in self._passing:
                self._free.append(buffer)
            self._passing.discard(id(buffer))

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

    def _take(self, size: int, device: torch.device, passing: bool = False) -> Tensor:
        """The smallest free buffer that is large enough, or a new one."""
        fitting = [n for n, buffer in enumerate(self._free) if len(buffer) >= size and not passing]
        if fitting:
            buffer = self._free.pop(min(fitting, key=lambda n: len(self._free[n])))
        else:
            buffer = torch.empty(size, dtype=self.dtype, device=device)
        self._users[id(buffer)] = 1
        if passing:
            self._passing.add(id(buffer))
        return buffer


def _gaps(bucket: Bucket) -> list[tuple[int, int]]:
    """The stretches of a bucket's window that no parameter covers."""
    gaps, at = [], bucket.first
    for slot in bucket.slots():
        if slot.first > at:
            gaps.append((at - bucket.first, slot.first - bucket.first))
        at = max(at, slot.last)
    if at < bucket.last:
        gaps.append((at - bucket.first, bucket.last - bucket.first))
    return gaps


def early_sum(bucket: Bucket) -> tuple[Axis, ...]:
    """The sum that may leave while backward runs: over data ranks, whose buckets are the same.

    Tensor ranks need not cut alike (their vocabulary shards differ in size), and their layers talk on the same axis
    all the while: a sum over them that leaves at the first chance would meet another message on another rank.
    """
    first = bucket.group.sums[:1]
    return first if bucket.group.shard.size == 1 and first and first[0].label == "dp" else ()


def later_sums(bucket: Bucket) -> tuple[Axis, ...]:
    """The sums that are left after the one a bucket starts with."""
    return bucket.group.sums[len(early_sum(bucket)) :]
