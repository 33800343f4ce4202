"""Finds the rank that caused a failure, so that it is reported exactly once.

    lost(error)                             # whether an error means that another rank has died
    named(folder, rank, world)              # a line per killed rank that this rank reports
    write_error_file(text)                  # the text for this rank in torchrun's report

If one rank dies, all other ranks lose their connection to it, and the launcher reports the first
rank that notices this, which is not the cause. A rank that fails with an error reports this error,
but a rank that was killed cannot report anything. Therefore each rank reads the heartbeat of the
next rank on its machine and checks whether that process has ended; if so, it also checks the rank
after that one, and so on up to the first process that is alive, or that ended with the state
"lost": such a rank has itself reported the dead ranks directly after it. Each dead rank is then
reported by exactly one other rank, and n ranks together read fewer than 2 n heartbeats.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import time
from pathlib import Path

from threed.core import process
from threed.reliability import heartbeat
from threed.reliability.heartbeat import Beat, first_three, process_state, when, who

# Parts of the messages of errors that gloo, NCCL and torch's store raise if another process died.
_LOST = (
    "connection closed by peer", "connection reset by peer", "broken pipe", "socket closed", "remote process exited",
    "communicator was aborted", "connection was likely closed", "connection refused", "recvvalue failed",
)  # fmt: skip
PATIENCE_S = 3.0  # maximum seconds to wait until the process of a killed rank has ended
REFUSAL_S = 5.0  # maximum seconds to wait until the machine's first rank has written its message


class LostContact(Exception):
    """Raised on a rank that ends because another rank has died. The death is already reported."""


def lost(error: BaseException) -> bool:
    """Returns whether an error means that another rank has died."""
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in _LOST)


def named(folder: str | Path, rank: int, world_size: int) -> list[str]:
    """Returns a line per killed rank that this rank reports.

    A rank reports the killed ranks directly after it on its machine (see the module's docstring).

    Args:
        folder: the folder of the heartbeats.
        rank: this rank.
        world_size: number of ranks.
    """
    beats = heartbeat.read_siblings(folder, rank, world_size)
    dead = itertools.takewhile(_is_passed, beats)
    return [describe(beat) for beat in dead if beat is not None and beat["state"] == ""]


def _is_passed(beat: Beat | None) -> bool:
    """Returns whether the ranks directly after this dead rank are reported by the rank before it."""
    return beat is not None and beat["state"] != "lost" and process_state(beat) == "ended"


def describe(beat: Beat) -> str:
    """Returns a line of text about a rank that was killed."""
    return f"{who(beat)} was killed: process {beat['pid']} has ended in {when(beat)}"


def a_sibling_failed(folder: str | Path, rank: int, world_size: int) -> bool:
    """Returns whether another rank on this machine failed, was killed, or lost its connection."""
    return any(
        b["state"] in ("failed", "lost") or (b["state"] == "" and process_state(b) == "ended")
        for b in heartbeat.read_siblings(folder, rank, world_size)
        if b
    )


def wait_for_names(
    folder: str | Path, rank: int, world_size: int, patience: float = PATIENCE_S
) -> list[str]:
    """Waits until the cause of a lost connection is known, and returns the lines to report.

    Returns:
        If this rank reports killed ranks: the lines of `named`. If another rank of this machine has
        reported its own failure: an empty list. If neither is the case after `patience` seconds:
        on rank 0, lines about other ranks (`_elsewhere`); on the other ranks, an empty list.
    """
    end = time.monotonic() + patience
    while not (found := named(folder, rank, world_size)) and time.monotonic() < end:
        beats = heartbeat.read_siblings(folder, rank, world_size)
        if any(beat is not None and beat["state"] == "failed" for beat in beats):
            return []
        time.sleep(0.1)
    return found or (_elsewhere(folder, rank, world_size) if rank == 0 else [])


def _elsewhere(folder: str | Path, rank: int, world_size: int) -> list[str]:
    """Returns lines about the ranks that this rank's launcher did not start.

    `named` does not check these ranks, because they belong to other launchers or other machines.

    Returns:
        A line per rank that another launcher started on this machine and that has died. If no
        process on this machine has ended and no rank has reported a failure: one line with the
        running ranks whose step is the earliest. In all other cases an empty list, because another
        rank reports the cause.
    """
    beats = [b for b in heartbeat.read_all(folder) if b["rank"] < world_size and b["rank"] != rank]
    running = [beat for beat in beats if beat["state"] == ""]
    dead = [beat for beat in beats if process_state(beat) == "ended"]
    if dead or not running or any(beat["state"] == "failed" for beat in beats):
        here = list(heartbeat.siblings(rank, world_size))
        return [describe(b) for b in dead if b["state"] == "" and b["rank"] not in here]
    # Compares steps, not times, because the machines' clocks may differ.
    earliest = min(beat["step"] for beat in running)
    last = [f"{who(beat)} in {when(beat)}" for beat in running if beat["step"] == earliest]
    why = "a connection was lost and no rank is known to have failed: a machine or the network?"
    return [f"{why} Earliest: {first_three(last)}"]


def attempt() -> str:
    """Returns "; attempt N of M" for messages if torchrun may restart the job, else ""."""
    most = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    return f"; attempt {process.restarts() + 1} of {most + 1}" if most else ""


def write_error_file(text: str) -> None:
    """Writes a message for torchrun's report. Later messages of the same rank are ignored."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and not os.path.exists(path):
        about = {"message": text, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps(about))


def refuse(text: str, code: int = 2, shared: bool = True) -> int:
    """Prints why this process ends, and writes it to torchrun's error file. Returns `code`.

    A launcher ends all ranks of a machine when the first one ends. So the other ranks wait until
    local rank 0 has printed the message.

    Args:
        text: message to print.
        code: exit code to return.
        shared: whether all ranks of the machine end for the same reason; if so, only local rank 0
            prints it.
    """
    if shared and int(os.environ.get("LOCAL_RANK", "0")) > 0:
        wait_for_first_rank()
    else:
        print(text, file=sys.stderr, flush=True)
    write_error_file(" ".join(text.split()))
    return code


def wait_for_first_rank() -> None:
    """Waits until the first rank of this machine has written its message for torchrun.

    Other ranks call it before they exit. A launcher terminates all ranks when one exits, so the
    rank that prints the message must exit first. The wait ends after at most
    `REFUSAL_S` seconds. Launchers other than torchrun have no message file, so under them this
    process waits `REFUSAL_S` seconds, or until the launcher terminates it.
    """
    own = os.environ.get("TORCHELASTIC_ERROR_FILE")
    first = Path(own).parents[1] / "0" / "error.json" if own else None
    end = time.monotonic() + REFUSAL_S
    while time.monotonic() < end and not (first is not None and first.exists()):
        time.sleep(0.1)
