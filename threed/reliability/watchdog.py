"""The watchdog: a thread of every rank that detects a hang, finds the rank that causes it, and ends
the run.

    watchdog = Watchdog(heart, world_size, limit=600, token="a1b2")
    watchdog.look()                 # every two seconds, in a thread; ends the process if the run hangs

All threads of a stopped process are stopped, so no rank can reliably report itself. When a rank has
been in one phase for longer than the limit, its thread

1. marks its heartbeat "hung" with the position of its main thread, and creates a file `hung-TOKEN`,
   which the other ranks see;
2. writes the stacks of its threads to `rank-N.stacks`;
3. waits three seconds; then the lowest marked rank reads all heartbeats and prints the culprits
   (`judge`), and `hang.txt` lists the position of every rank;
4. writes torch's record of its recent collectives to `rank-N.collectives.json`, and exits with code
   124, like timeout(1); torchrun restarts the run if it may.

The watchdog reads heartbeats only if the run hangs. Then one rank reads all of them; the others
read the heartbeats of lower ranks, up to the first marked one.

A rank that did not mark its heartbeat gets SIGUSR2, to write its stacks (faulthandler, which needs
no Python thread), and is then killed, by the rank before it on its machine. torchrun would wait
half a minute for a stopped process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from threed.core import process
from threed.distributed import collectives
from threed.reliability import heartbeat
from threed.reliability.failure import write_error_file
from threed.reliability.heartbeat import (
    Beat,
    Heartbeat,
    first_three,
    process_state,
    when,
    who,
)

HUNG = 124  # the exit code of all ranks
# seconds that ranks have to mark their heartbeats after one of them detects a hang
ANSWER_S = 3.0
WAITS = "waits in"  # start of the note of a rank that is inside a collective
COMMUNICATION = ("threed/distributed/collectives.py", "torch/distributed/")


class Watchdog:
    """Watches one rank's heartbeat, from the first step until `stop`. Loading is not watched.

    Args:
        heart: the rank's heartbeat.
        world_size: number of ranks.
        limit: seconds in one phase, 0 for no limit.
        token: equal on all ranks, different in each attempt.
    """

    def __init__(self, heart: Heartbeat, world_size: int, limit: float, token: str) -> None:
        self.heart, self.world_size, self.limit = heart, world_size, limit
        self.stopped = limit == 0
        self._mark = heart.folder / f"hung-{token}"
        self._report = heart.folder.parent / "hang.txt"
        self._stacks = heart.folder / f"rank-{heart.rank}.stacks"
        self._file = self._stacks.open("w") if limit else None
        if self._file is not None and hasattr(faulthandler, "register"):
            faulthandler.register(signal.SIGUSR2, self._file, all_threads=True)

    def stop(self) -> None:
        """Stops watching; removes `rank-N.stacks` if it is empty. May be called repeatedly."""
        self.stopped = True
        if self._file is not None:
            if hasattr(faulthandler, "unregister"):
                faulthandler.unregister(signal.SIGUSR2)
            self._file.close()
            self._file = None
            with contextlib.suppress(OSError):
                if not self._stacks.stat().st_size:
                    self._stacks.unlink()

    def look(self) -> None:
        """Ends the process, after a report, if the run hangs."""
        if self.stopped:
            return
        elapsed = time.monotonic() - self.heart.began
        # A rank that makes progress does not look for the file.
        slow = elapsed > min(10.0, self.limit / 2)
        if (elapsed > self.limit and self.heart.last["phase"] != "start") or (
            slow and self._mark.exists()
        ):
            self._end(elapsed)

    def _end(self, elapsed: float) -> None:
        self.heart.mark("hung", where())
        with contextlib.suppress(OSError):
            self._mark.touch()
        self._write_stacks()
        time.sleep(ANSWER_S)
        write_error_file(self._print(elapsed) if self._is_lowest() else self._wait_for_report())
        with contextlib.suppress(Exception):  # flight_record uses a private function of torch
            record = self._stacks.with_suffix(".collectives.json")
            record.write_bytes(collectives.flight_record())
        about = self.heart.folder, self.heart.rank, self.world_size
        for beat in heartbeat.read_siblings(*about):
            if beat is None or beat["state"]:
                break
            _kill(beat)
        os._exit(HUNG)

    def _write_stacks(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            if self._file is not None:
                self._file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}: {where()}\n")
                self._file.flush()
                faulthandler.dump_traceback(self._file, all_threads=True)

    def _is_lowest(self) -> bool:
        """Returns whether no lower rank is marked as hung."""
        beats = (heartbeat.read(self.heart.folder, rank) for rank in range(self.heart.rank))
        return not any(beat is not None and beat["state"] == "hung" for beat in beats)

    def _print(self, elapsed: float) -> str:
        """Prints the report and writes it to `hang.txt`; returns its first line."""
        beats = [b for b in heartbeat.read_all(self.heart.folder) if b["rank"] < self.world_size]
        limit = f"run.hang-timeout {self.limit:g} s"
        text = f"hang: no progress for {elapsed:.1f} s ({limit}). {judge(beats, self.world_size)}"
        files = f"All ranks: {self._report}; their stacks: {self.heart.folder}/rank-*.stacks"
        print(f"threed: {text}. {files}. Exit code {HUNG}", file=sys.stderr, flush=True)
        rows = [f"{who(beat)}: {when(beat)}, {beat['note'] or 'no answer'}" for beat in beats]
        with contextlib.suppress(OSError):
            scratch = self._report.with_suffix(".tmp")
            scratch.write_text("\n".join([text, files, *rows, ""]))
            scratch.replace(self._report)
            self._mark.unlink(missing_ok=True)
        return text

    def _wait_for_report(self) -> str:
        end = time.monotonic() + ANSWER_S
        while self._mark.exists() and time.monotonic() < end:
            time.sleep(0.1)
        return f"the run hung: see {self._report}"


def judge(beats: Sequence[Beat], world_size: int) -> str:
    """Returns a line with the ranks that made a run hang.

    Uses the first criterion that singles out some ranks: no heartbeat; no answer to the hang; not
    waiting in a collective; an earlier step than others.
    """
    if missing := sorted(set(range(world_size)) - {beat["rank"] for beat in beats}):
        return first_three([f"rank {rank} has no heartbeat" for rank in missing])
    if silent := [beat for beat in beats if not beat["state"]]:
        return first_three([f"{who(beat)} {_silence(beat)}" for beat in silent])
    outside = [beat for beat in beats if not beat["note"].startswith(WAITS)]
    earliest = min(beat["step"] for beat in beats)
    behind = [beat for beat in beats if beat["step"] == earliest]
    for found, what in ((outside, "waits for no other rank"), (behind, "is behind")):
        if 0 < len(found) < len(beats):
            texts = [f"{who(beat)} {what}: {when(beat)}, {beat['note']}" for beat in found]
            return first_three(texts)
    return f"all ranks hang in {when(beats[0])}: {who(beats[0])} {beats[0]['note']}"


def _silence(beat: Beat) -> str:
    states = {"stopped": "is stopped (SIGSTOP, or a debugger)", "ended": "has ended"}
    state = states.get(process_state(beat), "does not answer")
    return f"{state}: process {beat['pid']}, last seen in {when(beat)}"


def where() -> str:
    """Returns the position of this process, for messages.

    If a thread is in a collective: "waits in all_reduce over dp, for finish at zero/norm.py:31".
    Otherwise the position of the main thread.
    """
    frames = sys._current_frames()
    main = frames[threading.main_thread().ident or 0]
    other_threads = [
        f for ident, f in frames.items() if ident != threading.get_ident() and f is not main
    ]
    for frame in (main, *other_threads):  # on a GPU, autograd runs the backward in another thread
        if text := _communication(frame):
            return text
    return f"in {_place(main)}"


def _communication(frame: FrameType | None) -> str:
    """Returns the collective that a thread waits in, and its caller; "" if it does not."""
    found = None
    while frame is not None and any(
        part in frame.f_code.co_filename.replace(os.sep, "/") for part in COMMUNICATION
    ):
        found, frame = frame, frame.f_back
    if found is None:
        return ""
    label = getattr(found.f_locals.get("axis"), "label", "")
    over = f" over {label}" if label else ""
    return f"{WAITS} {found.f_code.co_name}{over}, for {_place(frame) if frame else 'an unknown caller'}"


def _place(frame: FrameType) -> str:
    while frame.f_code.co_name.startswith("<") and frame.f_back is not None:  # a comprehension
        frame = frame.f_back
    path = "/".join(Path(frame.f_code.co_filename).parts[-2:])
    return f"{frame.f_code.co_name} at {path}:{frame.f_lineno}"


def _kill(beat: Beat) -> None:
    """Makes a rank of the same launcher write its stacks, and kills it."""
    if process_state(beat) in ("unknown", "ended") or process.parent(beat["pid"]) != os.getppid():
        return
    with contextlib.suppress(OSError):
        os.kill(beat["pid"], signal.SIGUSR2)  # pending when the process continues
        os.kill(beat["pid"], signal.SIGCONT)
        time.sleep(0.2)
        os.kill(beat["pid"], signal.SIGKILL)
