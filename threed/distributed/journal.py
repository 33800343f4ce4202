"""A record of the collectives of a rank on the meta device, where they only count bytes.

    journal = Journal()
    work = journal.start("tp", 4096)      # when a collective starts
    work.wait()                           # when its result is needed
    journal.entries                       # both, in the order of the calls

The planner derives from it which collectives overlap with computation.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import Tensor

# To whom a rank sends: in a gather or a reduction, over all links of the group; to the next rank of a
# ring; or different numbers to each rank.
Pattern = Literal["group", "shift", "all-to-all"]


@dataclass(frozen=True)
class Entry:
    """The start of a collective, or a wait for it.

    Attributes:
        axis: label of the axis.
        number: number of the collective; the wait for a collective has the same number.
        sent: bytes that this rank sends, or receives, if they are more; None for a wait.
        ranks: the ranks of the axis.
        pattern: to whom each rank sends.
        counts: whether the numbers are integers: counts, which the host reads to size its buffers.
    """

    axis: str
    number: int
    sent: int | None
    ranks: tuple[int, ...] = ()
    pattern: Pattern = "group"
    counts: bool = False


@dataclass(frozen=True)
class Started:
    """A collective that has started; takes the place of a `dist.Work`."""

    entry: Entry
    journal: Journal

    def wait(self) -> None:
        """Records that the result is needed."""
        self.journal.entries.append(replace(self.entry, sent=None))


@dataclass
class Journal:
    """Collectives and waits in the order of the calls."""

    entries: list[Entry] = field(default_factory=list)
    started: int = 0

    def start(
        self, axis: str, sent: int, ranks: tuple[int, ...] = (), out: Tensor | None = None, *args: Any
    ) -> Started:  # fmt: skip
        """Records the start of a collective.

        Args:
            axis: label of the axis.
            sent: bytes that this rank sends.
            ranks: the ranks of the axis.
            out: first argument of the collective, if it is known.
            args: its other arguments. Of an all-to-all of different sizes: a tensor, and how many of
                its numbers come from each rank, and go to each rank.
        """
        pattern: Pattern = "group"
        counts = out is not None and not out.is_floating_point()
        if out is not None and len(args) == 3:
            _, receives, sends = args
            pattern = "shift" if sum(map(bool, sends)) == 1 else "all-to-all"
            sent += max(0, sum(receives) - sum(sends)) * out.element_size()
        self.started += 1
        self.entries.append(Entry(axis, self.started, sent, ranks, pattern, counts))
        return Started(self.entries[-1], self)
