"""The order in which a pass gathers, runs and releases a chunk's units, with prefetched gathers.

for step in walk(range(4), ahead=1):  gather 0, 1 · run 0 · release 0 · gather 2 · run 1 · ...
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Step(NamedTuple):
    """One step of a pass.

    Attributes:
        gather: units to start gathering.
        run: the unit to run then.
        release: whether to release that unit afterwards.
    """

    gather: tuple[int, ...]
    run: int
    release: bool


def walk(units: Sequence[int], ahead: int, keep_last: bool = False) -> Iterator[Step]:
    """Yields the steps of one pass over `units`.

    Args:
        units: the units in execution order (reversed for a backward).
        ahead: number of units to gather ahead; at most `ahead` + 1 units are gathered at once.
        keep_last: whether to keep the last unit gathered for the next pass.
    """
    for at, unit in enumerate(units):
        first = 0 if at == 0 else at + ahead
        last = len(units) - 1
        yield Step(tuple(units[first : at + ahead + 1]), unit, not (keep_last and at == last))


def first_units(units: Sequence[int], ahead: int) -> tuple[int, ...]:
    """Returns the units that a pass gathers before it runs the first one, in the GATHER action."""
    return tuple(units[: ahead + 1])
