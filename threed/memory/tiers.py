"""Storage of slices of the training state, in memory or in a file on an NVMe drive, and staged access to them.

    storage = tier(numel, dtype)    allocates space for `numel` values, zeros at first; a tier is any such function
    staged = storage.fetch()        begins to read the values into a buffer; `empty` returns one with undefined values
    values = staged.wait()          [numel], to be changed in place; SwapError when they could not be read
    staged.store()                  begins to write them back;   staged.drop() releases the buffer unwritten

After `store` or `drop` the values may not be used any more.

In memory none of this costs anything: the buffer is the tensor itself. On a drive values pass through constant-size,
page-aligned buffers, read ahead and written behind: algorithms are written once, as if everything were on a drive, and
memory does not grow with what is stored on it (ZeRO-Infinity, arXiv 2104.07857, section 6).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from threed import device as gpu
from threed.collectives import Pending, done
from threed.device import beside, copy_stream, is_accelerator
from threed.memory.io import Disk, Transfer
from threed.memory.pool import host_buffer


@dataclass(eq=False)
class InMemory:
    """A tensor in memory: it is both the storage and its staged buffer."""

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

    def exchange(self, other: InMemory) -> None:
        """Exchanges the tensors of two storages."""
        self.tensor, other.tensor = other.tensor, self.tensor

    def fetch(self) -> InMemory:
        return self

    def empty(self) -> InMemory:
        return self

    def wait(self) -> Tensor:
        return self.tensor

    def store(self) -> None:
        """Does nothing: the values are in the storage."""

    def drop(self) -> None:
        """Does nothing."""


def memory_tier(device: torch.device) -> Tier:
    """Returns the tier of a device's memory; host memory for a GPU is page-locked, so that copies are asynchronous."""
    pinned = device.type == "cpu" and gpu.count() > 0

    def storage(numel: int, dtype: torch.dtype) -> InMemory:
        return InMemory(torch.zeros(numel, dtype=dtype, device=device, pin_memory=pinned))

    return storage


def start_copy(values: Tensor, device: torch.device) -> Pending:
    """Begins to copy values to a device; returns the values themselves if they are on it.

    A copy from a GPU to the host runs on a stream of its own, into page-locked memory.
    """
    if values.device == device:
        return done(values)
    if not (is_accelerator(values.device) and device.type == "cpu"):
        return done(values.to(device))
    stream = copy_stream(values.device, "out")
    with beside(stream):
        out = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(
            values, non_blocking=True
        )
        values.record_stream(stream)
        copied = stream.record_event()

    def finish() -> Tensor:
        copied.synchronize()
        return out

    return Pending(finish)


class Copied:
    """A staged buffer of which a copy is on its way to another device; only the copy is read."""

    def __init__(self, staged: StagedBuffer, device: torch.device) -> None:
        self._staged, self._copy = staged, start_copy(staged.wait(), device)

    @property
    def values(self) -> Tensor:
        return self._copy.wait()

    def wait(self) -> Tensor:
        return self._copy.wait()

    def store(self) -> None:
        """Refuses: the values are elsewhere."""
        raise RuntimeError("a copy is not written back")

    def drop(self) -> None:
        self._copy.wait()
        self._staged.drop()


class Drive:
    """The tier of a swap file: storages in it, and `count` buffers of `nbytes` for staged values."""

    def __init__(self, disk: Disk, nbytes: int = 0, count: int = 1) -> None:
        self.disk, self.nbytes, self.count = disk, nbytes, count
        self.device = torch.device("cpu")  # of the buffers
        self._make_room: Callable[[], None] = lambda: None
        self._buffers: list[Tensor] | None = None  # those that are not in use
        self._writing: deque[tuple[Transfer, Tensor]] = deque()

    def __call__(self, numel: int, dtype: torch.dtype) -> OnDrive:
        return OnDrive(self, numel, dtype)

    @property
    def in_use(self) -> int:
        """The number of buffers in use, also by writes in flight."""
        return 0 if self._buffers is None else self.count - len(self._buffers)

    def settle(self) -> None:
        """Waits for all writes; SwapError if one failed."""
        while self._writing:
            self._reap(wait=True)

    def on_full(self, make_room: Callable[[], None]) -> None:
        """Registers what releases buffers; it is called if all are in use."""
        self._make_room = make_room

    def size_buffers(self, nbytes: int, count: int) -> None:
        """Sets size and number of the buffers, before the first is taken."""
        self.nbytes, self.count = nbytes, count

    def take(self) -> Tensor:
        """Returns a buffer; waits for the oldest write if all are in use. RuntimeError if there is none."""
        if self._buffers is None:
            self._buffers = [host_buffer(self.nbytes) for _ in range(self.count)]
        self._reap(wait=False)
        while not self._buffers and self._writing:
            self._reap(wait=True)
        if not self._buffers:
            self._make_room()
        if not self._buffers:
            raise RuntimeError(f"all {self.count} buffers of {self.nbytes} bytes are in use")
        return self._buffers.pop()

    def give(self, buffer: Tensor) -> None:
        """Takes a buffer back."""
        assert self._buffers is not None
        self._buffers.append(buffer)

    def give_after(self, transfer: Transfer, buffer: Tensor) -> None:
        """Takes a buffer back when its write is done."""
        self._writing.append((transfer, buffer))

    def _reap(self, wait: bool) -> None:
        """Takes back the buffers of finished writes; with `wait`, first waits for the oldest one."""
        while self._writing and (wait or self._writing[0][0].done()):
            transfer, buffer = self._writing.popleft()
            self.give(buffer)
            transfer.wait()
            wait = False


class DriveOnPaper(Drive):
    """A drive without a file, to count what would be stored: all staged buffers are one tensor."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(cast(Disk, self))
        self.device = device
        self._buffer: Tensor | None = None

    def reserve(self, nbytes: int) -> int:
        """Returns offset 0 for every region."""
        return 0

    def take(self) -> Tensor:
        if self._buffer is None:
            self._buffer = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
        return self._buffer

    def give(self, buffer: Tensor) -> None:
        """Does nothing."""

    def give_after(self, transfer: Transfer, buffer: Tensor) -> None:
        """Does nothing."""

    def read(self, offset: int, into: Tensor) -> Transfer | None:
        """Returns None: nothing is transferred."""
        return None

    write = read


class OnDrive:
    """A storage in a swap file, in a region of its own; or in two, one for values that do not count yet."""

    def __init__(self, drive: Drive, numel: int, dtype: torch.dtype) -> None:
        self.drive, self.device = drive, drive.device
        self.hold(numel, dtype)
        self.offset = drive.disk.reserve(self.nbytes)
        self.beside: int | None = None  # the offset of the second region
        self.writing: Transfer | None = None
        self.outstanding = 0  # staged buffers in use

    @property
    def reserved(self) -> int:
        """Bytes on the drive."""
        return self.nbytes * (1 if self.beside is None else 2)

    def double(self) -> None:
        """Reserves a second region, for `store_beside`."""
        self.beside = self.drive.disk.reserve(self.nbytes)

    def swap(self) -> None:
        """Makes what was last stored beside the values of this storage, and the other way round."""
        assert self.beside is not None
        if self.outstanding:
            raise RuntimeError("a buffer with the values from before is still in use")
        self.offset, self.beside = self.beside, self.offset

    def hold(self, numel: int, dtype: torch.dtype) -> None:
        """Changes length and dtype of the values, which must fit into the region."""
        self.dtype, self.nbytes = dtype, numel * dtype.itemsize

    def fetch(self) -> DriveBuffer:
        if self.writing is not None:  # a read must see the last write
            self.writing.wait()
            self.writing = None
        buffer = self.drive.take()
        values = buffer[: self.nbytes].view(self.dtype)
        return DriveBuffer(self, buffer, values, self.drive.disk.read(self.offset, values))

    def empty(self) -> DriveBuffer:
        buffer = self.drive.take()
        return DriveBuffer(self, buffer, buffer[: self.nbytes].view(self.dtype), None)


class DriveBuffer:
    """A staged buffer of a storage on a drive."""

    def __init__(
        self, storage: OnDrive, buffer: Tensor, values: Tensor, transfer: Transfer | None
    ) -> None:
        self.storage, self._buffer, self.values = storage, buffer, values
        self._transfer = transfer  # the read that fills it, or a write that it is kept for
        storage.outstanding += 1

    def arrived(self) -> bool:
        """Whether `wait` would return at once."""
        return self._transfer is None or self._transfer.done()

    def wait(self) -> Tensor:
        if self._transfer is not None:
            self._transfer.wait()
            self._transfer = None
        return self.values

    def write(self) -> None:
        """Begins to write the values back, and keeps the buffer; after `wait` it may change."""
        self._transfer = self._begin_write(self.storage.offset)

    def store(self) -> None:
        self._store(self.storage.offset)

    def store_beside(self) -> None:
        """Begins to write the values to the second region: they count once the storage has swapped the two."""
        assert self.storage.beside is not None
        self._store(self.storage.beside)

    def _store(self, offset: int) -> None:
        storage = self.storage
        storage.outstanding -= 1
        try:
            self.wait()
            # the other buffer was read before this write, and its values are old
            if storage.outstanding:
                raise RuntimeError(
                    "values were staged twice, and the second buffer is older than what is stored now"
                )
            transfer = self._begin_write(offset)
        except BaseException:
            storage.drive.give(self._buffer)
            raise
        storage.drive.give_after(transfer, self._buffer)

    def _begin_write(self, offset: int) -> Transfer:
        storage, values = self.storage, self.wait()
        if storage.writing is not None:  # two writes of one region must not overtake each other
            storage.writing.wait()
        storage.writing = storage.drive.disk.write(offset, values)
        return storage.writing

    def drop(self) -> None:
        self.storage.outstanding -= 1
        try:
            self.wait()
        finally:
            self.storage.drive.give(self._buffer)


Storage = InMemory | OnDrive  # holds values of one length and dtype
StagedBuffer = InMemory | DriveBuffer | Copied  # a buffer with a storage's values
Tier = Callable[[int, torch.dtype], Storage]
