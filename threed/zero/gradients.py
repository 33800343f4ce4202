"""Gradient buffers: memory of gradients before they are reduced, in full or bucket by bucket."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from threed.zero.layout import Bucket, Layout, Slot


class Gradients(Protocol):
    """The memory of gradients until they are reduced."""

    def view(self, slot: Slot) -> Tensor:
        """Returns the memory of a parameter's gradient, in its shape; undefined at first."""

    def set_zero(self, slot: Slot, bucket: Bucket) -> None:
        """Sets the gradient of a parameter, which got no contribution, to zero in a bucket."""

    def take_window(self, bucket: Bucket) -> Tensor:
        """Takes the gradients of a bucket [last - first] for their reduction; padding is zero."""

    def release_window(self, window: Tensor) -> None:
        """Releases a window after its reduction."""

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

    def set_zero(self, slot: Slot, bucket: Bucket) -> None:
        first, last = max(slot.first, bucket.first), min(slot.last, bucket.last)
        bucket.group.grads[first:last].zero_()

    def take_window(self, bucket: Bucket) -> Tensor:
        return bucket.group.grads[bucket.first : bucket.last]

    def release_window(self, window: Tensor) -> None:
        """Does nothing: the buffer stays."""

    def reset(self) -> None:
        """Does nothing: the first contribution overwrites."""

    def trim(self) -> None:
        """Does nothing: all of it is in use."""


class BucketGradients:
    """Gradients in full for the buckets that are being filled or reduced only (stages 2 and 3).

    A bucket takes a buffer when its first gradient comes, and releases it after its reduction;
    buffers are reused. A parameter that lies in several buckets gets a buffer of its own, from
    which its buckets take their parts. So memory is that of the open buckets and of the largest
    single gradient, however large the model. With an arena (see `Policy`) the large buffers are
    reused too: after every bucket was in use once, nothing is allocated.
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
        self._to_take: dict[Slot, int] = {}  # of a cut gradient: buckets not taken yet
        self._free: list[Tensor] = []
        self._temporary: set[int] = set()  # buffers that are not reused
        # of a buffer: who fills it, and its windows not released yet
        self._users: dict[int, int] = {}

    def view(self, slot: Slot) -> Tensor:
        buckets = self._buckets_of.get(slot, [])
        if len(buckets) == 1:
            at = slot.first - buckets[0].first
            return self._window(buckets[0])[at : at + slot.param.numel()].view(slot.param.shape)
        if slot not in self._cut:
            self._cut[slot] = self._take(
                slot.param.numel(), slot.param.device, temporary=not self.arena
            )
            self._to_take[slot] = len(buckets)
        return self._cut[slot][: slot.param.numel()].view(slot.param.shape)

    def set_zero(self, slot: Slot, bucket: Bucket) -> None:
        first, last = max(slot.first, bucket.first), min(slot.last, bucket.last)
        self._window(bucket)[first - bucket.first : last - bucket.first].zero_()

    def take_window(self, bucket: Bucket) -> Tensor:
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
            self._to_take[slot] -= 1
            if not self._to_take[slot]:
                self.release_window(self._cut.pop(slot))
        if window is None:
            window = self._window(bucket)
            del self._open[bucket]
        return window

    def release_window(self, window: Tensor) -> None:
        buffer = window if window._base is None else window._base
        self._users[id(buffer)] -= 1
        if not self._users[id(buffer)]:
            del self._users[id(buffer)]
            if id(buffer) not in self._temporary:
                self._free.append(buffer)
            self._temporary.discard(id(buffer))

    def reset(self) -> None:
        for window in (*self._open.values(), *self._cut.values()):
            self.release_window(window)
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
