"""GPipe: all forwards, then all backwards; and its first half alone, for evaluation and sampling.

Use: `gpipe(stages=4, microbatches=8)`, `forward_only(stages=4, microbatches=8)`.

Every rank keeps the activations of all micro-batches, and waits (stages - 1) forwards and as many backwards.
Source: Huang et al. 2019, arXiv 1811.06965.
"""

from __future__ import annotations

from collections.abc import Sequence

from threed.schedules.action import Action, Kind
from threed.schedules.plan import Plan


def gpipe(stages: int, microbatches: int) -> Plan:
    """Every rank runs all forwards and then all backwards, both in the order of the micro-batches."""
    forwards, backwards = _all(Kind.F, microbatches), _all(Kind.B, microbatches)
    return Plan("gpipe", stages, microbatches, 1, (forwards + backwards,) * stages)


def forward_only(stages: int, microbatches: int, placement: Sequence[Sequence[int]] = ()) -> Plan:
    """All forwards and no backward: no activation outlives its forward.

    placement: the stages of the model that every rank holds, as in `Plan`; by default one each. A rank takes the oldest
    micro-batch that has come to it, and of one micro-batch what comes first in the model.
    """
    held = tuple(map(tuple, placement)) or tuple((rank,) for rank in range(stages))
    home = {
        stage: (rank, chunk) for rank, mine in enumerate(held) for chunk, stage in enumerate(mine)
    }
    ranks: list[list[Action]] = [[] for _ in held]
    waiting = [(microbatch, 0) for microbatch in range(microbatches)]
    while waiting:
        taken: dict[int, tuple[int, int]] = {}  # one forward of every rank at a time
        for microbatch, stage in sorted(waiting):
            taken.setdefault(home[stage][0], (microbatch, stage))
        for rank, (microbatch, stage) in taken.items():
            ranks[rank].append(Action(Kind.F, microbatch, home[stage][1]))
        done = set(taken.values())
        waiting = [
            (m, s + ((m, s) in done)) for m, s in waiting if s + ((m, s) in done) < len(home)
        ]
    return Plan("forward-only", stages, microbatches, len(held[0]), tuple(map(tuple, ranks)), held)


def _all(kind: Kind, microbatches: int) -> tuple[Action, ...]:
    return tuple(Action(kind, microbatch) for microbatch in range(microbatches))
