"""Simulate a plan: check that it finishes, and compute the start and end of each action.

Use: `spans = play(plan, duration)` returns the times of all compute actions.

Every rank runs its list in order. An action starts as soon as its rank is free and its input from
other stages has arrived. Communication actions are ignored; deadlock_check.py checks them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from threed.schedules.action import COMPUTE, Action, Kind
from threed.schedules.plan import Plan
from threed.schedules.plan_checks import legal

Span = tuple[Action, float, float]  # action, start, end
Spans = tuple[tuple[Span, ...], ...]  # the spans of each rank
_NONE = -1


class _Exchange(NamedTuple):
    """The input and the result of an F, B or I, as indices into the list of all results.

    The list contains the activations of all stages, followed by the gradients of all stages. For
    each stage, it has one result per micro-batch: first the micro-batches of the previous step,
    with numbers below 0, then the micro-batches of this step. `needs` and `makes` are the indices
    for micro-batch 0; the index for micro-batch m is m higher.

    Attributes:
        needs: index of the input, or -1 if the action has no input.
        latency: time from the end of the action that computes the input until the input arrives.
        makes: index of the result, or -1 if the action has no result.
    """

    needs: int
    latency: float
    makes: int


class _ActionType(NamedTuple):
    """Properties of an action that do not depend on its micro-batch.

    Attributes:
        duration: time of the action.
        exchanges: inputs and results: two `_Exchange`s for an FB, one for any other action.
    """

    duration: float
    exchanges: tuple[_Exchange, ...]


def play(plan: Plan, duration: Callable[[Action, int], float], latency: float = 0.0) -> Spans:
    """Returns the start and end of each rank's compute actions, run strictly in list order.

    Args:
        plan: the plan to simulate.
        duration: `duration(action, rank)` returns the time of an action; it must not depend on the
            micro-batch.
        latency: time until a result arrives on another rank. Both ranks can compute meanwhile.

    Returns:
        Per rank, (action, start, end) of every compute action.

    Raises:
        ValueError: the plan is invalid, or deadlocks; the message names the rank, the action and
            the missing input.
    """
    legal(plan)
    ranks = [[action for action in actions if action.kind in COMPUTE] for actions in plan.ranks]
    types = [
        _action_types(plan, rank, actions, duration, latency) for rank, actions in enumerate(ranks)
    ]
    made = _initial_results(plan)
    spans: list[list[Span]] = [[] for _ in ranks]
    waiting: dict[int, int] = {}  # index of a result -> the rank that waits for it
    runnable = list(range(plan.stages))
    while runnable:
        rank = runnable.pop()
        missing = _run(ranks[rank], types[rank], spans[rank], made, waiting, runnable)
        if missing != _NONE:
            waiting[missing] = rank
    if any(len(out) < len(actions) for out, actions in zip(spans, ranks, strict=True)):
        raise ValueError(
            f"plan {plan.name} stalls: {'; '.join(_complaints(plan, ranks, spans, made))}"
        )
    return tuple(map(tuple, spans))


def _run(
    actions: list[Action],
    types: list[_ActionType],
    out: list[Span],
    made: list[float | None],
    waiting: dict[int, int],
    runnable: list[int],
) -> int:
    """Runs a rank from its current action until an input is missing.

    Appends the spans of the actions to `out`, writes the times of their results into `made`, and
    appends the ranks that waited for these results to `runnable`. Returns the index of the missing
    input in `made`, or _NONE if the rank has run all actions.
    """
    free = out[-1][2] if out else 0.0
    for number in range(len(out), len(actions)):
        action, (duration, exchanges) = actions[number], types[number]
        backward, start = action[3], free
        microbatches = (action[1],) if backward is None else (action[1], backward[1])
        for (needs, latency, _), microbatch in zip(exchanges, microbatches, strict=True):
            if needs != _NONE:
                ready = made[needs + microbatch]
                if ready is None:
                    return needs + microbatch
                if ready + latency > start:
                    start = ready + latency
        free = start + duration
        out.append((action, start, free))
        for (_, _, makes), microbatch in zip(exchanges, microbatches, strict=True):
            if makes != _NONE:
                made[makes + microbatch] = free
                if makes + microbatch in waiting:
                    runnable.append(waiting.pop(makes + microbatch))
    return _NONE


def _initial_results(plan: Plan) -> list[float | None]:
    """Returns the time of every result before the simulation.

    It is 0 for a result that the previous step has computed, and None for a result that this plan
    computes.
    """
    count = plan.before + plan.microbatches
    made: list[float | None] = [None] * (2 * plan.total_stages * count)
    for stage in range(plan.total_stages if plan.before else 0):
        rank = plan.locate(stage)[0]
        for microbatch in range(-plan.before, 0):
            made[stage * count + plan.before + microbatch] = 0.0
            if not plan.is_open(rank, microbatch):
                made[(plan.total_stages + stage) * count + plan.before + microbatch] = 0.0
    return made


def _action_types(
    plan: Plan,
    rank: int,
    actions: list[Action],
    duration: Callable[[Action, int], float],
    latency: float,
) -> list[_ActionType]:
    """Returns the type of every action; actions that differ only in micro-batch share a type."""
    known: dict[tuple[Kind, int, Kind | None, int], _ActionType] = {}
    types = []
    for action in actions:
        kind, _, chunk, backward = action
        key = (
            (kind, chunk, None, 0)
            if backward is None
            else (kind, chunk, backward.kind, backward.chunk)
        )
        action_type = known.get(key)
        if action_type is None:
            exchanges = tuple(_exchange(plan, rank, part, latency) for part in action.parts)
            action_type = known[key] = _ActionType(duration(action, rank), exchanges)
        types.append(action_type)
    return types


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
