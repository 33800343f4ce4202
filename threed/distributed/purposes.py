"""Purposes of `collectives.exchange`, with which ranks detect that they made different calls.

    collectives.exchange(True, axis, purposes.FORWARD)

If two ranks call `exchange` at the same time at different places of the program, each would read
the other's value as a value of its own kind. A purpose is sent with each value, so that all ranks
raise an error instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Purpose(NamedTuple):
    """Purpose of a call of `collectives.exchange`.

    Attributes:
        number: number that is sent with the value, below 256.
        what: what the calling ranks have begun.
        fix: how to make all ranks begin it.
    """

    number: int
    what: str = ""
    fix: str = ""

    def unequal(self, running: Sequence[int], others: Sequence[int]) -> str:
        """Returns the error text if some ranks have begun this, and the others have not.

        Args:
            running: the ranks that have begun it, at least one.
            others: the other ranks, at least one.
        """
        return f"{self.what} began on {_first(running)}, but not on {_first(others)}. {self.fix}"


DATA = Purpose(0)  # all purposes without an entry of their own
FORWARD = Purpose(
    1,
    "a forward of a sharded module",
    "ZeRO-3 gathers parameters on all ranks at once, so all ranks must run the same number of forwards: pass"
    " synced_gpus=True to generate, or run the forwards inside `with engine.gathered():`",
)
PURPOSES = (DATA, FORWARD)  # by number


class UnequalCallsError(RuntimeError):
    """Raised by `exchange` on all ranks if the ranks call it for different purposes."""


def check(numbers: Sequence[int], ranks: Sequence[int]) -> None:
    """Checks that all ranks called `exchange` for the same purpose.

    Args:
        numbers: number of the purpose of each rank.
        ranks: the ranks.

    Raises:
        UnequalCallsError: they did not.
    """
    highest = max(numbers)
    if min(numbers) < highest:
        running = [rank for rank, number in zip(ranks, numbers, strict=True) if number == highest]
        others = [rank for rank in ranks if rank not in running]
        raise UnequalCallsError(PURPOSES[highest].unequal(running, others))


def _first(ranks: Sequence[int]) -> str:
    """Returns the numbers of at most three ranks, as text."""
    more = f" and {len(ranks) - 3} more" if len(ranks) > 3 else ""
    noun = "rank" if len(ranks) == 1 else "ranks"
    return f"{noun} {', '.join(map(str, ranks[:3]))}{more}"
