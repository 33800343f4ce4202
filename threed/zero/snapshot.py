"""The optimizer's states as they were at one moment, while training goes on and changes them.

    snapshot = Snapshot(records, optimizer, room)     the moment; a GPU begins to copy
    optimizer.readers.add("disk", snapshot.release)   an update waits for its state, one at a time
    for values in snapshot.values(): ...              in another thread: the values of the records, in order

States on the device are copied to host memory during the next forward and backward: on a GPU by a
stream, on a CPU by the thread or by the update that changes the state, whichever comes first. States
on the host or on a drive are written from where they are; an update waits until its state is written.
`Room(copies=False)` treats the states of a CPU like that, too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
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

LINE = 4096  # bytes: parts of a slice start at multiples, as direct I/O requires
Place = Tensor | OnDrive
Range = tuple[int, int]


class GivenUp(RuntimeError):
    """The snapshot ended before all of it was read."""


def _ranges(records: Iterable[Record]) -> dict[str, Range]:
    """Returns the elements [first, last) of each part of a state that records span."""
    found: dict[str, Range] = {}
    for one in records:
        at, end = one.piece.offset, one.piece.offset + one.piece.numel
        first, last = found.get(one.part, (at, at))
        found[one.part] = min(first, at), max(last, end)
    return found


def _places(state: State, ranges: Mapping[str, Range]) -> dict[str, Place]:
    """Returns where these elements are; for a part on a drive, where all of its elements are."""
    found = {}
    for part, (first, last) in ranges.items():
        storage = state.storages[part]
        found[part] = (
            storage if isinstance(storage, OnDrive) else storage.fetch().wait()[first:last]
        )
    return found


def _aligned(nbytes: int) -> int:
    return -(-nbytes // LINE) * LINE


def _size(places: Iterable[Place]) -> int:
    return sum(_aligned(place.nbytes) for place in places)


def _on_drive(places: Iterable[Place]) -> int:
    return _size(place for place in places if isinstance(place, OnDrive))


def is_copied(state: State, policy: Policy, gpu: bool) -> bool:
    """Returns whether a state is on the device and changes, or is on a GPU."""
    group = state.bucket.group
    parameters = policy.delayed and PREVIOUS in state.storages  # not on the optimizer's tier
    if group.key.trainable and not parameters:
        return policy.optimizer_tier is None
    return gpu and not (group.sliced and policy.params_tier is not None)


def copy_bytes(records: Iterable[Record], policy: Policy, gpu: bool) -> int:
    """Returns the host memory that a save of records takes: the copies, and a buffer for drives."""
    copied, read = 0, 0
    for state, some in groupby(records, lambda one: one.state):
        places = _places(state, _ranges(some)).values()
        if is_copied(state, policy, gpu):
            copied += _size(places)
        else:
            read = max(read, _on_drive(places))
    return copied + read


class Room:
    """Host memory for the copies of states, kept from one save to the next.

    Args:
        copies: Whether states in the memory of a CPU are copied. A GPU's always are.
    """

    def __init__(self, copies: bool = True) -> None:
        self.copies = copies
        self._buffers: dict[tuple[State, tuple[tuple[str, Range], ...]], Tensor] = {}

    def make(self, records: Iterable[Record], policy: Policy, gpu: bool) -> None:
        """Allocates the memory of all copies that a save of these records makes."""
        for state, some in groupby(records, lambda one: one.state):
            if is_copied(state, policy, gpu):
                ranges = _ranges(some)
                self.buffer(state, ranges, _places(state, ranges))

    def buffer(
        self, state: State, ranges: Mapping[str, Range], places: Mapping[str, Place]
    ) -> Tensor:
        """Returns the memory for the copy of these elements of a state, uint8 [n]."""
        key = state, tuple(ranges.items())
        if key not in self._buffers:
            self._buffers[key] = pool.host_buffer(_size(places.values()))
        return self._buffers[key]


@dataclass(eq=False)
class _Item:
    """A state of the snapshot.

    Attributes:
        ranges: The elements of each part that records span.
        places: Where these are; for a part on a drive, where all of its elements are.
        writing: Writes to a drive that come first.
        is_copied: Whether it is copied, or else written from where it is.
        copies: The values of its parts, once it was copied.
        copied: When a GPU has copied it.
        safe: Set when it may change.
        lock: Held by the thread that copies it.
    """

    state: State
    records: list[Record]
    ranges: dict[str, Range]
    places: dict[str, Place]
    writing: dict[str, Transfer | None]
    is_copied: bool
    copies: dict[str, Tensor] = field(default_factory=dict)
    copied: torch.Event | None = None
    safe: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Snapshot:
    """The values of some records at the moment when it is made. Updates must be done.

    Attributes:
        waited_s: Seconds for which updates waited for it, or copied for it.
    """

    def __init__(self, wanted: Sequence[Record], optimizer: Optimizer, room: Room) -> None:
        self._room, self._policy = room, optimizer.layout.policy
        self._device = optimizer.updates.device
        self.waited_s = 0.0
        self._over = False
        self._reading = torch.empty(0, dtype=torch.uint8)  # for values on a drive
        self._items = [
            self._item(state, list(some)) for state, some in groupby(wanted, lambda one: one.state)
        ]
        self._of: dict[State, list[_Item]] = {}
        for item in self._items:
            self._of.setdefault(item.state, []).append(item)
        turn = {state: number for number, state in enumerate(reversed(optimizer.states))}
        copied = [item for item in self._items if item.is_copied]
        # as updates come
        self._to_copy = sorted(copied, key=lambda item: turn.get(item.state, len(turn)))
        if is_accelerator(self._device):
            self._copy_all()  # by the caller's thread, which knows the stream that made the values

    def _item(self, state: State, some: list[Record]) -> _Item:
        ranges = _ranges(some)
        places = _places(state, ranges)
        on_drive = {part: place for part, place in places.items() if isinstance(place, OnDrive)}
        writing = {part: place.writing for part, place in on_drive.items()}
        on_gpu = any(
            isinstance(place, Tensor) and is_accelerator(place.device) for place in places.values()
        )
        copies = on_gpu or (self._room.copies and is_copied(state, self._policy, gpu=False))
        return _Item(state, some, ranges, places, writing, copies)

    # -------------------------------------------------------------------------------------------------------- updates

    def release(self, state: State) -> None:
        """Returns when a state may change; copies it here if the thread has not yet."""
        began = time.perf_counter()
        for item in self._of.get(state, ()):
            self._release(item)
        self.waited_s += time.perf_counter() - began

    def _release(self, item: _Item) -> None:
        if item.is_copied:
            self._copy(item)
        item.safe.wait()
        if (copied := item.copied) is not None:
            current_stream(self._device).wait_event(copied)

    def release_all(self) -> None:
        """Returns when every state may change."""
        for item in self._items:
            self._release(item)

    def end(self) -> None:
        """Lets all states change; a thread that still reads the snapshot gets GivenUp."""
        self._over = True
        for item in self._items:
            item.safe.set()

    # -------------------------------------------------------------------------------------------------------- reading

    def values(self) -> Iterator[Tensor]:
        """Yields the values [numel] of every record, in order: views, valid until the next one.

        For one other thread than that of the updates.

        Raises:
            GivenUp: The snapshot, or the program, has ended.
        """
        self._copy_all()
        for item in self._items:
            parts = self._read(item)
            for one in item.records:
                on_drive = isinstance(item.places[one.part], OnDrive)
                at = one.piece.offset - (0 if on_drive else item.ranges[one.part][0])
                yield parts[one.part][at : at + one.piece.numel]
                self._check()  # it may have changed meanwhile
            item.safe.set()

    def _check(self) -> None:
        if self._over or not threading.main_thread().is_alive():
            raise GivenUp("the program ended before it was written")

    def _read(self, item: _Item) -> dict[str, Tensor]:
        """Returns a state's values: its copy, or those that do not change until it is safe."""
        self._check()
        if item.is_copied:
            if item.copied is not None:
                item.copied.synchronize()
            return item.copies
        nbytes = _on_drive(item.places.values())
        if self._reading.numel() < nbytes:
            self._reading = pool.host_buffer(nbytes)
        return self._into(self._reading, item)

    def _copy_all(self) -> None:
        for item in self._to_copy:
            self._copy(item)

    def _copy(self, item: _Item) -> None:
        """Copies a state, unless that was done, or it may have changed."""
        with item.lock:
            if not item.safe.is_set():
                buffer = self._room.buffer(item.state, item.ranges, item.places)
                item.copies = self._into(buffer, item)
                item.safe.set()

    def _into(self, buffer: Tensor, item: _Item) -> dict[str, Tensor]:
        """Returns the values of a state's parts, in `buffer`, uint8 [n], if they are copied or on a drive."""
        found, at = dict[str, Tensor](), 0
        for part, place in item.places.items():
            if isinstance(place, Tensor) and not item.is_copied:
                found[part] = place
                continue
            found[part] = buffer[at : at + place.nbytes].view(place.dtype)
            at += _aligned(place.nbytes)
            if isinstance(place, OnDrive):
                if (before := item.writing[part]) is not None:
                    before.wait()
                place.drive.disk.read(place.offset, found[part]).wait()
            elif is_accelerator(place.device):
                stream = copy_stream(place.device, "save")
                with beside(stream):
                    found[part].copy_(place, non_blocking=True)
                    item.copied = stream.record_event()
            else:
                found[part].copy_(place)
        return found
