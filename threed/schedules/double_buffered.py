"""PipeDream-2BW: 1F1B without an end, in which weights are one update older than what they are updated to.

Use: `two_bw(stages=4, microbatches=8)` is a step in the middle of a run; `first(plan)` is one without a step before it,
`drain(plan)` what the last one has left.

Every step leaves (stages - s - 1) backwards of stage s to the next one, which has them between its own first forwards:
so no rank waits between steps. A batch runs with one version of the weights, from its first forward to its last
backward: W(t+1) = W(t) - rate * gradient of batch t at W(t-1). Where the gradients of the step before are complete on
all ranks, `lower` puts NORM, and as late as it may UPDATE; so the norm is that of all stages, and nobody waits for it.
Source: Narayanan et al. 2021, arXiv 2006.09503, section 3.1 (double-buffered weight updates).
"""

from __future__ import annotations

from dataclasses import replace

from threed.schedules.action import Action, Kind
from threed.schedules.bidirectional import check_enough
from threed.schedules.plan import Plan


def two_bw(stages: int, microbatches: int) -> Plan:
    """Stage s runs a forward and the backward of (stages - s - 1) micro-batches before, in turn.

    Raises SizesError for fewer micro-batches than stages: a third version of the weights would be in use.
    """
    check_enough("2bw", stages, microbatches, stages)
    behind = tuple(stages - stage - 1 for stage in range(stages))
    ranks = (
        tuple(
            action
            for m in range(microbatches)
            for action in (Action(Kind.F, m), Action(Kind.B, m - late))
        )
        for late in behind
    )
    return Plan("2bw", stages, microbatches, 1, tuple(ranks), begun=behind, left=behind)


def first(plan: Plan) -> Plan:
    """The step of an asynchronous plan before which there is none: its own micro-batches alone."""
    own = (tuple(action for action in actions if action.microbatch >= 0) for actions in plan.ranks)
    return replace(plan, ranks=tuple(own), begun=())


def drain(plan: Plan) -> Plan:
    """What an asynchronous plan leaves to the next step, alone."""
    late = (tuple(action for action in actions if action.microbatch < 0) for actions in plan.ranks)
    return replace(plan, microbatches=0, ranks=tuple(late), left=())
