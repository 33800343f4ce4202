"""Files of tensors: written as a stream with their hash, durable; a partial file is always detected.

The format is safetensors (an 8-byte length, a JSON header, the bytes), written here rather than by the library so that
the hash is computed meanwhile (`sink`), one tensor is in memory at a time, and a full disk is an error at once.
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

from threed.atomic import building_place
from threed.checkpoint.sink import Sink

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64",
    torch.uint8: "U8",
}  # fmt: skip


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read, with the file and what to do."""


def plain(text: object) -> str:
    """Returns text of a stranger's as one line of ASCII that is safe to print, cut at 500 characters."""
    return str(text)[:500].encode("unicode_escape").decode()


def stream_tensors(
    path: Path,
    about: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    tensors: Iterable[Tensor],
    metadata: Mapping[str, str] | None = None,
    limit: float | None = None,
) -> str:
    """Writes a safetensors file, flushed to the disk, from tensors that come one by one; returns its sha256 in hex.

    about: dtype and shape of each, by name. limit: bytes written in a second, at most. OSError when it cannot be
    written, ValueError for other tensors than those.
    """
    nbytes = sum(math.prod(shape) * dtype.itemsize for dtype, shape in about.values())
    with Sink(path, nbytes, limit) as sink:
        for part in _parts(about, tensors, metadata or {}):
            sink.write(part)
    return sink.digest


def _parts(
    about: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], tensors: Iterable[Tensor], metadata: Mapping[str, str]
) -> Iterator[bytes | Tensor]:
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, (dtype, shape) in about.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for (name, wanted), tensor in zip(about.items(), tensors, strict=True):
        if (tensor.dtype, tuple(tensor.shape)) != wanted:
            raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, announced as {wanted}")
        yield tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)


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
