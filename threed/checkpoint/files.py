"""Writes folders of safetensors files durably, with hashes that detect damaged and truncated files.

    folder = begin(path, mark, "checkpoint", nbytes)     an unfinished folder, path + ".tmp"
    hashes = stream_tensors(folder / name, about, tensors)
    publish(folder, path)                                renames it; replaces an older folder

A safetensors file consists of an 8-byte header length, a JSON header, and the tensors' bytes. This
module does not use the safetensors library, so that it can hash the data while it writes them, keep
only one tensor in memory at a time, and report a full disk immediately. `reading` reads the files.

Each file has two hashes. `tree` is the SHA-256 of the concatenated SHA-256 digests of the file's
8 MiB blocks; threads hash the blocks in parallel. `sum` is the SHA-256 of the concatenated
checksums of the file, two 64-bit checksums per 64 KiB (csrc/cpu/checksum.cpp). `sum` is faster and
detects damage, which is enough for a load. `tree` in a signed manifest also detects forgery.
Without the native library there is no `sum`, and loads compare `tree`.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from io import FileIO
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from threed.core.atomic import sync
from threed.core.disk import ELSEWHERE, why
from threed.core.disk import in_units as in_units
from threed.core.native import function
from threed.core.parse import plain as plain

NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64",
    torch.uint8: "U8",
}  # fmt: skip
DTYPES = {name: dtype for dtype, name in NAMES.items()}
# All dtypes that an export may contain: `NAMES`, and further dtypes that only buffers have.
EXPORTED = NAMES | {
    torch.bool: "BOOL", torch.int8: "I8", torch.int16: "I16", torch.int32: "I32", torch.complex64: "C64",
}  # fmt: skip
About = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]  # (dtype, shape) of each tensor, by name
Metadata = Mapping[str, str]
Parts = Iterable[bytes | Tensor]  # contents of a file: bytes, and uint8 tensors [n] on the CPU
NONE: Metadata = MappingProxyType({})
POLL_S = 0.125  # `write_hashed` calls `hurries` every POLL_S seconds while it waits for the limit.
# BLOCK: bytes of a file that one task hashes. PIECE: bytes that the task reads at a time. CHUNK:
# bytes that `sums` summarizes in two 64-bit checksums.
BLOCK, PIECE, CHUNK = 2**23, 2**20, 2**16


class CheckpointError(RuntimeError):
    """Raised if a checkpoint cannot be written or read; the message names the file and a fix."""


@contextmanager
def reading(place: object, *errors: type[Exception]) -> Iterator[None]:
    """Context manager: turns errors of a read into a CheckpointError that names the place.

    Args:
        place: the file or folder.
        errors: types of the errors. Default: OSError.

    Raises:
        CheckpointError: if the block raises one of these errors.
    """
    expected = errors or (OSError,)
    try:
        yield
    except expected as error:
        raise CheckpointError(f"{place} cannot be read: {plain(error)}") from None


class NotFiniteError(CheckpointError):
    """Raised if a tensor that is saved has NaN or infinite values; the message names it."""


class RunFolderError(RuntimeError):
    """Raised if this run cannot use a run folder; the message has the reason and a fix.

    Every rank raises the same error.
    """


def is_finite(values: Tensor) -> bool:
    """Returns whether all values of a tensor are finite.

    The check allocates no temporary tensor of the size of `values`. If `values` is on a GPU, the
    host waits for the result. Integer tensors and empty tensors count as finite.
    """
    if not values.numel() or not values.is_floating_point():
        return True
    # It is enough to check the minimum and the maximum. Both are NaN if any value is NaN.
    return bool(torch.isfinite(torch.stack(values.detach().aminmax())).all())


# ------------------------------------------------------------------------------------------------------------ hashes


class Hashes(NamedTuple):
    """The hashes of a file, as hexadecimal text.

    Attributes:
        tree: SHA-256 of the concatenated SHA-256 digests of the file's blocks (BLOCK bytes each).
            None for a copy in memory that has a `sum`.
        sum: SHA-256 of the concatenated 64-bit checksums of the file. None without the native
            library.
    """

    tree: str | None
    sum: str | None


@cache
def threads() -> ThreadPoolExecutor:
    """Returns the thread pool in which files are hashed and read. Its tasks release the GIL."""
    return ThreadPoolExecutor(4)


os.register_at_fork(after_in_child=threads.cache_clear)  # threads do not exist in a forked child


def sums(data: bytes | memoryview, instructions: str | None = None) -> bytes:
    """Returns the checksums of each 64 KiB of `data`, or b"" without the native library.

    Args:
        data: bytes to sum, in chunks of 64 KiB; the last chunk may be shorter.
        instructions: instruction set to use; None chooses the fastest that the CPU supports.

    Returns:
        Two uint64 per chunk, as bytes.

    Raises:
        ValueError: if the CPU does not support `instructions`.
    """
    native = function("threed_checksum", "iPqPs")
    if native is None:
        return b""
    given, out = np.frombuffer(data, np.uint8), np.empty(2 * -(-len(data) // CHUNK), np.uint64)
    path = None if instructions is None else instructions.encode()
    if native(given.ctypes.data, len(given), out.ctypes.data, path):
        raise ValueError(f"instruction set {instructions} is not supported by this CPU")
    return out.tobytes()


def start_hashing(block: memoryview, tree: bool) -> Future[tuple[bytes, bytes]]:
    """Starts to hash a block of a file in a background thread.

    Args:
        block: at most BLOCK bytes, which must not change until the result is available.
        tree: whether to compute the SHA-256 in addition to the checksums. The SHA-256 takes about
            ten times as long as the checksums. Without the native library, it is always computed.

    Returns:
        A future of (SHA-256 digest, checksums); the digest is b"" if it was not computed.
    """

    def hashes() -> tuple[bytes, bytes]:
        found = sums(block)
        return hashlib.sha256(block).digest() if tree or not found else b"", found

    return threads().submit(hashes)


def combined(blocks: Sequence[tuple[bytes, bytes]]) -> Hashes:
    """Returns the hashes of a file, given (SHA-256 digest, checksums) of each of its blocks."""
    tree, total = (hashlib.sha256(b"".join(some)).hexdigest() for some in zip(*blocks, strict=True))
    return Hashes(tree if blocks[0][0] else None, total if blocks[0][1] else None)


def tree_hash(path: Path) -> str:
    """Returns the `tree` hash of a file. Raises OSError if the file cannot be read."""
    return _hash_file(path, _sha256)


def checksum(path: Path) -> str | None:
    """Returns the `sum` hash of a file, or None without the native library.

    Raises:
        OSError: if the file cannot be read.
    """
    if function("threed_checksum", "iPqPs") is None:
        return None
    return _hash_file(path, lambda pieces: b"".join(map(sums, pieces)))


def _hash_file(path: Path, of_block: Callable[[Iterator[bytes]], bytes]) -> str:
    starts, digest = range(0, path.stat().st_size, BLOCK), hashlib.sha256()
    for block in threads().map(lambda at: of_block(_pieces(path, at)), starts):
        digest.update(block)
    return digest.hexdigest()


def _pieces(path: Path, at: int) -> Iterator[bytes]:
    """Yields the bytes of a file's block at offset `at`, in pieces that fit into the CPU cache."""
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


# ----------------------------------------------------------------------------------------------------------- writing


def stream_tensors(
    path: Path, about: About, tensors: Iterable[Tensor], metadata: Metadata = NONE, **how: Any
) -> Hashes:
    """Writes a safetensors file from a stream of tensors, and returns its hashes.

    Args:
        path: file to write; an existing file is overwritten.
        about: dtype and shape of each tensor, by name.
        tensors: the tensors in the order of `about`. A tensor may be split along its rows into
            several consecutive tensors.
        metadata: entries of `__metadata__` in the header, text by name.
        how: further keyword arguments for `write_hashed`: `limit`, `hurries` and `durable`.

    Raises:
        OSError: if the file cannot be written.
        ValueError: if the tensors differ from `about`.
    """
    return write_hashed(path, _safetensors(about, tensors, metadata), **how)


def write_hashed(
    path: Path, parts: Parts, limit: float | None = None, hurries: Callable[[], bool] | None = None,
    durable: bool = True,
) -> Hashes:  # fmt: skip
    """Writes a file and returns its hashes.

    Args:
        path: file to write; an existing file is overwritten.
        parts: contents in order: bytes, and uint8 tensors [n] on the CPU.
        limit: maximum rate in bytes per second; None for no limit.
        hurries: callback that returns True once `limit` no longer applies, for example because the
            run stops and waits for this file. Without a callback (None), `limit` always applies.
        durable: whether to flush the file to disk and compute its SHA-256. Use False for files in
            memory: then only the checksum is computed, if the native library is available.

    Raises:
        OSError: if the file cannot be written.
    """
    hashes, began, written = [], time.monotonic(), 0
    with FileIO(str(path), overwriting(path)) as file:
        for block in _blocks(parts):
            hashing = start_hashing(block, tree=durable)
            _write_block(file, block)
            hashes.append(hashing.result())  # waits, because the next block overwrites the buffer
            written += len(block)
            if limit is not None:
                os.fdatasync(file.fileno())
                _wait_until(began + written / limit, hurries)
            # Starts to write dirty pages to disk, and drops clean pages from the page cache.
            if durable and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, written, os.POSIX_FADV_DONTNEED)
        file.truncate()
        if durable:
            _flush(file)
    return combined(hashes)


def overwriting(path: Path) -> str:
    """Returns the mode of `open` that writes a file from its start and does not truncate it.

    An existing file is not truncated, because overwriting the pages of a file in memory (tmpfs) is
    faster than allocating new pages.
    """
    return "r+b" if path.exists() else "wb"


def _blocks(parts: Parts) -> Iterator[memoryview]:
    """Yields the bytes of all parts in blocks of BLOCK bytes; the last block may be shorter.

    All blocks use the same buffer, so each block overwrites the previous one.
    """
    dtype, filled = torch.uint8, 0
    buffer = torch.empty(BLOCK, dtype=dtype)
    for part in parts:
        rest = torch.frombuffer(bytearray(part), dtype=dtype) if isinstance(part, bytes) else part
        while rest.numel():
            some = rest[: BLOCK - filled]
            buffer[filled : filled + len(some)].copy_(some)  # releases the GIL during the copy
            filled, rest = filled + len(some), rest[len(some) :]
            if filled == BLOCK:
                yield buffer.numpy().data
                filled = 0
    if filled:
        yield buffer.numpy().data[:filled]


def _write_block(file: FileIO, block: memoryview) -> None:
    while block:
        block = block[file.write(block) :]


def _flush(file: FileIO) -> None:
    os.fsync(file.fileno())


def _wait_until(end: float, hurries: Callable[[], bool] | None) -> None:
    while not (hurries and hurries()) and (remaining := end - time.monotonic()) > 0:
        time.sleep(min(remaining, POLL_S))


def _safetensors(about: About, tensors: Iterable[Tensor], metadata: Metadata) -> Parts:
    """Yields the bytes of a safetensors file; see `stream_tensors`."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, (dtype, shape) in about.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": EXPORTED[dtype],
            "shape": list(shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    given = (tensor for tensor in tensors if tensor.numel())
    for name, (dtype, shape) in about.items():
        missing = math.prod(shape)
        while missing:
            if (part := next(given, None)) is None:
                what = "fewer, or shorter, than announced"
                raise ValueError(f"the tensors are {what}: {name} is not complete")
            missing -= part.numel()
            if missing < 0 or part.dtype != dtype or part.shape[1:] != shape[1:]:
                what = f"{part.dtype} {tuple(part.shape)}"
                raise ValueError(f"{name} is {what}, announced as {(dtype, shape)}")
            yield part.detach().cpu().contiguous().view(-1).view(torch.uint8)
    if next(given, None) is not None:
        raise ValueError("more tensors than announced")


def cut(sizes: Mapping[Any, int], limit: int) -> list[list[Any]]:
    """Splits tensor names, in order, into groups of tensors for separate files.

    The tensors of a group have at most `limit` bytes in total. A tensor larger than `limit` is
    alone in its group.

    Args:
        sizes: bytes of each tensor, by name.
        limit: maximum bytes per group.
    """
    files: list[list[str]] = [[]]
    used = 0
    for name, size in sizes.items():
        if files[-1] and used + size > limit:
            files.append([])
            used = 0
        files[-1].append(name)
        used += size
    return files


# ----------------------------------------------------------------------------------------------------------- reading


def fill(handle: int, out: memoryview, at: int) -> None:
    """Fills `out` with bytes of an open file.

    Args:
        handle: descriptor of the file.
        out: memory to fill.
        at: offset of the first byte in the file.

    Raises:
        OSError: if the file ends before `out` is full.
    """
    while len(out):
        read = os.preadv(handle, [out], at)
        if not read:
            raise OSError("it ends too early")
        at, out = at + read, out[read:]


# ----------------------------------------------------------------------------------------------------------- folders


_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # values from fcntl.h and linux/fs.h
# Fixes for a full disk other than to free space: for checkpoints of a run, and for new folders.
FIXES = ("lower --checkpoint.keep", ELSEWHERE)
OTHER_FOLDER = ("choose another folder",)


def building_place(path: Path) -> Path:
    """Returns the temporary path, next to `path`, at which the folder is built before `publish`."""
    return path.with_name(path.name + ".tmp")


def begin(path: Path, mark: str, kind: str, nbytes: int, fixes: tuple[str, ...] = FIXES) -> Path:
    """Creates an empty temporary folder, which the caller later renames to `path`.

    Args:
        path: final path of the folder.
        mark: name of a file that every folder of this kind contains.
        kind: kind of folder, such as "checkpoint", for messages.
        nbytes: disk space that the folder will need, in bytes.
        fixes: fixes for a full disk, for the message; see `check_space`.

    Returns:
        The path of the temporary folder.

    Raises:
        CheckpointError: if `path` exists and is not of this kind, or the disk has less than
            `nbytes` free.
        OSError: if the folder cannot be created.
    """
    other = path.exists() and not (path / mark).is_file()
    if other and (not path.is_dir() or any(path.iterdir())):
        fix = "it stays as it is; choose another name"
        raise CheckpointError(f"{path} exists and is not a {kind}: {fix}")
    building = building_place(path)
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    check_space(path.parent, nbytes, kind, fixes)
    return building


@contextmanager
def new_folder(path: Path, mark: str, kind: str, nbytes: int) -> Iterator[Path]:
    """Context manager that creates a temporary folder for `path`, and yields the folder's path.

    The code in the `with` statement must rename the finished folder to `path`. If the temporary
    folder still exists at the end of the statement, for example after an error, it is removed. See
    `begin` for the arguments.

    Raises:
        CheckpointError: if `begin` raises it, or if the code in the `with` statement raises
            OSError.
    """
    try:
        yield begin(path, mark, kind, nbytes, OTHER_FOLDER)
    except OSError as error:
        # Removes the unfinished folder before `why` measures the free disk space.
        shutil.rmtree(building_place(path), ignore_errors=True)
        reason = why(error, path.parent, nbytes, OTHER_FOLDER[-1])
        raise CheckpointError(f"could not write {path}: {reason}") from error
    finally:
        shutil.rmtree(building_place(path), ignore_errors=True)


def check_space(
    folder: Path, needed: int, kind: str = "checkpoint", fixes: tuple[str, ...] = FIXES
) -> None:
    """Raises CheckpointError if the disk of `folder` has less than `needed` bytes free.

    Args:
        folder: existing folder on the disk.
        needed: required free space in bytes.
        kind: kind of folder that will be written, for the message.
        fixes: fixes other than to free space, for the message; the last one is to write elsewhere.
    """
    disk = shutil.disk_usage(folder)
    if disk.total == 0:
        raise CheckpointError(f"{folder} is on no disk: {fixes[-1]}")
    if disk.free < needed:
        free = f"{in_units(disk.free)} are free at {folder}"
        fix = f"{', '.join(['free some space', *fixes[:-1]])}, or {fixes[-1]}"
        raise CheckpointError(f"disk full: a {kind} needs {in_units(needed)}, {free}: {fix}")


def write_text(path: Path, text: str) -> None:
    """Writes and flushes a small file in a folder that is not published yet."""
    path.write_text(text, encoding="utf-8")
    sync(path)


def publish(building: Path, path: Path) -> None:
    """Renames a finished folder to its final name; replaces an existing folder with that name.

    The rename is flushed to disk. If the system can exchange two names atomically, `path` is a
    complete folder at every moment, even while an existing folder is being replaced.

    Args:
        building: the finished folder.
        path: the final name.

    Raises:
        OSError: if renaming fails.
    """
    sync(building)
    if not path.exists():
        building.rename(path)
    elif _swap(building, path):
        shutil.rmtree(building, ignore_errors=True)
    else:
        old = path.with_name(path.name + ".old")
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
        building.rename(path)
        shutil.rmtree(old, ignore_errors=True)
    sync(path.parent)


def _swap(a: Path, b: Path) -> bool:
    """Exchanges two names with Linux's renameat2(2); returns False if it is not supported."""
    call = getattr(ctypes.CDLL(None), "renameat2", None)
    return (
        call is not None
        and call(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0
    )
