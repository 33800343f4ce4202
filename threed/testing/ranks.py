"""Real ranks on this machine: gloo processes forked from a warm parent that has torch imported.

    results = run_ranks(4, work, arg)      # work(arg) on 4 ranks; what each returned, in rank order

A world costs tenths of a second. `work` must be a module-level function (or an object of a module-level class): its
arguments and results travel by pickle. A program that calls this needs its `if __name__ == "__main__":`.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from threed import collectives
from threed.topology import Axis, start_from_file

_context = multiprocessing.get_context("forkserver")
# Beside torch, what every rank would import for itself at a second of work: backward with a gradient given needs sympy.
# What torch imports at the first operation on the meta device is imported once, and not by every rank.
_preloaded = [
    "threed.engine",
    "torch.fx.experimental.symbolic_shapes",
    "torch._dynamo",
    "threed.testing",
]
_context.set_forkserver_preload(_preloaded)
_pipe: Connection | None = None  # to the process that started this rank


_SAY_STACKS = signal.SIGUSR2


class RanksFailed(AssertionError):
    """Ranks that failed, died or hung: the text has every traceback.

    failures: rank -> traceback, first come first. silent: ranks that were still running. notes: rank -> the last of its
    `note`s. reports: rank -> the `report` that its exception carried, if it did. died: rank -> exit code (negative: the
    signal) of those that ended without a word. stacks: rank -> where the threads of a silent one are.
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
    """The ranks of one call, and what they sent."""

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
            # After the first failure the others get a moment to report theirs: the first is often not the cause.
            left = max(0.0, end - time.monotonic())
            ready = wait(waiting, timeout=1.0 if self.failures else left)
            if not ready:
                self._ask_for_stacks(folder)
                break
            for pipe in ready:
                self._take(self.pipes.index(pipe))  # type: ignore[arg-type]
        if len(self.results) < len(self.pipes) or self.failures:
            raise RanksFailed(self)
        return [self.results[rank] for rank in range(len(self.pipes))]

    def _ask_for_stacks(self, folder: Path) -> None:
        """Where the threads of silent ranks are, of those that say so within five seconds."""
        for rank in self.silent:
            os.kill(self.processes[rank].pid, _SAY_STACKS)
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
            value = (f"the process died without a word, exit code {self.died[rank]}", None)
        if kind == "note":
            self.notes[rank] = value
            return
        self.results[rank] = value
        if kind == "failure":
            self.failures[rank], self.reports[rank] = value


def preload(*modules: str) -> None:
    """Has the warm parent import more modules; to be called before the first world."""
    _preloaded.extend(modules)
    _context.set_forkserver_preload(_preloaded)


def run_ranks(world: int, work: Callable[..., Any], *args: Any, timeout: float = 600) -> list[Any]:
    """Runs `work(*args)` on `world` gloo ranks, one thread each; what each returned, in rank order.

    Raises RanksFailed with every traceback when one fails or dies, or when they are not done after `timeout` seconds.
    """
    task = pickle.dumps((work, args))
    with tempfile.TemporaryDirectory() as folder:
        state = _World()
        try:
            for rank in range(world):
                mine, theirs = _context.Pipe(duplex=False)
                target = (theirs, rank, world, folder, task)
                state.processes.append(_context.Process(target=_rank, args=target, daemon=True))
                state.processes[-1].start()
                theirs.close()
                state.pipes.append(mine)
            return state.collect(timeout, Path(folder))
        finally:
            for process in state.processes:
                process.kill()
                process.join()


def note(text: str) -> None:
    """Tells the process that started this rank where it is: what is known of a rank that then hangs or dies."""
    if _pipe is not None:
        _send(_pipe, "note", text)


def _stacks(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.stacks"


def _rank(pipe: Connection, rank: int, world: int, folder: str, task: bytes) -> None:
    global _pipe
    _pipe = pipe
    said = _stacks(Path(folder), rank).open("w")
    faulthandler.register(_SAY_STACKS, said, all_threads=True)
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "RANK": str(rank), "CUDA_VISIBLE_DEVICES": ""}
    torch.set_num_threads(1)
    gc.freeze()  # a collection would read, and so copy, all that is shared with the parent: 0.2 s
    try:
        start_from_file(f"{folder}/store", rank, world)
        work, args = pickle.loads(task)
        _send(pipe, "result", work(*args))
        collectives.barrier(Axis("world", tuple(range(world)), rank))
    except BaseException as error:
        _send(pipe, "failure", (traceback.format_exc(), getattr(error, "report", None)))
    pipe.close()
    os._exit(0)  # nothing to tear down: gloo's threads may abort a process that exits the long way


def _send(pipe: Connection, kind: str, value: Any) -> None:
    """By value: torch teaches multiprocessing to share tensors by file descriptor, and this process is about to end."""
    pipe.send_bytes(pickle.dumps((kind, value)))
