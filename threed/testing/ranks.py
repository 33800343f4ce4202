"""Runs functions on ranks of this machine: gloo processes forked after importing torch.

    results = run_ranks(4, work, arg)      # work(arg) on 4 ranks; results in rank order

Starting the ranks takes some tenths of a second. `work`, its arguments and its result are pickled,
so `work` must be a module-level function or an object of a module-level class. A program that calls
`run_ranks` needs `if __name__ == "__main__":`.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from threed.core.errors import PicklableError
from threed.distributed import collectives
from threed.distributed.topology import Axis, start_from_file

_context = multiprocessing.get_context("forkserver")
# Modules that are imported once in the parent, because importing them would take about a second on
# every rank. torch itself imports some of them late: sympy in a backward with a given gradient, and
# other modules at the first operation on the meta device.
_preloaded = [
    "threed.engine",
    "torch.fx.experimental.symbolic_shapes",
    "torch._dynamo",
    "threed.testing",
]
_context.set_forkserver_preload(_preloaded)
_pipe: Connection | None = None  # connection to the process that started this rank


_DUMP_STACKS = signal.SIGUSR2


class RanksFailed(PicklableError, AssertionError):
    """Raised if ranks failed, died or hung. The message has every traceback.

    Attributes:
        failures: traceback by rank, in the order of arrival.
        silent: ranks that were still running.
        notes: last text that was passed to `note`, by rank.
        reports: by rank, the attribute `report` of the rank's exception, or None.
        died: exit code by rank, for ranks that exited without a result. If a signal ended the rank,
            its exit code is the negative number of the signal.
        stacks: stacks of all threads by rank, for silent ranks.

    Args:
        world: state of the ranks when the run ended.
    """

    def __init__(self, world: _World) -> None:
        self.failures, self.notes, self.reports = world.failures, world.notes, world.reports
        self.died, self.stacks, self.silent = world.died, world.stacks, world.silent
        lines = [f"rank {rank}: {text}" for rank, text in self.failures.items()]
        last = {rank: self.notes[rank] for rank in self.silent if rank in self.notes}
        seen = f", last seen at {last}" if last else ""
        lines += [f"ranks still running: {self.silent}{seen}"] if self.silent else []
        lines += [f"rank {rank}: {text}" for rank, text in self.stacks.items()]
        super().__init__("\n".join(lines))


@dataclass(eq=False)
class _World:
    """The ranks of one call of `run_ranks`, and the messages that they have sent."""

    pipes: list[Connection] = field(default_factory=list)
    processes: list[Any] = field(default_factory=list)
    results: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    notes: dict[int, str] = field(default_factory=dict)
    reports: dict[int, Any] = field(default_factory=dict)
    died: dict[int, int | None] = field(default_factory=dict)
    stacks: dict[int, str] = field(default_factory=dict)

    @property
    def silent(self) -> list[int]:
        return [rank for rank in range(len(self.pipes)) if rank not in self.results]

    def collect(self, timeout: float, folder: Path) -> list[Any]:
        end = time.monotonic() + timeout
        while len(self.results) < len(self.pipes):
            waiting = [self.pipes[rank] for rank in self.silent]
            # After a failure, waits up to one more second for messages of other ranks, because the
            # first failure is often not the cause.
            left = max(0.0, end - time.monotonic())
            ready = wait(waiting, timeout=1.0 if self.failures else left)
            if not ready:
                self._collect_stacks(folder)
                break
            for pipe in ready:
                self._take(self.pipes.index(pipe))  # type: ignore[arg-type]
        if len(self.results) < len(self.pipes) or self.failures:
            raise RanksFailed(self)
        return [self.results[rank] for rank in range(len(self.pipes))]

    def _collect_stacks(self, folder: Path) -> None:
        """Requests the stacks of silent ranks by a signal, and waits up to 5 s for the stacks."""
        for rank in self.silent:
            os.kill(self.processes[rank].pid, _DUMP_STACKS)
        end = time.monotonic() + 5
        while time.monotonic() < end and not all(self.stacks.get(rank) for rank in self.silent):
            time.sleep(0.1)
            self.stacks = {
                rank: path.read_text()
                for rank in self.silent
                if (path := _stacks(folder, rank)).exists()
            }

    def _take(self, rank: int) -> None:
        try:
            kind, value = pickle.loads(self.pipes[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            self.processes[rank].join(1)
            self.died[rank] = self.processes[rank].exitcode
            kind = "failure"
            value = (f"the process died without a traceback, exit code {self.died[rank]}", None)
        if kind == "note":
            self.notes[rank] = value
            return
        self.results[rank] = value
        if kind == "failure":
            self.failures[rank], self.reports[rank] = value


def preload(*modules: str) -> None:
    """Imports modules in the parent of all ranks, so that ranks start with them already imported.

    Must be called before the first `run_ranks`.

    Args:
        modules: names of modules.
    """
    _preloaded.extend(modules)
    _context.set_forkserver_preload(_preloaded)


def run_ranks(world: int, work: Callable[..., Any], *args: Any, timeout: float = 600) -> list[Any]:
    """Runs `work(*args)` on gloo ranks of this machine, with one thread per rank.

    Args:
        world: number of ranks.
        work: function to run; must be importable.
        args: arguments, which are pickled.
        timeout: limit in seconds.

    Returns:
        The results, in rank order.

    Raises:
        RanksFailed: if a rank raises or dies, or ranks are still running after the timeout.
    """
    task = pickle.dumps((work, args))
    with tempfile.TemporaryDirectory() as folder:
        state = _World()
        try:
            for rank in range(world):
                receiver, sender = _context.Pipe(duplex=False)
                target = (sender, rank, world, folder, task)
                process = _context.Process(target=_rank, args=target, daemon=True)
                process.start()
                state.processes.append(process)
                sender.close()
                state.pipes.append(receiver)
            return state.collect(timeout, Path(folder))
        finally:
            for process in state.processes:
                process.kill()
                process.join()


def note(text: str) -> None:
    """Records what this rank is doing, for `RanksFailed` if ranks hang or die.

    Args:
        text: what the rank is doing; replaces the previous text.
    """
    if _pipe is not None:
        _send(_pipe, "note", text)


def _stacks(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.stacks"


def _rank(pipe: Connection, rank: int, world: int, folder: str, task: bytes) -> None:
    global _pipe
    _pipe = pipe
    threading.Thread(target=_end_with_program, daemon=True).start()
    stacks = _stacks(Path(folder), rank).open("w")
    faulthandler.register(_DUMP_STACKS, stacks, all_threads=True)
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "RANK": str(rank), "CUDA_VISIBLE_DEVICES": ""}
    torch.set_num_threads(1)
    # Excludes existing objects from garbage collection. A collection would write to all memory
    # pages that are shared with the parent, and so copy them, which takes 0.2 s.
    gc.freeze()
    try:
        start_from_file(f"{folder}/store", rank, world)
        work, args = pickle.loads(task)
        _send(pipe, "result", work(*args))
        collectives.barrier(Axis("world", tuple(range(world)), rank))
    except BaseException as error:
        _send(pipe, "failure", (traceback.format_exc(), getattr(error, "report", None)))
    pipe.close()
    os._exit(0)  # exits at once, because gloo's threads may abort a process in a regular exit


def _end_with_program() -> None:
    """Ends this rank when the program that called `run_ranks` has ended, even if it was killed."""
    program = multiprocessing.parent_process()
    if program is not None:
        program.join()
        os._exit(1)


def _send(pipe: Connection, kind: str, value: Any) -> None:
    """Sends a message as bytes, because tensors in shared memory would be lost when this process
    exits."""
    pipe.send_bytes(pickle.dumps((kind, value)))
