"""After a failure: which rank it was, said once.

    why = lost(error)                             # another rank went away, says this error: so look who
    for line in named(folder, rank, world): ...   # those whose process has ended and that this rank has to name
    write_error_file(text)                        # what torchrun's report shows of this rank

When one rank dies, all others lose their connection to it, and the launcher names the first that it notices. A rank
whose own code failed names itself. One that was killed cannot: so each rank looks at the next rank on its machine,
whose process only this machine can check, and goes on to the next while the process has ended. So every dead rank,
rank 0 too, is named by one live one, and n ranks read less than 2 n files together.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
from pathlib import Path

from threed.reliability import heartbeat
from threed.reliability.heartbeat import ago, process_state, siblings, when, who

# What gloo, NCCL and the store say when another process went away; all else is an error of this rank's own.
_LOST = (
    "connection closed by peer", "connection reset by peer", "broken pipe", "socket closed", "remote process exited",
    "communicator was aborted", "connection was likely closed", "connection refused", "recvvalue failed",
)  # fmt: skip
PATIENCE_S = 3.0  # until the process of a rank that was killed is seen to have ended


class LostContact(Exception):
    """Another rank went away, and took this one with it: what is known of that."""


def lost(error: BaseException) -> bool:
    """Returns whether an error is that another rank went away."""
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in _LOST)


def named(folder: str | Path, rank: int, world_size: int) -> list[str]:
    """Returns a line for each rank that has ended without a word, and that this rank has to name."""
    beats = (heartbeat.read(folder, other) for other in siblings(rank, world_size))
    gone = itertools.takewhile(
        lambda beat: beat is not None and process_state(beat) == "ended", beats
    )
    return [describe(beat) for beat in gone if beat is not None and beat["state"] == ""]


def describe(beat: dict[str, object]) -> str:
    """Returns the line of a rank whose process has ended."""
    return f"{who(beat)} was killed: process {beat['pid']} has ended in {when(beat)}, {ago(beat)}"


def a_sibling_failed(folder: str | Path, rank: int, world_size: int) -> bool:
    """Returns whether some other rank on this machine failed, or ended without a word."""
    beats = (heartbeat.read(folder, other) for other in siblings(rank, world_size))
    return any(
        b["state"] in ("failed", "lost") or (b["state"] == "" and process_state(b) == "ended")
        for b in beats
        if b
    )


def wait_for_names(
    folder: str | Path, rank: int, world_size: int, patience: float = PATIENCE_S
) -> list[str]:
    """Returns `named`, or nothing once another rank is seen to have spoken for itself, or after a while.

    Rank 0 adds, where nobody on its own machine is to blame and no rank says that it failed, which ones said nothing
    since the earliest step: of a machine that is gone nobody else can tell.
    """
    end = time.monotonic() + patience
    while not (found := named(folder, rank, world_size)) and time.monotonic() < end:
        if any(
            (beat := heartbeat.read(folder, other)) and beat["state"] == "failed"
            for other in siblings(rank, world_size)
        ):
            return []
        time.sleep(0.1)
    return found or (_nobody(folder, rank, world_size) if rank == 0 else [])


def _nobody(folder: str | Path, rank: int, world_size: int) -> list[str]:
    beats = [
        beat
        for beat in heartbeat.read_all(folder)
        if beat["rank"] < world_size and beat["rank"] != rank
    ]
    silent = [beat for beat in beats if beat["state"] == ""]
    here = [
        beat
        for beat in silent
        if process_state(beat) == "ended" and beat["rank"] not in siblings(rank, world_size)
    ]
    if here:  # of another launcher on this machine, which is gone with all its ranks
        return [describe(beat) for beat in here]
    if (
        any(beat["state"] == "failed" or process_state(beat) == "ended" for beat in beats)
        or not silent
    ):
        return []
    first = min(
        beat["step"] for beat in silent
    )  # not by their times: clocks of machines may be hours apart
    last = [f"{who(beat)} in {when(beat)}" for beat in silent if beat["step"] == first]
    more = f"; and {len(last) - 3} more ranks" if len(last) > 3 else ""
    why = "a connection was lost and no rank is known to have failed: a machine or the network?"
    return [f"{why} Longest not heard of: {'; '.join(last[:3])}{more}"]


def attempt() -> str:
    """Returns which of torchrun's attempts this is, where it may restart a job; else nothing."""
    number, most = (
        int(os.environ.get(f"TORCHELASTIC_{name}", "0"))
        for name in ("RESTART_COUNT", "MAX_RESTARTS")
    )
    last = ": torchrun restarts it no more" if number >= most else ""
    return f"; attempt {number + 1} of {most + 1}{last}" if most else ""


def write_error_file(text: str) -> None:
    """Leaves a message for torchrun, which shows it in its report; without torchrun nothing happens."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and not os.path.exists(path):
        about = {"message": text, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps(about))
