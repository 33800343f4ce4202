"""What the operating system knows about processes: state, parent, time of start, peak memory.

Linux has it in /proc. Off Linux each function returns a documented fallback; none raises.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import resource
import sys
import time
from pathlib import Path


def since_launch() -> float:
    """Returns how many seconds ago torchrun started this job, else this process: a restart by torchrun is not a new
    launch. Off Linux it is since this was first asked. The clock is one that nobody sets: it counts from boot."""
    return _uptime() - _launched()


@functools.cache
def _launched() -> float:
    """Returns when that was, in seconds since boot."""
    pid = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()
    start = started(pid)
    return int(start) / os.sysconf("SC_CLK_TCK") if start.isdecimal() else _uptime()


def _uptime() -> float:
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def peak_rss_bytes() -> int:
    """Returns the largest resident set of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # bytes on macOS, KiB elsewhere: getrusage(2)
    return peak if sys.platform == "darwin" else peak * 1024


def process_space() -> str:
    """Names what a pid and its start belong to: this boot of this machine, and a container's namespaces."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return " ".join([boot, *(os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "time"))])
    return platform.node()


def state(pid: int) -> str:
    """Returns the state of a process of this machine: "running", "stopped" or "ended" (also a zombie)."""
    letter = _stat(pid)[0]
    return "ended" if letter in "ZX" else "stopped" if letter in "Tt" else "running"


def parent(pid: int) -> int:
    """Returns the parent of a process, -1 if it is unknown."""
    return int(_stat(pid)[1])


def started(pid: int) -> str:
    """Returns when a process started, in ticks since boot; nothing if it has ended."""
    fields = _stat(pid)
    return "" if fields[0] in "ZX" else fields[19]


def _stat(pid: int) -> list[str]:
    """Returns the fields of /proc/PID/stat after the name of the program (proc(5)).

    Off Linux only the state is known: R if there is such a process, else X.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        alive = False
        if not Path("/proc/self").exists():
            with contextlib.suppress(OSError):
                os.kill(pid, 0)
                alive = True
    return ["R" if alive else "X", "-1", *["alive"] * 18]
