"""Is an asynchronous plan right: what it takes over from the step before, what it leaves to the next, when it updates.

`legal` and `check_rendezvous` call these.
"""

from __future__ import annotations

from itertools import pairwise

from threed.schedules.action import Action, Kind
from threed.schedules.plan import Plan

_NORM, _UPDATE = Action(Kind.NORM, -1), Action(Kind.UPDATE, -1)
_BACKWARD = frozenset({Kind.B, Kind.I, Kind.W})


def check_open(plan: Plan) -> None:
    """Checks what a plan takes over and leaves. Raises ValueError naming rank and action."""
    for name, counts in (("begun", plan.begun), ("left", plan.left)):
        if not counts:
            continue
        where = f"plan {plan.name}: {name} is {counts}"
        if len(counts) != plan.stages or plan.chunks > 1 or min(counts) < 0:
            raise ValueError(
                f"{where}: it has a number for each of {plan.stages} ranks, and a rank has one chunk"
            )
        if name == "left" and max(counts) > plan.microbatches:
            raise ValueError(f"{where}: there are {plan.microbatches} micro-batches")
        along = [plan.locate(stage)[0] for stage in range(plan.stages)]
        for rank, other in pairwise(along):
            if counts[rank] < counts[other]:
                first = Action(
                    Kind.B, (0 if name == "begun" else plan.microbatches) - counts[other]
                )
                raise ValueError(
                    f"{where}: rank {rank} has {first} behind it, which comes after that of rank {other}"
                )


def check_updates(plan: Plan) -> None:
    """Checks that every rank of a plan that follows another sums the norm and updates once, behind the reduction of
    what it took over and before its next one begins. Raises ValueError naming rank and action."""
    for rank, actions in enumerate(plan.ranks):
        where = f"plan {plan.name}: rank {rank}"
        for wanted in (_NORM, _UPDATE):
            if actions.count(wanted) != bool(plan.begun):
                wrong = "is missing" if plan.begun and wanted not in actions else "appears twice"
                raise ValueError(
                    f"{where}: {wanted} {wrong if plan.begun else 'without a step before'}"
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
    """Whether all ranks, each at a place of its list, have begun the sum that an update waits for."""
    return all(_NORM in actions[:place] for actions, place in zip(plan.ranks, at, strict=True))
