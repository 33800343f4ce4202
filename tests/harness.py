"""Real ranks in tests: `threed.testing.run_ranks`, whose parent process has imported everything.

    results = run_ranks(4, work, arg)      # calls work(arg) on 4 ranks; returns their results in rank order

The ranks are forked from this parent, so they need no imports. Run many configurations in one call,
because a topology is created once per world. `run_script` runs a program on such ranks.
"""

from __future__ import annotations

import gc
import os
import random
import runpy
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from threed.testing.ranks import _context, preload
from threed.testing.ranks import run_ranks as run_ranks

# If there is a process group, torch.testing.assert_close imports DTensor, which takes a second.
preload(
    "tests.configs", "pytest", "hypothesis", "torch.distributed.tensor", "threed.trainer", "einops", "tests.warm"
)  # fmt: skip


def run_script(
    world: int,
    words: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    timeout: float = 240,
) -> subprocess.CompletedProcess[str]:
    """Runs a script, or a module after "-m", on `world` ranks in `folder`, as torchrun would.

    The processes are forked from the parent that has imported everything, which saves three seconds
    of imports per rank. Tests of the launch itself use torchrun instead.

    Returns:
        The output of all ranks, and as exit code the first that is not 0.
    """
    with tempfile.TemporaryDirectory() as said:
        known = {**environment, "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
        known |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
        ranks = []
        try:
            for rank in range(world):
                mine = {**known, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                ranks.append(
                    _context.Process(
                        target=_script, args=(list(words), str(folder), mine, f"{said}/{rank}")
                    )
                )
                ranks[-1].start()
            for process in ranks:
                process.join(timeout)
            codes = [process.exitcode for process in ranks]
            errors = "\n".join(
                Path(f"{said}/{rank}.err").read_text()[-2000:]
                for rank, code in enumerate(codes)
                if code
            )
            assert None not in codes, (
                f"ranks still running after {timeout} seconds: {codes}\n{errors}"
            )
        finally:
            for process in ranks:
                process.kill()
                process.join()
        files = [
            [Path(f"{said}/{rank}.{name}") for rank in range(world)] for name in ("out", "err")
        ]
        out, err = ("".join(file.read_text() for file in those) for those in files)
    return subprocess.CompletedProcess(
        list(words), next((code for code in codes if code), 0), out, err
    )


def free_port() -> int:
    """Returns a port on which no process listens.

    It is not from the range from which the system assigns ports to connections: otherwise another
    process could get the same port before rank 0 listens on it.
    """
    while True:
        port = random.SystemRandom().randrange(
            10_000, 30_000
        )  # the default generator is seeded by tests, so all would get the same port
        with socket.socket() as free:
            if free.connect_ex(("localhost", port)):
                return port


def _script(words: list[str], folder: str, environment: dict[str, str], said: str) -> None:
    for descriptor, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{said}.{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    gc.freeze()  # a garbage collection would write to, and so copy, the memory that is shared with the parent
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")
