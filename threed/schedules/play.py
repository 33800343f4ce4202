"""Play a plan out on paper: does it finish, and when does each action run.

Use: `spans = play(plan, duration)` gives the times of all compute actions.

All ranks walk their lists, each action starting when its rank is free and what it needs from other stages is there.
Communication in the plan is ignored here: see rendezvous.py for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from threed.schedules.action import COMPUTE, Action, Kind
from threed.schedules.legality import legal
from threed.schedules.plan import Plan

Span = tuple[Action, float, float]
Spans = tuple[tuple[Span, ...], ...]
_NONE = -1


class _Exchange(NamedTuple):
    """What an F, B or I of a chunk needs from another stage and makes for one: results of micro-batch 0.

    Results are numbers: activations of stage 0, micro-batches in order (those of the step before first), then of stage
    1 .., then gradients alike.
    """

    needs: int
    travels: float
    makes: int


class _Sort(NamedTuple):
    """What all actions of a kind on a chunk have in common: how long they take, and what their parts exchange."""

    takes: float
    exchanges: tuple[_Exchange, ...]


def play(plan: Plan, duration: Callable[[Action, int], float], latency: float = 0.0) -> Spans:
    """Returns each rank's compute actions with their start and end, every rank following its list strictly in order.

    `duration(action, rank)` is how long an action takes, for whatever micro-batch; a result reaches another rank
    `latency` after it was made, without keeping either rank busy. Raises ValueError if the plan is not legal, or where
    it stalls: rank, action and what it waits for.
    """
    legal(plan)
    ranks = [[action for action in actions if action.kind in COMPUTE] for actions in plan.ranks]
    sorts = [_sorts(plan, rank, actions, duration, latency) for rank, actions in enumerate(ranks)]
    made = _made_before(plan)
    spans: list[list[Span]] = [[] for _ in ranks]
    waiting: dict[int, int] = {}  # result -> the rank that waits for it
    runnable = list(range(plan.stages))
    while runnable:
        rank = runnable.pop()
        missing = _run(ranks[rank], sorts[rank], spans[rank], made, waiting, runnable)
        if missing != _NONE:
            waiting[missing] = rank
    if any(len(out) < len(actions) for out, actions in zip(spans, ranks, strict=True)):
        raise ValueError(
            f"plan {plan.name} stalls: {'; '.join(_complaints(plan, ranks, spans, made))}"
        )
    return tuple(map(tuple, spans))


def _run(
    actions: list[Action],
    sorts: list[_Sort],
    out: list[Span],
    made: list[float | None],
    waiting: dict[int, int],
    runnable: list[int],
) -> int:
    """Runs a rank on from where it is. Returns the result that it waits for, or _NONE at its end."""
    free = out[-1][2] if out else 0.0
    for number in range(len(out), len(actions)):
        action, (takes, exchanges) = actions[number], sorts[number]
        beside, start = action[3], free
        microbatches = (action[1],) if beside is None else (action[1], beside[1])
        for (needs, travels, _), microbatch in zip(exchanges, microbatches, strict=True):
            if needs != _NONE:
                there = made[needs + microbatch]
                if there is None:
                    return needs + microbatch
                if there + travels > start:
                    start = there + travels
        free = start + takes
        out.append((action, start, free))
        for (_, _, makes), microbatch in zip(exchanges, microbatches, strict=True):
            if makes != _NONE:
                made[makes + microbatch] = free
                if makes + microbatch in waiting:
                    runnable.append(waiting.pop(makes + microbatch))
    return _NONE


def _made_before(plan: Plan) -> list[float | None]:
    """When every result was made: at 0 those of the step before, the rest not yet."""
    count = plan.before + plan.microbatches
    made: list[float | None] = [None] * (2 * plan.total_stages * count)
    for stage in range(plan.total_stages if plan.before else 0):
        rank = plan.locate(stage)[0]
        for microbatch in range(-plan.before, 0):
            made[stage * count + plan.before + microbatch] = 0.0
            if not plan.is_open(rank, microbatch):
                made[(plan.total_stages + stage) * count + plan.before + microbatch] = 0.0
    return made


def _sorts(
    plan: Plan,
    rank: int,
    actions: list[Action],
    duration: Callable[[Action, int], float],
    latency: float,
) -> list[_Sort]:
    """Of every action; those of which only the micro-batch differs share theirs."""
    known: dict[tuple[Kind, int, Kind | None, int], _Sort] = {}
    sorts = []
    for action in actions:
        kind, _, chunk, beside = action
        key = (kind, chunk, None, 0) if beside is None else (kind, chunk, beside.kind, beside.chunk)
        sort = known.get(key)
        if sort is None:
            exchanges = tuple(_exchange(plan, rank, part, latency) for part in action.parts)
            sort = known[key] = _Sort(duration(action, rank), exchanges)
        sorts.append(sort)
    return sorts


def _exchange(plan: Plan, rank: int, part: Action, latency: float) -> _Exchange:
    if part.kind is Kind.W:
        return _Exchange(_NONE, 0.0, _NONE)
    backward = 0 if part.kind is Kind.F else plan.total_stages
    count = plan.before + plan.microbatches
    makes = (backward + plan.stage_of(rank, part.chunk)) * count + plan.before
    source = plan.producer(rank, part)
    if source is None:
        return _Exchange(_NONE, 0.0, makes)
    return _Exchange(
        (backward + plan.stage_of(*source)) * count + plan.before,
        latency * (source[0] != rank),
        makes,
    )


def _complaints(
    plan: Plan, ranks: list[list[Action]], spans: list[list[Span]], made: list[float | None]
) -> Iterator[str]:
    for rank, (actions, out) in enumerate(zip(ranks, spans, strict=True)):
        for part in actions[len(out)].parts if len(out) < len(actions) else ():
            exchange = _exchange(plan, rank, part, 0.0)
            source = plan.producer(rank, part)
            if source is not None and made[exchange.needs + part.microbatch] is None:
                needed = Action(
                    Kind.F if part.kind is Kind.F else Kind.B, part.microbatch, source[1]
                )
                yield f"rank {rank} waits at {actions[len(out)]} for {needed} of rank {source[0]}"
