"""GPipe: all forwards, then all backwards; and plans of only forwards, for evaluation and sampling.

Use: `gpipe(stages=4, microbatches=8)`, `forward_only(stages=4, microbatches=8)`.

Every rank keeps the activations of all micro-batches, and is idle for the time of (stages - 1)
forwards and (stages - 1) backwards. Source: Huang et al. 2019, arXiv 1811.06965.
"""

from __future__ import annotations

from collections.abc import Sequence

from threed.schedules.action import Action, Kind
from threed.schedules.plan import Plan


def gpipe(stages: int, microbatches: int) -> Plan:
    """Returns the plan with all forwards and then all backwards, both in micro-batch order.

    Args:
        stages: number of pipeline ranks.
        microbatches: number of micro-batches per step.
    """
    forwards, backwards = _all(Kind.F, microbatches), _all(Kind.B, microbatches)
    return Plan("gpipe", stages, microbatches, 1, (forwards + backwards,) * stages)


def forward_only(stages: int, microbatches: int, placement: Sequence[Sequence[int]] = ()) -> Plan:
    """Returns a plan without backwards, in which activations are freed after each forward.

    A rank may have the inputs of several forwards. It then runs the forward with the lowest
    micro-batch index.

    Args:
        stages: number of pipeline ranks.
        microbatches: number of micro-batches.
        placement: the stages per rank, as in `Plan`; by default one stage per rank.
    """
    per_rank = tuple(map(tuple, placement)) or tuple((rank,) for rank in range(stages))
    home = {
        stage: (rank, chunk)
        for rank, chunks in enumerate(per_rank)
        for chunk, stage in enumerate(chunks)
    }
    ranks: list[list[Action]] = [[] for _ in per_rank]
    waiting = [(microbatch, 0) for microbatch in range(microbatches)]
    while waiting:
        taken: dict[int, tuple[int, int]] = {}  # rank -> (micro-batch, stage) in this time slot
        for microbatch, stage in sorted(waiting):
            taken.setdefault(home[stage][0], (microbatch, stage))
        for rank, (microbatch, stage) in taken.items():
            ranks[rank].append(Action(Kind.F, microbatch, home[stage][1]))
        done = set(taken.values())
        waiting = [
            (m, s + ((m, s) in done)) for m, s in waiting if s + ((m, s) in done) < len(home)
        ]
    return Plan(
        "forward-only", stages, microbatches, len(per_rank[0]), tuple(map(tuple, ranks)), per_rank
    )


def _all(kind: Kind, microbatches: int) -> tuple[Action, ...]:
    return tuple(Action(kind, microbatch) for microbatch in range(microbatches))
