"""Preemption: stops a run before its last step, on all ranks after the same step, and records why.

    stop = Stop(topology.axis("world"), device, asked=lambda: signals.asked)
    if stop.check(): ...                # after each step: whether to stop; does not wait
    if stop.now(): ...                  # at points where the ranks wait for each other anyway

A signal may reach only one rank, or reach the ranks in different steps. So after each step, every
rank sends a flag that is 1 if this rank was asked to stop. The sum of the flags is the same on all
ranks, and is read after the next step. By then it has normally arrived, so the host does not wait
for it, unless a device is more than a step behind the host.

The file `preempted.json` in the run folder contains step, reason and checkpoint. The ranks exit
with code 75 (EX_TEMPFAIL of sysexits.h: try again later). torchrun treats this as a failure and may
restart the ranks. Restarted ranks exit at once if `preempted.json` was written by the same job with
the same number of ranks. Any other start removes the file and resumes.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from threed.core import process
from threed.core.device import copy_stream, is_accelerator, on_stream, start_copy_in, start_copy_out
from threed.distributed import collectives
from threed.distributed.topology import Axis

PREEMPTED = 75
FILE = "preempted.json"


class Preempted(Exception):
    """Raised when the run has stopped before its last step on request.

    The message explains how to continue.
    """


class Stop:
    """Decides together with all other ranks whether to stop the run; `bool(stop)` is the decision.

    Args:
        axis: axis of all ranks.
        device: device of this rank.
        asked: function that returns why this rank is to stop ("SIGTERM", ...), or "".

    Attributes:
        reason: the signal or time limit that stops the run, with the rank that reported it; "" as
            long as the run is not to stop.
    """

    def __init__(self, axis: Axis, device: torch.device, asked: Callable[[], str]) -> None:
        self.axis, self.device, self.asked = axis, device, asked
        self.reason = ""
        self._sent: Callable[[], float] | None = None

    def __bool__(self) -> bool:
        return bool(self.reason)

    def check(self) -> bool:
        """Reads the flags of the previous check, and sends this rank's flag. Collective.

        Returns:
            Whether the run is to stop: True if any rank was asked to stop before the previous
            check.
        """
        sent, self._sent = self._sent, None
        if not self.reason and sent is not None and sent():
            self.now()
        if not self.reason:
            self._sent = self._send()
        return bool(self.reason)

    def _send(self) -> Callable[[], float]:
        flag = torch.tensor([float(bool(self.asked()))])
        if not is_accelerator(self.device):
            pending = collectives.start_sum_of_scalars(flag, self.axis)
            return lambda: float(pending.wait())
        # The flags are sent on a separate stream, so that the next step does not wait for the flag
        # of a slow rank.
        stream = copy_stream(self.device, "flags")
        with on_stream(stream):
            total = collectives.sum_of_scalars(start_copy_in(flag, self.device), self.axis)
            read = start_copy_out(total)
        return lambda: float(read())

    def now(self) -> bool:
        """Returns whether any rank has been asked to stop. Collective; waits for all ranks."""
        return self.take(collectives.exchange(self.asked(), self.axis))

    def take(self, asked: Sequence[str]) -> bool:
        """Sets `reason` from the results of `asked` on all ranks.

        Args:
            asked: the result of `asked` on each rank, by rank. All ranks pass the same sequence.

        Returns:
            Whether the run is to stop.
        """
        found = [f"{what} (rank {rank})" for rank, what in enumerate(asked) if what]
        if found and not self.reason:
            all_equal = len(found) == len(asked) > 1 and len(set(asked)) == 1
            self.reason = asked[0] if all_equal or asked[0].startswith("train.") else found[0]
        return bool(self.reason)


def mark(
    folder: Path, step: int, reason: str, checkpoint: Path | None, job: str | None, world: int
) -> None:
    """Writes `preempted.json` into the run folder.

    Args:
        folder: the run folder.
        step: number of the last completed step.
        reason: why the run stopped.
        checkpoint: the checkpoint to resume from, or None.
        job: torchrun's run id; None without torchrun.
        world: number of ranks.
    """
    record = {
        "step": step,
        "reason": reason,
        "checkpoint": checkpoint and str(checkpoint),
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
        "job": job,
        "attempt": process.restarts(),
        "world": world,
    }
    scratch = folder / f"{FILE}.tmp"
    # If the disk fails, the exit code and the message still report the preemption.
    with contextlib.suppress(OSError):
        scratch.write_text(json.dumps(record))
        scratch.replace(folder / FILE)


def begin(folder: Path, job: str | None, axis: Axis) -> None:
    """Removes the `preempted.json` of an earlier run, or stops this attempt. Collective.

    Raises:
        Preempted: on every rank, if an earlier attempt of this job with the same number of ranks
            was preempted. With a different number of ranks this attempt continues, because the job
            is elastic and was restarted after the loss of a machine.
    """
    text = ""
    if axis.index == 0:
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            found = json.loads((folder / FILE).read_text())
            earlier = found["attempt"] < process.restarts()
            if (found["job"], found["world"]) == (job, axis.size) and earlier:
                text = f"this job was preempted in step {found['step']} by {found['reason']}: it is not restarted"
            else:
                (folder / FILE).unlink()
    collectives.raise_together([text], axis, Preempted)
