"""Heartbeats: a small file per rank with its step and phase, to find a rank that hangs or has died.

    heart = Heartbeat("runs/demo/heartbeat", rank, place="stage 1, dp 0, tp 0")
    heart.beat(step=41, phase="step")       # takes microseconds: call it at the start of each phase
    heart.mark("failed", "ValueError: …")   # records how the rank ended, for the other ranks
    read(folder, 3)                         # the last beat of rank 3
    read_all(folder)                        # the last beats of all ranks

A beat is a record of fixed size with rank, step, phase and time. Each beat overwrites the previous
one, with one pwrite to an open file. A reader may see a record that is only partly written
(observed on ext4), so records contain a CRC, and the reader retries. On the same machine, a beat is
visible at once. On other machines, it is visible after the network file system has updated its
caches.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from threed.core import process
from threed.core.parse import parse_json

RECORD_BYTES = 1024
Beat = dict[str, Any]  # keys: rank, step, phase, time, pid, host, place, state and note


class Heartbeat:
    """The heartbeat file of one rank, `<folder>/rank-<rank>.json`.

    Args:
        folder: the folder of the files; created if missing.
        rank: the global rank.
        place: the rank's coordinates, for messages.

    Attributes:
        last: the last beat.
        began: time of the last beat, in seconds of the monotonic clock.
    """

    def __init__(self, folder: str | Path, rank: int, place: str = "") -> None:
        self.folder, self.rank = Path(folder), rank
        self.folder.mkdir(parents=True, exist_ok=True)
        self._about = {"rank": rank, "pid": os.getpid(), "host": platform.node()[:64]}
        self._about |= {"place": place[:60]}
        self.last: Beat = {}
        self._fd = os.open(_file(folder, rank), os.O_WRONLY | os.O_CREAT, 0o644)
        os.ftruncate(self._fd, RECORD_BYTES)
        self.beat(0, "start")

    def beat(self, step: int, phase: str) -> None:
        """Records that this rank has begun a phase of a step.

        If the file cannot be written, the error is ignored. Once this rank has been marked "hung",
        beats do not return: the watchdog ends the process, and the run must not go on meanwhile.

        Raises:
            ValueError: if the name of the phase is longer than 100 characters.
        """
        if len(phase) > 100:
            raise ValueError(f"heartbeat phase of {len(phase)} characters: use at most 100")
        while self.last.get("state") == "hung":
            time.sleep(1.0)
        self.began = time.monotonic()
        self.last = {**self._about, "step": step, "phase": phase, "time": time.time()}
        self.mark("")

    def mark(self, state: str, note: str = "") -> None:
        """Adds a state to the last beat.

        Args:
            state: "" while the rank runs; "hung"; "failed" (with an error); "lost" (it lost the
                connection to another rank); or "ended" (without an error).
            note: details; the first 300 characters are kept.
        """
        note = "".join(c if " " <= c <= "~" and c not in '"\\' else " " for c in note[:300])
        self.last = {**self.last, "state": state, "note": note}
        with contextlib.suppress(OSError):
            os.pwrite(self._fd, _sealed(self.last).ljust(RECORD_BYTES - 1) + b"\n", 0)

    def close(self) -> None:
        """Closes the file but does not remove it. May be called repeatedly."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read(folder: str | Path, rank: int) -> Beat | None:
    """Returns the last beat of a rank, or None if it cannot be read.

    The `time` of the beat is from the clock of the rank's machine.
    """
    return _read(_file(folder, rank))


def read_all(folder: str | Path) -> list[Beat]:
    """Returns the last beat of every rank, by rank."""
    beats = [_read(path) for path in Path(folder).glob("rank-*.json")]
    return sorted((beat for beat in beats if beat is not None), key=lambda beat: int(beat["rank"]))


def siblings(rank: int, world_size: int) -> Iterator[int]:
    """Returns the other ranks of this machine: first all higher ones, then all lower ones.

    The ranks are computed from torchrun's LOCAL_RANK and LOCAL_WORLD_SIZE. If these variables are
    not set, all ranks are assumed to be on this machine.
    """
    place = int(os.environ.get("LOCAL_RANK", rank))
    count = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    return (rank - place + (place + n) % count for n in range(1, count))


def read_siblings(folder: str | Path, rank: int, world_size: int) -> Iterator[Beat | None]:
    """Yields the last beat, or None, of each rank in `siblings(rank, world_size)`.

    The file of a rank is read only when the iterator reaches this rank.
    """
    return (read(folder, other) for other in siblings(rank, world_size))


def process_state(beat: Beat) -> str:
    """Returns the state of a rank's process: "running", "stopped" or "ended".

    It is "unknown" if the process is on another machine.
    """
    return process.state(beat["pid"]) if beat["host"] == platform.node()[:64] else "unknown"


def who(beat: Beat) -> str:
    """Returns a text with a rank, its machine and its coordinates, for messages."""
    place = f" ({beat['place']})" if beat["place"] else ""
    return f"rank {beat['rank']} on {beat['host']}{place}"


def when(beat: Beat) -> str:
    """Returns a text with the step and phase of a rank, for messages."""
    return f"step {beat['step']}, phase {beat['phase']}"


def first_three(texts: Sequence[str]) -> str:
    """Returns the first three texts in one line, followed by the number of the other ranks.

    Args:
        texts: a text per rank.
    """
    more = f"; and {len(texts) - 3} more ranks" if len(texts) > 3 else ""
    return "; ".join(texts[:3]) + more


def _file(folder: str | Path, rank: int) -> Path:
    return Path(folder) / f"rank-{rank}.json"


def _sealed(record: Beat) -> bytes:
    body = json.dumps(record)
    return f'{body[:-1]}, "crc32": {zlib.crc32(body.encode())}}}'.encode()


def _read(path: Path, attempts: int = 10) -> Beat | None:
    for _ in range(attempts):
        with contextlib.suppress(ValueError, OSError, KeyError, TypeError):
            line = path.read_bytes().rstrip()
            beat: Beat = parse_json(line, str(path))
            del beat["crc32"]
            if _sealed(beat) == line:
                return beat
    return None
