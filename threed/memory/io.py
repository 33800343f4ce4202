"""Asynchronous reads and writes of tensors on a drive: one unlinked, preallocated file a process, by direct I/O.

    disk = Disk("/nvme/swap", "optimizer")
    offset = disk.reserve(values.nbytes)          # space on the drive, or an error now rather than in the middle
    disk.write(offset, values).wait()
    disk.read(offset, into=values).wait()         # SwapError unless every byte arrived
    disk.close()

A transfer of any length, from any memory, is cut into pieces that run concurrently: by io_uring if the kernel allows it
and the native library is built, else by a few threads. Memory that starts on a page (`threed.memory.pool`) goes straight
to the drive; other memory, and the bytes beyond the last multiple of 4096, pass through an aligned copy in a thread.
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
from typing import Protocol

from torch import Tensor

from threed import native

BLOCK = 4096  # the alignment of memory, lengths and offsets in direct I/O
PIECE = 8 * 2**20  # bytes in one request to the kernel
WORKERS = 4  # threads that move pieces
DEPTH = 16  # pieces in io_uring at once
SHORT = -5000  # the result of a read past the end of the file; below every -errno
BACKENDS = ("auto", "io_uring", "threads")

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


class Backend(Protocol):
    """Moves bytes: `submit` returns a transfer's id; `wait`, once for each id, the bytes moved, -errno or SHORT."""

    name: str

    def submit(
        self, write: bool, fd: int, address: int, nbytes: int, offset: int, block: int
    ) -> int: ...
    def wait(self, number: int) -> int: ...
    def done(self, number: int) -> bool: ...
    def close(self) -> None: ...


class Transfer:
    """A read or a write in flight; it keeps its tensor alive, which must not be touched until it is done."""

    def __init__(self, disk: Disk, write: bool, offset: int, tensor: Tensor, number: int) -> None:
        self._disk, self._write, self._offset, self._nbytes = disk, write, offset, tensor.nbytes
        self._tensor: Tensor | None = tensor
        self._number, self._result = number, None if tensor.nbytes else 0
        self._lock = threading.Lock()

    def done(self) -> bool:
        """Returns whether wait() would return, or raise, at once."""
        self._disk._check_process("testing a transfer")
        if not self._lock.acquire(blocking=False):  # another thread is waiting for it
            return False
        try:
            return self._result is not None or self._disk._engine.done(self._number)
        finally:
            self._lock.release()

    def wait(self) -> None:
        """Waits until every byte has moved; raises SwapError, at every call, if that failed."""
        self._disk._check_process("waiting for a transfer")
        result = self._finish()
        self._disk._under_way.pop(self._number, None)
        if result != self._nbytes:
            raise self._disk._failure(
                "writing" if self._write else "reading", self._nbytes, self._offset, result
            )

    def _finish(self) -> int:
        with self._lock:
            if self._result is None:
                self._result = self._disk._engine.wait(self._number)
                self._tensor = None
            return self._result


class Disk:
    """One file in `folder` for the tensors of this process; space in it is reserved region by region.

    The file has no name once it is open: its space returns to the drive when the process ends, however it ends.
    `backend`: auto, io_uring or threads; `disk.backend` is the one chosen, and `disk.direct` says if transfers bypass
    the page cache. Threads may share a Disk; a forked child may not use its parent's.

    Raises:
        SwapError: the folder cannot be made or written; io_uring is requested and the kernel refuses it.
    """

    _fd = -1  # until it is open, and after it is closed

    def __init__(self, folder: str | os.PathLike[str], name: str, *, backend: str = "auto") -> None:
        if backend not in BACKENDS:
            raise ValueError(f"backend {backend!r} is none of {', '.join(BACKENDS)}")
        self.path = os.path.join(folder, f"{name}.rank{_rank()}.{uuid.uuid4().hex[:12]}.swap")
        self._process, self._lock = os.getpid(), threading.Lock()
        self._under_way: dict[int, Transfer] = {}
        self._size, self._free = 0, dict[int, list[int]]()
        try:
            _make_folder(os.path.abspath(folder))
            self._fd, self.direct = _open(self.path)
        except OSError as error:
            raise self._error(error.errno, f"cannot make {self.path}: {error.strerror}") from None
        try:
            self._engine = _engine(backend, self._fd, self.direct)
        except OSError as error:
            os.close(self._fd)
            self._fd = -1
            fix = "use backend 'auto', which takes threads where the kernel blocks io_uring"
            raise self._error(
                error.errno, f"backend {backend!r} for {self.path}: {error.strerror}", fix
            ) from None
        self.backend = self._engine.name

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
        if nbytes == 0:
            return Transfer(self, write, offset, tensor, 0)
        self._check_process(doing)
        with self._lock:
            self._check_open(doing)
            self._forget_finished()
            block = BLOCK if self.direct else 1
            number = self._engine.submit(write, self._fd, tensor.data_ptr(), nbytes, offset, block)
            if number < 0:
                raise self._failure(doing, nbytes, offset, number)
            transfer = self._under_way[number] = Transfer(self, write, offset, tensor, number)
        return transfer

    def _forget_finished(self) -> None:
        """Drops finished transfers; those that failed stay, for close() to report."""
        for number, transfer in list(self._under_way.items()):
            if transfer.done() and transfer._finish() == transfer._nbytes:
                self._under_way.pop(number, None)

    def close(self) -> None:
        """Waits for transfers in flight and frees the file's space; SwapError if a transfer failed unnoticed."""
        if os.getpid() != self._process:  # a forked child has the file, but not the threads
            if self._fd >= 0:
                os.close(self._fd)
            self._fd = -1
            return
        with self._lock:
            fd, self._fd = self._fd, -1
        if fd < 0:
            return
        for transfer in list(self._under_way.values()):
            transfer._finish()
        self._engine.close()
        os.close(fd)
        for transfer in list(self._under_way.values()):
            transfer.wait()

    def __del__(
        self,
    ) -> None:  # before its transfers' tensors are freed: the engine may still write into them
        if self._fd >= 0:
            self.close()

    def _check_open(self, doing: str) -> None:
        if self._fd < 0:
            raise self._error(errno.EBADF, f"{doing}: {self.path} is closed", "make a new Disk")

    def _check_process(self, doing: str) -> None:
        if os.getpid() != self._process:
            what = f"{doing}: {self.path} belongs to process {self._process}, not to its forked child {os.getpid()}"
            raise self._error(errno.EBADF, what, "make a Disk in the child")

    def _failure(self, doing: str, nbytes: int, offset: int, result: int) -> SwapError:
        what = f"{doing} {nbytes} bytes at offset {offset} of {self.path} failed"
        if result == SHORT:
            what += ": the file ends before them"
            return self._error(
                errno.EIO, what, "nothing may truncate a swap file while it is in use"
            )
        return self._error(-result, f"{what}: {os.strerror(-result)}")

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


def _engine(backend: str, fd: int, direct: bool) -> Backend:
    """Returns the requested engine, or the best that runs here."""
    # Buffered reads are copies, which one ring would run one after another: threads are faster for them.
    if backend == "threads" or (backend == "auto" and not direct):
        return Threads()
    try:
        return IoUring(fd)
    except OSError:
        if backend == "io_uring":
            raise
        return Threads()


class IoUring:
    """The ring of csrc/cpu/io.cpp for whole aligned blocks, and threads for the rest. OSError if it does not run here."""

    name = "io_uring"

    def __init__(self, fd: int) -> None:
        if native.library("cpu") is None:
            what = "the native library is not built (see threed.native.status)"
            raise OSError(errno.ENOSYS, what)
        types = {"open": "PiiqP", "submit": "qPiiPqqq", "wait": "qPq", "done": "iPq", "close": "vP"}
        self._call = {
            name: native.function(f"threed_io_{name}", letters) for name, letters in types.items()
        }
        error = ctypes.c_int(0)
        self._ring = self._call["open"](fd, DEPTH, PIECE, ctypes.byref(error))
        if not self._ring:
            raise OSError(-error.value, os.strerror(-error.value))
        self._threads = Threads()
        self._parts: dict[int, tuple[int, int]] = {}  # ids in the ring and of the threads; 0: none
        self._numbers = itertools.count(1)

    def submit(
        self, write: bool, fd: int, address: int, nbytes: int, offset: int, block: int
    ) -> int:
        whole = nbytes // block * block if address % block == 0 else 0
        place = (address + whole, nbytes - whole, offset + whole)
        rest = self._threads.submit(write, fd, *place, block) if whole < nbytes else 0
        call = self._call["submit"]
        ring = call(self._ring, write, fd, address, whole, offset, block) if whole else 0
        if ring < 0:
            if rest:
                self._threads.wait(rest)
            return int(ring)
        number = next(self._numbers)
        self._parts[number] = ring, rest
        return number

    def wait(self, number: int) -> int:
        ring, rest = self._parts[number]
        results = [int(self._call["wait"](self._ring, ring))] if ring else []
        results += [self._threads.wait(rest)] if rest else []
        del self._parts[number]
        return min(results) if min(results) < 0 else sum(results)

    def done(self, number: int) -> bool:
        ring, rest = self._parts.get(number, (0, 0))
        ring_done = not ring or self._ring is None or bool(self._call["done"](self._ring, ring))
        return ring_done and (not rest or self._threads.done(rest))

    def close(self) -> None:
        ring, self._ring = self._ring, None
        self._call["close"](ring)
        self._threads.close()


class Threads:
    """Threads that move pieces; reads and writes release the interpreter's lock."""

    name = "threads"

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(WORKERS, thread_name_prefix="threed-io")
        self._pieces: dict[int, list[Future[int]]] = {}
        self._numbers = itertools.count(1)

    def submit(
        self, write: bool, fd: int, address: int, nbytes: int, offset: int, block: int
    ) -> int:
        number = next(self._numbers)
        whole = nbytes // block * block  # the tail beyond is a piece of its own
        cuts = [*range(0, whole, PIECE), whole, nbytes]
        self._pieces[number] = [
            self._threads.submit(_move, write, fd, address + a, b - a, offset + a, block)
            for a, b in itertools.pairwise(cuts)
            if b > a
        ]
        return number

    def wait(self, number: int) -> int:
        results = [piece.result() for piece in self._pieces[number]]
        del self._pieces[number]
        return min(results) if min(results) < 0 else sum(results)

    def done(self, number: int) -> bool:
        return all(piece.done() for piece in self._pieces.get(number, ()))

    def close(self) -> None:
        self._threads.shutdown()


def _move(write: bool, fd: int, address: int, nbytes: int, offset: int, block: int) -> int:
    """Moves one piece, through an aligned copy if direct I/O needs one; returns `nbytes`, -errno or SHORT."""
    whole = -(-nbytes // block) * block
    memory = memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
    copied = address % block or whole != nbytes
    aligned = memoryview(mmap.mmap(-1, whole)) if copied else memory
    if copied and write:
        aligned[:nbytes] = memory
    result = _transfer(write, fd, aligned, offset, block)
    if copied and not write and result == whole:
        memory[:] = aligned[:nbytes]
    return nbytes if result == whole else result


def _transfer(write: bool, fd: int, memory: memoryview, offset: int, block: int) -> int:
    """Moves all of `memory`, in as many calls as it takes: one call may move less than requested."""
    call, moved = os.pwritev if write else os.preadv, 0
    while moved < len(memory):
        try:
            count = call(fd, [memory[moved:]], offset + moved)
        except BlockingIOError:
            continue
        except OSError as error:
            return -(error.errno or errno.EIO)
        count -= count % block  # a direct transfer can go on only at a block
        if count == 0:
            return -errno.EIO if write else SHORT
        moved += count
    return moved
