"""Places and checks VALIDATE: the action at which a rank may still undo the previous update.

    lowered = add_validation(lowered)         # adds a VALIDATE to every rank
    check_validation(lowered)                 # raises ValueError if a VALIDATE is misplaced
    time_between_steps(plan, costs)           # time saved per step without a barrier between steps

At VALIDATE a rank may undo the update that precedes the step, and the step then restarts
(post-update validation, arXiv 2401.10241, section 4). This requires two conditions. First, no rank
computes a gradient before its VALIDATE, because the gradients of the previous step are still
needed. Second, a message is sent before the sender's VALIDATE if and only if it is received before
the receiver's VALIDATE, so that no message of the first attempt is in flight when the step
restarts.

`add_validation` places each VALIDATE as late as both conditions allow. This leaves the most time
for the all-reduce whose result shows whether the update was valid.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from threed.schedules.action import SENDS, Action, Kind
from threed.schedules.plan import Plan
from threed.schedules.simulation import Costs, simulate

_RECEIVE_OF = {Kind.SEND_F: Kind.RECV_F, Kind.SEND_B: Kind.RECV_B}
_VALIDATE = Action(Kind.VALIDATE, -1)
Message = tuple[int, int, int, int]  # rank and index of the send, rank and index of the receive


def add_validation(plan: Plan) -> Plan:
    """Returns a lowered plan with a VALIDATE on every rank, as late as possible."""
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
    """Checks the VALIDATEs of a lowered plan, if it has any.

    Raises:
        ValueError: a VALIDATE is missing, repeated or after a gradient, or a message is in flight
            at VALIDATE; the error names the rank and the action.
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
                f"plan {plan.name}: rank {sender}: {plan.ranks[sender][sent]} is in flight to rank {receiver} at"
                f" {_VALIDATE}"
            )


def _first_gradient(actions: tuple[Action, ...]) -> int:
    """Returns the index of the first action that changes gradients, or the length of the list."""
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
    """Returns all messages, ordered by sender, from the last rank to the first."""
    places = [{action: n for n, action in enumerate(actions)} for actions in plan.ranks]
    found = []
    for sender in reversed(range(plan.stages)):
        for sent, action in enumerate(plan.ranks[sender]):
            to = plan.consumer(sender, action) if action.kind in SENDS else None
            if to is not None:
                received = places[to[0]].get(
                    Action(_RECEIVE_OF[action.kind], action.microbatch, to[1])
                )
                if received is not None:  # None: `check_rendezvous` reports the missing receive
                    found.append((sender, sent, to[0], received))
    return found


@functools.lru_cache(maxsize=8)
def time_between_steps(plan: Plan, costs: Costs) -> float:
    """Returns the time that each step saves if ranks start the next step without a barrier.

    Without a barrier, a step takes the longest time of any one rank from its first start to its
    last end. With a barrier, a step takes the time from the first start on any rank to the last end
    on any rank. The result is the difference, in the unit of `costs`. It is 0 if the rank that
    starts first also ends last.
    """
    timeline = simulate(plan, costs)
    return timeline.makespan - timeline.span
