"""What the machine did while something was measured: other processes' load, this process's memory, loopback bytes."""

from __future__ import annotations

import os
import time

TICKS = os.sysconf("SC_CLK_TCK")


def busy_seconds() -> float:
    """CPU seconds that all processes have used since boot, and those that the hypervisor took away."""
    with open("/proc/stat") as file:
        user, nice, system, _idle, _wait, irq, soft, steal = (
            int(n) for n in file.readline().split()[1:9]
        )
    return (user + nice + system + irq + soft + steal) / TICKS


def wait_until_quiet(cores: float, end: float) -> None:
    """Returns when all processes together use less than `cores`, or when `time.monotonic()` is past `end`; at once
    where the machine has no more."""
    if cores >= (os.cpu_count() or 1):
        return
    while time.monotonic() < end:
        begin, before = time.perf_counter(), busy_seconds()
        time.sleep(1.5)
        if busy_seconds() - before < cores * (time.perf_counter() - begin):
            return


def stamp() -> tuple[float, float, float]:
    """Now, this process's CPU seconds, everybody's: differences of two stamps say who used the cores between them."""
    return time.perf_counter(), time.process_time(), busy_seconds()


def resident_mib(field: str = "VmRSS") -> float:
    """This process's resident memory."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(f"{field}:")) / 1024


def peak_mib() -> float:
    """The most resident memory this process has had since `reset_peak`."""
    return resident_mib("VmHWM")


def reset_peak() -> None:
    """Begins a new peak."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def drive_bytes() -> tuple[int, int]:
    """Bytes that this process has made a drive read, and write; what the page cache answered is not in it."""
    with open("/proc/self/io") as file:
        counts = {name: int(value) for name, value in (line.split(":") for line in file)}
    return counts["read_bytes"], counts["write_bytes"]


def loopback_bytes() -> int:
    """Bytes sent over the loopback interface since boot, by the kernel's counter."""
    with open("/proc/net/dev") as file:
        fields = next(line.split(":")[1].split() for line in file if line.strip().startswith("lo:"))
    return int(fields[8])
