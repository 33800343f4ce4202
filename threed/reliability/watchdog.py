"""The watchdog: detects a hang on every rank, finds the rank that causes it, and ends the run.

    watchdog = Watchdog(heart, world_size, limit=600, token="a1b2")
    watchdog.look()                 # every two seconds, in a thread; ends the process on a hang

A process that is stopped (SIGSTOP) cannot report a hang, because all its threads are stopped. The
other ranks must therefore report it. When a rank has been in one phase for longer than the limit,
its watchdog

1. marks the rank's heartbeat "hung", with the rank's position in the code, and creates a file
   `hung-TOKEN`; the watchdogs of the other ranks see this file and begin the same steps;
2. writes the stacks of its threads to `rank-N.stacks`;
3. waits three seconds; then the lowest rank with a marked heartbeat reads all heartbeats, prints
   the ranks that cause the hang (`judge`), and writes the position of every rank to `hang.txt`;
4. writes torch's record of its recent collectives to `rank-N.collectives.json`, and exits with code
   124, like timeout(1). torchrun then restarts the run if it has restarts left.

The watchdog reads heartbeats of other ranks only if the run hangs. The lowest marked rank reads all
heartbeats. Every other rank reads the heartbeats of lower ranks, up to the first marked one.

If a rank has not marked its heartbeat, the rank before it on the same machine sends it SIGUSR2, and
then kills it. On SIGUSR2, faulthandler, which needs no Python thread, writes the stacks of the
unmarked rank. If a stopped process were not killed, torchrun would wait half a minute for it.
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
from threed.reliability.heartbeat import Beat, Heartbeat, first_three, process_state, when, who

HUNG = 124  # exit code of every rank of a run that hangs
# Seconds within which the other ranks must mark their heartbeats after a rank detects a hang.
ANSWER_S = 3.0
WAITS = "waits in"  # prefix of the heartbeat's note if a rank waits in a collective
COMMUNICATION = ("threed/distributed/collectives.py", "torch/distributed/")


class Watchdog:
    """Watches the heartbeat of one rank from the end of the phase "start" until `stop`.

    The limit does not apply during the phase "start", which covers loading, for example.

    Args:
        heart: heartbeat of the rank.
        world_size: number of ranks.
        limit: maximum seconds in one phase; 0 for no limit.
        token: text that is the same on all ranks, and different in each attempt of a job.
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
        """If the run hangs, reports this and ends the process."""
        if self.stopped:
            return
        elapsed = time.monotonic() - self.heart.began
        # If another rank hangs, it creates the file `hung-TOKEN`. This rank looks for the file only
        # if it has made no progress for some seconds.
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
        # `flight_record` calls a private function of torch, which may fail in other versions.
        with contextlib.suppress(Exception):
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

    Four criteria are tried in this order: the rank has no heartbeat; its heartbeat is not marked;
    it does not wait in a collective; its step is the earliest. The first criterion that some rank
    meets decides: all ranks that meet it are returned. The last two criteria are skipped if all
    ranks meet them.

    Args:
        beats: the last beat of each rank that has one.
        world_size: number of ranks.
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
    """Returns the position of this process in the code, for messages.

    If a thread waits in a collective, the text has this collective and its caller: "waits in
    all_reduce over dp, for finish at zero/norm.py:31". Otherwise it has the position of the main
    thread.
    """
    frames = sys._current_frames()
    main = frames[threading.main_thread().ident or 0]
    other_threads = [
        f for ident, f in frames.items() if ident != threading.get_ident() and f is not main
    ]
    # Other threads are searched too, because on a GPU autograd runs the backward in its own thread.
    for frame in (main, *other_threads):
        if text := _communication(frame):
            return text
    return f"in {_place(main)}"


def _communication(frame: FrameType | None) -> str:
    """Returns the collective in which a thread waits, and its caller; "" if it waits in none.

    Args:
        frame: innermost frame of the thread.
    """
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
    # Skips frames without a function name, for example of comprehensions.
    while frame.f_code.co_name.startswith("<") and frame.f_back is not None:
        frame = frame.f_back
    path = "/".join(Path(frame.f_code.co_filename).parts[-2:])
    return f"{frame.f_code.co_name} at {path}:{frame.f_lineno}"


def _kill(beat: Beat) -> None:
    """Makes a rank write its stacks, then kills it.

    Has no effect on ranks that another launcher started, or that are on other machines.
    """
    if process_state(beat) in ("unknown", "ended") or process.parent(beat["pid"]) != os.getppid():
        return
    with contextlib.suppress(OSError):
        # A stopped process receives SIGUSR2 only when SIGCONT continues it.
        os.kill(beat["pid"], signal.SIGUSR2)
        os.kill(beat["pid"], signal.SIGCONT)
        time.sleep(0.2)
        os.kill(beat["pid"], signal.SIGKILL)
