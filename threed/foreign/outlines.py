"""What is in pickled files, as plain values: their pickles are looked at by a process of its own (`outliner`).

    first, second = outline([Job(path) for path in paths])       CheckpointError, naming the file and what is wrong
    first["module"]["lm_head.weight"].read(0, 100)               elements, read from the file when they are asked for

Values are None, bool, int, float, str, list, dict, `Thing` (an object of a class), and `Place` (a tensor).
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from threed.checkpoint.files import CheckpointError, plain
from threed.foreign import outliner
from threed.parse import ParseError, parse_json

SECONDS = 600.0  # that it may take
MOST_BYTES = 2**29  # of its answer
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
CHUNK = 2**25  # bytes that are read at a time
MOST_EXPANDED = 2**20  # elements of a tensor that has fewer values in its file


class Job(NamedTuple):
    """A file to be looked at, or bytes [first, last) of it. kind: "zip", of torch.save, or "pickle", bare."""

    path: Path
    first: int = 0
    last: int | None = None
    kind: str = "zip"


@dataclass(frozen=True, eq=False)
class Thing:
    """An object of a class, by its name: what it was made of, and its attributes where it has them."""

    name: str
    args: list[Any]
    state: Any


@dataclass(frozen=True, eq=False)
class Place:
    """A tensor in a file. first: the first byte of its storage there; offset, stride: in elements of that."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    first: int

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    @property
    def contiguous(self) -> bool:
        """Whether its elements follow one another."""
        want = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != want:
                return False
            want *= size
        return True

    def read(self, first: int, last: int) -> Tensor:
        """Returns elements [first, last), in row-major order, as [last - first]; CheckpointError if it cannot."""
        if not 0 <= first <= last <= self.numel:
            raise CheckpointError(
                f"{self.path}: elements {first} to {last} of a tensor of {self.numel}"
            )
        if not self.contiguous:
            reach = 1 + sum(
                (size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True)
            )
            return self._bytes(0, reach).as_strided(self.shape, self.stride).reshape(-1)[first:last]
        return self._bytes(first, last)

    def _bytes(self, first: int, last: int) -> Tensor:
        out = torch.empty(last - first, dtype=self.dtype)
        if last == first:
            return out
        at, rest = (
            self.first + (self.offset + first) * self.dtype.itemsize,
            out.view(torch.uint8).numpy().data,
        )
        try:
            with self.path.open("rb", buffering=0) as file:
                while len(rest):
                    read = os.preadv(file.fileno(), [rest[: 2**30]], at)
                    if not read:
                        raise OSError("it ends too early")
                    at, rest = at + read, rest[read:]
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {plain(error)}") from None
        return out

    def whole(self) -> Tensor:
        """Returns the tensor."""
        return self.read(0, self.numel).view(self.shape)


def outline(jobs: Sequence[Job]) -> list[Any]:
    """Returns what is in each file. Raises CheckpointError with the first one that cannot be understood."""
    if not jobs:
        return []
    try:
        sizes = {job.path: job.path.stat().st_size for job in jobs}
    except OSError as error:
        raise CheckpointError(f"{error.filename} cannot be read: {error.strerror}") from None
    spans = [(job.first, sizes[job.path] if job.last is None else job.last) for job in jobs]
    for job, (first, last) in zip(jobs, spans, strict=True):
        if not job.path.is_file() or not 0 <= first <= last <= sizes[job.path]:
            raise CheckpointError(f"{job.path} is no plain file, or is cut off")
        if first == last:
            raise CheckpointError(f"{job.path} cannot be read: it is empty")
    said = [
        [os.fspath(job.path.absolute()), *span, job.kind]
        for job, span in zip(jobs, spans, strict=True)
    ]
    lines = _run(json.dumps(said).encode(), len(jobs))
    found = []
    for job, line in zip(jobs, lines, strict=True):
        if "error" in line:
            raise CheckpointError(f"{job.path} cannot be read: {plain(line['error'])}")
        found.append(_Values(job.path, sizes[job.path]).of(line["ok"]))
    return found


def _run(said: bytes, count: int) -> list[Any]:
    """Runs the program on so many jobs; returns a line of each."""
    command = [sys.executable, "-I", "-S", outliner.__file__]
    pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
    env = {
        name: os.environ[name]
        for name in ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
        if name in os.environ
    }
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=nothing, env=env, cwd="/"
    ) as process:
        timer = threading.Timer(SECONDS, process.kill)
        timer.start()
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(said)
                process.stdin.close()
            except BrokenPipeError:
                pass
            text = process.stdout.read(MOST_BYTES + 1)
            if len(text) > MOST_BYTES:
                raise CheckpointError("the pickles have more in them than any checkpoint")
        finally:
            timer.cancel()
            process.kill()
    lines = text.splitlines()
    if process.returncode not in (0, -9) or len(lines) != 1 + count:
        raise CheckpointError(
            f"the process that looks at pickles ended with {process.returncode}: it may have needed more than"
            f" {outliner.MEMORY >> 30} GiB or {outliner.CPU_S} s"
        )
    try:
        about, *rest = (parse_json(line, "the answer") for line in lines)
    except ParseError as error:
        raise CheckpointError(f"the process that looks at pickles says: {error}") from None
    if about["left"]:
        warnings.warn(
            f"pickles are looked at without {'; '.join(map(plain, about['left']))}", stacklevel=4
        )
    return rest


class _Values:
    """Values of a file's JSON."""

    def __init__(self, path: Path, size: int) -> None:
        self.path, self.size = path, size

    def of(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.of(item) for item in value]
        if not isinstance(value, dict):
            return value
        if "$tensor" in value:
            return self._place(*value["$tensor"])
        if "$dict" in value:
            pairs = [(self.of(key), self.of(item)) for key, item in value["$dict"]]
            return {_key(key): item for key, item in pairs}
        if "$object" in value:
            return Thing(value["$object"], self.of(value["args"]), self.of(value["state"]))
        if "$float" in value:
            return float(value["$float"])
        if value and next(iter(value)).startswith("$"):
            return Thing(str(value), [], None)
        return {key: self.of(item) for key, item in value.items()}

    def _place(
        self, dtype: str, shape: list[int], stride: list[int], offset: int, first: int, nbytes: int
    ) -> Place:  # fmt: skip
        """Returns a tensor's place; CheckpointError where it lies outside of its storage, or that of the file."""
        reach = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        reach = 0 if 0 in shape else reach
        if (offset + reach) * DTYPES[dtype].itemsize > nbytes or first + nbytes > self.size:
            raise CheckpointError(f"{self.path}: a tensor lies outside of the file")
        if math.prod(shape) > max(reach, MOST_EXPANDED):
            raise CheckpointError(
                f"{self.path}: a tensor of {shape} has only {reach} values in the file"
            )
        return Place(self.path, DTYPES[dtype], tuple(shape), tuple(stride), offset, first)


def _key(value: Any) -> Any:
    """Returns a key of a dictionary, which Python can have."""
    if isinstance(value, list):
        return tuple(map(_key, value))
    return id(value) if isinstance(value, dict) else value


def number(value: Any, default: float | None = None) -> float | None:
    """Returns a number that was pickled as it is, or as a tensor of one element."""
    if isinstance(value, Place) and value.numel == 1:
        return float(value.read(0, 1).double())
    return (
        float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else default
    )
