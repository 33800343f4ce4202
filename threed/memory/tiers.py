"""Where a slice of the training state lives, and how it comes and goes: in memory, or in a file on an NVMe drive.

    storage = tier(numel, dtype)    a place for so many numbers, zeros at first; a tier is any such function
    staged = storage.fetch()        begins to read the values into a buffer
    values = staged.wait()          [numel], to work on in place
    staged.store()                  begins to write them back as they are now;   staged.drop() forgets what was changed

In memory all of that is free: the buffer is the tensor itself. On a drive values pass through constant-size,
page-aligned buffers, read ahead and written behind: so algorithms are written once, as if everything were on a drive,
and memory does not grow with what the drive holds (ZeRO-Infinity, arXiv 2104.07857, section 6).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

from threed import device as gpu
from threed.collectives import Pending, done
from threed.device import beside, copy_stream
from threed.memory.io import Disk, Transfer
from threed.memory.pool import Pool


class StagedBuffer(Protocol):
    """A copy of a storage's values to work on. `values` [numel] is its tensor, which `wait` says to be filled."""

    @property
    def values(self) -> Tensor: ...

    def wait(self) -> Tensor:
        """The values [numel]; SwapError when they could not be read."""

    def store(self) -> None:
        """Begins to put the values back. The tensor that `wait` gave may not be touched any more."""

    def drop(self) -> None:
        """Gives the buffer back; the storage stays as it was."""


class Storage(Protocol):
    """A place for values of one length and dtype."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device:
        """Where a staged buffer's values are."""

    def fetch(self) -> StagedBuffer:
        """Begins to bring the values."""

    def empty(self) -> StagedBuffer:
        """A staged buffer to be written in full: its values are undefined."""


Tier = Callable[[int, torch.dtype], Storage]


@dataclass(eq=False)
class InMemory:
    """A tensor that is always there: its own storage, and its own staged buffer."""

    tensor: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def device(self) -> torch.device:
        return self.tensor.device

    @property
    def values(self) -> Tensor:
        return self.tensor

    def fetch(self) -> InMemory:
        return self

    def empty(self) -> InMemory:
        return self

    def wait(self) -> Tensor:
        return self.tensor

    def store(self) -> None:
        """Nothing: the values are in the storage."""

    def drop(self) -> None:
        """Nothing to give back."""


def memory_tier(device: torch.device) -> Tier:
    """Storages in the memory of a device; host memory beside a GPU is page-locked, so that copies run by themselves."""
    pinned = device.type == "cpu" and gpu.count() > 0

    def storage(numel: int, dtype: torch.dtype) -> InMemory:
        return InMemory(torch.zeros(numel, dtype=dtype, device=device, pin_memory=pinned))

    return storage


def start_copy(values: Tensor, device: torch.device) -> Pending:
    """Begins to copy values to a device; where they are there already, that is it.

    From a GPU to the host it goes on a stream of its own, beside what the GPU computes, into page-locked memory.
    """
    if values.device == device:
        return done(values)
    if not (values.is_cuda and device.type == "cpu"):
        return done(values.to(device))
    stream = copy_stream(values.device, "out")
    with beside(stream):
        out = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
        values.record_stream(stream)
        copied = stream.record_event()

    def finish() -> Tensor:
        copied.synchronize()
        return out

    return Pending(finish)


class Drive:
    """Storages in a swap file, and `count` buffers of `nbytes` for staged values. Call it for a storage, as a tier.

    Size and number may be set until the first buffer is lent. idle: how many of them nobody needs between updates.
    """

    def __init__(self, disk: Disk, nbytes: int = 0, count: int = 1) -> None:
        self.disk, self.nbytes, self.count, self.idle = disk, nbytes, count, 0
        self.device = torch.device("cpu")  # of the buffers
        self.make_room: Callable[[], None] = lambda: None  # asked to give buffers back when all are in use
        self._pool: Pool | None = None
        self._writing: deque[tuple[Transfer, Tensor]] = deque()

    def __call__(self, numel: int, dtype: torch.dtype) -> OnDrive:
        return OnDrive(self, numel, dtype)

    @property
    def lent(self) -> int:
        """Buffers in use, also by what is being written."""
        return 0 if self._pool is None else self._pool.lent

    def settle(self) -> None:
        """Waits until everything is written; SwapError if something could not be."""
        while self._writing:
            self._reap(wait=True)

    def take(self) -> Tensor:
        """A buffer; waits for the oldest write if all are in use."""
        if self._pool is None:
            self._pool = Pool(self.nbytes, self.count)
        self._reap(wait=False)
        while self.lent == self.count and self._writing:
            self._reap(wait=True)
        if self.lent == self.count:
            self.make_room()
        return self._pool.take()

    def give(self, buffer: Tensor) -> None:
        """Takes a buffer back."""
        assert self._pool is not None
        self._pool.give(buffer)

    def give_after(self, transfer: Transfer, buffer: Tensor) -> None:
        """Takes a buffer back when it is written."""
        self._writing.append((transfer, buffer))

    def _reap(self, wait: bool) -> None:
        """Frees the buffers of writes that are done, or waits for the oldest one."""
        while self._writing and (wait or self._writing[0][0].done()):
            transfer, buffer = self._writing.popleft()
            self.give(buffer)
            transfer.wait()
            wait = False


class DriveOnPaper(Drive):
    """A drive that holds nothing: what would be there can be counted; all staged buffers are one tensor."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(cast(Disk, self))
        self.device = device
        self._buffer: Tensor | None = None

    def reserve(self, nbytes: int) -> int:
        """A region at the beginning."""
        return 0

    def take(self) -> Tensor:
        if self._buffer is None:
            self._buffer = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
        return self._buffer

    def give(self, buffer: Tensor) -> None:
        """Nothing to take back."""

    def give_after(self, transfer: Transfer, buffer: Tensor) -> None:
        """Nothing to take back."""

    def read(self, offset: int, into: Tensor) -> Transfer | None:
        """No transfer."""
        return None

    write = read


class OnDrive:
    """A storage in a swap file: a region of its own."""

    def __init__(self, drive: Drive, numel: int, dtype: torch.dtype) -> None:
        self.drive, self.device = drive, drive.device
        self.hold(numel, dtype)
        self.offset = drive.disk.reserve(self.nbytes)
        self.writing: Transfer | None = None
        self.buffers = 0  # that are out

    def hold(self, numel: int, dtype: torch.dtype) -> None:
        """Other values from now on, which must fit into the region."""
        self.dtype, self.nbytes = dtype, numel * dtype.itemsize

    def fetch(self) -> _DriveBuffer:
        if self.writing is not None:  # what is read now must have been written
            self.writing.wait()
            self.writing = None
        buffer = self.drive.take()
        values = buffer[: self.nbytes].view(self.dtype)
        return _DriveBuffer(self, buffer, values, self.drive.disk.read(self.offset, values))

    def empty(self) -> _DriveBuffer:
        buffer = self.drive.take()
        return _DriveBuffer(self, buffer, buffer[: self.nbytes].view(self.dtype), None)


class _DriveBuffer:
    """Values of a storage on a drive, in a buffer."""

    def __init__(self, storage: OnDrive, buffer: Tensor, values: Tensor, reading: Transfer | None) -> None:
        self.storage, self._buffer, self.values, self._reading = storage, buffer, values, reading
        storage.buffers += 1

    def wait(self) -> Tensor:
        if self._reading is not None:
            self._reading.wait()
            self._reading = None
        return self.values

    def store(self) -> None:
        storage = self.storage
        storage.buffers -= 1
        try:
            values = self.wait()
            if storage.buffers:  # it was read before this is written, and would be used, or stored, as if it were new
                raise RuntimeError("values were borrowed twice, and the second buffer is older than what is stored now")
            if storage.writing is not None:  # two writes of one region must not overtake each other
                storage.writing.wait()
            storage.writing = storage.drive.disk.write(storage.offset, values)
        except BaseException:
            storage.drive.give(self._buffer)
            raise
        storage.drive.give_after(storage.writing, self._buffer)

    def drop(self) -> None:
        self.storage.buffers -= 1
        try:
            self.wait()
        finally:
            self.storage.drive.give(self._buffer)
