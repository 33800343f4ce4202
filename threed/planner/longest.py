"""The longest sequence that fits into the memory of a device.

    found = longest(peak_at, seq, peak, limit, step)
    found.seq                                 # in tokens; 0: not even a sequence of `step` tokens fits

`peak_at` forecasts the peak memory of a run with sequences of some length. The peak is nearly linear
in the length, so most searches take three forecasts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

FORECASTS = (
    8  # largest number of forecasts of a search; lengths that `peak_at` refuses do not count
)


@dataclass(frozen=True)
class Longest:
    """The result of a search.

    Attributes:
        seq: the longest sequence whose forecast fits, in tokens.
        why: why the next longer sequence cannot be trained, if not because of memory; else empty.
        exact: whether the next longer sequence, `step` tokens more, does not fit. False if the
            search has ended before it was known.
    """

    seq: int
    why: str = ""
    exact: bool = True


def step_of(seq: int, ranks: int) -> int:
    """Returns the step between the lengths of a search.

    It is an eighth to a sixteenth of `seq`, as a power of two, and a multiple of `ranks`, the
    number of parts into which tensor and context ranks divide a sequence.
    """
    return math.lcm(2 ** max(0, (seq // 8).bit_length() - 1), ranks)


def longest(
    peak_at: Callable[[int], int], seq: int, peak: int, limit: int, step: int
) -> Longest | None:
    """Returns the longest sequence that fits, a multiple of `step`.

    This is a bisection, which first tries the length that two known peaks predict.

    Args:
        peak_at: function that returns the peak in bytes for a length. It raises ValueError if the
            model does not accept this length.
        seq: a length with a known peak.
        peak: the peak at `seq`, in bytes.
        limit: bytes of memory.
        step: step between lengths.

    Returns:
        The result; None if the peak does not grow with the length.
    """
    # Peaks by number of steps. (0, 0) stands for a second forecast until there is one; the line
    # through it and a forecast gives the first guess.
    known, why = {0.0: 0, seq / step: peak}, ""
    # numbers of steps: the longest known to fit, and the shortest known not to fit
    fits, over = (seq // step, math.inf) if peak <= limit else (0, math.ceil(seq / step))
    while over - fits > 1 and len(known) < FORECASTS + 2:
        number = (fits + int(over)) // 2 if why else _next(known, fits, over, limit)
        try:
            known[number] = peak_at(number * step)
        except ValueError as error:
            over, why = number, str(error.__cause__ or error)
            continue
        if known[number] == peak:
            return None
        fits, over, why = (number, over, why) if known[number] <= limit else (fits, number, "")
    return Longest(fits * step, why, over - fits <= 1)


def _next(known: dict[float, int], fits: int, over: float, limit: int) -> int:
    """Returns the next number of steps to try, between `fits` and `over`."""
    # a line through the two known points that are nearest to the limit
    (one, low), (two, high) = sorted(known.items(), key=lambda at: abs(at[1] - limit))[:2]
    guess = math.floor(one + (limit - low) * (two - one) / (high - low)) if high != low else -1
    if fits <= guess < over:
        return max(guess, fits + 1)
    return 2 * fits + 1 if over == math.inf else (fits + int(over)) // 2
