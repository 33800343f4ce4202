"""Facts about processes from the operating system: state, parent, start time, peak memory.

The functions read /proc. On systems other than Linux, each function returns the fallback that its
docstring describes, and does not raise.
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
    """Returns the seconds since the launch.

    The launch is the start of torchrun or, without torchrun, the start of this process. A restart
    of the ranks by torchrun does not reset the result. On systems other than Linux, the first call
    of this function counts as the launch. Changes of the system time have no effect, because the
    clock counts from boot.
    """
    return _uptime() - _launched()


@functools.cache
def _launched() -> float:
    """Returns the time of the launch, in seconds since boot."""
    pid = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()
    start = started(pid)
    return int(start) / os.sysconf("SC_CLK_TCK") if start.isdecimal() else _uptime()


def job_name() -> str | None:
    """Returns torchrun's run id, which is the same after restarts, or None without torchrun.

    Checkpoints contain this id, so that a restarted job finds its own checkpoints.
    """
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return None if name == "none" else name


def restarts() -> int:
    """Returns the number of times that torchrun has restarted this job; 0 without torchrun."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _uptime() -> float:
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def peak_rss_bytes() -> int:
    """Returns the largest resident set of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # ru_maxrss is in bytes on macOS and in KiB on other systems: getrusage(2)
    return peak if sys.platform == "darwin" else peak * 1024


def process_space() -> str:
    """Returns an id of the boot and the namespaces of this process.

    Processes with the same id have the same boot, pid namespace and time namespace, so a pid and a
    start time together identify one of them. On systems other than Linux the id is the name of the
    machine.
    """
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return " ".join([boot, *(os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "time"))])
    return platform.node()


def state(pid: int) -> str:
    """Returns the state of a local process: "running", "stopped", or "ended" (zombies included)."""
    letter = _stat(pid)[0]
    return "ended" if letter in "ZX" else "stopped" if letter in "Tt" else "running"


def parent(pid: int) -> int:
    """Returns the pid of a process's parent, or -1 if it is unknown."""
    return int(_stat(pid)[1])


def started(pid: int) -> str:
    """Returns when a process started, in ticks since boot, or "" if it has ended.

    On systems other than Linux the result is "alive" for a running process.
    """
    fields = _stat(pid)
    return "" if fields[0] in "ZX" else fields[19]


def _stat(pid: int) -> list[str]:
    """Returns the fields of /proc/PID/stat after the name of the program (proc(5)).

    On systems other than Linux only the first field, the state, is known: R if the process exists,
    else X.
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
