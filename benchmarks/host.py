"""The state of the machine during a measurement: load, memory, transferred bytes."""

from __future__ import annotations

import os
import time

TICKS = os.sysconf("SC_CLK_TCK")


def busy_seconds() -> float:
    """Returns the CPU seconds of all processes since boot.

    They include the time that the hypervisor has taken.
    """
    with open("/proc/stat") as file:
        user, nice, system, _idle, _wait, irq, soft, steal = (
            int(n) for n in file.readline().split()[1:9]
        )
    return (user + nice + system + irq + soft + steal) / TICKS


def wait_until_quiet(cores: float, end: float) -> None:
    """Waits until all processes together use less than `cores`.

    It returns at the latest when `time.monotonic()` is past `end`, and at once if the machine does
    not have more cores.
    """
    if cores >= (os.cpu_count() or 1):
        return
    while time.monotonic() < end:
        begin, before = time.perf_counter(), busy_seconds()
        time.sleep(1.5)
        if busy_seconds() - before < cores * (time.perf_counter() - begin):
            return


def stamp() -> tuple[float, float, float]:
    """Returns the time, this process's CPU seconds, and those of all processes.

    The differences of two stamps show which processes used the cores in between.
    """
    return time.perf_counter(), time.process_time(), busy_seconds()


def resident_mib(field: str = "VmRSS") -> float:
    """Returns the resident memory of this process, in MiB."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(f"{field}:")) / 1024


def peak_mib() -> float:
    """Returns the peak of this process's resident memory since `reset_peak`, in MiB."""
    return resident_mib("VmHWM")


def reset_peak() -> None:
    """Resets the peak of `peak_mib`."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def drive_bytes() -> tuple[int, int]:
    """Returns the bytes that a drive has read and written for this process.

    Reads that the page cache answered are not included.
    """
    with open("/proc/self/io") as file:
        counts = {name: int(value) for name, value in (line.split(":") for line in file)}
    return counts["read_bytes"], counts["write_bytes"]


def loopback_bytes() -> int:
    """Returns the bytes sent over the loopback interface since boot, from the kernel's counter."""
    with open("/proc/net/dev") as file:
        fields = next(line.split(":")[1].split() for line in file if line.strip().startswith("lo:"))
    return int(fields[8])
