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
) -> str:
    """Writes a safetensors file, flushed to the disk, from tensors that come one by one; returns its sha256 in hex.

    about: dtype and shape of each, by name. OSError when it cannot be written, ValueError for other tensors than those.
    """
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for part in _parts(about, tensors, metadata or {}):
            digest.update(part)
            file.write(part)
    sync(path)
    return digest.hexdigest()


def _parts(
    about: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], tensors: Iterable[Tensor], metadata: Mapping[str, str]
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
        if (tensor.dtype, tuple(tensor.shape)) != wanted:
            raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, announced as {wanted}")
        yield tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


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


def in_units(nbytes: int) -> str:
    """Returns a number of bytes in the unit that fits: 812 bytes, 4.0 KiB, 37.2 MiB, 1.5 TiB."""
    power = min(max(nbytes.bit_length() - 1, 0) // 10, 5)
    return f"{nbytes / 2 ** (10 * power):,.1f} {'KMGTP'[power - 1]}iB" if power else f"{nbytes} bytes"


def check_space(folder: Path, needed: int) -> None:
    """Raises CheckpointError when the disk under `folder` has not `needed` bytes free."""
    disk = shutil.disk_usage(folder)
    if disk.total == 0:
        raise CheckpointError(f"{folder} is on no disk: point --run.dir elsewhere")
    if disk.free < needed:
        raise CheckpointError(
            f"disk full: a checkpoint needs {in_units(needed)}, {in_units(disk.free)} are free at {folder}:"
            " free some space, lower --checkpoint.keep, or point --run.dir elsewhere"
        )
