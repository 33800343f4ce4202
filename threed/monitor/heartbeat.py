"""Heartbeats: one small file per rank that says where the rank is, for the moment when a run hangs.

    heart = Heartbeat("runs/demo/heartbeat", rank)
    heart.beat(step=41, phase="recv_forward")           # a few microseconds: call it at every phase
    slowest("runs/demo/heartbeat", world_size=8)         # 'rank 3 last seen step 41, phase recv_forward, 12.3 s ago'

When one rank stalls, the healthy ranks time out first, and the launcher names one of them as the root cause. These
files tell who really stopped: a rank whose process is gone, else the one whose last beat has the lowest step, and among
equals the oldest time.

A beat overwrites a record of fixed size in place, with one pwrite on an open file: no rename, no truncation, no fsync.
A reader can catch it half written (seen on ext4: new first bytes, old last ones), so the record carries a CRC, and the
reader looks again. On a network file system other machines see a beat only when their caches allow it (often seconds
later); on one machine at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import time
import zlib
from pathlib import Path
from typing import Any

RECORD_BYTES = 320


class Heartbeat:
    """The heartbeat file of one rank, `<folder>/rank-<rank>.json`; its first beat (step 0, "start") comes at once."""

    def __init__(self, folder: str | Path, rank: int) -> None:
        path = Path(folder) / f"rank-{rank}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._rank = rank
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        os.ftruncate(self._fd, RECORD_BYTES)
        self.beat(0, "start")

    def beat(self, step: int, phase: str) -> None:
        """Say that this rank is in `phase` of `step`; raises ValueError for a phase name too long for the record.

        A disk that fails is no reason to stop training: the beat is then lost without a word.
        """
        place = {"pid": os.getpid(), "host": platform.node()}
        record = {"rank": self._rank, "step": step, "phase": phase, "time": time.time(), **place}
        line = _sealed(record)
        if len(line) >= RECORD_BYTES:
            raise ValueError(f"phase name of {len(phase)} characters does not fit a heartbeat; use at most 100")
        with contextlib.suppress(OSError):
            os.pwrite(self._fd, line.ljust(RECORD_BYTES - 1) + b"\n", 0)

    def close(self) -> None:
        """Close the file and leave it lying; closing twice is allowed."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read_all(folder: str | Path) -> list[dict[str, Any]]:
    """The last beat of every rank, in rank order: rank, step, phase, time (seconds since 1970), pid and host."""
    beats = [_read(path) for path in Path(folder).glob("rank-*.json")]
    return sorted((beat for beat in beats if beat is not None), key=lambda beat: int(beat["rank"]))


def slowest(folder: str | Path, world_size: int | None = None, now: float | None = None) -> str:
    """One line naming the rank that is furthest behind.

    With `world_size`, ranks without a file are named first, and files of higher ranks (left by a larger run) are
    ignored.
    """
    beats = read_all(folder)
    if world_size is not None:
        beats = [beat for beat in beats if beat["rank"] < world_size]
        missing = sorted(set(range(world_size)) - {beat["rank"] for beat in beats})
        if missing:
            return f"never seen: rank {', '.join(map(str, missing))} (no heartbeat in {folder})"
    if not beats:
        return f"no heartbeat in {folder}"
    gone = [beat for beat in beats if beat.get("host") == platform.node() and _has_ended(beat["pid"])]
    last = min(gone or beats, key=lambda beat: (beat["step"], beat["time"]))
    age = (time.time() if now is None else now) - last["time"]
    who = f"rank {last['rank']}, whose process has ended," if gone else f"rank {last['rank']}"
    return f"{who} last seen step {last['step']}, phase {last['phase']}, {age:.1f} s ago"


def _has_ended(pid: int) -> bool:
    """Whether a process of this machine is no more; one that its parent has not asked after yet is not, either."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return Path("/proc/self").exists()  # else there is nothing to learn here
    return status.rpartition(")")[2].split()[0] in "ZX"


def _sealed(record: dict[str, Any]) -> bytes:
    body = json.dumps(record)
    return f'{body[:-1]}, "crc32": {zlib.crc32(body.encode())}}}'.encode()


def _read(path: Path, attempts: int = 10) -> dict[str, Any] | None:
    for _ in range(attempts):
        with contextlib.suppress(ValueError, OSError, KeyError, TypeError):
            line = path.read_bytes().rstrip()
            beat: dict[str, Any] = json.loads(line)
            del beat["crc32"]
            if _sealed(beat) == line:
                return beat
    return None
