"""The optimizer's states at one moment, read while training continues and changes them.

    snapshot = Snapshot(records, optimizer, room)     takes the snapshot; on a GPU, starts to copy
    optimizer.readers.add("disk", snapshot.release)   from now on, an update changes a state only
                                                      after the state was read or copied
    for values in snapshot.values(): ...              yields the values; call it in another thread
    snapshot.close()                                  ends the snapshot; updates no longer wait

States on the device are copied to host memory during the next forward and backward. On a GPU a
separate stream makes the copies. On a CPU each state is copied either by the reading thread or by
the update that changes the state, whichever reaches it first. Offloaded states (in host memory or
on a drive) are not copied: the reading thread yields the values from their storage, and an update
of a state waits until the reading thread no longer needs the state. With `Room(copies=False)`,
states on a CPU device are not copied either.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from threed.core.device import copy_stream, current_stream, is_accelerator, on_stream
from threed.memory import pool
from threed.memory.tiers import OnDrive
from threed.zero.layout import Policy
from threed.zero.optimizer import Optimizer
from threed.zero.state import PREVIOUS, Record, State

LINE = 4096  # bytes; direct I/O requires this alignment of buffers


class GivenUp(RuntimeError):
    """Raised in the reading thread if the snapshot is closed before all values were read."""


@dataclass(eq=False)
class _Item:
    """The records of a snapshot that belong to one state, and how their values are read.

    A state has several parts: the weight, and the tensors of the update rule. A record is a range
    of one part.

    Attributes:
        state: the state.
        records: the records of this state, in the order of the snapshot.
        is_copied: True if the values are copied before an update may change them. False if they
            are read from the state's storage, and updates wait for the read.
        first: name of each part -> index of the part's first element that a record contains. For a
            part on a drive it is 0.
        memory: name of each part that is in memory -> view of its elements, from index `first` to
            the last element that a record contains.
        drive: name of each part that is on a drive -> the part's storage.
        copies: name of each part -> copy of its view in `memory`. Empty before the copy.
        copied: event recorded after the copies from a GPU; None if nothing was copied from a GPU.
        safe: event that is set once updates may change the state.
        lock: lock that a thread holds while it copies the state.
    """

    state: State
    records: list[Record]
    is_copied: bool
    first: dict[str, int] = field(default_factory=dict)
    memory: dict[str, Tensor] = field(default_factory=dict)
    drive: dict[str, OnDrive] = field(default_factory=dict)
    copies: dict[str, Tensor] = field(default_factory=dict)
    copied: torch.Event | None = None
    safe: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        last = dict[str, int]()
        for part, piece in ((one.part, one.piece) for one in self.records):
            self.first[part] = min(self.first.get(part, piece.offset), piece.offset)
            last[part] = max(last.get(part, 0), piece.offset + piece.numel)
        for part, end in last.items():
            storage = self.state.storages[part]
            if isinstance(storage, OnDrive):
                # read from the first element, because offsets of reads must be aligned
                self.first[part], self.drive[part] = 0, storage
            else:
                self.memory[part] = storage.fetch().wait()[self.first[part] : end]
        self.is_copied = self.is_copied and not self.drive

    @property
    def nbytes(self) -> int:
        """Bytes of host memory for the copies, or for reading the parts that are on a drive."""
        if self.is_copied:
            return sum(values.nbytes for values in self.memory.values())
        return sum(_aligned(storage.nbytes) for storage in self.drive.values())


def _aligned(nbytes: int) -> int:
    return -(-nbytes // LINE) * LINE


def _items(records: Iterable[Record], policy: Policy, gpu: bool, copies: bool) -> list[_Item]:
    return [
        _Item(state, list(some), (gpu or copies) and _is_copied(state, policy, gpu))
        for state, some in groupby(records, lambda one: one.state)
    ]


def _is_copied(state: State, policy: Policy, gpu: bool) -> bool:
    """Returns whether a snapshot copies a state, instead of reading it from its storage.

    Only states on the device are copied. On a CPU, states of frozen parameters are not copied,
    because they do not change.
    """
    group = state.bucket.group
    # whether the state contains previous parameters, which are on the tier of the parameters
    parameters = policy.delayed and PREVIOUS in state.storages
    if group.key.trainable and not parameters:
        return policy.optimizer_tier is None
    return gpu and not (group.sliced and policy.params_tier is not None)


def copy_bytes(records: Iterable[Record], policy: Policy, gpu: bool) -> int:
    """Returns the bytes of host memory for a snapshot: for copies, and for reads from a drive.

    Args:
        records: records of the snapshot.
        policy: policy of the optimizer's layout.
        gpu: whether the device is a GPU.
    """
    items = _items(records, policy, gpu, copies=True)
    read = max((item.nbytes for item in items if not item.is_copied), default=0)
    return read + sum(item.nbytes for item in items if item.is_copied)


class Room:
    """Host memory for a snapshot's copies of states. Later snapshots reuse it.

    Args:
        copies: whether states on a CPU device are copied. States on a GPU are always copied.
    """

    def __init__(self, copies: bool = True) -> None:
        self.copies = copies
        self._buffers: dict[tuple[State, str, int, int], Tensor] = {}

    def make(self, records: Iterable[Record], policy: Policy, gpu: bool) -> None:
        """Allocates the memory for all copies that a snapshot of these records makes.

        Args:
            records: records of the snapshot.
            policy: policy of the optimizer's layout.
            gpu: whether the device is a GPU.
        """
        for item in _items(records, policy, gpu, self.copies):
            for part in item.memory if item.is_copied else ():
                self.buffer(item, part)

    def buffer(self, item: _Item, part: str) -> Tensor:
        """Returns the memory for the copy of one part of a state, allocated at the first call."""
        values = item.memory[part]
        key = item.state, part, item.first[part], values.numel()
        if key not in self._buffers:
            self._buffers[key] = pool.host_buffer(values.nbytes).view(values.dtype)
        return self._buffers[key]


class Snapshot:
    """The values that some records have when the snapshot is constructed.

    No update may be running at that time.

    Args:
        wanted: the records. Records of the same state must be consecutive.
        optimizer: the optimizer that holds the states.
        room: memory for copies.

    Attributes:
        waited_s: seconds for which updates waited for this snapshot, or made copies for it.
    """

    def __init__(self, wanted: Iterable[Record], optimizer: Optimizer, room: Room) -> None:
        self._room, self._device = room, optimizer.updates.device
        self.waited_s, self._closed = 0.0, False
        self._reading = torch.empty(0, dtype=torch.uint8)  # buffer for values read from a drive
        gpu = is_accelerator(self._device)
        self._items = _items(wanted, optimizer.layout.policy, gpu, room.copies)
        self._items_of: dict[State, list[_Item]] = {}
        for item in self._items:
            self._items_of.setdefault(item.state, []).append(item)
        # copied in the order in which updates change the states
        turn = {state: number for number, state in enumerate(reversed(optimizer.states))}
        self._to_copy = sorted(self._items, key=lambda item: turn.get(item.state, len(turn)))
        for item in self._to_copy if gpu else ():
            # copied in this thread, because the copy must wait for this thread's current stream
            self._copy(item)

    # -------------------------------------------------------------------------------------------------------- updates

    def release(self, state: State) -> None:
        """Waits until an update may change a state.

        If the state must be copied and no copy exists yet, this call makes the copy.
        """
        began = time.perf_counter()
        for item in self._items_of.get(state, ()):
            self._release(item)
        self.waited_s += time.perf_counter() - began

    def _release(self, item: _Item) -> None:
        self._copy(item)
        item.safe.wait()
        if (copied := item.copied) is not None:
            current_stream(self._device).wait_event(copied)

    def release_all(self) -> None:
        """Waits until every state may change."""
        for item in self._items:
            self._release(item)

    def close(self) -> None:
        """Ends the snapshot, so that all states may change. A running `values` raises GivenUp."""
        self._closed = True
        for item in self._items:
            item.safe.set()

    # -------------------------------------------------------------------------------------------------------- reading

    def values(self) -> Iterator[Tensor]:
        """Yields the values [numel] of every record, in the order of the records.

        Each tensor is a view that is only valid until the next iteration. Call this method once,
        and not in the thread that runs the updates.

        Raises:
            GivenUp: the snapshot was closed, or the program has ended.
        """
        for item in self._to_copy:
            self._copy(item)
        for item in self._items:
            parts = self._read(item)
            for one in item.records:
                at = one.piece.offset - item.first[one.part]
                yield parts[one.part][at : at + one.piece.numel]
                # If `close` was called meanwhile, an update may have changed the yielded values.
                self._check()
            item.safe.set()

    def _check(self) -> None:
        if self._closed or not threading.main_thread().is_alive():
            raise GivenUp("the program ended before the snapshot was written")

    def _read(self, item: _Item) -> dict[str, Tensor]:
        """Returns the values of each part of a state, from the copies or from the storages."""
        self._check()
        if item.is_copied:
            if item.copied is not None:
                item.copied.synchronize()
            return item.copies
        return item.memory | self._from_drive(item) if item.drive else item.memory

    def _from_drive(self, item: _Item) -> dict[str, Tensor]:
        """Reads the parts of a state that are on a drive; returns the values of each part."""
        if self._reading.numel() < item.nbytes:
            self._reading = pool.host_buffer(item.nbytes)
        found, at = dict[str, Tensor](), 0
        for part, storage in item.drive.items():
            found[part] = self._reading[at : at + storage.nbytes].view(storage.dtype)
            if (before := storage.writing) is not None:
                before.wait()
            storage.drive.disk.read(storage.offset, found[part]).wait()
            at += _aligned(storage.nbytes)
        return found

    def _copy(self, item: _Item) -> None:
        """Copies a state if a copy is needed and not made yet; does nothing after `close`."""
        with item.lock:
            if item.is_copied and not item.safe.is_set():
                self._into(item)
                item.safe.set()

    def _into(self, item: _Item) -> None:
        """Copies a state's values to host memory; on a GPU only enqueues the copy."""
        for part, values in item.memory.items():
            item.copies[part] = self._room.buffer(item, part)
            if is_accelerator(values.device):
                stream = copy_stream(values.device, "save")
                with on_stream(stream):
                    item.copies[part].copy_(values, non_blocking=True)
                    item.copied = stream.record_event()
            else:
                item.copies[part].copy_(values)
