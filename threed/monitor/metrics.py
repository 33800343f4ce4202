"""Reads and writes metrics.jsonl: one JSON object per line, written by rank 0.

    with MetricsFile("runs/demo/metrics.jsonl") as file:
        file.truncate_after(400)                       # on resume: delete rows of steps that will be repeated
        file.append({"step": 401, "train/loss": 2.31})
    rows = read("runs/demo/metrics.jsonl")

JSON has no NaN and no infinity, and most parsers refuse a bare `NaN`. So a non-finite float is
written as null, and its name and value ("nan", "inf" or "-inf") are stored under "non_finite":

    {"step": 7, "train/loss": null, "non_finite": {"train/loss": "nan"}}

`read` restores the float.

Opening a `MetricsFile` repairs an incomplete last line. If a write fails, `append` removes the
partial rows. `truncate_after` replaces the file atomically (new file, fsync, rename).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from threed.core.atomic import building, sync
from threed.core.parse import parse_json

NON_FINITE = "non_finite"


def encode(row: Mapping[str, object]) -> str:
    """Returns a row as a line of JSON, without a line break.

    Raises TypeError if a value cannot be written as JSON.
    """
    bad = {
        key: str(value)
        for key, value in row.items()
        if isinstance(value, float) and not math.isfinite(value)
    }
    plain: dict[str, object] = {key: None if key in bad else value for key, value in row.items()}
    if bad:
        plain[NON_FINITE] = bad
    return json.dumps(plain, allow_nan=False)


def decode(line: str | bytes) -> dict[str, Any]:
    """Returns the row of a line, with non-finite floats restored.

    Raises ValueError if the line is not a JSON object.
    """
    row = parse_json(line, "a row")
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object, found {type(row).__name__}")
    row.update({key: float(text) for key, text in row.pop(NON_FINITE, {}).items()})
    return row


def read(path: str | Path) -> list[dict[str, Any]]:
    """Returns all rows of a metrics file, in order. Ignores a last line that a crash truncated.

    Args:
        path: path of a metrics.jsonl.

    Raises:
        FileNotFoundError: if the file does not exist.
        ValueError: if a line other than the last one is damaged.
    """
    lines = Path(path).read_bytes().split(b"\n")
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            rows.append(decode(line))
        except ValueError as error:
            if number < len(lines):
                raise ValueError(
                    f"{path}, line {number} is damaged ({error}); delete that line to continue"
                ) from error
    return rows


class MetricsFile:
    """An append-only metrics.jsonl. When `append` returns, its rows are completely written."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = _open_repaired(self.path)

    def append(self, *rows: Mapping[str, object]) -> None:
        """Appends rows. If writing fails, removes partial rows and raises OSError."""
        rest = memoryview("".join(encode(row) + "\n" for row in rows).encode())
        end = os.fstat(self._fd).st_size
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError:
            os.ftruncate(self._fd, end)
            raise

    def sync(self) -> None:
        """Flushes the rows to disk with fsync. Raises OSError if that fails."""
        os.fsync(self._fd)
        sync(self.path.parent)

    def truncate_after(self, step: int) -> int:
        """Deletes, atomically, the rows of steps after `step` and lines that are not valid rows.

        Args:
            step: last step to keep.

        Returns:
            The number of deleted lines.
        """
        lines = [line for line in self.path.read_bytes().split(b"\n") if line]
        kept = [line for line in lines if _belongs(line, step)]
        if len(kept) < len(lines):
            self._replace(b"".join(line + b"\n" for line in kept))
        return len(lines) - len(kept)

    def _replace(self, content: bytes) -> None:
        with building(self.path) as (scratch,):
            scratch.write_bytes(content)
        os.close(self._fd)
        self._fd = _open_repaired(self.path)

    def close(self) -> None:
        """Closes the file. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _belongs(line: bytes, step: int) -> bool:
    with contextlib.suppress(ValueError):
        return bool(decode(line).get("step", 0) <= step)
    return False


def _open_repaired(path: Path) -> int:
    """Opens a file for appending, repairs an incomplete last line, and returns the descriptor.

    A last line without a line break gets one if it is a complete row, and is removed otherwise.
    """
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    content = path.read_bytes()
    tail = content[content.rfind(b"\n") + 1 :]
    if not tail:
        return fd
    try:
        # `tail` is the last line. An incomplete JSON object does not parse. So if the line parses,
        # only its line break is missing.
        decode(tail)
        os.write(fd, b"\n")
    except ValueError:
        os.ftruncate(fd, len(content) - len(tail))
    return fd
