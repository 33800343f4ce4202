"""The hashes of a file of tensors: a sha256 that anybody can rely on, and a checksum that is as fast as memory.

    work = start_hashing(block, tree=True); ...; combined([work.result(), ...])      while a file is written
    tree_hash(path), checksum(path)                                                  of a file on the disk

`tree`: the sha256 of the sha256 of each 8 MiB, so that threads share the work. `sum`: the sha256 of two 64-bit sums of
each 64 KiB (csrc/cpu/checksum.cpp). The latter finds damage, which is what a load looks for; a tree that is part of a
signed manifest finds forgery too. Without the native library there is no sum, and loads compare the tree.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from threed.native import function

BLOCK, PIECE, CHUNK = 2**23, 2**20, 2**16  # bytes per thread, per read, and per sum


class Hashes(NamedTuple):
    """The hashes of a file, in hex.

    Attributes:
        tree: None for a copy in memory that has a sum.
        sum: None without the native library.
    """

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


def start_hashing(block: memoryview, tree: bool) -> Future[tuple[bytes, bytes]]:
    """Starts to hash BLOCK bytes, or fewer at the end of a file, in a thread.

    Args:
        block: Must not change until the result is there.
        tree: Whether to compute the sha256 if there is a sum, which takes a tenth of the time.
    """

    def hashes() -> tuple[bytes, bytes]:
        found = sums(block)
        return hashlib.sha256(block).digest() if tree or not found else b"", found

    return threads().submit(hashes)


def combined(blocks: Sequence[tuple[bytes, bytes]]) -> Hashes:
    """Returns the hashes of a file from those of its blocks."""
    tree, total = (hashlib.sha256(b"".join(some)).hexdigest() for some in zip(*blocks, strict=True))
    return Hashes(tree if blocks[0][0] else None, total if blocks[0][1] else None)


# ------------------------------------------------------------------------------------------------------------- files


def tree_hash(path: Path) -> str:
    """Returns the tree of a file. OSError if it cannot be read."""
    return _of_file(path, _sha256)


def checksum(path: Path) -> str | None:
    """Returns the sum of a file, or None without the native library. OSError if it cannot be read."""
    if function("threed_checksum", "iPqPs") is None:
        return None
    return _of_file(path, lambda pieces: b"".join(map(sums, pieces)))


def _of_file(path: Path, of_block: Callable[[Iterator[bytes]], bytes]) -> str:
    starts, digest = range(0, path.stat().st_size, BLOCK), hashlib.sha256()
    for block in threads().map(lambda at: of_block(_pieces(path, at)), starts):
        digest.update(block)
    return digest.hexdigest()


def _pieces(path: Path, at: int) -> Iterator[bytes]:
    """Yields the bytes of the block at `at`, in pieces that fit into a cache of the processor."""
    with path.open("rb") as file:
        file.seek(at)
        for _ in range(BLOCK // PIECE):
            if piece := file.read(PIECE):
                yield piece


def _sha256(pieces: Iterator[bytes]) -> bytes:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.digest()
