"""Checks of asynchronous plans: the backwards that a step leaves to the next one, and the update.

The checks of a plan in plan_checks.py and deadlock_check.py call these functions.
"""

from __future__ import annotations

from itertools import pairwise

from threed.core.messages import counted
from threed.schedules.action import Action, Kind
from threed.schedules.plan import Plan

_NORM, _UPDATE = Action(Kind.NORM, -1), Action(Kind.UPDATE, -1)
_BACKWARD = frozenset({Kind.B, Kind.I, Kind.W})


def check_open(plan: Plan) -> None:
    """Checks the counts in `Plan.begun` and `Plan.left`. Raises ValueError naming rank and action.

    Each has one count per rank: the number of backwards that one step leaves to the next. The count
    must not increase from a stage to the next stage. Otherwise a stage would run a backward one
    step before the next stage computes the gradient that this backward needs.
    """
    for name, counts in (("begun", plan.begun), ("left", plan.left)):
        if not counts:
            continue
        where = f"plan {plan.name}: {name} is {counts}"
        if len(counts) != plan.stages or plan.chunks > 1 or min(counts) < 0:
            raise ValueError(
                f"{where}: it needs one number of at least 0 for each of {plan.stages} ranks, and one chunk per rank"
            )
        if name == "left" and max(counts) > plan.microbatches:
            raise ValueError(f"{where}: the plan has {counted(plan.microbatches, 'micro-batch')}")
        in_order = [plan.locate(stage)[0] for stage in range(plan.stages)]
        for rank, other in pairwise(in_order):
            if counts[rank] < counts[other]:
                first = Action(
                    Kind.B, (0 if name == "begun" else plan.microbatches) - counts[other]
                )
                raise ValueError(
                    f"{where}: rank {rank} runs {first} one step before its producer, rank {other}"
                )


def check_updates(plan: Plan) -> None:
    """Checks that every rank of a plan with a previous step has one NORM and one UPDATE.

    A plan without a previous step must have neither. NORM must follow the reduction of the previous
    step's gradients. UPDATE must follow NORM, and must precede the backward that completes this
    step's gradients, which overwrite the previous ones. Raises ValueError naming the rank and the
    action.
    """
    for rank, actions in enumerate(plan.ranks):
        where = f"plan {plan.name}: rank {rank}"
        for required in (_NORM, _UPDATE):
            if actions.count(required) != bool(plan.begun):
                wrong = "is missing" if plan.begun and required not in actions else "appears twice"
                raise ValueError(
                    f"{where}: {required} {wrong if plan.begun else 'without a previous step'}"
                )
        if not plan.begun:
            continue
        norm, update = actions.index(_NORM), actions.index(_UPDATE)
        if update < norm:
            raise ValueError(f"{where}: {_UPDATE} appears before {_NORM}")
        reductions = [at for at, action in enumerate(actions) if action.kind is Kind.REDUCE]
        if plan.begun[rank] and norm < reductions[0]:
            raise ValueError(f"{where}: {_NORM} appears before {actions[reductions[0]]}")
        own = [
            at
            for at, action in enumerate(actions)
            if action.kind in _BACKWARD and action.microbatch >= 0
        ]
        if own and not plan.is_left(rank, plan.microbatches - 1) and own[-1] < update:
            raise ValueError(
                f"{where}: {_UPDATE} appears after {actions[own[-1]]}, which overwrites gradients"
            )


def norms_begun(plan: Plan, at: list[int]) -> bool:
    """Returns whether every rank has run its NORM. An UPDATE must wait for this.

    Args:
        plan: a lowered plan.
        at: per rank, the index of the rank's next action.
    """
    return all(_NORM in actions[:place] for actions, place in zip(plan.ranks, at, strict=True))
