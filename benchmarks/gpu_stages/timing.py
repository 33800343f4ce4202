"""Times of GPU work, measured with CUDA events for several sides in turn.

It also computes from a profile how busy a GPU was.

On a GPU each run begins with an empty L2 cache, after a short wait on the GPU: so the host is
ahead, and the time is that of the GPU alone. On a CPU (rehearsals) the time is measured by the
host's clock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

Work = Callable[[], Any]
WAIT = 2_000_000  # cycles, about a millisecond: longer than the host needs to launch the timed work


class Flush:
    """Empties a GPU's L2 cache by reading twice its size."""

    def __init__(self, device: torch.device) -> None:
        size = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or 64 << 20
        self._buffer, self._sum = (torch.zeros(n, device=device) for n in (2 * size // 4, 1))

    def __call__(self) -> None:
        torch.sum(self._buffer, 0, keepdim=True, out=self._sum)


def interleaved(
    sides: Mapping[str, Work], device: torch.device, rounds: int = 30, warm_up: int = 3
) -> dict[str, Any]:
    """Returns the milliseconds of `rounds` runs of each side; they run in turn.

    Every round begins with another side.
    """
    if not sides:
        return {}
    for work in sides.values():
        for _ in range(warm_up):
            work()
    flush = Flush(device) if device.type == "cuda" else None
    found: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(_once(sides[name], flush))
    return {name: summary(times) for name, times in found.items()}


def _once(work: Work, flush: Flush | None) -> float:
    if flush is None:
        begin = time.perf_counter()
        work()
        return 1e3 * (time.perf_counter() - begin)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    flush()
    torch.cuda._sleep(WAIT)
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def summary(times: list[float]) -> dict[str, float | int]:
    """Returns the median and the quartiles of times in milliseconds."""
    low, middle, high = (
        statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
    )
    return {"median_ms": middle, "low_ms": low, "high_ms": high, "runs": len(times)}


def busy(intervals: Iterable[tuple[float, float]]) -> dict[str, float | int]:
    """Returns how busy a GPU was, from intervals (begin, end) in microseconds on any streams.

    Returns:
        The total span, its idle time, the number of gaps (stretches without an interval), the
        number of gaps longer than 10 microseconds, and the number of intervals.
    """
    ordered = sorted(intervals)
    if not ordered:
        return {"span_us": 0.0, "idle_us": 0.0, "gaps": 0, "long_gaps": 0, "kernels": 0}
    reached, gaps = ordered[0][1], []
    for begin, end in ordered[1:]:
        if begin > reached:
            gaps.append(begin - reached)
        reached = max(reached, end)
    span = reached - ordered[0][0]
    long_gaps = sum(gap > 10 for gap in gaps)
    return {
        "span_us": span,
        "idle_us": sum(gaps),
        "gaps": len(gaps),
        "long_gaps": long_gaps,
        "kernels": len(ordered),
    }


def difference(got: Tensor, truth: Tensor) -> float:
    """Returns ||got - truth|| / ||truth|| in fp64; NaN if either contains a NaN."""
    truth = truth.double()
    return float((got.double() - truth).norm() / truth.norm().clamp(min=1e-300))
