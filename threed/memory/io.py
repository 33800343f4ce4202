"""Asynchronous reads and writes of tensors on a drive: one unlinked, preallocated file a process, by direct I/O.

    disk = Disk("/nvme/swap", "optimizer")
    offset = disk.reserve(values.nbytes)          # space on the drive, or an error now rather than in the middle
    disk.write(offset, values).wait()
    disk.read(offset, into=values).wait()         # SwapError unless every byte arrived
    disk.close()

A transfer of any length, from any memory, is cut into pieces that a few threads move at the same time; the calls release
the interpreter's lock. Memory that starts on a page (`threed.memory.pool`) is read and written directly; other memory,
and the bytes beyond the last multiple of 4096, pass through an aligned copy.
Transfers have no order among themselves: wait for a write before reading or writing the same place.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import mmap
import os
import threading
import uuid
import warnings
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

BLOCK = 4096  # the alignment of memory, lengths and offsets in direct I/O
PIECE = 8 * 2**20  # bytes in one call
WORKERS = 4  # threads that move pieces

_FIXES = {
    errno.ENOSPC: "free space there, or name a folder on a larger drive",
    errno.EDQUOT: "raise the quota there, or name another folder",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f), or name a folder whose file system allows larger files",
    errno.EIO: "the drive or its file system failed: look into the kernel's log, and name another drive",
    errno.EACCES: "make it writable for this user, or name another folder",
    errno.EROFS: "it is read-only: name another folder",
}


class SwapError(OSError):
    """I/O on a swap file failed: the message names rank, operation, place and file, and what to do."""


def _make_folder(folder: str) -> None:
    """Creates a missing folder, with a warning: it may be the mount point of a drive that is not mounted."""
    if os.path.lexists(folder):
        return
    os.makedirs(folder, exist_ok=True)
    mount = folder
    while not os.path.ismount(mount):
        mount = os.path.dirname(mount)
    warnings.warn(
        f"the folder for swap files {folder} did not exist and was created on the file system mounted at {mount}: if it"
        " should be on another drive, end the run and mount the drive",
        stacklevel=4,
    )


class _File:
    """An open file. It closes when neither its Disk nor a transfer in flight refers to it.

    So a Disk that is dropped needs no waiting: a garbage collection may run in any thread, also in
    one that is being started, where a wait for other threads would never end.
    """

    def __init__(self, fd: int = -1) -> None:
        self.fd = fd

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    __del__ = close


class Transfer:
    """A read or a write in flight. Its pieces hold its tensor, which must not be touched until it is done."""

    def __init__(self, disk: Disk, what: str, pieces: list[Future[None]]) -> None:
        self._disk, self._what, self._pieces = disk, what, pieces

    def done(self) -> bool:
        """Returns whether wait() would return, or raise, at once."""
        self._disk._check_process("testing a transfer")
        return all(piece.done() for piece in self._pieces)

    def wait(self) -> None:
        """Waits until every byte has moved; raises SwapError, at every call, if that failed."""
        self._disk._check_process("waiting for a transfer")
        errors = self._errors()
        self._disk._under_way.discard(self)
        if errors:
            raise self._disk._failure(self._what, errors[0])

    def _errors(self) -> list[BaseException]:
        """Waits for all pieces; returns the errors of those that failed."""
        return [error for piece in self._pieces if (error := piece.exception()) is not None]


class Disk:
    """One file in `folder` for the tensors of this process; space in it is reserved region by region.

    The file has no name once it is open: its space returns to the drive when the process ends, however it ends.
    `disk.direct`: whether transfers bypass the page cache. Threads may share a Disk; a forked child may not use its
    parent's.

    Raises:
        SwapError: the folder cannot be made or written.
    """

    def __init__(self, folder: str | os.PathLike[str], name: str) -> None:
        self.path = os.path.join(folder, f"{name}.rank{_rank()}.{uuid.uuid4().hex[:12]}.swap")
        self._process, self._lock = os.getpid(), threading.Lock()
        self._under_way: set[Transfer] = set()
        self._size, self._free = 0, dict[int, list[int]]()
        try:
            _make_folder(os.path.abspath(folder))
            fd, self.direct = _open(self.path)
        except OSError as error:
            raise self._error(error.errno, f"cannot make {self.path}: {error.strerror}") from None
        self._file = _File(fd)
        self._threads = ThreadPoolExecutor(WORKERS, thread_name_prefix="threed-io")

    @property
    def _fd(self) -> int:
        return self._file.fd

    def reserve(self, nbytes: int) -> int:
        """Reserves a region of `nbytes`, rounded up to blocks, and returns its offset.

        Raises:
            SwapError: the drive is full.
        """
        need = _whole_blocks(nbytes)
        # before the lock, which a thread of the parent may have held
        self._check_process("reserving space")
        with self._lock:
            self._check_open("reserving space")
            if self._free.get(need):
                return self._free[need].pop()
            try:
                _allocate(self._fd, self._size, need)
            except OSError as error:
                os.ftruncate(self._fd, self._size)  # what was allocated before the drive was full
                what = f"cannot reserve {need} bytes beyond the {self._size} of {self.path}: {error.strerror}"
                raise self._error(
                    error.errno, f"{what}; {_free_bytes(self._fd)} bytes are free"
                ) from None
            offset, self._size = self._size, self._size + need
            return offset

    def release(self, offset: int, nbytes: int) -> None:
        """Releases a region: the next reserve() of the same size returns it."""
        with self._lock:
            self._free.setdefault(_whole_blocks(nbytes), []).append(offset)

    def read(self, offset: int, into: Tensor) -> Transfer:
        """Begins to fill `into` (contiguous, on the CPU, any dtype) from `offset`, a multiple of 4096."""
        return self._begin(False, offset, into)

    def write(self, offset: int, values: Tensor) -> Transfer:
        """Begins to write `values` at `offset`, a multiple of 4096; zeros fill the rest of its last block."""
        return self._begin(True, offset, values)

    def _begin(self, write: bool, offset: int, tensor: Tensor) -> Transfer:
        doing, nbytes = "writing" if write else "reading", tensor.nbytes
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise ValueError(
                f"{doing} needs a contiguous CPU tensor, not one on {tensor.device} of {tensor.stride()}"
            )
        if offset < 0 or offset % BLOCK or offset + nbytes > self._size:
            raise ValueError(
                f"{doing} {nbytes} bytes at {offset}: offsets are multiples of {BLOCK}, and transfers stay inside the "
                f"{self._size} bytes that are reserved"
            )
        self._check_process(doing)
        with self._lock:
            self._check_open(doing)
            self._forget_finished()
            what = f"{doing} {nbytes} bytes at offset {offset} of {self.path} failed"
            transfer = Transfer(self, what, self._submit(write, offset, tensor))
            self._under_way.add(transfer)
        return transfer

    def _submit(self, write: bool, offset: int, tensor: Tensor) -> list[Future[None]]:
        block, nbytes = BLOCK if self.direct else 1, tensor.nbytes
        whole = nbytes // block * block  # the tail beyond is a piece of its own
        cuts = [*range(0, whole, PIECE), whole, nbytes]
        return [
            self._threads.submit(_move, write, self._file, tensor, range(a, b), offset + a, block)
            for a, b in itertools.pairwise(cuts)
            if b > a
        ]

    def _forget_finished(self) -> None:
        """Drops finished transfers; those that failed stay, for close() to report."""
        for transfer in list(self._under_way):
            if transfer.done() and not transfer._errors():
                self._under_way.discard(transfer)

    def close(self) -> None:
        """Waits for transfers in flight and frees the file's space; SwapError if a transfer failed unnoticed."""
        if os.getpid() != self._process:  # a forked child has the file, but not the threads
            self._file.close()
            return
        with self._lock:
            file, self._file = self._file, _File()
        if file.fd < 0:
            return
        self._threads.shutdown()
        file.close()
        for transfer in list(self._under_way):
            transfer.wait()

    def _check_open(self, doing: str) -> None:
        if self._fd < 0:
            raise self._error(errno.EBADF, f"{doing}: {self.path} is closed", "make a new Disk")

    def _check_process(self, doing: str) -> None:
        if os.getpid() != self._process:
            what = f"{doing}: {self.path} belongs to process {self._process}, not to its forked child {os.getpid()}"
            raise self._error(errno.EBADF, what, "make a Disk in the child")

    def _failure(self, what: str, error: BaseException) -> SwapError:
        if isinstance(error, EOFError):
            fix = "nothing may truncate a swap file while it is in use"
            return self._error(errno.EIO, f"{what}: the file ends before them", fix)
        number = (error.errno if isinstance(error, OSError) else None) or errno.EIO
        return self._error(number, f"{what}: {os.strerror(number)}")

    def _error(self, number: int | None, what: str, fix: str = "") -> SwapError:
        number = number or errno.EIO
        return SwapError(
            number, f"rank {_rank()}: {what}; {fix or _FIXES.get(number, 'name another folder')}"
        )


def _rank() -> str:
    return os.environ.get("RANK", "0")


def _open(path: str) -> tuple[int, bool]:
    """Opens a new file that only this process can reach; returns whether it takes direct I/O, by writing a block."""
    for direct in (getattr(os, "O_DIRECT", 0), 0):
        fd = -1
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | direct, 0o600)
            os.unlink(path)
            _allocate(fd, 0, BLOCK)
            os.pwrite(fd, mmap.mmap(-1, BLOCK), 0)
            return fd, bool(direct)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            with contextlib.suppress(OSError):
                os.unlink(path)  # an open that refuses direct I/O has created the file
            if not direct or error.errno != errno.EINVAL:
                raise
    raise AssertionError("unreachable")


def _whole_blocks(nbytes: int) -> int:
    if nbytes < 0:
        raise ValueError(f"a region of {nbytes} bytes")
    return max(1, -(-nbytes // BLOCK)) * BLOCK


def _free_bytes(fd: int) -> int:
    here = os.fstatvfs(fd)
    # some file systems do not count
    return here.f_bavail * here.f_frsize if here.f_blocks else 2**63


def _allocate(fd: int, offset: int, nbytes: int) -> None:
    """Allocates space; checks first that it is free, so that a failed attempt does not fill the drive."""
    if _free_bytes(fd) < nbytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    try:
        os.posix_fallocate(fd, offset, nbytes)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        os.ftruncate(fd, offset + nbytes)  # a file system that cannot promise space


def _move(write: bool, file: _File, tensor: Tensor, part: range, offset: int, block: int) -> None:
    """Moves some bytes of a tensor, through an aligned copy if direct I/O needs one.

    Raises:
        OSError: a call failed.
        EOFError: the file ends before them.
    """
    address, nbytes = tensor.data_ptr() + part.start, len(part)
    whole = -(-nbytes // block) * block
    memory = memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
    copied = address % block or whole != nbytes
    aligned = memoryview(mmap.mmap(-1, whole)) if copied else memory
    if copied and write:
        aligned[:nbytes] = memory
    _transfer(write, file.fd, aligned, offset, block)
    if copied and not write:
        memory[:] = aligned[:nbytes]


def _transfer(write: bool, fd: int, memory: memoryview, offset: int, block: int) -> None:
    """Moves all of `memory`, in as many calls as it takes: one call may move less than requested."""
    call, moved = os.pwritev if write else os.preadv, 0
    while moved < len(memory):
        try:
            count = call(fd, [memory[moved:]], offset + moved)
        except BlockingIOError:
            continue
        count -= count % block  # a direct transfer can go on only at a block
        if count == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO)) if write else EOFError
        moved += count
