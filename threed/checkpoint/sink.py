"""A file that is written in order, and hashed meanwhile: past the page cache, by threads of its own.

    with Sink(path, nbytes, limit=100 * 2**20) as sink:        bytes a second; None: as fast as it goes
        sink.write(part)                                       any bytes, one after the other
    sink.hashes                                                see `checksum`; the file is on the drive

`hurries` ends the limit: a run that is to end waits for its last save.

The caller copies a part into a page-aligned buffer, which threads hash and write by direct I/O, while it fills the next
one: that takes less of the processor, on which training goes on, than a copy into the page cache and a flush of it.
Where a file system has no direct I/O, and for small files, writes go through the page cache and are flushed at the end.
"""

from __future__ import annotations

import errno
import mmap
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from threed.checkpoint import checksum
from threed.checkpoint.checksum import Hashes, Hashing

BLOCK = 4096  # direct I/O: of memory, lengths and offsets
PIECE = checksum.BLOCK  # what is hashed and written at a time
WRITERS = 2
SMALL = 4 * PIECE  # bytes: threads would cost more than they bring
POLL_S = 0.125  # how often a write that waits asks whether it may hurry


def never() -> bool:
    """Returns False."""
    return False


class Sink:
    """A new file of `nbytes`. OSError from `write`, or at the end, when it cannot be written."""

    def __init__(
        self,
        path: Path,
        nbytes: int,
        limit: float | None = None,
        hurries: Callable[[], bool] = never,
    ) -> None:
        self.path, self.nbytes, self.limit, self.hurries = path, nbytes, limit, hurries
        self.hashes: Hashes
        self._hashing = Hashing()
        self._began = time.monotonic()
        self._at = self._filled = (
            0  # bytes of the file that left for the drive, and those in the buffer
        )
        self._error: OSError | None = None
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Sink:
        self._fd, direct = _open(self.path, self.nbytes >= SMALL)
        try:
            self._free: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()
            self._full: queue.SimpleQueue[tuple[mmap.mmap, int, int, Future[Any]] | None] = (
                queue.SimpleQueue()
            )
            if direct:
                _allocate(self._fd, self.nbytes)
                self._threads = [
                    threading.Thread(target=self._write_out, name="sink") for _ in range(WRITERS)
                ]
            for _ in range(WRITERS + 1 if direct else 1):
                self._free.put(mmap.mmap(-1, PIECE))
            self._buffer = self._free.get()
            for thread in self._threads:
                thread.start()
        except BaseException:
            os.close(self._fd)
            raise
        return self

    def write(self, part: bytes | Tensor) -> None:
        """Appends bytes, or a tensor on the CPU, uint8 [n]."""
        rest = (
            torch.frombuffer(bytearray(part), dtype=torch.uint8)
            if isinstance(part, bytes)
            else part
        )
        while rest.numel():
            count = min(rest.numel(), PIECE - self._filled)
            # Not by a memoryview, which would keep the interpreter's lock while it copies.
            torch.frombuffer(
                self._buffer, dtype=torch.uint8, offset=self._filled, count=count
            ).copy_(rest[:count])
            self._filled, rest = self._filled + count, rest[count:]
            if self._filled == PIECE:
                self._leave()

    def _leave(self) -> None:
        """Hands the buffer on, to be hashed and written; takes another one."""
        if self._error is not None:
            raise self._error
        count, buffer = self._filled, self._buffer
        hashed = self._hashing.add(memoryview(buffer)[:count])
        if self._threads:
            self._full.put((buffer, count, self._at, hashed))
            self._buffer = self._free.get()
        else:
            _write_all(self._fd, memoryview(buffer)[:count], self._at)
            hashed.result()
            if (
                self.limit is not None
            ):  # else the page cache would take it, and flush it all at once
                os.fdatasync(self._fd)
        self._at, self._filled = self._at + count, 0
        while self.limit is not None and not self.hurries():
            left = self._at / self.limit - (time.monotonic() - self._began)
            if left <= 0:
                break
            time.sleep(min(left, POLL_S))

    def _write_out(self) -> None:
        """Writes buffers until there are no more; after an error it only gives them back."""
        while (one := self._full.get()) is not None:
            buffer, count, at, hashed = one
            try:
                if self._error is None:
                    _write_all(self._fd, memoryview(buffer)[: -(-count // BLOCK) * BLOCK], at)
            except OSError as error:
                self._error = error
            wait((hashed,))
            self._free.put(buffer)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None and self._filled:
                self._leave()
        finally:
            for _ in self._threads:
                self._full.put(None)
            for thread in self._threads:
                thread.join()
            try:
                if kind is None and self._error is None:
                    if self._threads:
                        os.ftruncate(self._fd, self._at)  # the last block was a whole one
                    os.fsync(self._fd)
            finally:
                os.close(self._fd)
        if kind is None and self._error is not None:
            raise self._error
        if kind is None:
            self.hashes = self._hashing.result()


def _open(path: Path, direct: bool) -> tuple[int, bool]:
    """Opens a file anew; returns whether it takes direct I/O."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    if direct and hasattr(os, "O_DIRECT"):
        fd = -1
        try:
            fd = os.open(path, flags | os.O_DIRECT, 0o666)
            os.pwrite(fd, mmap.mmap(-1, BLOCK), 0)  # some file systems refuse it only here
            return fd, True
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            if error.errno != errno.EINVAL:
                raise
    return os.open(path, flags, 0o666), False


def _allocate(fd: int, nbytes: int) -> None:
    """Allocates space, so that two threads can write at once, and a full drive is an error now."""
    try:
        os.posix_fallocate(fd, 0, max(1, nbytes))
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        os.ftruncate(fd, nbytes)


def _write_all(fd: int, data: memoryview, at: int) -> None:
    while data:
        count = os.pwrite(fd, data, at)
        if count == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        data, at = data[count:], at + count
