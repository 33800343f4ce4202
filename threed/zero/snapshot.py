"""The optimizer's states as they were at one moment, while training goes on and changes them.

    snapshot = Snapshot(records, optimizer, room)     the moment; a GPU begins to copy
    optimizer.readers.add("disk", snapshot.release)   an update waits, bucket by bucket, for what is not safe yet
    for values in snapshot.values(): ...              in a thread of its own: those of the records, in order

A state is safe to change once it was copied, or written. What is copied, when, and into how much memory:

- all (`Room.whole`): slices on the device, beside the next forward and backward: on a CPU by the thread, on a GPU by a
  stream of its own into page-locked memory. Whoever comes to a slice first copies it, the thread or its update.
- nothing: slices that are on the host or a drive anyway. They are written from where they are. An update that comes
  before copies its slices into a window of constant size; when that is full, it waits until there is room again.
- with less memory than one copy: on a CPU as on the host; on a GPU slices pass through the window in the order in which
  they are written, and the first update waits until the last of them is there.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from threed.device import beside, copy_stream, current_stream, is_accelerator
from threed.memory import pool
from threed.memory.io import Transfer
from threed.memory.tiers import OnDrive
from threed.zero.layout import Policy
from threed.zero.optimizer import Optimizer
from threed.zero.records import Record
from threed.zero.state import PREVIOUS, State

WINDOW = 2  # slices in the window
LINE = 4096  # bytes: parts of a slice start at multiples, as direct I/O wants them
POLL_S = 1.0  # how often a thread that waits looks whether the program has ended


GIVEN_UP = "the program ended before it was written"


class GivenUp(RuntimeError):
    """The snapshot ended before all of it was read."""


def _ranges(records: Iterable[Record]) -> dict[str, tuple[int, int]]:
    """Returns the elements [first, last) of each part of a state that records span."""
    found: dict[str, tuple[int, int]] = {}
    for one in records:
        at, end = one.piece.offset, one.piece.offset + one.piece.numel
        first, last = found.get(one.part, (at, at))
        found[one.part] = min(first, at), max(last, end)
    return found


def _places(state: State, ranges: Mapping[str, tuple[int, int]]) -> dict[str, Tensor | OnDrive]:
    """Returns where these elements are: a drive's all together."""
    found = {}
    for part, (first, last) in ranges.items():
        storage = state.storages[part]
        found[part] = (
            storage if isinstance(storage, OnDrive) else storage.fetch().wait()[first:last]
        )
    return found


def _aligned(nbytes: int) -> int:
    return -(-nbytes // LINE) * LINE


def _size(places: Iterable[Tensor | OnDrive]) -> int:
    return sum(_aligned(place.nbytes) for place in places)


def is_copied(state: State, policy: Policy, gpu: bool) -> bool:
    """Whether a state is copied where there is memory for all: it is on the device, and changes, or is on a GPU."""
    group = state.bucket.group
    parameters = policy.delayed and PREVIOUS in state.storages  # not on the optimizer's tier
    if group.key.trainable and not parameters:
        return policy.optimizer_tier is None
    return gpu and not (group.sliced and policy.params_tier is not None)


def copy_bytes(records: Iterable[Record], policy: Policy, gpu: bool) -> int:
    """The bytes of the host's memory that a save of them takes: a copy of what is on the device, and a window for the
    rest."""
    copied, rest = list[int](), list[int]()
    for state, some in groupby(records, lambda one: one.state):
        size = _size(_places(state, _ranges(some)).values())
        (copied if is_copied(state, policy, gpu) else rest).append(size)
    return sum(copied) + (WINDOW * max(copied + rest) if rest else 0)


class Room:
    """The host's memory for copies, kept from one save to the next. whole: for all that is copied, and not only for a
    window. Memory is taken by `make`, or when it is first written to."""

    def __init__(self, whole: bool) -> None:
        self.whole = whole
        self._own: dict[tuple[State, int], Tensor] = {}
        self._window: list[Tensor | None] = [None] * WINDOW
        self._size = 0

    def make(self, records: Iterable[Record], policy: Policy, gpu: bool) -> None:
        """Takes the memory of all copies that a save of these records makes, and writes to it."""
        for state, some in groupby(records, lambda one: one.state):
            if self.whole and is_copied(state, policy, gpu):
                self._copy_of(state, _size(_places(state, _ranges(some)).values()))

    def _copy_of(self, state: State, nbytes: int) -> Tensor:
        if (state, nbytes) not in self._own:
            self._own[state, nbytes] = pool.host_buffer(nbytes)
        return self._own[state, nbytes]

    def begin(self, items: Sequence[_Item]) -> None:
        """Takes note of the largest slice that will come."""
        size = max((item.nbytes for item in items), default=0)
        if size > self._size:
            self._size, self._window = size, []
        self._window += [None] * (WINDOW - len(self._window))  # one that failed kept what it had

    def take(self, item: _Item) -> bool:
        """Takes the place of a copy, unless the window is full."""
        if self.whole and item.eager:
            return True
        if not self._window:
            return False
        item.buffer = self._window.pop()
        return True

    def of(self, item: _Item) -> Tensor:
        """The memory of a place that was taken, uint8 [n]."""
        if self.whole and item.eager:
            return self._copy_of(item.state, item.nbytes)
        if item.buffer is None:
            item.buffer = pool.host_buffer(self._size)
        return item.buffer

    def give(self, item: _Item) -> None:
        """Gives a place back."""
        if not (self.whole and item.eager):
            self._window.append(item.buffer)
            item.buffer = None


class _Progress(enum.Enum):
    """How far the snapshot is with a state."""

    WAITING = enum.auto()
    BUSY = enum.auto()  # a thread copies it, or writes it from where it is
    SAFE = enum.auto()  # it may change


@dataclass(eq=False)
class _Item:
    """A state of the snapshot.

    Attributes:
        parts: where its values are, from the element of `first` on.
        nbytes: of a copy.
        eager: it is copied at once.
        on_gpu: the thread cannot read it where it is.
        before: writes to a drive that come first.
    """

    state: State
    records: list[Record]
    parts: dict[str, Tensor | OnDrive]
    first: dict[str, int]
    nbytes: int
    eager: bool
    on_gpu: bool
    progress: _Progress = _Progress.WAITING
    buffer: Tensor | None = None
    copies: dict[str, Tensor] | None = None
    copied: torch.Event | None = None
    before: dict[str, Transfer | None] = field(default_factory=dict)


class Snapshot:
    """The values of some records at the moment when it is made. Updates must be done.

    waited_s: seconds for which updates waited for it, or copied for it.
    """

    def __init__(self, wanted: Sequence[Record], optimizer: Optimizer, room: Room) -> None:
        self._room = room
        self._policy = optimizer.layout.policy
        self._device = optimizer.updates.device
        self.waited_s = 0.0
        self._changed = threading.Condition()
        self._over = False
        self._reading: Tensor | None = None  # a buffer for a drive's values
        self._items = [
            self._item(state, list(some)) for state, some in groupby(wanted, lambda one: one.state)
        ]
        self._of: dict[State, list[_Item]] = {}
        for item in self._items:
            self._of.setdefault(item.state, []).append(item)
        room.begin(self._items)
        # as updates come
        turn = [item for state in reversed(optimizer.states) for item in self._of.get(state, ())]
        self._eager = [i for i in turn if i.eager] + [
            i for i in self._items if i.eager and i not in turn
        ]
        # Through a window the copies of a GPU come in the order in which they are written: else it would fill up with
        # what is written last, and nothing could be written.
        self._queue = [item for item in (self._eager if room.whole else self._items) if item.on_gpu]
        self._copy_ahead()

    def _item(self, state: State, some: list[Record]) -> _Item:
        ranges = _ranges(some)
        parts = _places(state, ranges)
        first = {
            part: 0 if isinstance(parts[part], OnDrive) else begin
            for part, (begin, _) in ranges.items()
        }
        before = {
            part: place.writing for part, place in parts.items() if isinstance(place, OnDrive)
        }
        on_gpu = any(
            isinstance(place, Tensor) and is_accelerator(place.device) for place in parts.values()
        )
        eager = on_gpu or (self._room.whole and is_copied(state, self._policy, gpu=False))
        return _Item(state, some, parts, first, _size(parts.values()), eager, on_gpu, before=before)

    # -------------------------------------------------------------------------------------------------------- updates

    def release(self, state: State) -> None:
        """Waits until a state may change; copies it here if nobody has, and there is room."""
        began = time.perf_counter()
        for item in self._of.get(state, ()):
            self._release(item)
        self.waited_s += time.perf_counter() - began

    def _release(self, item: _Item) -> None:
        while item.progress is not _Progress.SAFE:
            if (next_one := self._claim_for(item)) is not None:
                self._copy(next_one)
        if (copied := item.copied) is not None:
            current_stream(self._device).wait_event(copied)

    def release_all(self) -> None:
        """Waits until every state may change."""
        for item in self._items:
            self._release(item)

    def copy_rest(self) -> None:
        """Copies what is left of a GPU's slices, as there is room for them."""
        for item in self._queue:
            self._release(item)

    def _claim_for(self, item: _Item) -> _Item | None:
        """Returns what this thread has to copy so that the item gets safe; None after waiting for another thread."""
        with self._changed:
            turn = item
            if item.on_gpu and not self._room.whole:
                waiting = (one for one in self._queue if one.progress is _Progress.WAITING)
                turn = next(waiting, item)
            if self._claim(turn):
                return turn
            if item.progress is not _Progress.SAFE:
                self._changed.wait()
            return None

    def _claim(self, item: _Item) -> bool:
        if item.progress is not _Progress.WAITING or not self._room.take(item):
            return False
        item.progress = _Progress.BUSY
        return True

    # --------------------------------------------------------------------------------------------------------- copies

    def _copy_ahead(self) -> None:
        """Begins to copy what is on a GPU, as much as there is room for: in the caller's thread, which knows it."""
        for item in self._queue:
            with self._changed:
                claimed = self._claim(item)
            if not claimed:
                break
            self._copy(item)

    def _copy(self, item: _Item) -> None:
        """Copies a state that was claimed, and says so."""
        try:
            copies = self._into(self._room.of(item), item)
        except BaseException:
            self.end()
            raise
        with self._changed:
            item.copies, item.progress = copies, _Progress.SAFE
            self._changed.notify_all()

    def _into(self, buffer: Tensor, item: _Item) -> dict[str, Tensor]:
        """Copies the values of a state's parts to a buffer, uint8 [n]; returns the copies."""
        copies, at = dict[str, Tensor](), 0
        for part, place in item.parts.items():
            nbytes = place.nbytes
            copies[part] = buffer[at : at + nbytes].view(place.dtype)
            at += _aligned(nbytes)
        for part, place in item.parts.items():
            if isinstance(place, OnDrive):
                _read(place, item.before[part], copies[part])
            elif is_accelerator(place.device):
                stream = copy_stream(place.device, "save")
                with beside(stream):
                    copies[part].copy_(place, non_blocking=True)
                    item.copied = stream.record_event()
            else:
                copies[part].copy_(place)
        return copies

    # -------------------------------------------------------------------------------------------------------- reading

    def values(self) -> Iterator[Tensor]:
        """Yields the values [numel] of every record, in order: views that are valid until the next one. For one other
        thread than that of the updates; GivenUp where the snapshot was ended."""
        for item in self._eager:
            with self._changed:
                claimed = not item.on_gpu and self._claim(item)
            if claimed:
                self._copy(item)
        for item in self._items:
            with self._held(item) as parts:
                for one in item.records:
                    at = one.piece.offset - item.first[one.part]
                    yield parts[one.part][at : at + one.piece.numel]
                    if self._over:  # it may have changed meanwhile
                        raise GivenUp(GIVEN_UP)

    @contextmanager
    def _held(self, item: _Item) -> Iterator[dict[str, Tensor]]:
        """Holds a state's values: its copy, or what is there, which then does not change meanwhile."""
        in_place = self._hold(item)
        try:
            if in_place:
                yield self._where_they_are(item)
            else:
                if item.copied is not None:
                    item.copied.synchronize()
                assert item.copies is not None
                yield item.copies
        finally:
            with self._changed:
                item.copies, item.progress = None, _Progress.SAFE
                if not in_place:
                    self._room.give(item)
                self._changed.notify_all()

    def _hold(self, item: _Item) -> bool:
        """Waits until a state was copied, or can be read where it is; returns whether the latter."""
        with self._changed:
            while True:
                if self._over or not threading.main_thread().is_alive():
                    raise GivenUp(GIVEN_UP)
                if item.copies is not None:
                    return False
                if item.progress is _Progress.WAITING and not item.on_gpu:
                    item.progress = _Progress.BUSY
                    return True
                self._changed.wait(POLL_S)

    def _where_they_are(self, item: _Item) -> dict[str, Tensor]:
        drives = _size(place for place in item.parts.values() if isinstance(place, OnDrive))
        if drives and (self._reading is None or self._reading.numel() < drives):
            self._reading = pool.host_buffer(drives)
        found, at = dict[str, Tensor](), 0
        for part, place in item.parts.items():
            if isinstance(place, OnDrive):
                assert self._reading is not None
                found[part] = self._reading[at : at + place.nbytes].view(place.dtype)
                _read(place, item.before[part], found[part])
                at += _aligned(place.nbytes)
            else:
                found[part] = place
        return found

    # ------------------------------------------------------------------------------------------------------------ end

    def end(self) -> None:
        """Lets all states change; who still reads the snapshot gets GivenUp."""
        with self._changed:
            self._over = True
            for item in self._items:
                item.progress = _Progress.SAFE
            self._changed.notify_all()


def _read(place: OnDrive, before: Transfer | None, into: Tensor) -> None:
    if before is not None:
        before.wait()
    place.drive.disk.read(place.offset, into).wait()
