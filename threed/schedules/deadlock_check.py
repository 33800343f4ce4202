"""Check that a lowered plan cannot deadlock, even with the strictest transport.

Use: `check_rendezvous(lower(plan))` returns None, or raises an error that names the ranks and
actions that wait for each other.

With the strictest transport, every send and every receive blocks until the peer reaches the
matching action, and all messages from one rank to another share one in-order channel. A plan that
passes also finishes on any transport with buffers or asynchronous sends. REDUCE and GATHER use
other process groups and are ignored here. UPDATE waits until all ranks have run NORM. VALIDATE does
not wait for other ranks, and is checked by post_update_validation.py.
"""

from __future__ import annotations

from threed.schedules.action import COMPUTE, RECEIVES, SENDS, Action, Kind
from threed.schedules.asynchronous import norms_begun
from threed.schedules.event_simulation import play
from threed.schedules.plan import Plan
from threed.schedules.plan_checks import check_reductions, legal
from threed.schedules.post_update_validation import check_validation

_RECEIVE_OF = {Kind.SEND_F: Kind.RECV_F, Kind.SEND_B: Kind.RECV_B}


def check_rendezvous(plan: Plan) -> None:
    """Simulates a lowered plan with blocking, in-order transfers.

    Raises:
        ValueError: the plan is invalid, uses a tensor before its receive, has a send that meets the
            receive of a different message, or deadlocks.
    """
    legal(plan)
    _check_inputs(plan)
    check_validation(plan)
    at = [0] * plan.stages
    progress = True
    while progress:
        progress = False
        for rank in range(plan.stages):
            while (action := _head(plan, at, rank)) is not None and (
                peer := _partner(plan, at, rank, action)
            ) is not None:
                at[rank] += 1
                at[peer] += peer != rank
                progress = True
    stuck = [
        (rank, action)
        for rank in range(plan.stages)
        if (action := _head(plan, at, rank)) is not None
    ]
    if stuck:
        texts = (
            f"rank {rank} at {action} with {_waits_for(plan, rank, action)}"
            for rank, action in stuck
        )
        raise ValueError(f"plan {plan.name} deadlocks: {'; '.join(texts)}")


def _head(plan: Plan, at: list[int], rank: int) -> Action | None:
    return plan.ranks[rank][at[rank]] if at[rank] < len(plan.ranks[rank]) else None


def _partner(plan: Plan, at: list[int], rank: int, action: Action) -> int | None:
    """Returns the peer whose current action ends together with `action`, or None.

    Args:
        plan: the plan.
        at: per rank, the index of its current action.
        rank: the rank whose current action is `action`.
        action: the current action of `rank`.

    Returns:
        For a send, the receiver; for an action without a peer, `rank` itself. None if the action
        cannot end yet. Also None for every receive: a receive ends when this function is called for
        the matching send.

    Raises:
        ValueError: if a send meets the receive of a different message.
    """
    if action.kind is Kind.UPDATE:
        return rank if norms_begun(plan, at) else None
    if action.kind not in SENDS:
        return rank if action.kind not in RECEIVES else None
    peer = _peer(plan, rank, action)
    other = _head(plan, at, peer)
    if other is None or other.kind not in RECEIVES or _peer(plan, peer, other) != rank:
        return None
    to = plan.consumer(rank, action)
    expected = Action(_RECEIVE_OF[action.kind], action.microbatch, to[1] if to else 0)
    if other != expected:
        raise ValueError(
            f"plan {plan.name}: rank {rank} sends {action} where rank {peer} receives {other}, not {expected}"
        )
    return peer


def _waits_for(plan: Plan, rank: int, action: Action) -> str:
    return "all ranks" if action.kind is Kind.UPDATE else f"rank {_peer(plan, rank, action)}"


def _peer(plan: Plan, rank: int, action: Action) -> int:
    place = plan.consumer(rank, action) if action.kind in SENDS else plan.producer(rank, action)
    if place is None or place[0] == rank:
        raise ValueError(
            f"plan {plan.name}: rank {rank}: {action} has no other rank to exchange with"
        )
    return place[0]


def _check_inputs(plan: Plan) -> None:
    """Checks that every action has its input: computed or received earlier on the same rank."""
    for rank, actions in enumerate(plan.ranks):
        have: set[Action] = set()
        for action in actions:
            for part in action.parts:
                needs = _needs(plan, rank, part)
                if needs and have.isdisjoint(needs) and not _is_from_last_step(plan, rank, part):
                    raise ValueError(
                        f"plan {plan.name}: rank {rank}: {action} appears before {needs[0]}"
                    )
            if action.kind not in COMPUTE and action in have and action.kind is not Kind.GATHER:
                raise ValueError(f"plan {plan.name}: rank {rank}: {action} appears twice")
            have.update(action.parts)


def _is_from_last_step(plan: Plan, rank: int, action: Action) -> bool:
    """Returns whether the input of an action was computed and sent in the previous step."""
    if action.microbatch >= 0 or action.kind in SENDS:
        return False
    source = plan.producer(rank, action)
    return source is not None and not plan.is_open(source[0], action.microbatch)


def _needs(plan: Plan, rank: int, action: Action) -> list[Action]:
    """Returns the actions of the same rank that can provide an action's input.

    One of these actions must precede the action. The list is empty if the action needs no input.
    """
    if action.kind is Kind.SEND_F:
        return [Action(Kind.F, action.microbatch, action.chunk)]
    if action.kind is Kind.SEND_B:
        return [Action(kind, action.microbatch, action.chunk) for kind in (Kind.B, Kind.I)]
    source = plan.producer(rank, action) if action.kind in COMPUTE else None
    if source is None:
        return []
    backward = action.kind is not Kind.F
    if source[0] != rank:
        return [Action(Kind.RECV_B if backward else Kind.RECV_F, action.microbatch, action.chunk)]
    return [
        Action(kind, action.microbatch, source[1])
        for kind in ((Kind.B, Kind.I) if backward else (Kind.F,))
    ]


def validate(plan: Plan) -> None:
    """Checks a plan completely before it runs, including its communication if it has any.

    Raises:
        ValueError: an action is missing, repeated or out of order; a send and its receive do not
            match; a tensor is used before its receive; the plan deadlocks with blocking transfers;
            or a reduction precedes a weight gradient of its chunk. The error names the rank and the
            action.
    """
    play(plan, lambda *_: 1.0)
    if any(action.kind not in COMPUTE for actions in plan.ranks for action in actions):
        check_rendezvous(plan)
        check_reductions(plan)
