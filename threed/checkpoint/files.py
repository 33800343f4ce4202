"""Files of tensors: written as a stream with their hash, durable; a partial file is always detected.

The format is safetensors (an 8-byte length, a JSON header, the bytes), written here rather than by the library so that
the hash is computed meanwhile, one tensor is in memory at a time, and a full disk is an error at once.
Read with the library.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from threed.atomic import building_place, sync
from threed.parse import plain as plain

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64",
    torch.uint8: "U8",
}  # fmt: skip


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read, with the file and what to do."""


def stream_tensors(
    path: Path,
    about: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    tensors: Iterable[Tensor | Iterable[Tensor]],
    metadata: Mapping[str, str] | None = None,
) -> str:
    """Writes a safetensors file, flushed to the disk, from tensors that come one by one; returns its sha256 in hex.

    about: dtype and shape of each, by name. tensors: each whole, or its rows in order, some at a time. OSError when it
    cannot be written, ValueError for other tensors than those.
    """
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for part in _parts(about, tensors, metadata or {}):
            digest.update(part)
            file.write(part)
    sync(path)
    return digest.hexdigest()


def _parts(
    about: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    tensors: Iterable[Tensor | Iterable[Tensor]],
    metadata: Mapping[str, str],
) -> Iterator[bytes | memoryview]:
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, (dtype, shape) in about.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for (name, wanted), tensor in zip(about.items(), tensors, strict=True):
        whole, rows = isinstance(tensor, Tensor), 0
        for part in (tensor,) if isinstance(tensor, Tensor) else tensor:
            shape = tuple(part.shape) if whole else (wanted[1][0], *part.shape[1:])
            if (part.dtype, shape) != wanted:
                raise ValueError(f"{name} is {part.dtype} {tuple(part.shape)}, announced as {wanted}")
            rows += 0 if whole else part.shape[0]
            yield part.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
        if not whole and rows != wanted[1][0]:
            raise ValueError(f"{name} has {rows} rows, announced as {wanted}")


def cut(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
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


def sha256(path: Path) -> str:
    """Returns the hash of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def begin(path: Path, mark: str, kind: str, nbytes: int) -> Path:
    """Makes the empty folder that `path` is built in, and returns it. `mark`: a file that every folder of its kind has.

    Raises CheckpointError where `path` is something of another kind, or the disk has not `nbytes` free.
    """
    if path.exists() and not (path / mark).is_file() and not (path.is_dir() and not any(path.iterdir())):
        raise CheckpointError(f"{path} exists and is no {kind}: it stays as it is; choose another name")
    building = building_place(path)
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    check_space(building, nbytes)
    return building


def check_space(folder: Path, needed: int) -> None:
    """Raises CheckpointError when the disk under `folder` has not `needed` bytes free."""
    disk = shutil.disk_usage(folder)
    if disk.total == 0:
        raise CheckpointError(f"{folder} is on no disk: point --run.dir elsewhere")
    if disk.free < needed:
        want, free = (f"{n / 2**30:,.1f} GiB" if n >= 2**30 else f"{n / 2**20:.1f} MiB" for n in (needed, disk.free))
        raise CheckpointError(
            f"disk full: a checkpoint needs {want}, {free} are free at {folder}:"
            " free some space, lower --checkpoint.keep, or point --run.dir elsewhere"
        )
