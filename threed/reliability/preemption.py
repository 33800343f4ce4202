"""The end of a run before its last step: all ranks stop at the same one, and the next start knows why.

    stop = Stop(topology.axis("world"), device, asked=lambda: signals.asked)
    if stop.check(): ...                # after each step: a flag of all ranks, sent a step before
    if stop.now(): ...                  # where ranks meet anyway

A signal may reach one rank alone, and those that reach all do so in different steps. So every rank sends, after each
step, whether it was asked to stop; the sum is read after the next step, on all ranks the same. The host does not wait
for it: it has long arrived, or a device is more than a step behind.

The run folder's `preempted.json` says step, reason and checkpoint. The ranks end with exit code 75 (EX_TEMPFAIL of
sysexits.h: try again later). torchrun takes that for a failure and may restart them: then they end at once, because the
file is of the same job and as many ranks. The next start removes it and resumes.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from threed import collectives
from threed.device import beside, copy_stream, is_accelerator, start_copy_in
from threed.topology import Axis

PREEMPTED = 75
FILE = "preempted.json"


class Preempted(Exception):
    """The run was asked to end before its last step, and has; the message says how it goes on."""


class Stop:
    """Whether the run is to stop, as all ranks agreed; `reason` says who was asked, and how. asked: why this rank is
    to stop, or nothing."""

    def __init__(self, axis: Axis, device: torch.device, asked: Callable[[], str]) -> None:
        self.axis, self.device, self.asked = axis, device, asked
        self.reason = ""
        self._sent: Callable[[], float] | None = None

    def __bool__(self) -> bool:
        return bool(self.reason)

    def check(self) -> bool:
        """Whether some rank was asked before this rank's last check; sends whether this one was. Collective."""
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
        # beside the step: nothing of it waits for the slowest rank's flag
        stream = copy_stream(self.device, "flags")
        with beside(stream):
            total = collectives.sum_of_scalars(start_copy_in(flag, self.device), self.axis)
            host = torch.empty(1, pin_memory=True)
            host.copy_(total, non_blocking=True)
            event = stream.record_event()
        return lambda: _read(host, event)

    def now(self) -> bool:
        """Whether some rank has been asked. Collective; ranks wait for each other."""
        return self.take(collectives.exchange(self.asked(), self.axis))

    def take(self, asked: Sequence[str]) -> bool:
        """Takes what each rank was asked, by rank, from a message that all got alike."""
        found = [f"{what} (rank {rank})" for rank, what in enumerate(asked) if what]
        if found and not self.reason:
            everyone = len(found) == len(asked) > 1 and len(set(asked)) == 1
            self.reason = asked[0] if everyone or asked[0].startswith("train.") else found[0]
        return bool(self.reason)


def _read(host: Tensor, event: torch.Event) -> float:
    event.synchronize()
    return float(host)


def mark(
    folder: Path, step: int, reason: str, checkpoint: Path | None, job: str | None, world: int
) -> None:
    """Writes the file of a run that was preempted."""
    about = {
        "step": step,
        "reason": reason,
        "checkpoint": checkpoint and str(checkpoint),
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
    }
    scratch = folder / f"{FILE}.tmp"
    # a disk that fails: the exit code and the message say it all the same
    with contextlib.suppress(OSError):
        scratch.write_text(json.dumps({**about, "job": job, "attempt": _attempt(), "world": world}))
        scratch.replace(folder / FILE)


def begin(folder: Path, job: str | None, axis: Axis) -> None:
    """Removes the file that an earlier run left; raises Preempted if that was an attempt of this job. Collective.

    An attempt with another number of ranks goes on: a machine was taken away, and an elastic job has others.
    """
    text = ""
    if axis.index == 0:
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            found = json.loads((folder / FILE).read_text())
            if (found["job"], found["world"]) == (job, axis.size) and found["attempt"] < _attempt():
                text = f"this job was preempted in step {found['step']} by {found['reason']}: it is not restarted"
            else:
                (folder / FILE).unlink()
    collectives.raise_together([text], axis, Preempted)


def _attempt() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
