"""Check that a lowered plan cannot deadlock, under the strictest transport there is.

Use: `check_rendezvous(lower(plan))` returns nothing, or raises naming the ranks and actions that wait for each other.

Every send and every receive blocks until the other side stands at the matching one, and messages between two ranks in
one direction share one in-order channel. A plan that passes also finishes on any transport that buffers or runs
ahead. REDUCE and GATHER concern other groups of ranks and are passed over here; VALIDATE waits for none that has not
got there, and must be a consistent cut. UPDATE waits until all ranks have come to NORM.
"""

from __future__ import annotations

from threed.schedules.action import COMPUTE, RECEIVES, SENDS, Action, Kind
from threed.schedules.asynchronous import norms_begun
from threed.schedules.legality import check_reductions, legal
from threed.schedules.plan import Plan
from threed.schedules.play import play
from threed.schedules.validation import check_validation

_RECEIVE_OF = {Kind.SEND_F: Kind.RECV_F, Kind.SEND_B: Kind.RECV_B}


def check_rendezvous(plan: Plan) -> None:
    """Play a lowered plan with fully blocking, in-order transfers.

    Raises ValueError for a plan that is not legal, uses what it has not received, pairs different messages, or
    deadlocks.
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
    """The rank that takes the next step together with this one: itself for local work; None where this one must
    wait."""
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
    """Whatever a rank computes with has been computed or received by it before, and whatever it sends it has made."""
    for rank, actions in enumerate(plan.ranks):
        have: set[Action] = set()
        for action in actions:
            for part in action.parts:
                needs = _needs(plan, rank, part)
                if needs and have.isdisjoint(needs) and not _came_before(plan, rank, part):
                    raise ValueError(
                        f"plan {plan.name}: rank {rank}: {action} comes before {needs[0]}"
                    )
            if action.kind not in COMPUTE and action in have and action.kind is not Kind.GATHER:
                raise ValueError(f"plan {plan.name}: rank {rank}: {action} appears twice")
            have.update(action.parts)


def _came_before(plan: Plan, rank: int, action: Action) -> bool:
    """Whether what an action uses was made in the step before, and sent there."""
    if action.microbatch >= 0 or action.kind in SENDS:
        return False
    source = plan.producer(rank, action)
    return source is not None and not plan.is_open(source[0], action.microbatch)


def _needs(plan: Plan, rank: int, action: Action) -> list[Action]:
    """Actions of the same rank, any one of which gives what this one uses; none needed where empty."""
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
    """Checks everything that can be known of a plan before it runs, with its communication if it has any.

    Raises ValueError naming rank and action of what is missing, doubled, misordered, unmatched, used before it arrives,
    deadlocked under blocking transfers, or reduced before a weight gradient is there.
    """
    play(plan, lambda *_: 1.0)
    if any(action.kind not in COMPUTE for actions in plan.ranks for action in actions):
        check_rendezvous(plan)
        check_reductions(plan)
