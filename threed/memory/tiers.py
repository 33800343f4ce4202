"""Stores slices of the training state in memory or on an NVMe drive, with staged access.

    storage = tier(numel, dtype)    allocates a storage of zeros; the function `tier` decides where
    staged = storage.fetch()        starts to read the values into a staged buffer
    values = staged.wait()          [numel], may be changed in place; SwapError if the read failed
    staged.store()                  starts to write the values back, and releases the buffer
    staged.drop()                   instead of `store`: releases the buffer without writing

`storage.empty()` returns a staged buffer without reading the values. The values must not be used
after `store` or `drop`.

For a storage in memory, these calls copy no values, because the staged buffer is the tensor itself.
For a storage on a drive, values are read into page-aligned buffers before they are used, and
written back in the background. The number and size of these buffers do not grow with the size of
the state (ZeRO-Infinity, arXiv 2104.07857, section 6). Because both storages have the same methods,
each algorithm is implemented once, as if all state were on a drive.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from threed.core import device as gpu
from threed.core.device import copy_stream, is_accelerator, on_stream
from threed.distributed.collectives import Pending, done
from threed.memory.io import Disk, Transfer
from threed.memory.pool import host_buffer

LAZY_BYTES = 2**20  # smaller storages are allocated by torch


@dataclass(eq=False)
class InMemory:
    """A storage in memory. It is also its own staged buffer, so no values are copied."""

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
        """Exchanges the tensors of this storage and another storage."""
        self.tensor, other.tensor = other.tensor, self.tensor

    def fetch(self) -> InMemory:
        return self

    def empty(self) -> InMemory:
        return self

    def wait(self) -> Tensor:
        return self.tensor

    def store(self) -> None:
        """Has no effect, because the values are already in the storage."""

    def drop(self) -> None:
        """Has no effect, because an `InMemory` has no separate buffer to release."""


def memory_tier(device: torch.device) -> Tier:
    """Returns the tier that allocates storages in a device's memory.

    If there is a GPU, host memory is page-locked, so that copies to and from the GPU are
    asynchronous. Otherwise host memory is occupied only when values are written, so that gradients
    and moments take no memory before the first step.
    """
    pinned = device.type == "cpu" and gpu.count() > 0
    lazy = device.type == "cpu" and not pinned

    def storage(numel: int, dtype: torch.dtype) -> InMemory:
        if lazy and numel * dtype.itemsize >= LAZY_BYTES:
            return InMemory(_untouched_zeros(numel, dtype))
        return InMemory(torch.zeros(numel, dtype=dtype, device=device, pin_memory=pinned))

    return storage


def _untouched_zeros(numel: int, dtype: torch.dtype) -> Tensor:
    """Returns zeros on the CPU whose pages the kernel allocates when they are written."""
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        memory = mmap.mmap(-1, numel * dtype.itemsize, flags=private)
    except OSError:  # not enough memory; torch's error names the number of bytes
        return torch.zeros(numel, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype)


def start_copy(values: Tensor, device: torch.device) -> Pending:
    """Starts to copy values to a device. Values that are already on the device are not copied.

    A copy from a GPU to the host runs on a separate stream, into page-locked memory.

    Returns:
        A pending operation; its result is the tensor on the device.
    """
    if values.device == device:
        return done(values)
    if not (is_accelerator(values.device) and device.type == "cpu"):
        return done(values.to(device))
    stream = copy_stream(values.device, "out")
    with on_stream(stream):
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
    """A read-only copy of a staged buffer, on another device.

    The values cannot be written back to the storage.

    Args:
        staged: the staged buffer that is copied. `drop` releases it, too.
        device: device of the copy.
    """

    def __init__(self, staged: StagedBuffer, device: torch.device) -> None:
        self._staged, self._copy = staged, start_copy(staged.wait(), device)

    @property
    def values(self) -> Tensor:
        return self._copy.wait()

    def wait(self) -> Tensor:
        return self._copy.wait()

    def store(self) -> None:
        """Raises RuntimeError, because a copy cannot be written back."""
        raise RuntimeError("a copy is not written back")

    def drop(self) -> None:
        self._copy.wait()
        self._staged.drop()


class Drive:
    """The tier that allocates storages in a swap file, with a pool of buffers for staged values.

    Args:
        disk: the swap file.
        nbytes: size of each buffer in bytes.
        count: number of buffers.
    """

    def __init__(self, disk: Disk, nbytes: int = 0, count: int = 1) -> None:
        self.disk, self.nbytes, self.count = disk, nbytes, count
        self.device = torch.device("cpu")  # device of the buffers
        self._make_room: Callable[[], None] = lambda: None
        self._buffers: list[Tensor] | None = None  # free buffers; None until the first use
        self._writing: deque[tuple[Transfer, Tensor]] = deque()

    def __call__(self, numel: int, dtype: torch.dtype) -> OnDrive:
        return OnDrive(self, numel, dtype)

    @property
    def in_use(self) -> int:
        """The number of buffers in use, including buffers that are being written to the drive."""
        return 0 if self._buffers is None else self.count - len(self._buffers)

    def settle(self) -> None:
        """Waits for all writes in flight. Raises SwapError if a write failed."""
        while self._writing:
            self._reap(wait=True)

    def on_full(self, make_room: Callable[[], None]) -> None:
        """Registers a function that releases buffers. `take` calls it if all buffers are in use.

        Args:
            make_room: the function, without arguments.
        """
        self._make_room = make_room

    def size_buffers(self, nbytes: int, count: int) -> None:
        """Sets the size of a buffer in bytes, and the number of buffers.

        Call it before the first `take`, which allocates the buffers.
        """
        self.nbytes, self.count = nbytes, count

    def take(self) -> Tensor:
        """Returns a free buffer, uint8 [nbytes].

        If all buffers are in use, this method waits for the oldest write in flight. If no write is
        in flight, it calls the function that was registered by `on_full`.

        Raises:
            RuntimeError: if all buffers are still in use after that.
        """
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
        """Returns a buffer to the pool."""
        assert self._buffers is not None
        self._buffers.append(buffer)

    def give_after(self, transfer: Transfer, buffer: Tensor) -> None:
        """Returns a buffer to the pool once its write is done."""
        self._writing.append((transfer, buffer))

    def _reap(self, wait: bool) -> None:
        """Returns the buffers of finished writes to the pool.

        Args:
            wait: whether to wait for the oldest write first.

        Raises:
            SwapError: if a write failed.
        """
        while self._writing and (wait or self._writing[0][0].done()):
            transfer, buffer = self._writing.popleft()
            self.give(buffer)
            transfer.wait()
            wait = False


class MetaDrive(Drive):
    """A `Drive` without a file, for memory forecasts on the meta device.

    All staged buffers are the same tensor. The object is also its own `Disk`; its methods `read`
    and `write` transfer no bytes.
    """

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
        """Has no effect, because all staged buffers are the same tensor."""

    def give_after(self, transfer: Transfer, buffer: Tensor) -> None:
        """Has no effect, because all staged buffers are the same tensor."""

    def read(self, offset: int, into: Tensor) -> Transfer | None:
        """Returns None, because no bytes are transferred."""
        return None

    write = read


class OnDrive:
    """A storage in a region of a swap file.

    The storage may have a second region. New values are written to the second region while the old
    values are still in use. A call of `swap` then replaces the old values by the new ones.

    Args:
        drive: the tier.
        numel: number of values.
        dtype: dtype of the values.

    Attributes:
        offset: offset in the file of the region with the current values, in bytes.
        writing: the latest write to the storage; None if there was none, or if a read has waited
            for it.
        staged_buffers: number of staged buffers in use.
    """

    def __init__(self, drive: Drive, numel: int, dtype: torch.dtype) -> None:
        self.drive, self.device = drive, drive.device
        self.hold(numel, dtype)
        self.offset = drive.disk.reserve(self.nbytes)
        # offset of the region for new values; None if there is no second region
        self.second_offset: int | None = None
        self.writing: Transfer | None = None
        self.staged_buffers = 0  # number of staged buffers in use

    @property
    def reserved(self) -> int:
        """Bytes reserved on the drive."""
        return self.nbytes * (1 if self.second_offset is None else 2)

    def double(self) -> None:
        """Reserves a second region, for `DriveBuffer.store_second`."""
        self.second_offset = self.drive.disk.reserve(self.nbytes)

    def swap(self) -> None:
        """Exchanges the two regions, so that the values of the second region become current."""
        assert self.second_offset is not None
        if self.staged_buffers:
            raise RuntimeError("a staged buffer of the old values is still in use")
        self.offset, self.second_offset = self.second_offset, self.offset

    def hold(self, numel: int, dtype: torch.dtype) -> None:
        """Sets the number and dtype of the values, which must fit into the storage's region."""
        self.dtype, self.nbytes = dtype, numel * dtype.itemsize

    def fetch(self) -> DriveBuffer:
        if self.writing is not None:  # a read must begin after the latest write has ended
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
        # the read that fills the buffer, or the write that `write` started; None after `wait`
        self._transfer = transfer
        storage.staged_buffers += 1

    def arrived(self) -> bool:
        """Returns whether the transfer has finished, so that `wait` does not block."""
        return self._transfer is None or self._transfer.done()

    def wait(self) -> Tensor:
        if self._transfer is not None:
            self._transfer.wait()
            self._transfer = None
        return self.values

    def write(self) -> None:
        """Starts to write the values to the storage, but does not release the buffer.

        Do not change the values before `wait` has returned.
        """
        self._transfer = self._begin_write(self.storage.offset)

    def store(self) -> None:
        self._store(self.storage.offset)

    def store_second(self) -> None:
        """Starts to write the values to the second region, and releases the buffer.

        These values become the values of the storage when `OnDrive.swap` is called.
        """
        assert self.storage.second_offset is not None
        self._store(self.storage.second_offset)

    def _store(self, offset: int) -> None:
        storage = self.storage
        storage.staged_buffers -= 1
        try:
            self.wait()
            # The other staged buffer of the storage, if there is one, was read before this write.
            # So it has stale values, and must not be stored.
            if storage.staged_buffers:
                raise RuntimeError(
                    "values were staged twice: the other staged buffer is stale after this store"
                )
            transfer = self._begin_write(offset)
        except BaseException:
            storage.drive.give(self._buffer)
            raise
        storage.drive.give_after(transfer, self._buffer)

    def _begin_write(self, offset: int) -> Transfer:
        storage, values = self.storage, self.wait()
        if storage.writing is not None:  # two writes to one region must run in order
            storage.writing.wait()
        storage.writing = storage.drive.disk.write(offset, values)
        return storage.writing

    def drop(self) -> None:
        self.storage.staged_buffers -= 1
        try:
            self.wait()
        finally:
            self.storage.drive.give(self._buffer)


Storage = InMemory | OnDrive  # stores a flat tensor, in memory or on a drive
StagedBuffer = InMemory | DriveBuffer | Copied  # buffer in memory with the values of a storage
Tier = Callable[[int, torch.dtype], Storage]
