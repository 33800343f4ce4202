"""The order in which a pass gathers, runs and releases a chunk's units, with prefetched gathers.

Units are identified by the numbers of their layers. A pass is one forward or one backward of the
chunk.

    walk(range(4), ahead=1)      # gather 0 and 1 · run 0 · release 0 · gather 2 · run 1 · ...
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Step(NamedTuple):
    """One step of a pass: start gathers, run one unit, and release this unit if required.

    Attributes:
        gather: the units whose gathers start.
        run: the unit that runs next.
        release: whether to release the full parameters of `run` afterwards.
    """

    gather: tuple[int, ...]
    run: int
    release: bool


def walk(units: Sequence[int], ahead: int, keep_last: bool = False) -> Iterator[Step]:
    """Yields the steps of one pass over `units`.

    Args:
        units: the units in execution order, which is reversed for a backward.
        ahead: number of units to gather ahead; at most `ahead` + 1 units are gathered at once.
        keep_last: whether the last unit stays gathered, because the next pass starts with it.
    """
    for at, unit in enumerate(units):
        first = 0 if at == 0 else at + ahead
        last = len(units) - 1
        yield Step(tuple(units[first : at + ahead + 1]), unit, not (keep_last and at == last))


def first_units(units: Sequence[int], ahead: int) -> tuple[int, ...]:
    """Returns the units that the GATHER action starts to gather before a pass runs its first unit.

    Args:
        units: as in `walk`.
        ahead: as in `walk`.
    """
    return tuple(units[: ahead + 1])
