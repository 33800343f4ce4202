"""Where a plan may find out that the update before it was wrong, and begin again: a cut through all ranks' lists.

    lowered = add_validation(lowered)         every rank gets a VALIDATE
    check_validation(lowered)                 is it a cut behind which nothing is left to undo but forwards?
    time_between_steps(plan, costs)           what ranks save that need not wait for each other between two steps

The update before the step may be undone at VALIDATE (post-update validation, arXiv 2401.10241, section 4), and the step
begun again. So no gradient may be there yet, for those of the step before are still needed. And the cut is consistent:
what is sent before it is received before it, so that no message of the first attempt meets one of the second. Of all
such cuts this is the last one: it leaves the most time for the sum over all ranks.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from threed.schedules.action import SENDS, Action, Kind
from threed.schedules.plan import Plan
from threed.schedules.simulation import Costs, simulate

_RECEIVE_OF = {Kind.SEND_F: Kind.RECV_F, Kind.SEND_B: Kind.RECV_B}
_VALIDATE = Action(Kind.VALIDATE, -1)
Message = tuple[int, int, int, int]  # rank and place in its list of the send, and of the receive


def add_validation(plan: Plan) -> Plan:
    """Returns a lowered plan with a VALIDATE on every rank, at the last consistent cut before any gradient."""
    cut = [_first_gradient(actions) for actions in plan.ranks]
    messages = [m for m in _messages(plan) if m[1] < cut[m[0]] or m[3] < cut[m[2]]]
    moved = True
    while moved:
        moved = False
        for sender, sent, receiver, received in messages:
            if (sent < cut[sender]) != (received < cut[receiver]):
                cut[sender], cut[receiver] = min(cut[sender], sent), min(cut[receiver], received)
                moved = True
    ranks = (
        (*actions[:place], _VALIDATE, *actions[place:])
        for actions, place in zip(plan.ranks, cut, strict=True)
    )
    return replace(plan, ranks=tuple(ranks))


def check_validation(plan: Plan) -> None:
    """Checks the cut of a lowered plan, if it has one.

    Raises ValueError naming rank and action where VALIDATE is missing, doubled or behind a gradient, and of a message
    that is on its way while ranks validate.
    """
    counts = [actions.count(_VALIDATE) for actions in plan.ranks]
    if not any(counts):
        return
    for rank, (actions, count) in enumerate(zip(plan.ranks, counts, strict=True)):
        where = f"plan {plan.name}: rank {rank}"
        if count != 1:
            raise ValueError(
                f"{where}: {_VALIDATE} {'is missing' if count == 0 else 'appears twice'}"
            )
        first = _first_gradient(actions)
        if first < actions.index(_VALIDATE):
            raise ValueError(
                f"{where}: {_VALIDATE} appears after {actions[first]}, which changes gradients"
            )
    cut = [actions.index(_VALIDATE) for actions in plan.ranks]
    for sender, sent, receiver, received in _messages(plan):
        if (sent < cut[sender]) != (received < cut[receiver]):
            raise ValueError(
                f"plan {plan.name}: rank {sender}: {plan.ranks[sender][sent]} is on its way to rank {receiver} at"
                f" {_VALIDATE}"
            )


def _first_gradient(actions: tuple[Action, ...]) -> int:
    """The place of the first action that changes gradients; behind the list where none does."""
    changes = (Kind.B, Kind.I, Kind.W, Kind.REDUCE)
    return next(
        (
            n
            for n, action in enumerate(actions)
            if any(part.kind in changes for part in action.parts)
        ),
        len(actions),
    )


def _messages(plan: Plan) -> list[Message]:
    """All messages, those of the last ranks first."""
    places = [{action: n for n, action in enumerate(actions)} for actions in plan.ranks]
    found = []
    for sender in reversed(range(plan.stages)):
        for sent, action in enumerate(plan.ranks[sender]):
            to = plan.consumer(sender, action) if action.kind in SENDS else None
            if to is not None:
                received = places[to[0]].get(
                    Action(_RECEIVE_OF[action.kind], action.microbatch, to[1])
                )
                if received is not None:  # else `check_rendezvous` says so
                    found.append((sender, sent, to[0], received))
    return found


@functools.lru_cache(maxsize=8)
def time_between_steps(plan: Plan, costs: Costs) -> float:
    """How much sooner every step ends where a rank begins the next one when it is done, and not when all are.

    In the costs' unit of time. Steps may follow one another as fast as the slowest rank runs one; where all wait, as
    fast as the first one's start and the last one's end allow. 0 where the rank that begins first ends last.
    """
    timeline = simulate(plan, costs)
    return timeline.makespan - timeline.span
