"""metrics.jsonl: the record of a run, one JSON object a line, written by rank 0.

    with MetricsFile("runs/demo/metrics.jsonl") as file:
        file.truncate_after(400)                       # on resume: forget the steps that will be done again
        file.append({"step": 401, "train/loss": 2.31})
    rows = read("runs/demo/metrics.jsonl")

JSON has no NaN and no infinity, and a file with a bare `NaN` in it is refused by most parsers. A float that is not
finite is therefore written as null, and its name and value are kept beside it:

    {"step": 7, "train/loss": null, "non_finite": {"train/loss": "nan"}}

`read` puts the float back, so what was logged is what is read. The values are "nan", "inf" and "-inf".

Phases: open (repair a torn end) · append (one write a line, undone if it fails) · truncate (new file, fsync, rename) ·
read.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from threed.atomic import building, sync
from threed.parse import parse_json

NON_FINITE = "non_finite"


def encode(row: Mapping[str, object]) -> str:
    """Returns one row as a line of valid JSON, without line end; raises TypeError for a value JSON cannot hold."""
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
    """Returns the row of one line, with its non-finite floats; raises ValueError if it is not a JSON object."""
    row = parse_json(line, "a row")
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object, found {type(row).__name__}")
    row.update({key: float(text) for key, text in row.pop(NON_FINITE, {}).items()})
    return row


def read(path: str | Path) -> list[dict[str, Any]]:
    """Returns all rows of a metrics file, in order; a last line torn by a crash is left out.

    Raises FileNotFoundError, and ValueError naming the line for damage anywhere but in the last line.
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
                    f"{path}, line {number} is damaged ({error}); delete that line to go on"
                ) from error
    return rows


class MetricsFile:
    """An append-only metrics.jsonl; every row is in the file, whole, when `append` returns."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = _open_mended(self.path)

    def append(self, *rows: Mapping[str, object]) -> None:
        """Adds rows; raises OSError (such as a full disk) after taking back what was written of them."""
        rest = memoryview("".join(encode(row) + "\n" for row in rows).encode())
        end = os.fstat(self._fd).st_size
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError:
            os.ftruncate(self._fd, end)
            raise

    def sync(self) -> None:
        """Has the rows on the disk, whatever happens to the machine. OSError where it cannot."""
        os.fsync(self._fd)
        sync(self.path.parent)

    def truncate_after(self, step: int) -> int:
        """Drops the rows of later steps, and lines that cannot be read; atomic; returns how many lines went."""
        lines = [line for line in self.path.read_bytes().split(b"\n") if line]
        kept = [line for line in lines if _belongs(line, step)]
        if len(kept) < len(lines):
            self._replace(b"".join(line + b"\n" for line in kept))
        return len(lines) - len(kept)

    def _replace(self, content: bytes) -> None:
        with building(self.path) as (scratch,):
            scratch.write_bytes(content)
        os.close(self._fd)
        self._fd = _open_mended(self.path)

    def close(self) -> None:
        """Closes the file; closing twice is allowed."""
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


def _open_mended(path: Path) -> int:
    """Returns a descriptor for appending to `path`, after making sure that the next row starts on a line of its own."""
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    content = path.read_bytes()
    tail = content[content.rfind(b"\n") + 1 :]
    if not tail:
        return fd
    try:
        # no JSON object is the beginning of another: if it parses, only the line end is missing
        decode(tail)
        os.write(fd, b"\n")
    except ValueError:
        os.ftruncate(fd, len(content) - len(tail))
    return fd
