"""Heartbeats: one small file per rank with its step and phase, to find the rank that hangs.

    heart = Heartbeat("runs/demo/heartbeat", rank)
    heart.beat(step=41, phase="recv_forward")           # a few microseconds: call it at every phase
    culprit("runs/demo/heartbeat", rank, world_size=8)   # 'rank 3 last seen step 41, phase recv_forward, 12.3 s ago'

When one rank stalls, the healthy ranks time out first, and the launcher names one of them as the root cause. These
files show which rank stopped: a rank whose process is gone, else the one whose last beat has the lowest step, and among
equals the oldest time.

On a failure every rank looks at once. Only rank 0 reads all files. Each other rank reads that of the next rank on its
machine, whose process only this machine can check, and goes on to the next while the process has ended. So every dead
rank, rank 0 too, is named by a live one, and n ranks read less than 2 n files together, not n each.

A beat overwrites a record of fixed size in place, with one pwrite on an open file: no rename, no truncation, no fsync.
A reader can catch it half written (seen on ext4: new first bytes, old last ones), so the record carries a CRC, and the
reader looks again. On a network file system other machines see a beat only when their caches allow it (often seconds
later); on one machine at once.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import platform
import time
import zlib
from pathlib import Path
from typing import Any

from threed.parse import parse_json

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
        """Says that this rank is in `phase` of `step`; raises ValueError for a phase name too long for the record.

        A disk that fails is no reason to stop training: the beat is then lost silently.
        """
        place = {"pid": os.getpid(), "host": platform.node()}
        record = {"rank": self._rank, "step": step, "phase": phase, "time": time.time(), **place}
        line = _sealed(record)
        if len(line) >= RECORD_BYTES:
            raise ValueError(f"phase name of {len(phase)} characters does not fit a heartbeat; use at most 100")
        with contextlib.suppress(OSError):
            os.pwrite(self._fd, line.ljust(RECORD_BYTES - 1) + b"\n", 0)

    def close(self) -> None:
        """Closes the file and leave it lying; closing twice is allowed."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read_all(folder: str | Path) -> list[dict[str, Any]]:
    """Returns the last beat of every rank, by rank: rank, step, phase, time (seconds since 1970), pid and host."""
    beats = [_read(path) for path in Path(folder).glob("rank-*.json")]
    return sorted((beat for beat in beats if beat is not None), key=lambda beat: int(beat["rank"]))


def culprit(folder: str | Path, rank: int, world_size: int) -> str:
    """Returns one line naming the ranks that this rank found dead; empty if there are none.

    Ranks on the same machine follow from torchrun's LOCAL_RANK and LOCAL_WORLD_SIZE; by default all are.
    """
    if rank == 0:
        return slowest(folder, world_size)
    place, count = int(os.environ.get("LOCAL_RANK", rank)), int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    others = (rank - place + (place + n) % count for n in range(1, count))
    beats = (_read(Path(folder) / f"rank-{other}.json") for other in others)
    gone = itertools.takewhile(lambda beat: beat is not None and _is_gone(beat), beats)
    return "; ".join(_describe(beat, time.time(), gone=True) for beat in gone if beat is not None)


def slowest(folder: str | Path, world_size: int | None = None, now: float | None = None) -> str:
    """Returns one line naming the rank that is furthest behind.

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
    gone = [beat for beat in beats if _is_gone(beat)]
    last = min(gone or beats, key=lambda beat: (beat["step"], beat["time"]))
    return _describe(last, time.time() if now is None else now, gone=bool(gone))


def _describe(beat: dict[str, Any], now: float, gone: bool) -> str:
    who = f"rank {beat['rank']}, whose process has ended," if gone else f"rank {beat['rank']}"
    return f"{who} last seen step {beat['step']}, phase {beat['phase']}, {now - beat['time']:.1f} s ago"


def _is_gone(beat: dict[str, Any]) -> bool:
    """Returns whether a rank's process was on this machine and has ended; a zombie counts as ended."""
    if beat.get("host") != platform.node():
        return False
    try:
        status = Path(f"/proc/{beat['pid']}/stat").read_text()
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
            beat: dict[str, Any] = parse_json(line, str(path))
            del beat["crc32"]
            if _sealed(beat) == line:
                return beat
    return None
