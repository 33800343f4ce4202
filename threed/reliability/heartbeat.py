"""Heartbeats: one small file per rank with its step and phase, to find the rank that hangs or has ended.

    heart = Heartbeat("runs/demo/heartbeat", rank, place="pp 1, tp 0")
    heart.beat(step=41, phase="step")       # a few microseconds: call it at every phase
    heart.mark("failed", "ValueError: …")   # how it ended, for the others to see
    read(folder, 3)                         # rank 3's last beat; read_all(folder): everybody's

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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from threed.parse import parse_json

RECORD_BYTES = 512


class Heartbeat:
    """The heartbeat file of one rank, `<folder>/rank-<rank>.json`; its first beat (step 0, "start") comes at once.

    place: where the rank is in the grid, for messages. `last` is its last beat: step, phase, seconds of the monotonic
    clock.
    """

    def __init__(self, folder: str | Path, rank: int, place: str = "") -> None:
        self.folder, self.rank = Path(folder), rank
        self.folder.mkdir(parents=True, exist_ok=True)
        self._place = place[:60]
        self._fd = os.open(_file(folder, rank), os.O_WRONLY | os.O_CREAT, 0o644)
        os.ftruncate(self._fd, RECORD_BYTES)
        self.beat(0, "start")

    def beat(self, step: int, phase: str) -> None:
        """Says that this rank is in `phase` of `step`; raises ValueError for a phase name too long for the record.

        A disk that fails is no reason to stop training: the beat is then lost silently.
        """
        if len(phase) > 100:
            raise ValueError(
                f"phase name of {len(phase)} characters does not fit a heartbeat; use at most 100"
            )
        self.last, self._time = (step, phase, time.monotonic()), time.time()
        self.mark("")

    def mark(self, state: str, note: str = "") -> None:
        """Adds to the last beat what became of the rank: "hung", "failed", "lost" another, "ended"; "" is running."""
        step, phase, clock = self.last
        about = {
            "pid": os.getpid(),
            "host": platform.node()[:64],
            "place": self._place,
            "state": state,
            "note": "",
        }
        record = {
            "rank": self.rank,
            "step": step,
            "phase": phase,
            "time": self._time,
            "clock": round(clock, 3),
            **about,
        }
        line = _sealed(record)
        if note:
            plain = "".join(
                c if c.isascii() and c.isprintable() and c not in '"\\' else " " for c in note
            )
            line = _sealed(
                {**record, "note": plain[: RECORD_BYTES - len(line) - 4]}
            )  # a sum has up to 10 digits
        with contextlib.suppress(OSError):
            os.pwrite(self._fd, line.ljust(RECORD_BYTES - 1) + b"\n", 0)

    def close(self) -> None:
        """Closes the file and leave it lying; closing twice is allowed."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read(folder: str | Path, rank: int) -> dict[str, Any] | None:
    """Returns the last beat of a rank; None if there is none.

    It has rank, step, phase, time (seconds since 1970, by the clock of its machine), clock (seconds of that one's
    monotonic clock), pid, host, place, state and note.
    """
    return _read(_file(folder, rank))


def read_all(folder: str | Path) -> list[dict[str, Any]]:
    """Returns the last beat of every rank, by rank."""
    beats = [_read(path) for path in Path(folder).glob("rank-*.json")]
    return sorted((beat for beat in beats if beat is not None), key=lambda beat: int(beat["rank"]))


def siblings(rank: int, world_size: int) -> Iterator[int]:
    """Returns the other ranks on this machine, from the next one on, round to the one before.

    They follow from torchrun's LOCAL_RANK and LOCAL_WORLD_SIZE; by default all are.
    """
    place, count = (
        int(os.environ.get("LOCAL_RANK", rank)),
        int(os.environ.get("LOCAL_WORLD_SIZE", world_size)),
    )
    return (rank - place + (place + n) % count for n in range(1, count))


def process_state(beat: dict[str, Any]) -> str:
    """Returns the state of a rank's process, as the kernel of this machine has it: "ended" (a zombie has), "stopped",
    "running"; and "unknown" for one of another machine."""
    if beat.get("host") != platform.node()[:64]:
        return "unknown"
    try:
        status = Path(f"/proc/{beat['pid']}/stat").read_text()
    except FileNotFoundError:
        return "ended" if Path("/proc/self").exists() else "unknown"
    except OSError:
        return "ended"
    letter = status.rpartition(")")[2].split()[0]
    return "ended" if letter in "ZX" else "stopped" if letter in "Tt" else "running"


def who(beat: dict[str, Any]) -> str:
    """Returns which rank it is, on which machine, and where in the grid."""
    place = f" ({beat['place']})" if beat.get("place") else ""
    return f"rank {beat['rank']} on {beat['host']}{place}"


def when(beat: dict[str, Any]) -> str:
    """Returns how far a rank came."""
    return f"step {beat['step']}, phase {beat['phase']}"


def ago(beat: dict[str, Any]) -> str:
    """Returns when a rank began what it was last seen in: how long ago, on this machine; of another one only what its
    clock said, for that may be hours off."""
    if beat.get("host") == platform.node()[:64] and "clock" in beat:
        return f"begun {time.monotonic() - beat['clock']:.1f} s ago"
    return f"begun at {time.strftime('%H:%M:%S', time.localtime(beat['time']))} by its clock"


def _file(folder: str | Path, rank: int) -> Path:
    return Path(folder) / f"rank-{rank}.json"


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
