"""Files of tensors: written as a stream with their hash, durable, and never taken for whole when they are not.

The format is safetensors (an 8-byte length, a JSON header, the bytes), written here rather than by the library so that
the hash is made on the way, nothing is copied into one big buffer, and a full disk is an error at the byte it happens.
Read with the library.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64",
    torch.uint8: "U8",
}  # fmt: skip


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read, with the file and what to do."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> str:
    """Writes tensors as a safetensors file, flushed to the disk; gives its sha256 in hex. OSError when it cannot."""
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for part in _parts(tensors, metadata or {}):
            digest.update(part)
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _parts(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]):  # type: ignore[no-untyped-def]
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors.values():
        yield memoryview(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())


def sha256(path: Path) -> str:
    """The hash of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_text(path: Path, text: str) -> None:
    """Writes a small file, flushed to the disk."""
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Makes the names in a folder durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_space(folder: Path, needed: int) -> None:
    """CheckpointError when the disk under `folder` has not `needed` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        gib = 2**30
        raise CheckpointError(
            f"disk full: a checkpoint needs {needed / gib:.2f} GiB, {free / gib:.2f} GiB are free at {folder}:"
            " free some space, lower --checkpoint.keep, or point --run.dir elsewhere"
        )
