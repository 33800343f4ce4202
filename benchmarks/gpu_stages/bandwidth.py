"""Measures the bandwidth of copies on the device, and between device and page-locked host memory.

On the device, bytes read and bytes written both count.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.gpu_stages.stage import Stage, main
from benchmarks.gpu_stages.timing import interleaved

MIB = 2**20


def rates(found: dict[str, float], nbytes: int) -> dict[str, Any]:
    """Returns the GB/s for `nbytes` bytes; low and high are quartiles."""
    return {
        "gb_per_s": nbytes / found["median_ms"] / 1e6, "low": nbytes / found["high_ms"] / 1e6,
        "high": nbytes / found["low_ms"] / 1e6, "runs": found["runs"],
    }  # fmt: skip


def on_device(size: int, device: torch.device, rounds: int) -> dict[str, Any]:
    """Measures copies of `size` bytes on the device."""
    # random values, because zeros may be faster
    given = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    out = torch.empty_like(given)
    return rates(interleaved({"copy": lambda: out.copy_(given)}, device, rounds)["copy"], 2 * size)


def with_host(size: int, device: torch.device, rounds: int) -> dict[str, Any]:
    """Measures copies of `size` bytes in each direction, and in both at once on two streams."""
    host = [torch.randint(0, 255, (size,), dtype=torch.uint8) for _ in range(2)]
    there = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
    if device.type == "cuda":
        host, beside = [part.pin_memory() for part in host], torch.cuda.Stream(device)

    def both() -> None:
        if device.type != "cuda":
            there[0].copy_(host[0])
            host[1].copy_(there[1])
            return
        now = torch.cuda.current_stream(device)
        beside.wait_stream(now)  # so that both copies begin after the start of the measurement
        there[0].copy_(host[0], non_blocking=True)
        with torch.cuda.stream(beside):
            host[1].copy_(there[1], non_blocking=True)
        now.wait_stream(beside)

    ways = {
        "host_to_device": lambda: there[0].copy_(host[0], non_blocking=True),
        "device_to_host": lambda: host[1].copy_(there[1], non_blocking=True),
        "both_at_once": both,
    }
    found = interleaved(ways, device, rounds)
    return {
        name: rates(times, (2 if name == "both_at_once" else 1) * size)
        for name, times in found.items()
    }


def run(stage: Stage) -> None:
    sizes = (1, 2) if stage.small else (1, 4, 16, 64, 256, 1024)
    found = {}
    for mib in sizes:
        if stage.memory() > 4 * mib * MIB:
            found[str(mib)] = on_device(mib * MIB, stage.device, 3 if stage.small else 50)
            stage.put(copy_by_mib=found)
    stage.put(
        copy_gb_per_s=found[max(found, key=int)]["gb_per_s"], copy_mib=int(max(found, key=int))
    )
    stage.put(host_mib=2 if stage.small else 256)
    stage.put(
        host=with_host((2 if stage.small else 256) * MIB, stage.device, 3 if stage.small else 20)
    )


if __name__ == "__main__":
    main("bandwidth", run)
