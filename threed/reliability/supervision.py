"""Supervises a run on each rank: heartbeat, signals, time limit and watchdog.

    with Supervision(folder, topology, config) as supervision:
        supervision.heart.beat(step, "step")
        supervision.asked()     # why this rank is to stop: "SIGTERM", "train.time-limit 60 s" or ""

One background thread per rank listens for signals and runs the watchdog. If an error leaves the
block, exactly one rank reports it: the rank that raised it or, if a rank was killed, another rank
on the same machine. Ranks that only lost their connection to a dead rank raise LostContact.
"""

from __future__ import annotations

import os
import secrets
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from threed.checkpoint.files import CheckpointError, RunFolderError
from threed.config import Config
from threed.core import process
from threed.core.disk import is_unwritable
from threed.distributed import collectives
from threed.distributed.topology import Topology
from threed.memory.io import SwapError
from threed.models.custom import ForwardError
from threed.reliability import failure
from threed.reliability.failure import LostContact
from threed.reliability.heartbeat import Heartbeat, when, who
from threed.reliability.preemption import Preempted
from threed.reliability.signals import TERMINATED, Signals
from threed.reliability.watchdog import Watchdog
from threed.zero.replicas import ReplicaError
from threed.zero.step_metrics import BadStepsError

LISTEN_S = 2.0  # seconds between checks of the watchdog; signals are received immediately
# Errors that all ranks raise together, or that name the rank in their message. The caller prints
# them, so they are not printed here.
REPORTED = (
    CheckpointError, RunFolderError, SwapError, Preempted, BadStepsError, ReplicaError, ForwardError,
)  # fmt: skip


class Supervision:
    """Supervises this rank inside its `with` block. The constructor is collective.

    Args:
        folder: the run folder.
        topology: ranks of the run.
        config: configuration of the run.
        interrupted: event that is set when the user has interrupted the run.
    """

    def __init__(
        self,
        folder: Path,
        topology: Topology,
        config: Config,
        interrupted: threading.Event | None = None,
    ) -> None:
        self.topology, self.limit = topology, config.train.time_limit
        self.interrupted = interrupted or threading.Event()
        self.heart = Heartbeat(folder / "heartbeat", topology.rank, place_of(topology))
        if topology.rank == 0:
            for old in self.heart.folder.glob("hung-*"):
                old.unlink(missing_ok=True)
        token = collectives.exchange(secrets.token_hex(4), topology.axis("world"))[0]
        self.watchdog = Watchdog(self.heart, topology.world, config.run.hang_timeout, token)
        self.signals = Signals(end=self._end_at_once)
        self._before_exit: list[Callable[[], None]] = []
        self._over = threading.Event()
        self._failing = False
        self._thread = threading.Thread(target=self._watch, daemon=True, name="threed-supervision")

    def before_exit(self, action: Callable[[], None]) -> None:
        """Registers an action that runs before this process ends because another rank failed."""
        self._before_exit.append(action)

    def asked(self) -> str:
        """Returns why this rank is to stop, or "". Only rank 0 checks the time limit."""
        limit = self.limit if self.topology.rank == 0 else None
        over = limit is not None and process.since_launch() > limit
        return self.signals.asked or (f"train.time-limit {limit:g} s" if over else "")

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Context manager: if the block raises an error, lets this rank finish its cleanup.

        The watchdog is stopped, and failures of other ranks no longer end this process.
        """
        try:
            yield
        except Exception:
            self._fail()
            raise

    def _fail(self) -> None:
        self._failing = True
        self.watchdog.stop()

    def __enter__(self) -> Supervision:
        self.signals.__enter__()
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        failed = isinstance(error, Exception)
        try:
            if isinstance(error, Exception):
                self._report(error)
            else:
                self.heart.mark("ended")
        finally:
            self.watchdog.stop()
            self._over.set()
            self.signals.wake()
            self._thread.join()
            # After a failure, further signals are ignored, because the launcher sends SIGTERM to
            # all ranks when the first one exits, and this rank must finish its report.
            self.signals.close(ignore=failed)
            self.heart.close()

    def _watch(self) -> None:
        while not self._over.is_set():
            self.signals.listen(LISTEN_S)
            self.watchdog.look()
            if self.signals.terminated and not self._failing:
                self._end_with_siblings()

    def _end_with_siblings(self) -> None:
        """Ends this process if another rank on this machine failed; called after a SIGTERM.

        The current step cannot finish, because its next collective would wait for the failed rank.
        """
        if self._report_siblings():
            for action in self._before_exit:
                action()
            self._exit("lost", "another rank on this machine failed")

    def _report_siblings(self) -> bool:
        """Returns whether another rank on this machine failed; prints the lines of `named` if so."""
        about = self.heart.folder, self.topology.rank, self.topology.world
        if failed := failure.a_sibling_failed(*about):
            for line in failure.named(*about):
                _print(line)
        return failed

    def _end_at_once(self) -> None:
        """Ends this process at a second SIGTERM, unless it is reporting a failure."""
        if self._failing:
            return
        if self._report_siblings():
            self._exit("lost", "another rank on this machine failed")
        text = f"{who(self.heart.last)} ended in {when(self.heart.last)}: a second SIGTERM"
        failure.write_error_file(text)
        _print(text)
        self._exit("failed", "a second SIGTERM")

    def _exit(self, state: str, note: str) -> NoReturn:
        """Ends this process with a state, without which others would report that it was killed."""
        self.heart.mark(state, note)
        os._exit(TERMINATED)

    def _report(self, error: Exception) -> None:
        """Marks the heartbeat with the outcome, and prints the error unless the caller prints it.

        The caller prints errors of the types in `REPORTED`, broken pipes, and errors of disks that
        cannot be written. If the error means that another rank has died, this method does not print
        the error, but the lines of `failure.wait_for_names`.

        Raises:
            LostContact: if the error means that another rank has died.
        """
        self._fail()
        if isinstance(error, (*REPORTED, BrokenPipeError)) or is_unwritable(error):
            self.heart.mark("ended" if isinstance(error, Preempted) else "failed", str(error))
            failure.write_error_file(str(error))
        elif failure.lost(error):
            self.heart.mark("lost", str(error))
            self._report_others(error)
        else:
            about = f"{type(error).__name__}: {error}".splitlines()[0]
            self.heart.mark("failed", about)
            text = f"{who(self.heart.last)} failed in {when(self.heart.last)}: {about}"
            failure.write_error_file(text)
            _print(text)

    def _report_others(self, error: Exception) -> None:
        """Prints the lines of `failure.wait_for_names`, and raises LostContact with these lines.

        If the user has interrupted the run, it prints nothing and returns.
        """
        if self.interrupted.wait(1.0):
            return
        lines = failure.wait_for_names(self.heart.folder, self.topology.rank, self.topology.world)
        for line in lines:
            _print(line)
        text = "; ".join(lines) or "another rank failed: see its message"
        failure.write_error_file(text)
        raise LostContact(text) from error


def _print(text: str) -> None:
    print(f"threed: {text}{failure.attempt()}", file=sys.stderr, flush=True)


def place_of(topology: Topology) -> str:
    """Returns the coordinates of this rank, for messages."""
    at = topology.coordinates
    context = f", cp {at['cp']}" if topology.cp > 1 else ""
    return f"stage {at['pp']}, dp {at['dp']}{context}, tp {at['tp']}"
