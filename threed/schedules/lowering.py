"""Add communication to a plan, in an order that is consistent across ranks.

Use: `lower(one_f_one_b(4, 8))` returns the same plan with sends and receives of activations (SF,
RF) and gradients (SB, RB), and with REDUCE, in the lists of the ranks.

The plan is simulated with unit times. The starts of all actions and the departures of all messages
are sorted into one global timeline, which is then distributed to the ranks. The send and the
receive of a message are one entry of the timeline. So if the entries are executed one after the
other, the plan finishes, even if a transfer blocks both of its ranks. If every channel also
delivers its messages in order, the plan finishes at any relative speed of the ranks. If each
receive were placed directly before its first use instead, 1F1B would deadlock: see
`deadlock_check.py` and its test.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from threed.schedules.action import COMPUTE, Action, Kind
from threed.schedules.event_simulation import Spans, play
from threed.schedules.plan import Plan
from threed.schedules.post_update_validation import add_validation

_UNIT_TIME = {Kind.F: 1, Kind.B: 2, Kind.I: 1, Kind.W: 1}
# If entries of the timeline have equal times, the entry with the lower phase is first. Entries at
# the end of an action (messages, reductions) precede the start of the next action. Messages precede
# reductions, because other ranks wait for messages.
_GATHER, _MESSAGE, _REDUCE, _NORM, _UPDATE, _START, _PHASES = range(7)
# (rank, kind, chunk) -> (kind of send, kind of receive, receiving rank, chunk on that rank)
Targets = dict[tuple[int, Kind, int], tuple[Kind, Kind, int, int]]


def lower(plan: Plan, gathers: bool = False, validates: bool = False) -> Plan:
    """Returns the plan with communication: sends, receives and reductions.

    A send and its receive are placed at the time at which the result is computed. If the next stage
    is on the same rank, no message is sent. REDUCE follows a chunk's last backward.

    If the plan has a previous step, NORM and UPDATE are added on every rank. NORM is placed when
    the last rank has reduced the gradients of the previous step. UPDATE is placed before the
    backward that completes this step's gradients on the rank, or at the end of the rank's list if
    that backward is left to the next step.

    Args:
        plan: a plan with compute actions only.
        gathers: whether to add GATHER before every action that needs parameters, as early as
            possible: directly after the previous compute action.
        validates: whether to add VALIDATE, as late as possible (see post_update_validation.py).

    Raises:
        ValueError: the plan is invalid, deadlocks, or already has communication.
    """
    for rank, actions in enumerate(plan.ranks):
        for action in actions:
            if action.kind not in COMPUTE:
                raise ValueError(
                    f"plan {plan.name}: rank {rank}: {action}: only plans without communication can be lowered"
                )
    spans = play(plan, lambda action, _: sum(_UNIT_TIME[part.kind] for part in action.parts))
    targets = _targets(plan)
    keys, timeline = _timeline(plan, spans, targets, gathers)
    ranks: list[list[Action]] = [[] for _ in plan.ranks]
    for number in sorted(range(len(keys)), key=keys.__getitem__):
        action = timeline[number]
        (phase, rank) = divmod(keys[number] % (_PHASES * plan.stages), plan.stages)
        if phase != _MESSAGE:
            ranks[rank].append(action)
            continue
        kind, microbatch, chunk, _ = action
        send, receive, receiver, receiver_chunk = targets[rank, kind, chunk]
        ranks[rank].append(Action(send, microbatch, chunk))
        ranks[receiver].append(Action(receive, microbatch, receiver_chunk))
    lowered = replace(plan, ranks=tuple(map(tuple, ranks)))
    return add_validation(lowered) if validates else lowered


def _targets(plan: Plan) -> Targets:
    """Returns the messages of a plan (see `Targets`). They are the same for all micro-batches.

    An action has an entry only if its result is used on another rank.
    """
    kinds = {
        Kind.F: (Kind.SEND_F, Kind.RECV_F),
        Kind.B: (Kind.SEND_B, Kind.RECV_B),
        Kind.I: (Kind.SEND_B, Kind.RECV_B),
    }
    return {
        (rank, kind, chunk): (*kinds[kind], *to)
        for rank in range(plan.stages)
        for chunk in range(plan.chunks)
        for kind in kinds
        if (to := plan.consumer(rank, Action(kind, 0, chunk))) is not None and to[0] != rank
    }


def _timeline(
    plan: Plan, spans: Spans, targets: Targets, gathers: bool
) -> tuple[list[int], list[Action]]:
    """Returns the unsorted timeline as sort keys and actions.

    A message is represented by the action that computes its content. A key is the integer
    (time * _PHASES + phase) * stages + rank, with a phase from _GATHER to _START.
    """
    stages = plan.stages
    keys: list[int] = []
    timeline: list[Action] = []

    def put(time: float, phase: int, rank: int, action: Action) -> None:
        keys.append((int(time) * _PHASES + phase) * stages + rank)
        timeline.append(action)

    for rank, actions in enumerate(spans):
        before = 0.0
        last: dict[tuple[int, bool], float] = {}
        for action, start, end in actions:
            put(start, _START, rank, action)
            for part in (action,) if action.beside is None else action.parts:
                if gathers and part.kind is not Kind.W:  # W needs no parameters
                    put(before, _GATHER, rank, Action(Kind.GATHER, -1, part.chunk))
                if (rank, part.kind, part.chunk) in targets:
                    put(end, _MESSAGE, rank, part)
                if part.kind in (Kind.B, Kind.W):
                    last[part.chunk, part.microbatch >= 0] = end
            before = end
        for (chunk, own), end in last.items():
            if not (own and plan.is_left(rank, plan.microbatches - 1)):
                put(end, _REDUCE, rank, Action(Kind.REDUCE, -1, chunk))
    for rank, (norm, update) in enumerate(_updates(plan, spans) if plan.begun else ()):
        put(norm, _NORM, rank, Action(Kind.NORM, -1))
        put(update, _UPDATE, rank, Action(Kind.UPDATE, -1))
    return keys, timeline


def _updates(plan: Plan, spans: Spans) -> Iterator[tuple[float, float]]:
    """Yields per rank (time of NORM, time of UPDATE)."""
    norm = max(
        (end for actions in spans for action, _, end in actions if action.microbatch < 0),
        default=0.0,
    )
    for rank, actions in enumerate(spans):
        own = [
            start
            for action, start, _ in actions
            if action.kind is not Kind.F and action.microbatch >= 0
        ]
        ends = plan.is_left(rank, plan.microbatches - 1) or not own
        yield norm, max(norm, actions[-1][2] if actions else 0.0) if ends else own[-1]
