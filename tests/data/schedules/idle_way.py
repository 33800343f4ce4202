"""Plans that go both ways, and nobody takes one of them."""

from __future__ import annotations

from threed.schedules import Action, Kind, Plan


def idle_way(stages: int, microbatches: int) -> Plan:
    """GPipe from the last rank to the first; every rank also holds a stage of the other way, for no micro-batch."""
    actions = tuple(
        Action(kind, number, 1) for kind in (Kind.F, Kind.B) for number in range(microbatches)
    )
    placement = tuple((rank, stages - 1 - rank) for rank in range(stages))
    return Plan("idle-way", stages, microbatches, 2, (actions,) * stages, placement, ways=2)
