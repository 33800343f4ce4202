"""The order in which a chunk's units are gathered, run and released: one pass, with gathers running ahead.

for step in walk(range(4), ahead=1):  gather 0, 1 · run 0 · release 0 · gather 2 · run 1 · ...
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Step(NamedTuple):
    """Begin to gather the units `gather`, run the unit `run`, then release it if `release`."""

    gather: tuple[int, ...]
    run: int
    release: bool


def walk(units: Sequence[int], ahead: int, keep_last: bool = False) -> Iterator[Step]:
    """The steps of one pass over `units`, in their order: forward as they are, backward reversed.

    At most `ahead` + 1 units are whole at once. keep_last: the last one is needed by what follows, and stays.
    """
    for at, unit in enumerate(units):
        first = 0 if at == 0 else at + ahead
        last = len(units) - 1
        yield Step(tuple(units[first : at + ahead + 1]), unit, not (keep_last and at == last))


def first_units(units: Sequence[int], ahead: int) -> tuple[int, ...]:
    """What a pass over `units` gathers before anything runs: the work of the GATHER action."""
    return tuple(units[: ahead + 1])
