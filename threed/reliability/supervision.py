"""What watches over a run on each rank: its heartbeat, the signals it gets, its time limit, and a watchdog.

    with Supervision(folder, topology, config) as supervision:
        supervision.heart.beat(step, "step")
        supervision.asked()             # why this rank is to stop: "SIGTERM", "train.time-limit 3 h", or ""

One thread a rank does the work, half a second apart. An error that leaves the block is told once: by the rank whose own
it is, or, where a rank's process was killed, by a neighbour; ranks that only lost their connection raise LostContact.
"""

from __future__ import annotations

import os
import secrets
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from threed import collectives
from threed.checkpoint.files import CheckpointError, RunFolderError
from threed.config import Config
from threed.disk import is_unwritable
from threed.memory.io import SwapError
from threed.metrics import BadStepsError
from threed.monitor import process
from threed.reliability import failure, heartbeat
from threed.reliability.failure import LostContact
from threed.reliability.heartbeat import Heartbeat, when, who
from threed.reliability.preemption import Preempted
from threed.reliability.signals import TERMINATED, Signals
from threed.reliability.watchdog import Watchdog
from threed.topology import Topology
from threed.zero.replicas import ReplicaError

LISTEN_S = 0.5
# Errors that all ranks have alike, or that name their rank themselves: whoever catches them says them.
TOLD = (CheckpointError, RunFolderError, SwapError, Preempted, BadStepsError, ReplicaError)


class Supervision:
    """Watches this rank while entered. Made by all ranks together. interrupted: set when Ctrl-C has ended the run."""

    def __init__(
        self,
        folder: Path,
        topology: Topology,
        config: Config,
        interrupted: threading.Event | None = None,
    ) -> None:
        self.topology, self.limit = topology, config.train.time_limit
        self.interrupted = interrupted or threading.Event()
        coordinates = topology.coordinates
        place = ", ".join(
            f"{'stage' if axis == 'pp' else axis} {coordinates[axis]}"
            for axis in ("pp", "dp", "tp")
        )
        self.heart = Heartbeat(folder / "heartbeat", topology.rank, place)
        if topology.rank == 0:
            for old in self.heart.folder.glob("hung-*"):
                old.unlink(missing_ok=True)
        token = collectives.exchange(secrets.token_hex(4), topology.axis("world"))[0]
        self.watchdog = Watchdog(self.heart, topology.world, config.run.hang_timeout, token)
        self.signals = Signals()
        self.before_exit: Callable[[], None] = lambda: (
            None
        )  # called where another rank's failure ends this one
        self._over = threading.Event()
        self._failing = False
        self._thread = threading.Thread(target=self._watch, daemon=True, name="threed-supervision")

    def asked(self) -> str:
        """Why this rank is to stop; of the time limit the first rank alone says so."""
        over = (
            self.limit is not None
            and self.topology.rank == 0
            and process.since_launch() > self.limit
        )
        return self.signals.asked or (f"train.time-limit {self.limit:g} s" if over else "")

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Where the block ends by an error, nobody ends this rank any more: what follows has its time to end well."""
        try:
            yield
        except Exception:
            self._failing = True
            self.watchdog.stop()
            raise

    def __enter__(self) -> Supervision:
        self.signals.__enter__()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if isinstance(error, Exception):
                self._tell(error)
            else:
                self.heart.mark("ended")
        finally:
            self.watchdog.stop()
            self._over.set()
            self.signals.wake()
            self._thread.join()
            self.signals.close(
                ignore=isinstance(error, Exception)
            )  # a launcher ends all ranks with the first
            self.heart.close()

    def _watch(self) -> None:
        while not self._over.is_set():
            self.signals.listen(LISTEN_S)
            self.watchdog.look()
            if self.signals.terminated and not self._failing:
                self._end_with_siblings()

    def _end_with_siblings(self) -> None:
        """Ends this process if SIGTERM came because another rank failed: a step waits for that one in vain."""
        about = self.heart.folder, self.topology.rank, self.topology.world
        if failure.a_sibling_failed(*about):
            for line in failure.named(*about):
                _say(line + failure.attempt())
            self.before_exit()
            os._exit(TERMINATED)

    def _tell(self, error: Exception) -> None:
        """Says whose fault an error is, if that is for this rank to say."""
        self._failing = True
        self.watchdog.stop()
        if isinstance(error, TOLD) or is_unwritable(error):
            self.heart.mark("ended" if isinstance(error, Preempted) else "failed", str(error))
            failure.write_error_file(str(error))
            return
        if not failure.lost(error):
            about = f"{type(error).__name__}: {error}".splitlines()[0]
            self.heart.mark("failed", about)
            beat = heartbeat.read(self.heart.folder, self.topology.rank)
            text = (
                f"{who(beat)} failed in {when(beat)}: {about}"
                if beat
                else f"rank {self.topology.rank} failed: {about}"
            )
            failure.write_error_file(text)
            _say(text + failure.attempt())
            return
        self.heart.mark("lost", str(error))
        if self.interrupted.wait(1.0):
            return
        lines = failure.wait_for_names(self.heart.folder, self.topology.rank, self.topology.world)
        for line in lines:
            _say(line + failure.attempt())
        text = "; ".join(lines) or "another rank failed: its own message says why"
        failure.write_error_file(text)
        raise LostContact(text) from error


def _say(text: str) -> None:
    print(f"threed: {text}", file=sys.stderr, flush=True)
