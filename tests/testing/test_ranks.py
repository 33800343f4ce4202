"""`run_ranks` leaves no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
from pathlib import Path
from tests.testing.test_ranks import wait_for_ever
from threed.testing import run_ranks
if __name__ == "__main__":
    run_ranks(2, wait_for_ever, Path("."))
"""


def wait_for_ever(folder: Path) -> None:
    (folder / f"rank-{os.environ['RANK']}").write_text(str(os.getpid()))
    time.sleep(600)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.grid  # the program and the parent of its ranks import torch
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux: prctl and /proc")
def test_ranks_end_with_a_program_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    known = os.environ | {"PYTHONPATH": str(ROOT)}
    program = subprocess.Popen([sys.executable, "program.py"], cwd=tmp_path, env=known)
    try:
        end = time.monotonic() + 60
        while not all((tmp_path / f"rank-{rank}").exists() for rank in range(2)):
            assert time.monotonic() < end
            assert program.poll() is None
            time.sleep(0.05)
        time.sleep(0.1)  # until the files are written
        pids = [int((tmp_path / f"rank-{rank}").read_text()) for rank in range(2)]
        assert all(map(is_alive, pids))
    finally:
        program.send_signal(signal.SIGKILL)
        program.wait()
    end = time.monotonic() + 30
    while any(map(is_alive, pids)):
        assert time.monotonic() < end, f"ranks outlived the program: {pids}"
        time.sleep(0.05)
