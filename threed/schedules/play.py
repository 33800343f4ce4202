"""Play a plan out on paper: does it finish, and when does each action run.

Use: `spans = play(plan, duration)` gives the times of all compute actions.

All ranks walk their lists, each action starting when its rank is free and what it needs from other stages is there.
Communication in the plan is ignored here: see rendezvous.py for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from threed.schedules.action import COMPUTE, Action, Kind
from threed.schedules.legal import legal
from threed.schedules.plan import Plan

Span = tuple[Action, float, float]
Spans = tuple[tuple[Span, ...], ...]
_NONE = -1


# An action, the results that it needs with the time that each travels, those that it makes, and how long it takes.
# Results are numbers: activations of stage 0, micro-batches in order, then of stage 1 .., then gradients alike.
_Work = tuple[Action, list[tuple[int, float]], list[int], float]


class _Exchange(NamedTuple):
    """What an F, B or I of a chunk needs from another stage and makes for one: results of micro-batch 0."""

    needs: int
    travels: float
    makes: int


def play(plan: Plan, duration: Callable[[Action, int], float], latency: float = 0.0) -> Spans:
    """Returns each rank's compute actions with their start and end, every rank following its list strictly in order.

    `duration(action, rank)` is how long an action takes, for whatever micro-batch; a result reaches another rank
    `latency` after it was made, without keeping either rank busy. Raises ValueError if the plan is not legal, or where
    it stalls: rank, action and what it waits for.
    """
    legal(plan)
    work = [_work(plan, rank, duration, latency) for rank in range(plan.stages)]
    made: list[float | None] = [None] * (2 * plan.total_stages * plan.microbatches)
    spans: list[list[Span]] = [[] for _ in work]
    waiting: dict[int, int] = {}  # result -> the rank that waits for it
    at = [0] * plan.stages
    runnable = list(range(plan.stages))
    while runnable:
        rank = runnable.pop()
        mine, out = work[rank], spans[rank]
        free = out[-1][2] if out else 0.0
        for number in range(at[rank], len(mine)):
            action, needs, makes, takes = mine[number]
            missing = _NONE
            start = free
            for result, travels in needs:
                there = made[result]
                if there is None:
                    missing = result
                    break
                if there + travels > start:
                    start = there + travels
            if missing != _NONE:
                waiting[missing], at[rank] = rank, number
                break
            free = start + takes
            out.append((action, start, free))
            for result in makes:
                made[result] = free
                if result in waiting:
                    runnable.append(waiting.pop(result))
        else:
            at[rank] = len(mine)
    if any(place < len(mine) for place, mine in zip(at, work, strict=True)):
        raise ValueError(f"plan {plan.name} stalls: {'; '.join(_complaints(plan, at, work, made))}")
    return tuple(map(tuple, spans))


def _work(plan: Plan, rank: int, duration: Callable[[Action, int], float], latency: float) -> list[_Work]:
    """The rank's compute actions. Of chunks and kinds that come again only the micro-batch differs."""
    times: dict[tuple[Kind, int, Kind | None, int], float] = {}
    known: dict[tuple[Kind, int], _Exchange] = {}
    work = []
    for action in plan.ranks[rank]:
        kind, _, chunk, beside = action
        if kind not in COMPUTE:
            continue
        sort = (kind, chunk, beside and beside.kind, beside.chunk if beside else 0)
        takes = times.get(sort)
        if takes is None:
            takes = times[sort] = duration(action, rank)
        needs, makes = [], []
        for part in (action,) if beside is None else action.parts:
            key = part[0], part[2]
            exchange = known.get(key)
            if exchange is None:
                exchange = known[key] = _exchange(plan, rank, part, latency)
            if exchange.needs != _NONE:
                needs.append((exchange.needs + part[1], exchange.travels))
            if exchange.makes != _NONE:
                makes.append(exchange.makes + part[1])
        work.append((action, needs, makes, takes))
    return work


def _exchange(plan: Plan, rank: int, part: Action, latency: float) -> _Exchange:
    if part.kind is Kind.W:
        return _Exchange(_NONE, 0.0, _NONE)
    backward = 0 if part.kind is Kind.F else plan.total_stages
    count = plan.microbatches
    makes = (backward + plan.stage_of(rank, part.chunk)) * count
    source = plan.producer(rank, part)
    if source is None:
        return _Exchange(_NONE, 0.0, makes)
    return _Exchange((backward + plan.stage_of(*source)) * count, latency * (source[0] != rank), makes)


def _complaints(plan: Plan, at: list[int], work: list[list[_Work]], made: list[float | None]) -> list[str]:
    texts = []
    for rank, (number, mine) in enumerate(zip(at, work, strict=True)):
        for part in mine[number][0].parts if number < len(mine) else ():
            exchange = _exchange(plan, rank, part, 0.0)
            source = plan.producer(rank, part)
            if source is not None and made[exchange.needs + part.microbatch] is None:
                needed = Action(Kind.F if part.kind is Kind.F else Kind.B, part.microbatch, source[1])
                texts.append(f"rank {rank} waits at {mine[number][0]} for {needed} of rank {source[0]}")
    return texts
