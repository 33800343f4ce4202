"""Real ranks in tests: `threed.testing.run_ranks`, with what tests need imported once, in the warm parent.

results = run_ranks(4, work, arg)      # work(arg) on 4 ranks; what each returned, in rank order

One world runs many configurations: topologies are made once per world. `run_script` runs a program on such ranks.
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

# torch.testing.assert_close needs DTensor where there is a process group: a second of work.
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
    """Runs a script, or a module by "-m", on `world` ranks in `folder`, as torchrun would; what all of them printed.

    The processes come from the warm parent, which spares each the three seconds of its imports; what a start of its own
    is about goes through torchrun. The exit code is the first that is not 0.
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
    """A port that nobody listens on. Not one that the system gives away: until rank 0 listens there, it might give the
    same to another process, whose connections come and go."""
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)  # tests seed the common one
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
    gc.freeze()  # a collection would read, and so copy, all that is shared with the parent
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")
