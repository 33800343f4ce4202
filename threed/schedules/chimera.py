"""Chimera: two pipelines through the same ranks in opposite directions, which fill half of each other's bubble.

Use: `chimera(stages=4, microbatches=8)`.

Every rank holds two stages: rank r the stage r of the way down, and stage (stages - 1 - r) of the way up. The first
half of the micro-batches goes down, the second half up. With forwards and backwards of one slot each, stage s of a way
runs the forward of its i-th micro-batch in slot s + 2i and the backward in slot 2 stages - 1 - s + 2i; on a rank the
slots of the two ways never meet. After `stages` micro-batches (a unit) the same starts again in the slot
2 stages later, where it fills the holes that the unit before left: the paper's direct concatenation.

Waiting in u whole units of D = stages micro-batches, with forwards of time f and backwards of time b >= f:
(D - 2) (b + (u - 1) (b - f)). So D - 2 slots for any number of units where both take equally long, the paper's
(D - 2) / (2m + D - 2) of the whole; with b = 2f its (D - 2) / (1.5m + D - 2) in a single unit, and more with each
further one: take m = D then, or another schedule. A last unit of r < D micro-batches waits D - r slots more.
Between D/2 + 1 (outer ranks) and D micro-batches are held. Each rank has the weights of two stages.
Source: Li and Hoefler 2021, arXiv 2107.06925, section 3.
"""

from __future__ import annotations

from threed.schedules.action import Action, Kind
from threed.schedules.plan import Plan


def chimera(stages: int, microbatches: int) -> Plan:
    """Both ways in their slots, in the order of the slots; a last unit that is not full leaves some empty.

    Raises ValueError where stages or micro-batches are odd.
    """
    placement = both_ways("chimera", stages, microbatches)
    ranks = []
    for rank in range(stages):
        slots = {
            slot: action
            for way in (0, 1)
            for slot, action in _slots(way, rank, stages, microbatches)
        }
        ranks.append(tuple(slots[slot] for slot in sorted(slots)))
    return Plan("chimera", stages, microbatches, 2, tuple(ranks), placement, ways=2)


def both_ways(
    name: str, stages: int, microbatches: int, least: int = 1
) -> tuple[tuple[int, int], ...]:
    """The placement of a bidirectional plan: rank r holds stage r, and that of the opposite rank for the other way.

    Raises ValueError where stages or micro-batches are odd, or the latter fewer than `least`.
    """
    check_even(name, stages, "stages")
    check_enough(name, stages, microbatches, least)
    check_even(name, microbatches, "micro-batches")
    return tuple((rank, stages - 1 - rank) for rank in range(stages))


def check_enough(name: str, stages: int, microbatches: int, least: int) -> None:
    """Raises ValueError for fewer micro-batches than `least`."""
    if microbatches < least:
        raise ValueError(
            f"schedule {name}: {microbatches} micro-batches; {stages} stages need at least {least}: use more, or "
            "another schedule"
        )


def check_even(name: str, count: int, what: str) -> None:
    """Raises ValueError for an odd number of what goes both ways."""
    if count % 2:
        raise ValueError(
            f"schedule {name}: {count} {what}; it goes both ways, so their number must be even: use {count + 1}"
        )


def _slots(way: int, rank: int, stages: int, microbatches: int) -> list[tuple[int, Action]]:
    stage, half = (stages - 1 - rank if way else rank), microbatches // 2
    found = []
    for number in range(half):
        unit, within = divmod(number, stages // 2)
        slot, microbatch = 2 * (stages * unit + within), way * half + number
        found.append((slot + stage, Action(Kind.F, microbatch, way)))
        found.append((slot + 2 * stages - 1 - stage, Action(Kind.B, microbatch, way)))
    return found
