"""Real ranks in tests: gloo processes forked from a warm parent that has torch and threed imported.

    results = run_ranks(4, work, arg)      # work(arg) on 4 ranks; what each returned, in rank order

A world costs tens of milliseconds, and one world runs many configurations: topologies are made once per world.
`work` must be a module-level function; its arguments and results travel by pickle.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

_context = multiprocessing.get_context("forkserver")
# What every rank would import for itself at a second of work: backward with a gradient given needs sympy,
# torch.testing.assert_close needs DTensor where there is a process group.
_SLOW = ["pytest", "hypothesis", "torch.fx.experimental.symbolic_shapes", "torch.distributed.tensor"]
_context.set_forkserver_preload(["threed.engine", "tests.configs", *_SLOW])


def run_ranks(world: int, work: Callable[..., Any], *args: Any, timeout: float = 600) -> list[Any]:
    """Runs `work(*args)` on `world` gloo ranks; AssertionError with every traceback when one fails, dies or hangs."""
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world):
            mine, theirs = _context.Pipe(duplex=False)
            process = _context.Process(
                target=_rank, args=(theirs, rank, world, f"{folder}/store", pickle.dumps((work, args))), daemon=True
            )
            process.start()
            theirs.close()
            pipes.append(mine)
            processes.append(process)
        try:
            return _collect(pipes, timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(pipes: list[Connection], timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: list[str] = []
    end = time.monotonic() + timeout
    while len(results) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        # After the first failure the others get a moment to report theirs: the first is often not the cause.
        ready = wait(waiting, timeout=1.0 if failures else max(0.0, end - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                ok, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                ok, value = False, "the process died without a word"
            results[rank] = value
            if not ok:
                failures.append(f"rank {rank}: {value}")
    silent = [rank for rank in range(len(pipes)) if rank not in results]
    if failures or silent:
        raise AssertionError("\n".join([*failures, f"ranks still running: {silent}"] if silent else failures))
    return [results[rank] for rank in range(len(pipes))]


def _rank(pipe: Connection, rank: int, world: int, store: str, task: bytes) -> None:
    import torch
    import torch.distributed as dist

    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "RANK": str(rank), "CUDA_VISIBLE_DEVICES": ""}
    torch.set_num_threads(1)
    try:
        if world > 1:
            dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
        work, args = pickle.loads(task)
        _send(pipe, True, work(*args))
        if world > 1:
            dist.barrier()
    except BaseException:
        _send(pipe, False, traceback.format_exc())
    pipe.close()
    os._exit(0)  # nothing to tear down: gloo's threads may abort a process that exits the long way


def _send(pipe: Connection, ok: bool, value: Any) -> None:
    """By value: torch teaches multiprocessing to share tensors by file descriptor, and this process is about to end."""
    pipe.send_bytes(pickle.dumps((ok, value)))
