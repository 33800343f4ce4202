"""PipeDream-2BW: 1F1B without a flush between steps; gradients are one weight version behind.

Use: `plan = two_bw(stages=4, microbatches=8)` returns the plan of a step in the middle of a run,
`first(plan)` the plan of a run's first step, and `drain(plan)` a plan of the backwards that remain
after the last step.

In every step, stage s leaves (stages - s - 1) backwards to the next step, which runs them between
its first forwards. So ranks are not idle between steps. A batch uses one version of the weights
from its first forward to its last backward: W(t+1) = W(t) - rate * gradient of batch t at W(t-1),
where `rate` is the learning rate. `lower` adds NORM after all ranks have completed the gradients of
the previous step, so that the gradient norm covers all stages. It adds UPDATE as late as possible,
so that no rank waits for the norm. Source: Narayanan et al. 2021, arXiv 2006.09503, section 3.1
(double-buffered weight updates).
"""

from __future__ import annotations

from dataclasses import replace

from threed.schedules.action import Action, Kind
from threed.schedules.bidirectional import check_enough
from threed.schedules.plan import Plan


def two_bw(stages: int, microbatches: int) -> Plan:
    """Returns the plan of a step in the middle of a run.

    For m = 0, 1 .., stage s runs the forward of micro-batch m, then the backward of micro-batch
    m - (stages - s - 1).

    Args:
        stages: number of pipeline ranks.
        microbatches: number of micro-batches per step.

    Raises:
        SizesError: fewer micro-batches than stages, which would require a third version of the
            weights.
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
    """Returns the plan of a run's first step: `plan` without the actions of a previous step."""
    own = (tuple(action for action in actions if action.microbatch >= 0) for actions in plan.ranks)
    return replace(plan, ranks=tuple(own), begun=())


def drain(plan: Plan) -> Plan:
    """Returns the plan that ends a run: the backwards that the last step did not run."""
    late = (tuple(action for action in actions if action.microbatch < 0) for actions in plan.ranks)
    return replace(plan, microbatches=0, ranks=tuple(late), left=())
