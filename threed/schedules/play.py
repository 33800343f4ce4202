"""Play a plan out on paper: is it legal, does it finish, and when does each action run.

Use: `legal(plan)` raises on a plan that is wrong in itself; `spans = play(plan, duration)` gives the times of all
compute actions.

Phases: check each rank's list on its own, then let all ranks walk their lists, each action starting when its rank is
free and what it needs from other stages is there. Communication in the plan is ignored here: see rendezvous.py for
it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from threed.schedules.action import COMPUTE, Action, Kind, Plan

Span = tuple[Action, float, float]
Spans = tuple[tuple[Span, ...], ...]
Result = tuple[bool, int, int]  # (backward, stage, micro-batch): an activation, or the gradient of a stage's input

_REQUIRED_BEFORE = {Kind.F: None, Kind.B: Kind.F, Kind.I: Kind.F, Kind.W: Kind.I}


def legal(plan: Plan) -> None:
    """Check that every stage computes every micro-batch once and in order.

    Each (stage, micro-batch) has one F, and then one B or one I and W; or F alone everywhere.
    Raises ValueError naming rank and action.
    """
    if min(plan.stages, plan.microbatches, plan.chunks) < 1:
        raise ValueError(f"plan {plan.name}: stages, micro-batches and chunks must be at least 1")
    if len(plan.ranks) != plan.stages:
        raise ValueError(f"plan {plan.name}: {len(plan.ranks)} lists of actions for {plan.stages} ranks")
    _check_placement(plan)
    backward = not plan.forward_only
    for rank, actions in enumerate(plan.ranks):
        _check_rank(plan, rank, [action for action in actions if action.kind in COMPUTE], backward)


def _check_placement(plan: Plan) -> None:
    held = [stage for chunks in plan.placement for stage in chunks]
    shape = [len(chunks) for chunks in plan.placement]
    if held and (sorted(held) != list(range(plan.total_stages)) or shape != [plan.chunks] * plan.stages):
        raise ValueError(
            f"plan {plan.name}: the placement {plan.placement} must give each of {plan.stages} ranks {plan.chunks} of "
            f"the stages 0 .. {plan.total_stages - 1}, each stage once"
        )


def _check_rank(plan: Plan, rank: int, actions: Sequence[Action], backward: bool) -> None:
    seen: set[Action] = set()
    for action in actions:
        where = f"plan {plan.name}: rank {rank}: {action}"
        if not (0 <= action.chunk < plan.chunks and 0 <= action.microbatch < plan.microbatches):
            raise ValueError(f"{where}: there are {plan.chunks} chunks and {plan.microbatches} micro-batches")
        if action in seen:
            raise ValueError(f"{where} appears twice")
        before = _REQUIRED_BEFORE[action.kind]
        if before is not None and _sibling(action, before) not in seen:
            raise ValueError(f"{where} appears before {_sibling(action, before)}")
        if action.kind in (Kind.B, Kind.I) and seen & {_sibling(action, Kind.B), _sibling(action, Kind.I)}:
            raise ValueError(f"{where}: this micro-batch already had its backward; it is one B, or one I and one W")
        seen.add(action)
    _check_complete(plan, rank, seen, backward)


def _check_complete(plan: Plan, rank: int, seen: set[Action], backward: bool) -> None:
    for chunk in range(plan.chunks):
        for microbatch in range(plan.microbatches):
            forward = Action(Kind.F, microbatch, chunk)
            missing = None if forward in seen else forward
            if backward and not seen & {_sibling(forward, Kind.B), _sibling(forward, Kind.W)}:
                missing = missing or _sibling(forward, Kind.W if _sibling(forward, Kind.I) in seen else Kind.B)
            if missing is not None:
                raise ValueError(f"plan {plan.name}: rank {rank}: {missing} is missing")


def _sibling(action: Action, kind: Kind) -> Action:
    return Action(kind, action.microbatch, action.chunk)


def play(plan: Plan, duration: Callable[[Action, int], float], latency: float = 0.0) -> Spans:
    """Returns each rank's compute actions with their start and end, every rank following its list strictly in order.

    `duration(action, stage)` is how long an action takes; a result reaches another rank `latency` after it was made,
    without keeping either rank busy. Raises ValueError if the plan is not legal, or where it stalls: rank, action and
    what it waits for.
    """
    legal(plan)
    waiting = [[action for action in reversed(actions) if action.kind in COMPUTE] for actions in plan.ranks]
    spans: list[list[Span]] = [[] for _ in waiting]
    made: dict[Result, float] = {}
    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(waiting):
            while actions and (ready := _ready(plan, rank, actions[-1], made, latency)) is not None:
                action = actions.pop()
                stage = plan.stage_of(rank, action.chunk)
                start = max(ready, spans[rank][-1][2] if spans[rank] else 0.0)
                spans[rank].append((action, start, start + duration(action, stage)))
                if action.kind is not Kind.W:
                    made[action.kind is not Kind.F, stage, action.microbatch] = spans[rank][-1][2]
                progress = True
    if any(waiting):
        raise ValueError(f"plan {plan.name} stalls: {'; '.join(_complaints(plan, waiting))}")
    return tuple(tuple(actions) for actions in spans)


def _ready(plan: Plan, rank: int, action: Action, made: dict[Result, float], latency: float) -> float | None:
    source = plan.producer(rank, action)
    if source is None:
        return 0.0
    at = made.get((action.kind is not Kind.F, plan.stage_of(*source), action.microbatch))
    return None if at is None else at + latency * (source[0] != rank)


def _complaints(plan: Plan, waiting: list[list[Action]]) -> list[str]:
    texts = []
    for rank, actions in enumerate(waiting):
        source = plan.producer(rank, actions[-1]) if actions else None
        if source is not None:
            kind = Kind.F if actions[-1].kind is Kind.F else Kind.B
            needed = Action(kind, actions[-1].microbatch, source[1])
            texts.append(f"rank {rank} waits at {actions[-1]} for {needed} of rank {source[0]}")
    return texts
