"""Process facts: dying with the parent (killed, and already dead), peak memory, loopback bytes of a real socket."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from threed.monitor.process import die_with_parent, loopback_bytes, peak_rss_bytes, reset_peak_rss

ROOT = Path(__file__).resolve().parents[1]
LINUX = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="needs Linux: prctl and /proc"
)
MIB = 2**20

# A parent that starts a child which arranges to die with it and reports its pid through the pipe.
PARENT = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", '''
import os, time
from threed.monitor.process import die_with_parent
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


@LINUX
def test_a_parent_that_died_first_is_noticed() -> None:
    """The named parent is not ours any more: the process ends at once, by SIGKILL, and never reaches the print."""
    program = "from threed.monitor.process import die_with_parent; die_with_parent(parent=2**22 - 1); print('alive')"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL
    assert done.stdout == ""
    program = f"from threed.monitor.process import die_with_parent; print(die_with_parent(parent={os.getpid()}))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "True\n"


def test_elsewhere_nothing_is_arranged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert die_with_parent() is False


@pytest.mark.alone
@LINUX
def test_peak_rss_sees_a_buffer_come_and_its_reset_lets_it_go() -> None:
    if not reset_peak_rss():
        pytest.skip("this kernel does not let clear_refs reset the peak")
    before = peak_rss_bytes()
    buffer = bytearray(b"x") * (64 * MIB)
    del buffer
    grown = peak_rss_bytes() - before
    assert 60 * MIB < grown < 80 * MIB
    reset_peak_rss()
    assert peak_rss_bytes() - before < 20 * MIB


def test_peak_rss_agrees_with_getrusage() -> None:
    resource = pytest.importorskip("resource")
    ever = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
    assert MIB < peak_rss_bytes() <= 1.05 * ever


@LINUX
def test_loopback_bytes_counts_what_a_socket_sends() -> None:
    sent = 16 * MIB
    with socket.create_server(("127.0.0.1", 0)) as server:
        before = loopback_bytes()
        thread = threading.Thread(target=_send, args=(server.getsockname()[1], sent))
        thread.start()
        connection, _ = server.accept()
        received = 0
        while chunk := connection.recv(MIB):
            received += len(chunk)
        thread.join()
        connection.close()
    after = loopback_bytes()
    assert before is not None
    assert after is not None
    assert received == sent
    # Headers and acknowledgements come on top; other processes may add, never take away.
    assert after - before >= sent


def _send(port: int, count: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(bytes(count))
