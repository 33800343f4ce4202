"""Add communication to a plan, in one order that all ranks agree on.

Use: `lower(one_f_one_b(4, 8))` gives the same plan with SF/RF (activations), SB/RB (gradients) and REDUCE in every
rank's list.

Phases: play the plan out in unit time; sort the starts of all actions and the departures of all messages into one
global line; deal that line out to the ranks. A message's send and receive stand at the same point of the line, so
doing everything in that order, even with transfers that block both sides, is one way to finish, and with in-order
channels then every way finishes. Putting a receive just before its first use instead deadlocks 1F1B: see
`rendezvous.py` and its test.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from threed.schedules.action import COMPUTE, Action, Kind
from threed.schedules.plan import Plan
from threed.schedules.play import Spans, play
from threed.schedules.validation import add_validation

_UNIT_TIME = {Kind.F: 1, Kind.B: 2, Kind.I: 1, Kind.W: 1}
# At equal times what ends comes before what starts, and a message that another rank waits for before a reduction.
_GATHER, _MESSAGE, _REDUCE, _NORM, _UPDATE, _START, _PHASES = range(7)
Targets = dict[tuple[int, Kind, int], tuple[Kind, Kind, int, int]]


def lower(plan: Plan, gathers: bool = False, validates: bool = False) -> Plan:
    """Returns the plan with sends, receives and reductions added, with `gathers` the starts of parameter gathers, and
    with `validates` where the update before it is validated; an asynchronous plan gets its update.

    A SEND and its RECV stand where the result is made, unless both stages are on one rank; REDUCE follows a chunk's
    last backward; GATHER stands as early as it may, right behind the compute action before the one it is for; VALIDATE
    as late as it may (`validation.py`). NORM stands where the last rank has reduced the gradients of the step before;
    UPDATE at the end, or before the backward that completes the next gradients. Raises ValueError if the plan is not
    legal, stalls, or has communication already.
    """
    for rank, actions in enumerate(plan.ranks):
        for action in actions:
            if action.kind not in COMPUTE:
                raise ValueError(
                    f"plan {plan.name}: rank {rank}: {action}: only plans without communication can be lowered"
                )
    spans = play(plan, lambda action, _: sum(_UNIT_TIME[part.kind] for part in action.parts))
    targets = _targets(plan)
    whens, whats = _line(plan, spans, targets, gathers)
    ranks: list[list[Action]] = [[] for _ in plan.ranks]
    for number in sorted(range(len(whens)), key=whens.__getitem__):
        action = whats[number]
        (phase, rank) = divmod(whens[number] % (_PHASES * plan.stages), plan.stages)
        if phase != _MESSAGE:
            ranks[rank].append(action)
            continue
        kind, microbatch, chunk, _ = action
        send, receive, by, there = targets[rank, kind, chunk]
        ranks[rank].append(Action(send, microbatch, chunk))
        ranks[by].append(Action(receive, microbatch, there))
    lowered = replace(plan, ranks=tuple(map(tuple, ranks)))
    return add_validation(lowered) if validates else lowered


def _targets(plan: Plan) -> Targets:
    """Of every F, B and I of which another rank uses the result: send, receive, and the rank and chunk of that."""
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


def _line(
    plan: Plan, spans: Spans, targets: Targets, gathers: bool
) -> tuple[list[int], list[Action]]:
    """When everything stands in the line, and what: of a message the action of which it is the result.

    A place in the line is one number, (time, phase, rank) with the time first.
    """
    stages = plan.stages
    whens: list[int] = []
    whats: list[Action] = []

    def put(time: float, phase: int, rank: int, action: Action) -> None:
        whens.append((int(time) * _PHASES + phase) * stages + rank)
        whats.append(action)

    for rank, actions in enumerate(spans):
        before = 0.0
        last: dict[tuple[int, bool], float] = {}
        for action, start, end in actions:
            put(start, _START, rank, action)
            for part in (action,) if action.beside is None else action.parts:
                if gathers and part.kind is not Kind.W:  # which needs no parameters
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
    return whens, whats


def _updates(plan: Plan, spans: Spans) -> Iterator[tuple[float, float]]:
    """When every rank sums the norm of the step before, and when it updates."""
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
