"""A stage's file of figures: one JSON object, which is always complete.

    {"stage": "step", "status": "done", "message": "", "rehearsal": false, "device": "NVIDIA ...", "commit": "...",
     "torch": "...", "began": "2026-01-31T12:00:00+00:00", "seconds": 200.0, "figures": {...}}

So the file of a killed stage contains the figures up to that time.
"""

from __future__ import annotations

import json
import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RUNNING, DONE, FAILED, CRASHED = "running", "done", "failed", "crashed"
OUT_OF_TIME, NOT_RUN, INTERRUPTED = "out of time", "not run", "interrupted"
STATUSES = (RUNNING, DONE, FAILED, CRASHED, OUT_OF_TIME, NOT_RUN, INTERRUPTED)
NOT_MEASURED = "not measured"


class CorruptRecord(ValueError):
    """Raised for a file that is not a record of a stage."""


def path_of(folder: Path, stage: str) -> Path:
    """Returns the path of a stage's record."""
    return folder / f"{stage}.json"


def read(folder: Path, stage: str) -> dict[str, Any] | None:
    """Returns the record of a stage, or None if there is none; raises CorruptRecord."""
    path = path_of(folder, stage)
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CorruptRecord(f"{path} is not JSON: {error}") from error
    fits = (
        isinstance(found, dict) and found.get("stage") == stage and found.get("status") in STATUSES
    )
    if not fits or not isinstance(found.get("figures"), dict):
        raise CorruptRecord(f"{path} is no record of the stage {stage!r}")
    return found


def figures(folder: Path, stage: str) -> dict[str, Any]:
    """Returns the figures of a stage so far; empty if its file is missing or corrupt."""
    try:
        found = read(folder, stage)
    except CorruptRecord:
        return {}
    return found["figures"] if found else {}


def write(folder: Path, content: dict[str, Any]) -> None:
    """Writes a record atomically, by a rename."""
    folder.mkdir(parents=True, exist_ok=True)
    path = path_of(folder, content["stage"])
    beside = path.with_suffix(f".{os.getpid()}.tmp")
    beside.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(beside, path)


class Record:
    """The record of a running stage; each `put` rewrites the file."""

    def __init__(self, folder: Path, stage: str, **about: Any) -> None:
        self._folder, self._began = folder, time.monotonic()
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self.content = {
            "stage": stage,
            "status": RUNNING,
            "message": "",
            **about,
            "began": now,
            "figures": {},
        }
        self._write()

    def put(self, **found: Any) -> None:
        """Adds figures by name."""
        self.content["figures"].update(found)
        self._write()

    def end(self, status: str, message: str = "") -> None:
        """Completes the record."""
        self.content |= {"status": status, "message": message}
        self._write()

    def _write(self) -> None:
        self.content["seconds"] = round(time.monotonic() - self._began, 1)
        write(self._folder, self.content)
