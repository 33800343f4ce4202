"""Times that ranks measured, on one time line: their machines' clocks count from different moments.

    rows = on_one_clock(mine, axis)        # mine: (what, begin, end) by time.perf_counter; every rank's, as by ours

Ranks of one machine have one such clock. Those of others are set by a moment that all pass together, at the end of a
collective: so times of two machines agree to within the time of a message. Nobody asks for the hour.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from threed import collectives
from threed.topology import Axis

Span = tuple[str, float, float]


def on_one_clock(mine: Sequence[Span], axis: Axis) -> list[list[Span]]:
    """Returns the spans of every rank of an axis, in seconds of this rank's clock. Collective."""
    rows = collectives.exchange(mine, axis)
    # all left the one before together
    moments = collectives.exchange([_clock(), time.perf_counter()], axis)
    here, now = moments[axis.index]
    shifts = [0.0 if clock == here else now - moment for clock, moment in moments]
    return [
        [(what, begin + shift, end + shift) for what, begin, end in row]
        for row, shift in zip(rows, shifts, strict=True)
    ]


def _clock() -> str:
    """Names what `perf_counter` counts from: this boot of this machine, and a container's own offset."""
    with suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/time')}"
    return platform.node()
