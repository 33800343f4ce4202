"""Files of tensors: written as a stream with their hash, durable; a partial file is always detected.

    hashes = stream_tensors(path, about, tensors)
    with TensorFile(path) as file: file.read("weight", 0, out)

The format is safetensors (an 8-byte length, a JSON header, the bytes), written here rather than by the library so that
the hash is computed meanwhile, one tensor is in memory at a time, and a full disk is an error at once; and read here so
that values go straight to where they belong, by plain reads, whose errors are exceptions.

A file has two hashes. `tree` is the sha256 of the sha256 of each 8 MiB, so that threads share the work. `sum` is the
sha256 of two 64-bit sums of each 64 KiB (csrc/cpu/checksum.cpp). The latter finds damage, which is what a load looks
for; a tree that is part of a signed manifest finds forgery too. Without the native library there is no sum, and loads
compare the tree.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import cache
from io import FileIO
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from threed.atomic import building_place
from threed.disk import in_units as in_units
from threed.disk import why
from threed.native import function
from threed.parse import plain as plain

NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64",
    torch.uint8: "U8",
}  # fmt: skip
DTYPES = {name: dtype for dtype, name in NAMES.items()}
MOST_HEADER = 10**8  # bytes, as the library has it
About = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]  # dtype and shape, by name
Metadata = Mapping[str, str]
Parts = Iterable[bytes | Tensor]  # of a file; tensors are uint8 [n], on the CPU
NONE: Metadata = MappingProxyType({})
POLL_S = 0.125  # between calls of `hurries`
BLOCK, PIECE, CHUNK = 2**23, 2**20, 2**16  # bytes per thread, per read, and per sum


def never() -> bool:
    """Returns False."""
    return False


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read, with the file and what to do."""


class NotFiniteError(CheckpointError):
    """A tensor with values that are infinite or not a number, by its name."""


class RunFolderError(RuntimeError):
    """A run folder that this run cannot have, with the reason and what to do; the same on every rank."""


def is_finite(values: Tensor) -> bool:
    """Whether all values of a tensor are finite; the host waits for it. No memory of its size is taken."""
    if not values.numel() or not values.is_floating_point():
        return True
    return bool(torch.isfinite(torch.stack(values.detach().aminmax())).all())  # both pass NaN on


# ------------------------------------------------------------------------------------------------------------ hashes


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
    return ThreadPoolExecutor(4)


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


# ----------------------------------------------------------------------------------------------------------- writing


def stream_tensors(
    path: Path, about: About, tensors: Iterable[Tensor], metadata: Metadata = NONE, **how: Any
) -> Hashes:
    """Writes a safetensors file from a stream of tensors; returns its hashes.

    Args:
        path: The file; an existing one is overwritten.
        about: Dtype and shape of each tensor, by name. A tensor may come in several parts, by rows.
        tensors: The tensors or their parts, in the order of `about`.
        metadata: Text by name.
        how: See `write_hashed`.

    Raises:
        OSError: If the file cannot be written.
        ValueError: If the tensors differ from `about`.
    """
    return write_hashed(path, _safetensors(about, tensors, metadata), **how)


def write_hashed(
    path: Path, parts: Parts, limit: float | None = None, hurries: Callable[[], bool] = never,
    durable: bool = True,
) -> Hashes:  # fmt: skip
    """Writes a new file and returns its hashes. OSError if it cannot be written.

    Args:
        path: the file; an existing one is overwritten.
        parts: bytes, and uint8 tensors [n] on the CPU, one after the other.
        limit: bytes per second, at most; None for no limit.
        hurries: returns whether the limit has ended, because a run that is to stop waits for this file.
        durable: whether to flush the file to the disk, and to compute its SHA-256; False for a
            file in memory.
    """
    hashes, began, written = [], time.monotonic(), 0
    with FileIO(str(path), overwriting(path)) as file:
        for block in _blocks(parts):
            hashing = start_hashing(block, tree=durable)
            _write_block(file, block)
            hashes.append(hashing.result())  # the memory of a block is used again
            written += len(block)
            if limit is not None:
                os.fdatasync(file.fileno())
                _wait_until(began + written / limit, hurries)
            # starts to write them back, and frees clean pages
            if durable and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, written, os.POSIX_FADV_DONTNEED)
        file.truncate()
        if durable:
            _flush(file)
    return combined(hashes)


def overwriting(path: Path) -> str:
    """Returns the mode that opens a file to be written from its start, without truncating it.

    In memory, pages take longer to allocate than to write.
    """
    return "r+b" if path.exists() else "wb"


def _blocks(parts: Parts) -> Iterator[memoryview]:
    """Yields the bytes of all parts in blocks, each of which is valid until the next one."""
    dtype, filled = torch.uint8, 0
    buffer = torch.empty(BLOCK, dtype=dtype)
    for part in parts:
        rest = torch.frombuffer(bytearray(part), dtype=dtype) if isinstance(part, bytes) else part
        while rest.numel():
            some = rest[: BLOCK - filled]
            buffer[filled : filled + len(some)].copy_(some)  # releases the interpreter's lock
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


def _wait_until(end: float, hurries: Callable[[], bool]) -> None:
    while not hurries() and (left := end - time.monotonic()) > 0:
        time.sleep(min(left, POLL_S))


def _safetensors(about: About, tensors: Iterable[Tensor], metadata: Metadata) -> Parts:
    """Yields the bytes of a safetensors file; see `stream_tensors`."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, (dtype, shape) in about.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    given = (tensor for tensor in tensors if tensor.numel())
    for name, (dtype, shape) in about.items():
        left = math.prod(shape)
        while left:
            if (part := next(given, None)) is None:
                what = "fewer, or shorter, than announced"
                raise ValueError(f"the tensors are {what}: {name} is not complete")
            left -= part.numel()
            if left < 0 or part.dtype != dtype or part.shape[1:] != shape[1:]:
                what = f"{part.dtype} {tuple(part.shape)}"
                raise ValueError(f"{name} is {what}, announced as {(dtype, shape)}")
            yield part.detach().cpu().contiguous().view(-1).view(torch.uint8)
    if next(given, None) is not None:
        raise ValueError("more tensors than announced")


def cut(sizes: Mapping[Any, int], limit: int) -> list[list[Any]]:
    """Returns names in order, cut into files of at most `limit` bytes; what is larger has a file of its own."""
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


class TensorFile:
    """A safetensors file that is open to be read. CheckpointError where it is none.

    tensors: dtype (as the format has it), shape, and the first byte of each, by name. metadata: text by name.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._handle = path, -1
        try:
            self._handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            size = os.fstat(self._handle).st_size
            length = int.from_bytes(os.pread(self._handle, 8, 0), "little")
            if not 2 <= length <= min(size - 8, MOST_HEADER):
                raise ValueError("its header is longer than it")
            header = json.loads(os.pread(self._handle, length, 8).decode())
            self.metadata, self.tensors = _understood(header, 8 + length, size)
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            RecursionError,
            MemoryError,
        ) as error:
            self.close()
            raise CheckpointError(f"{path} cannot be read: {plain(error)}") from None

    def read(self, name: str, first: int, out: Tensor) -> None:
        """Fills `out` [n], contiguous and on the CPU, from the elements of a tensor from `first` on, of its dtype."""
        dtype, _, begin = self.tensors[name]
        at, rest = begin + first * DTYPES[dtype].itemsize, out.view(torch.uint8).numpy().data
        starts = range(0, len(rest), BLOCK)
        try:
            if len(starts) > 1:
                blocks = [(rest[start : start + BLOCK], at + start) for start in starts]
                work = [threads().submit(fill, self._handle, *block) for block in blocks]
                # after an error too: no thread may still write into `out` after the return
                wait(work)
                for one in work:
                    one.result()
            else:
                fill(self._handle, rest, at)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {plain(error)}") from None

    def tensor(self, name: str) -> Tensor:
        """Returns a whole tensor."""
        dtype, shape, _ = self.tensors[name]
        out = torch.empty(shape, dtype=DTYPES[dtype])
        self.read(name, 0, out.view(-1))
        return out

    def close(self) -> None:
        """Closes the file."""
        if self._handle >= 0:
            os.close(self._handle)
        self._handle = -1

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def fill(handle: int, out: memoryview, at: int) -> None:
    """Reads bytes of an open file, from `at` on; OSError where it ends before `out` is full."""
    while len(out):
        read = os.preadv(handle, [out], at)
        if not read:
            raise OSError("it ends too early")
        at, out = at + read, out[read:]


def _understood(
    header: Any, begin: int, size: int
) -> tuple[dict[str, str], dict[str, tuple[str, list[int], int]]]:
    """Returns metadata and tensors of a header; ValueError and others unless the tensors fill the file exactly."""
    metadata, found = dict(header.pop("__metadata__", {})), {}
    for name, about in header.items():
        (first, last), shape = about["data_offsets"], list(about["shape"])
        if not all(type(n) is int and n >= 0 for n in (first, last, *shape)) or len(shape) > 64:
            raise ValueError(f"{name} has no valid place or shape")
        if last - first != math.prod(shape) * DTYPES[about["dtype"]].itemsize:
            raise ValueError(f"{name} has {last - first} bytes, which is not its size")
        found[name] = (about["dtype"], shape, begin + first, begin + last)
    end = begin
    for _, _, first, last in sorted(found.values(), key=lambda place: place[2:]):
        if first != end:
            raise ValueError("its tensors overlap, or leave a gap")
        end = last
    if end != size:
        raise ValueError(f"its tensors end at {end}, and it has {size} bytes")
    return metadata, {
        name: (dtype, shape, first) for name, (dtype, shape, first, _) in found.items()
    }


# ----------------------------------------------------------------------------------------------------------- folders


def begin(path: Path, mark: str, kind: str, nbytes: int) -> Path:
    """Makes the empty folder that `path` is built in, and returns it.

    Args:
        mark: A file that every folder of its kind has.

    Raises:
        CheckpointError: If `path` is something of another kind, or the disk has not `nbytes` free.
        OSError: If the folder cannot be made.
    """
    other = path.exists() and not (path / mark).is_file()
    if other and (not path.is_dir() or any(path.iterdir())):
        fix = "it stays as it is; choose another name"
        raise CheckpointError(f"{path} exists and is no {kind}: {fix}")
    building = building_place(path)
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    check_space(path.parent, nbytes, kind)
    return building


@contextmanager
def new_folder(path: Path, mark: str, kind: str, nbytes: int) -> Iterator[Path]:
    """Yields the folder that `path` is built in, as `begin` makes it; removes what is left of it after the block.

    Raises CheckpointError where `begin` does, and if the block cannot write.
    """
    try:
        yield begin(path, mark, kind, nbytes)
    except OSError as error:
        shutil.rmtree(building_place(path), ignore_errors=True)  # frees what it took
        raise CheckpointError(
            f"could not write {path}: {why(error, path.parent, nbytes)}"
        ) from error
    finally:
        shutil.rmtree(building_place(path), ignore_errors=True)


def check_space(folder: Path, needed: int, kind: str = "checkpoint") -> None:
    """Raises CheckpointError if the disk under `folder` has not `needed` bytes free, for a folder of this kind."""
    disk = shutil.disk_usage(folder)
    if disk.total == 0:
        raise CheckpointError(f"{folder} is on no disk: point --run.dir elsewhere")
    if disk.free < needed:
        free = f"{in_units(disk.free)} are free at {folder}"
        fix = "free some space, lower --checkpoint.keep, or point --run.dir elsewhere"
        raise CheckpointError(f"disk full: a {kind} needs {in_units(needed)}, {free}: {fix}")
