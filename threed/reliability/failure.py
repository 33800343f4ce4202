"""After a failure: reports which rank caused it, once.

    lost(error)                             # another rank is gone, according to this error
    named(folder, rank, world)              # a line for each dead rank that this rank reports
    write_error_file(text)                  # what torchrun's report shows for this rank

When one rank dies, all others lose their connection to it, and the launcher names the first that
notices. A rank whose own code failed reports that itself. A rank that was killed cannot: so each
rank checks the process of the next rank on its machine, and goes on to the one after while
processes have ended. So each dead rank is reported by exactly one live rank, and n ranks read less
than 2 n files together.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
from pathlib import Path

from threed.reliability import heartbeat
from threed.reliability.heartbeat import Beat, first_three, process_state, when, who

# What gloo, NCCL and the store report when another process is gone.
_LOST = (
    "connection closed by peer", "connection reset by peer", "broken pipe", "socket closed", "remote process exited",
    "communicator was aborted", "connection was likely closed", "connection refused", "recvvalue failed",
)  # fmt: skip
PATIENCE_S = 3.0  # until the process of a killed rank is seen to have ended
REFUSAL_S = 5.0  # until the first rank of a machine has reported a refusal


class LostContact(Exception):
    """Another rank is gone, and this one ends because of that. Has been reported."""


def lost(error: BaseException) -> bool:
    """Returns whether an error means that another rank is gone."""
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in _LOST)


def named(folder: str | Path, rank: int, world_size: int) -> list[str]:
    """Returns a line for each dead rank that this rank has to report."""
    beats = heartbeat.read_siblings(folder, rank, world_size)
    gone = itertools.takewhile(lambda beat: beat and process_state(beat) == "ended", beats)
    return [describe(beat) for beat in gone if beat is not None and beat["state"] == ""]


def describe(beat: Beat) -> str:
    """Returns the line of a rank that was killed."""
    return f"{who(beat)} was killed: process {beat['pid']} has ended in {when(beat)}"


def a_sibling_failed(folder: str | Path, rank: int, world_size: int) -> bool:
    """Returns whether another rank on this machine failed or was killed."""
    return any(
        b["state"] in ("failed", "lost") or (b["state"] == "" and process_state(b) == "ended")
        for b in heartbeat.read_siblings(folder, rank, world_size)
        if b
    )


def wait_for_names(
    folder: str | Path, rank: int, world_size: int, patience: float = PATIENCE_S
) -> list[str]:
    """Returns `named` as soon as it has any; nothing once a rank of this machine reported itself.

    After `patience` seconds without either, rank 0 returns a line on the ranks of other machines.
    """
    end = time.monotonic() + patience
    while not (found := named(folder, rank, world_size)) and time.monotonic() < end:
        beats = heartbeat.read_siblings(folder, rank, world_size)
        if any(beat is not None and beat["state"] == "failed" for beat in beats):
            return []
        time.sleep(0.1)
    return found or (_elsewhere(folder, rank, world_size) if rank == 0 else [])


def _elsewhere(folder: str | Path, rank: int, world_size: int) -> list[str]:
    """Returns the dead ranks of other launchers here; else a line on the ranks at the earliest step.

    Returns nothing if some rank failed or its death is reported by another rank.
    """
    beats = [b for b in heartbeat.read_all(folder) if b["rank"] < world_size and b["rank"] != rank]
    running = [beat for beat in beats if beat["state"] == ""]
    dead = [beat for beat in beats if process_state(beat) == "ended"]
    if dead or not running or any(beat["state"] == "failed" for beat in beats):
        here = list(heartbeat.siblings(rank, world_size))
        return [describe(b) for b in dead if b["state"] == "" and b["rank"] not in here]
    earliest = min(beat["step"] for beat in running)  # clocks of machines may be hours apart
    last = [f"{who(beat)} in {when(beat)}" for beat in running if beat["step"] == earliest]
    why = "a connection was lost and no rank is known to have failed: a machine or the network?"
    return [f"{why} Earliest: {first_three(last)}"]


def attempt() -> str:
    """Returns the number of torchrun's attempt, if torchrun may restart the job; else nothing."""
    number, most = (
        int(os.environ.get(f"TORCHELASTIC_{name}", "0"))
        for name in ("RESTART_COUNT", "MAX_RESTARTS")
    )
    return f"; attempt {number + 1} of {most + 1}" if most else ""


def write_error_file(text: str) -> None:
    """Leaves a message for torchrun's report. The first message of a rank counts."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and not os.path.exists(path):
        about = {"message": text, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps(about))


def wait_for_first_rank() -> None:
    """Waits until the first rank of this machine has left its message for torchrun.

    A launcher ends all ranks when one ends, so the rank that prints a message must end first.
    Other launchers than torchrun have no such file: then this waits to be ended by the launcher.
    """
    own = os.environ.get("TORCHELASTIC_ERROR_FILE")
    first = Path(own).parents[1] / "0" / "error.json" if own else None
    end = time.monotonic() + REFUSAL_S
    while time.monotonic() < end and not (first is not None and first.exists()):
        time.sleep(0.1)
