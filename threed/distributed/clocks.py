"""Converts times measured on several ranks to one clock.

    rows = on_one_clock(spans, axis)       # spans: (name, begin, end) by time.perf_counter

Ranks on one machine share the clock of `time.perf_counter`. To convert times of other machines, all
ranks read their clocks at the end of a collective, which all ranks leave at about the same time. So
after the conversion the clocks of two machines differ by at most the time of a message. The wall
clock is not used, because the wall clocks of two machines may differ by more.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from threed.distributed import collectives
from threed.distributed.topology import Axis

Span = tuple[str, float, float]


def on_one_clock(spans: Sequence[Span], axis: Axis) -> list[list[Span]]:
    """Returns the spans of every rank of an axis, converted to this rank's clock. Collective.

    Args:
        spans: (name, begin, end) by `time.perf_counter`.
        axis: the ranks.
    """
    rows = collectives.exchange(spans, axis)
    # The clocks are read right after a collective, which all ranks leave together.
    moments = collectives.exchange([_clock(), time.perf_counter()], axis)
    own_clock, now = moments[axis.index]
    shifts = [0.0 if clock == own_clock else now - moment for clock, moment in moments]
    return [
        [(name, begin + shift, end + shift) for name, begin, end in row]
        for row, shift in zip(rows, shifts, strict=True)
    ]


def _clock() -> str:
    """Returns an id of this process's clock. Processes with the same id share the clock.

    The id consists of the id of the machine's boot and the container's time namespace.
    """
    with suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/time')}"
    return platform.node()
