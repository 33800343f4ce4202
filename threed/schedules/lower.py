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

from dataclasses import replace
from operator import itemgetter

from threed.schedules.action import COMPUTE, Action, Kind
from threed.schedules.plan import Place, Plan
from threed.schedules.play import Spans, play
from threed.schedules.validation import add_validation

_UNIT_TIME = {Kind.F: 1.0, Kind.B: 2.0, Kind.I: 1.0, Kind.W: 1.0}
# At equal times what ends comes before what starts, and a message that another rank waits for before a reduction.
_GATHER, _MESSAGE, _REDUCE, _START = range(4)
# time, phase, rank, what is added to that rank's list, and for a message what is added to the list of which rank
Event = tuple[float, int, int, Action, Action | None, int]


def lower(plan: Plan, gathers: bool = False, validates: bool = False) -> Plan:
    """Returns the plan with sends, receives and reductions added, with `gathers` the starts of parameter gathers, and
    with `validates` where the update before it is validated.

    A SEND and its RECV stand where the result is made, unless both stages are on one rank; REDUCE follows a chunk's
    last backward; GATHER stands as early as it may, right behind the compute action before the one it is for; VALIDATE
    as late as it may (`validation.py`). Raises ValueError if the plan is not legal, stalls, or has communication
    already.
    """
    for rank, actions in enumerate(plan.ranks):
        for action in actions:
            if action.kind not in COMPUTE:
                raise ValueError(
                    f"plan {plan.name}: rank {rank}: {action}: only plans without communication can be lowered"
                )
    ranks: list[list[Action]] = [[] for _ in plan.ranks]
    for _, _, rank, action, received, by in sorted(_events(plan, gathers), key=itemgetter(0, 1, 2)):
        ranks[rank].append(action)
        if received is not None:
            ranks[by].append(received)
    lowered = replace(plan, ranks=tuple(tuple(actions) for actions in ranks))
    return add_validation(lowered) if validates else lowered


def _events(plan: Plan, gathers: bool) -> list[Event]:
    spans = play(plan, lambda action, _: sum(_UNIT_TIME[part.kind] for part in action.parts))
    events = _reductions(spans) + (_gathers(spans) if gathers else [])
    targets: dict[tuple[int, int, Kind], Place | None] = {}
    for rank, actions in enumerate(spans):
        for action, start, end in actions:
            events.append((start, _START, rank, action, None, rank))
            for part in action.parts:
                key = rank, part.chunk, part.kind
                if key not in targets:
                    targets[key] = plan.consumer(rank, part)
                to = targets[key]
                if to is not None and to[0] != rank:
                    send, receive = (Kind.SEND_F, Kind.RECV_F) if part.kind is Kind.F else (Kind.SEND_B, Kind.RECV_B)
                    sent, received = Action(send, part[1], part[2]), Action(receive, part[1], to[1])
                    events.append((end, _MESSAGE, rank, sent, received, to[0]))
    return events


def _reductions(spans: Spans) -> list[Event]:
    last = {
        (rank, part.chunk): end
        for rank, actions in enumerate(spans)
        for action, _, end in actions
        for part in action.parts
        if part.kind in (Kind.B, Kind.W)
    }
    return [(end, _REDUCE, rank, Action(Kind.REDUCE, -1, chunk), None, rank) for (rank, chunk), end in last.items()]


def _gathers(spans: Spans) -> list[Event]:
    """Before every F, B and I, when what ran before it is over; W needs no parameters."""
    events: list[Event] = []
    for rank, actions in enumerate(spans):
        before = 0.0
        for action, _, end in actions:
            for part in action.parts if action.kind is not Kind.W else ():
                events.append((before, _GATHER, rank, Action(Kind.GATHER, -1, part.chunk), None, rank))
            before = end
    return events
