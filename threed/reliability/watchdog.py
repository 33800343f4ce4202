"""The watchdog: a thread of every rank notices that the run stands still, finds the rank to blame, and ends the run.

    watchdog = Watchdog(heart, world_size, limit=600, token="a1b2")
    watchdog.look()                 # every half second, in a thread; does not return once the run hangs

A process that is stopped has stopped threads, so nobody can report on itself alone. When a rank has been in one phase
for longer than the limit, its thread answers: it marks its heartbeat "hung" with the place where its main thread is,
and writes the stacks of its threads into `rank-N.stacks` beside it. It also leaves a file `hung-TOKEN`, which the
others see. Three seconds later the lowest rank that answered reads what all others wrote, and `judge` finds the
culprit: who did not answer; else who is in no collective while others wait in one; else who is furthest behind.
The report is one message on the screen and a file, `hang.txt`. Then all ranks end with exit code 124, as timeout(1)
does, and torchrun restarts them if it may.

In a run that moves no rank reads anything, and after a hang one rank reads all heartbeats; the others read those of the
ranks below theirs, up to the first that answered.

Who did not answer is made to write its stacks by SIGUSR2 (faulthandler, which needs no thread of Python's), and is
killed, by the rank before it on its machine: torchrun would give a stopped process half a minute to end.
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
from typing import Any

from threed.reliability import heartbeat
from threed.reliability.failure import write_error_file
from threed.reliability.heartbeat import Heartbeat, ago, process_state, siblings, when, who

HUNG = 124  # the exit code of all ranks
LOOK_S, ANSWER_S = (
    2.0,
    3.0,
)  # how often a rank that moves slowly looks for the file, and how long one waits for answers
# torch's OpType (Work.hpp)
_OPERATIONS = {
    0: "broadcast", 1: "all-reduce", 4: "all-gather", 5: "all-gather", 9: "reduce-scatter", 10: "all-to-all",
    11: "all-to-all", 12: "send", 13: "receive", 15: "barrier", 16: "reduce-scatter", 17: "send or receive",
}  # fmt: skip
COMMUNICATION = ("threed/collectives.py", "torch/distributed/")


class Watchdog:
    """Watches one rank's heartbeat. limit: seconds in one phase, 0 for ever. token: the same on all ranks, of this
    attempt only. Loading before the first step, and what follows `stop`, may take longer."""

    def __init__(self, heart: Heartbeat, world_size: int, limit: float, token: str) -> None:
        self.heart, self.world_size, self.limit = heart, world_size, limit
        self.stopped = limit == 0
        self._mark = heart.folder / f"hung-{token}"
        self._report = heart.folder.parent / "hang.txt"
        self._looked = 0.0
        self._stacks = heart.folder / f"rank-{heart.rank}.stacks"
        self._file = self._stacks.open("w") if limit else None
        if self._file is not None and hasattr(faulthandler, "register"):
            faulthandler.register(signal.SIGUSR2, self._file, all_threads=True)

    def stop(self) -> None:
        """Watches no more, and removes the file of stacks if it is empty; again does nothing."""
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
        """Ends the process if the run hangs, once that is reported."""
        if self.stopped:
            return
        _, phase, since = self.heart.last
        stood = time.monotonic() - since
        if (stood > self.limit and phase != "start") or self._others_hang(stood):
            self._end(stood)

    def _others_hang(self, stood: float) -> bool:
        """Returns whether another rank found that the run hangs; one that moves need not ask."""
        now = time.monotonic()
        if stood < min(10.0, self.limit / 2) or now - self._looked < LOOK_S:
            return False
        self._looked = now
        return self._mark.exists()

    def _end(self, stood: float) -> None:
        self.heart.mark("hung", where())
        with contextlib.suppress(OSError):
            self._mark.touch()
        self._write_stacks()
        time.sleep(ANSWER_S)
        text = self._say(stood) if self._is_lowest() else self._wait_for_report()
        write_error_file(text)
        for other in siblings(self.heart.rank, self.world_size):
            if (beat := heartbeat.read(self.heart.folder, other)) is None or beat["state"]:
                break
            _stop_process(beat)
        os._exit(HUNG)

    def _write_stacks(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            if self._file is not None:
                self._file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}: {where()}\n")
                self._file.flush()
                faulthandler.dump_traceback(self._file, all_threads=True)

    def _is_lowest(self) -> bool:
        """Returns whether no lower rank answered."""
        beats = (heartbeat.read(self.heart.folder, rank) for rank in range(self.heart.rank))
        return not any(beat is not None and beat["state"] == "hung" for beat in beats)

    def _say(self, stood: float) -> str:
        beats = [
            beat for beat in heartbeat.read_all(self.heart.folder) if beat["rank"] < self.world_size
        ]
        text = f"hang: no progress for {stood:.1f} s (run.hang-timeout {self.limit:g} s). {judge(beats, self.world_size)}"
        stacks = f"Stacks of all ranks: {self.heart.folder}/rank-*.stacks"
        print(
            f"threed: {text}. {stacks}. The run ends with exit code {HUNG}",
            file=sys.stderr,
            flush=True,
        )
        rows = [f"{who(beat)}: {when(beat)}, {beat['note'] or 'no answer'}" for beat in beats]
        with contextlib.suppress(OSError):
            scratch = self._report.with_suffix(".tmp")
            scratch.write_text("\n".join([text, stacks, *rows, ""]))
            scratch.replace(self._report)
            self._mark.unlink(missing_ok=True)
        return text

    def _wait_for_report(self) -> str:
        end = time.monotonic() + ANSWER_S
        while self._mark.exists() and time.monotonic() < end:
            time.sleep(0.1)
        return f"the run hung: see {self._report}"


def judge(beats: Sequence[dict[str, Any]], world_size: int) -> str:
    """Returns who made a run hang, from the last beats of its ranks, and what the others do."""
    missing = sorted(set(range(world_size)) - {beat["rank"] for beat in beats})
    silent = [beat for beat in beats if beat["state"] == ""]
    answered = [beat for beat in beats if beat["state"] != ""]
    if missing:
        return f"Never seen: {_ranks(missing)}"
    if silent:
        return _list(silent, [_silence(beat) for beat in silent]) + _others(answered)
    outside = [beat for beat in answered if not beat["note"].startswith("waits in")]
    if 0 < len(outside) < len(answered):
        waiting = [beat for beat in answered if beat["note"].startswith("waits in")]
        return _list(
            outside, [f"waits for no other rank: {when(b)}, {b['note']}" for b in outside]
        ) + _others(waiting)
    first = min(beat["step"] for beat in answered)
    behind = [beat for beat in answered if beat["step"] == first]
    if len(behind) < len(answered):
        rest = [beat for beat in answered if beat["step"] > first]
        return _list(
            behind, [f"is behind: {when(beat)}, {beat['note']}" for beat in behind]
        ) + _others(rest)
    return "All ranks wait for each other, in the same step" + _others(answered, "They are")


def _silence(beat: dict[str, Any]) -> str:
    state = process_state(beat)
    what = {"stopped": "is stopped (SIGSTOP, or a debugger)", "ended": "has ended"}.get(
        state, "does not answer"
    )
    return f"{what}: process {beat['pid']}, last seen in {when(beat)}, {ago(beat)}"


def _list(beats: Sequence[dict[str, Any]], texts: Sequence[str], most: int = 3) -> str:
    more = (
        f"; and {len(beats) - most} more: {_ranks([b['rank'] for b in beats[most:]])}"
        if len(beats) > most
        else ""
    )
    return (
        "; ".join(
            f"{who(beat)} {text}" for beat, text in list(zip(beats, texts, strict=True))[:most]
        )
        + more
    )


def _others(beats: Sequence[dict[str, Any]], begin: str = "Others are") -> str:
    """Returns a few of the places where ranks are, each with the ranks that are there."""
    places: dict[str, list[int]] = {}
    for beat in beats:
        places.setdefault(f"{when(beat)}: {beat['note']}", []).append(beat["rank"])
    if not places:
        return ""
    return f". {begin} in " + "; ".join(
        f"{place} ({_ranks(ranks)})" for place, ranks in list(places.items())[:4]
    )


def _ranks(ranks: Sequence[int]) -> str:
    listed = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {listed}"


def where() -> str:
    """Returns where this process is: "waits in all_reduce over dp, for finish at zero/norm.py:31", else its place in
    the program."""
    frames = sys._current_frames()
    main = threading.main_thread().ident
    order = sorted(
        (ident for ident in frames if ident != threading.get_ident()),
        key=lambda ident: ident != main,
    )
    for ident in order:  # autograd's threads too: on a GPU a backward is theirs
        if text := _communication(frames[ident]):
            return text
    return f"in {_place(frames[main])}" if main in frames else "at no place of Python's"


def _communication(frame: Any) -> str:
    """Returns which collective a thread waits in, and for whom; empty if it does not."""
    found = work = None
    while frame is not None and any(
        part in frame.f_code.co_filename.replace(os.sep, "/") for part in COMMUNICATION
    ):
        found, frame = frame, frame.f_back
        work = work or found.f_locals.get("work")
    if found is None:
        return ""
    name = found.f_code.co_name
    if name == "wait":  # for one that was begun before
        name = _OPERATIONS.get(_kind(work), "a collective")
    label = getattr(found.f_locals.get("axis"), "label", "")
    over = f" over {label}" if label else ""
    return f"waits in {name}{over}" + (f", for {_place(frame)}" if frame is not None else "")


def _kind(work: Any) -> int:
    """Returns torch's number of an operation, -1 where it tells none."""
    with contextlib.suppress(Exception):
        return int(work._get_op_type())
    return -1


def _place(frame: Any) -> str:
    while (
        frame.f_code.co_name.startswith("<") and frame.f_back is not None
    ):  # a comprehension is no place
        frame = frame.f_back
    path = "/".join(Path(frame.f_code.co_filename).parts[-2:])
    return f"{frame.f_code.co_name} at {path}:{frame.f_lineno}"


def _stop_process(beat: dict[str, Any]) -> None:
    """Makes a rank that did not answer write its stacks, and kills it: if it is of the same launcher, here."""
    try:
        parent = Path(f"/proc/{beat['pid']}/stat").read_text().rpartition(")")[2].split()[1]
    except OSError:
        return
    if process_state(beat) == "unknown" or int(parent) != os.getppid():
        return
    with contextlib.suppress(OSError):
        os.kill(beat["pid"], signal.SIGUSR2)  # before it runs on
        os.kill(beat["pid"], signal.SIGCONT)
        time.sleep(0.2)
        os.kill(beat["pid"], signal.SIGKILL)
