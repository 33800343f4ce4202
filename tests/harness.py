"""Real ranks in tests: `threed.testing.run_ranks`, whose parent process has imported everything.

    results = run_ranks(4, work, arg)      # calls work(arg) on 4 ranks; returns their results in rank order

The ranks are forked from this parent, so they need no imports. Run many configurations in one call,
because a topology is created once per world. `run_script` runs a program on such ranks.
"""

from __future__ import annotations

import contextlib
import random
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.programs import Program, output_of
from threed.testing.ranks import run_ranks as run_ranks


def run_script(
    world: int,
    words: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    timeout: float = 240,
) -> subprocess.CompletedProcess[str]:
    """Runs a program of `tests/programs.py` on `world` ranks in `folder`, as torchrun would.

    Returns:
        The output of all ranks, and as exit code the first that is not 0.
    """
    with tempfile.TemporaryDirectory() as said:
        known = {**environment, "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
        known |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
        files = [[Path(said, f"{rank}.{name}") for name in ("out", "err")] for rank in range(world)]
        ranks: list[Program] = []
        try:
            for rank in range(world):
                mine = {**known, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                ranks.append(Program(words, folder, mine, *files[rank]))
            with contextlib.suppress(subprocess.TimeoutExpired):
                for rank in ranks:
                    rank.wait(timeout)
            codes = [rank.poll() for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        out, err = ("".join(map(output_of, those)) for those in zip(*files, strict=True))
    assert None not in codes, f"ranks still running after {timeout} seconds: {codes}\n{err[-2000:]}"
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
