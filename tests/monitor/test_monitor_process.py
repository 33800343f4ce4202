"""Process facts: dying with the parent, and peak memory."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from threed.core.process import peak_rss_bytes
from threed.distributed.launcher import die_with_parent

ROOT = Path(__file__).resolve().parents[2]
LINUX = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="needs Linux: prctl and /proc"
)
MIB = 2**20

# A parent that starts a child which arranges to die with it and reports its pid through the pipe.
PARENT = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", '''
import os, time
from threed.distributed.launcher import die_with_parent
print(os.getpid(), die_with_parent(), flush=True)
time.sleep(600)
'''])
time.sleep(600)
"""


def _gone(pid: int, seconds: float = 60.0) -> bool:
    """Whether the process ended (or is a zombie waiting for init) within `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.01)
    return False


@LINUX
def test_a_child_dies_when_its_parent_is_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid, arranged = parent.stdout.readline().split()
        assert arranged == "True"
        assert not _gone(int(pid), 0.1)
        parent.kill()
        assert _gone(int(pid))


def test_elsewhere_nothing_is_arranged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert die_with_parent() is False


@pytest.mark.alone
def test_peak_rss_sees_a_buffer_come() -> None:
    before = peak_rss_bytes()
    buffer = bytearray(b"x") * (before + 64 * MIB)  # the process is smaller than it was at its peak
    del buffer
    assert before + 60 * MIB < peak_rss_bytes() < 2 * before + 80 * MIB
