"""A record of the collectives of a rank on the meta device, where they only count bytes.

    journal = Journal()
    work = journal.start("tp", 4096)      # when a collective starts
    work.wait()                           # when its result is needed
    journal.entries                       # both, in the order of the calls

The planner derives from it which collectives overlap with computation.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Entry:
    """The start of a collective, or a wait for it.

    Attributes:
        axis: label of the axis.
        number: number of the collective; the wait for a collective has the same number.
        sent: bytes that this rank sends; None for a wait.
    """

    axis: str
    number: int
    sent: int | None


@dataclass(frozen=True)
class Started:
    """A collective that has started; takes the place of a `dist.Work`."""

    entry: Entry
    journal: Journal

    def wait(self) -> None:
        """Records that the result is needed."""
        self.journal.entries.append(Entry(self.entry.axis, self.entry.number, None))


@dataclass
class Journal:
    """Collectives and waits in the order of the calls."""

    entries: list[Entry] = field(default_factory=list)
    started: int = 0

    def start(self, axis: str, sent: int) -> Started:
        """Records the start of a collective."""
        self.started += 1
        self.entries.append(Entry(axis, self.started, sent))
        return Started(self.entries[-1], self)
