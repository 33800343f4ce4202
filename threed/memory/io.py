"""Reads and writes tensors on a drive asynchronously, by direct I/O.

    disk = Disk("/nvme/swap", "optimizer")
    offset = disk.reserve(values.nbytes)          # allocates space; SwapError if the drive is full
    disk.write(offset, values).wait()
    disk.read(offset, into=values).wait()         # SwapError if not every byte was read
    disk.close()

A Disk is one file with preallocated space. The file is unlinked: it has no name in its folder. Each
transfer is split into pieces, which a few threads transfer concurrently; the threads release the
GIL during system calls. Memory that starts on a page boundary (`threed.memory.pool`) is transferred
directly. Other memory is copied through an aligned buffer. If the size of a tensor is not a
multiple of 4096 bytes, its last bytes are copied, too. Transfers are not ordered: wait for a write
before reading or writing the same region.
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

BLOCK = 4096  # bytes; direct I/O requires this alignment of memory, lengths and offsets
PIECE = 8 * 2**20  # bytes per piece of a transfer
WORKERS = 4  # number of threads that transfer pieces

_FIXES = {
    errno.ENOSPC: "free space there, or name a folder on a larger drive",
    errno.EDQUOT: "raise the quota there, or name another folder",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f), or name a folder whose file system allows larger files",
    errno.EIO: "the drive or its file system failed: check the kernel log, and name another drive",
    errno.EACCES: "make it writable for this user, or name another folder",
    errno.EROFS: "it is read-only: name another folder",
}


class SwapError(OSError):
    """Raised if I/O on a swap file fails.

    The message names the rank, the operation, the offset, the file and a fix.
    """


def _make_folder(folder: str) -> None:
    """Creates a folder if it does not exist, and warns in this case.

    The folder may be missing because its drive is not mounted. The new folder would then be on
    another drive.
    """
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
    """An open file, which is closed once its Disk and all transfers in flight have released it.

    So a Disk that is garbage-collected without `close` need not wait for its threads before the
    file is closed. Such a wait could hang, because garbage collection may run in any thread,
    including a thread that is just being started.
    """

    def __init__(self, fd: int = -1) -> None:
        self.fd = fd

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    __del__ = close


class Transfer:
    """A read or write in flight.

    This object keeps the tensor of the transfer alive. Do not use the tensor until the transfer is
    done.
    """

    def __init__(self, disk: Disk, what: str, pieces: list[Future[None]]) -> None:
        self._disk, self._what, self._pieces = disk, what, pieces

    def done(self) -> bool:
        """Returns whether the transfer has finished, so that `wait` does not block."""
        self._disk._check_process("testing a transfer")
        return all(piece.done() for piece in self._pieces)

    def wait(self) -> None:
        """Waits until every byte has been transferred.

        Raises:
            SwapError: if the transfer failed. Every call of this method then raises the error.
        """
        self._disk._check_process("waiting for a transfer")
        errors = self._errors()
        self._disk._in_flight.discard(self)
        if errors:
            raise self._disk._failure(self._what, errors[0]) from errors[0]

    def _errors(self) -> list[BaseException]:
        """Waits for all pieces of the transfer, and returns the errors of failed pieces."""
        return [error for piece in self._pieces if (error := piece.exception()) is not None]


class Disk:
    """A swap file for the tensors of this process. Its space is reserved in regions.

    The file is unlinked as soon as it is open, so its space on the drive is freed when the process
    ends, even if the process is killed. Threads may share a Disk. A forked child must not use the
    Disk of its parent.

    Args:
        folder: folder on the drive; created with a warning if it does not exist.
        name: prefix of the file name. Error messages contain the file name.

    Attributes:
        path: path that the file had before it was unlinked, for messages.
        direct: whether transfers use direct I/O, which bypasses the page cache. False if the file
            system does not support it.

    Raises:
        SwapError: if the folder or the file cannot be created or written.
    """

    def __init__(self, folder: str | os.PathLike[str], name: str) -> None:
        self.path = os.path.join(folder, f"{name}.rank{_rank()}.{uuid.uuid4().hex[:12]}.swap")
        self._process, self._lock = os.getpid(), threading.Lock()
        self._in_flight: set[Transfer] = set()
        self._size, self._free = 0, dict[int, list[int]]()
        try:
            _make_folder(os.path.abspath(folder))
            fd, self.direct = _open(self.path)
        except OSError as error:
            raise self._error(error.errno, f"cannot create {self.path}: {error.strerror}") from None
        self._file = _File(fd)
        self._threads = ThreadPoolExecutor(WORKERS, thread_name_prefix="threed-io")

    @property
    def _fd(self) -> int:
        return self._file.fd

    def reserve(self, nbytes: int) -> int:
        """Reserves a region and returns its offset.

        Args:
            nbytes: size of the region in bytes; rounded up to a multiple of 4096.

        Raises:
            SwapError: if the drive is full.
        """
        need = _round_up(nbytes)
        # The process is checked before the lock is taken, because a lock that a thread of the
        # parent held during the fork is never released in the child.
        self._check_process("reserving space")
        with self._lock:
            self._check_open("reserving space")
            if self._free.get(need):
                return self._free[need].pop()
            try:
                _allocate(self._fd, self._size, need)
            except OSError as error:
                os.ftruncate(self._fd, self._size)  # frees the part that was allocated
                what = f"cannot reserve {need} bytes beyond the {self._size} of {self.path}: {error.strerror}"
                raise self._error(
                    error.errno, f"{what}; {_free_bytes(self._fd)} bytes are free"
                ) from None
            offset, self._size = self._size, self._size + need
            return offset

    def release(self, offset: int, nbytes: int) -> None:
        """Releases a region; the next `reserve` of the same size reuses it."""
        with self._lock:
            self._free.setdefault(_round_up(nbytes), []).append(offset)

    def read(self, offset: int, into: Tensor) -> Transfer:
        """Starts to read a tensor from the file.

        Args:
            offset: offset in the file, a multiple of 4096.
            into: destination, contiguous and on the CPU, of any dtype.
        """
        return self._begin(False, offset, into)

    def write(self, offset: int, values: Tensor) -> Transfer:
        """Starts to write a tensor to the file, in blocks of 4096 bytes.

        If the tensor does not fill its last block, the rest of the block is filled with zeros.

        Args:
            offset: offset in the file, a multiple of 4096.
            values: contiguous tensor on the CPU, of any dtype.
        """
        return self._begin(True, offset, values)

    def _begin(self, write: bool, offset: int, tensor: Tensor) -> Transfer:
        doing, nbytes = "writing" if write else "reading", tensor.nbytes
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise ValueError(
                f"{doing} needs a contiguous CPU tensor, not one on {tensor.device} of {tensor.stride()}"
            )
        if offset < 0 or offset % BLOCK or offset + nbytes > self._size:
            raise ValueError(
                f"{doing} {nbytes} bytes at {offset}: offsets are multiples of {BLOCK}, and transfers must stay within the "
                f"{self._size} bytes that are reserved"
            )
        self._check_process(doing)
        with self._lock:
            self._check_open(doing)
            self._drop_finished()
            what = f"{doing} {nbytes} bytes at offset {offset} of {self.path} failed"
            transfer = Transfer(self, what, self._submit(write, offset, tensor))
            self._in_flight.add(transfer)
        return transfer

    def _submit(self, write: bool, offset: int, tensor: Tensor) -> list[Future[None]]:
        block, nbytes = BLOCK if self.direct else 1, tensor.nbytes
        aligned = nbytes // block * block  # the bytes after the last full block are another piece
        bounds = [*range(0, aligned, PIECE), aligned, nbytes]
        return [
            self._threads.submit(_move, write, self._file, tensor, range(a, b), offset + a, block)
            for a, b in itertools.pairwise(bounds)
            if b > a
        ]

    def _drop_finished(self) -> None:
        """Drops the references to finished transfers, except failed ones, which `close` reports."""
        for transfer in list(self._in_flight):
            if transfer.done() and not transfer._errors():
                self._in_flight.discard(transfer)

    def close(self) -> None:
        """Waits for transfers in flight, and frees the space of the file.

        Raises:
            SwapError: if a transfer failed and its `wait` has not been called.
        """
        # A forked child inherits the file but not the threads, so it has no transfers to wait for.
        if os.getpid() != self._process:
            self._file.close()
            return
        with self._lock:
            file, self._file = self._file, _File()
        if file.fd < 0:
            return
        self._threads.shutdown()
        file.close()
        for transfer in list(self._in_flight):
            transfer.wait()

    def _check_open(self, doing: str) -> None:
        if self._fd < 0:
            raise self._error(errno.EBADF, f"{doing}: {self.path} is closed", "create a new Disk")

    def _check_process(self, doing: str) -> None:
        if os.getpid() != self._process:
            what = f"{doing}: {self.path} belongs to process {self._process}, not to its forked child {os.getpid()}"
            raise self._error(errno.EBADF, what, "create a Disk in the child")

    def _failure(self, what: str, error: BaseException) -> SwapError:
        if isinstance(error, EOFError):
            fix = "do not truncate swap files of a running process"
            return self._error(errno.EIO, f"{what}: the file ends before the last byte", fix)
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
    """Creates a file and unlinks it.

    Returns:
        (fd, direct): the file descriptor, and whether the file supports direct I/O, which is tested
        by writing one block.
    """
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
                os.unlink(path)  # an open() with O_DIRECT may fail after it has created the file
            if not direct or error.errno != errno.EINVAL:
                raise
    raise AssertionError("unreachable")


def _round_up(nbytes: int) -> int:
    if nbytes < 0:
        raise ValueError(f"a region cannot have {nbytes} bytes")
    return max(1, -(-nbytes // BLOCK)) * BLOCK


def _free_bytes(fd: int) -> int:
    here = os.fstatvfs(fd)
    # some file systems report 0 blocks; their free space is assumed to be unlimited
    return here.f_bavail * here.f_frsize if here.f_blocks else 2**63


def _allocate(fd: int, offset: int, nbytes: int) -> None:
    """Allocates `nbytes` bytes of space in the file, beginning at `offset`.

    First checks that the drive has enough free space, because an allocation that fails could fill
    the drive.

    Raises:
        OSError: if there is not enough space.
    """
    if _free_bytes(fd) < nbytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    try:
        os.posix_fallocate(fd, offset, nbytes)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        os.ftruncate(fd, offset + nbytes)  # the file system does not support fallocate


def _move(write: bool, file: _File, tensor: Tensor, part: range, offset: int, block: int) -> None:
    """Transfers a range of a tensor's bytes, through an aligned buffer if direct I/O requires it.

    Args:
        write: True to write to the file, False to read from it.
        file: the file.
        tensor: contiguous tensor on the CPU.
        part: range of the tensor's bytes to transfer.
        offset: offset in the file, in bytes.
        block: required alignment in bytes; 1 without direct I/O.

    Raises:
        OSError: if a system call fails.
        EOFError: if the file is too short.
    """
    address, nbytes = tensor.data_ptr() + part.start, len(part)
    padded = -(-nbytes // block) * block
    memory = memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
    copied = address % block or padded != nbytes
    aligned = memoryview(mmap.mmap(-1, padded)) if copied else memory
    if copied and write:
        aligned[:nbytes] = memory
    _transfer(write, file.fd, aligned, offset, block)
    if copied and not write:
        memory[:] = aligned[:nbytes]


def _transfer(write: bool, fd: int, memory: memoryview, offset: int, block: int) -> None:
    """Transfers all of `memory`, in several calls if a call moves fewer bytes than requested."""
    call, moved = os.pwritev if write else os.preadv, 0
    while moved < len(memory):
        try:
            count = call(fd, [memory[moved:]], offset + moved)
        except BlockingIOError:
            continue
        count -= count % block  # the next call of direct I/O must begin at a multiple of `block`
        if count == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO)) if write else EOFError
        moved += count
