"""The hashes of a file of tensors: a sha256 that anybody can rely on, and a checksum that is as fast as memory.

    hashing = Hashing(); hashing.update(data); hashing.settle(); hashing.result()      while a file is written
    tree_hash(path), checksum(path, look)                                              of a file that is there

`tree`: the sha256 of the sha256 of each 8 MiB, so that threads share the work. `sum`: the sha256 of two 64-bit sums of
each 64 KiB (csrc/cpu/checksum.cpp). The latter finds damage, which is what a load looks for; a tree that is part of a
signed manifest finds forgery too. Without the native library there is no sum, and the tree is looked at.

Who needs the bytes of a file beside its hash passes `look`: threads call it with every piece while that is in a cache.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from threed.native import function

BLOCK, READ, PIECE, CHUNK = (
    2**23,
    2**22,
    2**20,
    2**16,
)  # bytes of a thread, read and looked at at a time, of a sum
READERS = 4  # threads that read past the page cache, where they wait for the drive
AHEAD = 4  # blocks that are hashed while more are written
Look = Callable[
    [int, memoryview], None
]  # first byte in its file, bytes; they are valid during the call


class Hashes(NamedTuple):
    """tree, sum: in hex; sum is None where there is no native library. Of copies in memory there is a sum alone."""

    tree: str | None
    sum: str | None


@cache
def threads() -> ThreadPoolExecutor:
    """Threads for what needs no interpreter: hashing and reading."""
    return ThreadPoolExecutor(workers())


def workers() -> int:
    """Returns how many of them there are."""
    return min(4, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2)


os.register_at_fork(after_in_child=threads.cache_clear)  # threads do not survive a fork


def sums(data: bytes | memoryview, instructions: str | None = None) -> bytes:
    """Returns the sums of each 64 KiB of some bytes, the last of which may be fewer; nothing without the library."""
    native = function("threed_checksum", "iPqPs")
    if native is None:
        return b""
    given, out = np.frombuffer(data, np.uint8), np.empty(2 * -(-len(data) // CHUNK), np.uint64)
    path = None if instructions is None else instructions.encode()
    if native(given.ctypes.data, len(given), out.ctypes.data, path):
        raise ValueError(f"no {instructions} here")
    return out.tobytes()


def _both(data: memoryview) -> tuple[bytes, bytes]:
    return hashlib.sha256(data).digest(), sums(data)


class Hashing:
    """The hashes of a stream, whose blocks are hashed by threads: what was given must stay until `settle`."""

    def __init__(self) -> None:
        self._blocks: list[Future[tuple[bytes, bytes]]] = []
        self._borrowed: list[Future[tuple[bytes, bytes]]] = []
        self._copies: deque[tuple[Future[tuple[bytes, bytes]], memoryview]] = (
            deque()
        )  # of what came in parts
        self._open, self._filled = memoryview(b""), 0

    def update(self, data: bytes | memoryview) -> None:
        """Adds bytes."""
        rest = memoryview(data)
        while len(rest):
            if not self._filled and len(rest) >= BLOCK:
                self._borrowed.append(self._begin(rest[:BLOCK]))
                rest = rest[BLOCK:]
                continue
            if not self._filled:
                self._open = self._buffer()
            some, rest = rest[: BLOCK - self._filled], rest[BLOCK - self._filled :]
            self._open[self._filled : self._filled + len(some)] = some
            self._filled += len(some)
            if self._filled == BLOCK:
                self._close()

    def _buffer(self) -> memoryview:
        """Returns memory for a block; that of an earlier one where enough are on their way."""
        if len(self._copies) < AHEAD:
            return memoryview(bytearray(BLOCK))
        future, buffer = self._copies.popleft()
        future.result()
        return buffer

    def _close(self) -> None:
        self._copies.append((self._begin(self._open[: self._filled]), self._open))
        self._filled = 0

    def _begin(self, data: memoryview) -> Future[tuple[bytes, bytes]]:
        self._blocks.append(threads().submit(_both, data))
        return self._blocks[-1]

    def add(self, block: memoryview) -> Future[tuple[bytes, bytes]]:
        """Adds a whole block, or the last one, instead of `update`: it must stay until what this returns is done."""
        return self._begin(block)

    def settle(self) -> None:
        """Waits until nothing of what was given is needed any more."""
        while self._borrowed:
            self._borrowed.pop().result()

    def result(self) -> Hashes:
        """Returns the hashes of all that was given."""
        if self._filled:
            self._close()
        pairs = [block.result() for block in self._blocks]
        tree, total = (
            hashlib.sha256(b"".join(some)).hexdigest() for some in zip(*pairs, strict=True)
        )
        return Hashes(tree, total if pairs[0][1] else None)


# ------------------------------------------------------------------------------------------------------------- files


def tree_hash(path: Path, look: Look | None = None, direct: bool = False) -> str:
    """Returns the tree of a file. direct: past the page cache, unless it is there. OSError if it cannot be read."""
    return _of_file(path, lambda pieces: _sha256(pieces), look, direct)


def checksum(path: Path, look: Look | None = None, direct: bool = False) -> str | None:
    """Returns the sum of a file, likewise; None without the native library."""
    if function("threed_checksum", "iPqPs") is None:
        return None
    return _of_file(path, lambda pieces: b"".join(map(sums, pieces)), look, direct)


def _of_file(
    path: Path, of_block: Callable[[Iterator[memoryview]], bytes], look: Look | None, direct: bool
) -> str:
    digest, own = hashlib.sha256(), threading.local()
    with (
        _Opened(path, direct) as file,
        ThreadPoolExecutor(READERS if file.direct >= 0 else workers()) as pool,
    ):
        for block in pool.map(
            lambda at: of_block(_pieces(file, at, look, own)), range(0, file.size, BLOCK)
        ):
            digest.update(block)
    return digest.hexdigest()


class _Opened:
    """A file that is open to be read: past the page cache if `direct`, where the file system has that."""

    def __init__(self, path: Path, direct: bool) -> None:
        self.direct, flags = -1, os.O_RDONLY | os.O_CLOEXEC
        self.handle = os.open(path, flags)
        self.size = os.fstat(self.handle).st_size
        if direct and self.size and hasattr(os, "O_DIRECT") and hasattr(_libc(), "mincore"):
            with suppress(OSError):
                self.direct = os.open(path, flags | os.O_DIRECT)

    def __enter__(self) -> _Opened:
        return self

    def __exit__(self, *about: object) -> None:
        for handle in (self.handle, self.direct):
            if handle >= 0:
                os.close(handle)

    def fill(self, piece: memoryview, at: int) -> int:
        """Reads as much of a piece as there is, from a multiple of READ on; returns the number of bytes."""
        filled = 0
        if self.direct >= 0 and not self._is_cached(at, min(len(piece), self.size - at)):
            with suppress(OSError):  # the other way says what is wrong, if anything is
                filled = os.preadv(self.direct, [piece], at)
        while filled < len(piece) and (
            read := os.preadv(self.handle, [piece[filled:]], at + filled)
        ):
            filled += read
        return filled

    def _is_cached(self, at: int, nbytes: int) -> bool:
        """Whether all of these bytes are in the page cache."""
        with mmap.mmap(self.handle, nbytes, prot=mmap.PROT_READ, offset=at) as window:
            pages = np.zeros(-(-nbytes // mmap.PAGESIZE), np.uint8)
            address = np.frombuffer(window, np.uint8).ctypes.data
            failed = _libc().mincore(
                ctypes.c_void_p(address),
                ctypes.c_size_t(nbytes),
                ctypes.c_void_p(pages.ctypes.data),
            )
        return not failed and bool((pages & 1).all())


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _pieces(
    file: _Opened, at: int, look: Look | None, own: threading.local
) -> Iterator[memoryview]:
    """Yields the bytes of a block, in pieces that are in the processor's caches. own: has the memory of each thread."""
    if not hasattr(own, "memory"):
        own.memory = memoryview(mmap.mmap(-1, READ))  # begins with a page, as direct I/O wants it
    memory, end = own.memory, min(at + BLOCK, file.size)
    for begin in range(at, end, READ):
        filled = file.fill(memory, begin)
        for first in range(0, min(filled, end - begin), PIECE):
            piece = memory[first : min(first + PIECE, filled, end - begin)]
            if look is not None:
                look(begin + first, piece)
            yield piece
        if filled < READ:
            return


def _sha256(pieces: Iterator[memoryview]) -> bytes:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.digest()
