"""Checks a plan before it runs. Every error names the rank and the action.

`legal(plan)` checks each rank's list of actions separately, for missing, repeated and misordered
actions. `validate` in deadlock_check.py also simulates all ranks together. If the plan contains
communication, `validate` checks it, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from numbers import Integral

from threed.core.messages import counted
from threed.schedules.action import COMPUTE, PER_CHUNK, RECEIVES, SENDS, Action, Kind
from threed.schedules.asynchronous import check_open, check_updates
from threed.schedules.plan import Plan

# Progress of a micro-batch on a chunk: not started, F done, I done, B or W done. `_STEP` has, for
# each kind, the progress that the action requires and the progress that it leads to.
_NOT_STARTED, _FORWARD, _INPUT, _DONE = range(4)
_STEP = {
    Kind.F: (_NOT_STARTED, _FORWARD),
    Kind.B: (_FORWARD, _DONE),
    Kind.I: (_FORWARD, _INPUT),
    Kind.W: (_INPUT, _DONE),
}
_COMMUNICATION = SENDS | RECEIVES | PER_CHUNK
_REQUIRED_BEFORE = {Kind.F: None, Kind.B: Kind.F, Kind.I: Kind.F, Kind.W: Kind.I}


def legal(plan: Plan) -> None:
    """Checks that every rank computes each micro-batch once per chunk, in a valid order.

    Each (stage, micro-batch) has one F, followed by one B or by one I and one W. An evaluation plan
    has only F. In a bidirectional plan a micro-batch runs on the stages of one direction only. In
    an asynchronous plan, the previous plan contains the first actions of some micro-batches, and
    the next plan the last actions of others.

    GATHER, REDUCE, VALIDATE, NORM and UPDATE are optional. If any rank has one of them, the
    reductions and updates of all ranks are checked (see `check_reductions` and `check_updates`). If
    any rank has a GATHER, the gathers of all ranks are checked (see `_check_gathers`).

    Raises:
        ValueError: the plan is invalid; the message names the rank and the action.
    """
    sizes = (plan.stages, plan.microbatches, plan.chunks)
    # 0 micro-batches are allowed in a plan that runs only remaining backwards of the previous step.
    fewest = (1, 0 if plan.begun else 1, 1)
    if not all(
        isinstance(size, Integral) and size >= least
        for size, least in zip(sizes, fewest, strict=True)
    ):
        raise ValueError(
            f"plan {plan.name}: stages, micro-batches and chunks must be whole numbers of at least 1"
        )
    if len(plan.ranks) != plan.stages:
        raise ValueError(
            f"plan {plan.name}: {len(plan.ranks)} lists of actions for {plan.stages} ranks"
        )
    _check_placement(plan)
    _check_actions(plan)
    check_open(plan)
    done = [_walk(plan, rank) for rank in range(plan.stages)]
    _check_complete(plan, done)
    kinds = {action.kind for actions in plan.ranks for action in actions}
    if not kinds.isdisjoint(PER_CHUNK):
        check_reductions(plan)
        check_updates(plan)
    if Kind.GATHER in kinds:
        _check_gathers(plan)


def _check_actions(plan: Plan) -> None:
    """Checks the types of all actions' fields. Raises ValueError naming the rank and action."""
    for rank, actions in enumerate(plan.ranks):
        for action in actions:
            if type(action) is not Action or not all(
                map(_is_well_formed, (action, action.beside or action))
            ):
                shown = tuple(action) if isinstance(action, Action) else action
                raise ValueError(
                    f"plan {plan.name}: rank {rank}: {shown!r} is not an Action; write Action(Kind.F, 3), whole numbers,"
                    " or Action.parse('F0.3')"
                )


def _is_well_formed(action: Action) -> bool:
    """Returns whether the fields of an action have valid types.

    A string such as "F" equals `Kind.F`, but is rejected, because kinds are compared with `is`.
    """
    if type(action) is not Action or type(action.kind) is not Kind:
        return False
    _, microbatch, chunk, _ = action
    return type(microbatch) is type(chunk) is int or (
        isinstance(microbatch, Integral) and isinstance(chunk, Integral)
    )


def _check_placement(plan: Plan) -> None:
    if plan.ways not in (1, 2) or plan.chunks % plan.ways:
        raise ValueError(
            f"plan {plan.name}: ways is {plan.ways}; it must be 1 or 2, and divide the {plan.chunks} chunks"
        )
    if not plan.placement and plan.ways == 1:
        return
    shape = [len(chunks) for chunks in plan.placement]
    placed = [
        sorted(
            chunks[at]
            for chunks in plan.placement
            for at in range(len(chunks))
            if plan.way_of(at) == way
        )
        for way in range(plan.ways)
    ]
    if (
        placed != [list(range(plan.total_stages))] * plan.ways
        or shape != [plan.chunks] * plan.stages
    ):
        raise ValueError(
            f"plan {plan.name}: the placement {plan.placement} must give each of {plan.stages} ranks {plan.chunks} of "
            f"the stages 0 .. {plan.total_stages - 1}, each stage {'once' if plan.ways == 1 else 'once on each way'}"
        )


def _walk(plan: Plan, rank: int) -> list[int]:
    """Checks the order of a rank's actions; returns the final progress of all its micro-batches.

    In the result, micro-batch m (negative in the previous step) on chunk c has the index
    c * count + before + m. Here `before` is the number of micro-batches of the previous step that
    appear in the plan, and `count` is `before` plus the number of micro-batches of this step.
    """
    chunks, earlier, count = plan.chunks, plan.before, plan.before + plan.microbatches
    taken_over = [
        _FORWARD if plan.is_open(rank, microbatch) else _DONE for microbatch in range(-earlier, 0)
    ]
    state = (taken_over + [_NOT_STARTED] * plan.microbatches) * chunks
    for number, action in enumerate(plan.ranks[rank]):
        kind, microbatch, chunk, backward = action
        if kind not in COMPUTE:
            known = kind in _COMMUNICATION and backward is None and 0 <= chunk < chunks
            if not known or (microbatch < -earlier if kind not in PER_CHUNK else microbatch != -1):
                raise _wrong_communication(plan, rank, action)
            continue
        if kind is Kind.FB or backward is not None:
            _check_pair(plan, rank, action)
            # The backward is checked first, because the forward of its micro-batch must be in an
            # earlier action.
            parts: Sequence[Action] = (
                action.parts[1],
                action.parts[0],
            )
        else:
            parts = (action,)
        for kind, microbatch, chunk, _ in parts:
            at = chunk * count + earlier + microbatch
            before, after = _STEP[kind]
            if (
                not (0 <= chunk < chunks and -earlier <= microbatch < plan.microbatches)
                or state[at] != before
            ):
                raise _wrong(plan, rank, number, Action(kind, microbatch, chunk))
            state[at] = after
    return state


def _check_pair(plan: Plan, rank: int, action: Action) -> None:
    backward = action.beside
    if action.kind is not Kind.FB or backward is None or backward.kind not in (Kind.B, Kind.I):
        raise ValueError(
            f"plan {plan.name}: rank {rank}: {action}: a pair is a forward together with a B or an I"
        )


def _wrong(plan: Plan, rank: int, number: int, action: Action) -> ValueError:
    """Returns the error for an action that cannot follow the actions before it."""
    seen = {
        part
        for before in plan.ranks[rank][:number]
        if before.kind in COMPUTE
        for part in before.parts
    }
    where = f"plan {plan.name}: rank {rank}: {action}"
    if not (
        0 <= action.chunk < plan.chunks and -plan.before <= action.microbatch < plan.microbatches
    ):
        return ValueError(
            f"{where}: the plan has {counted(plan.chunks, 'chunk')} and {counted(plan.microbatches, 'micro-batch')}"
        )
    if action in seen:
        return ValueError(f"{where} appears twice")
    if action.microbatch < 0 and (
        action.kind is Kind.F or not plan.is_open(rank, action.microbatch)
    ):
        return ValueError(f"{where}: the previous step already ran this action")
    before = _REQUIRED_BEFORE[action.kind]
    if before is not None and action._replace(kind=before) not in seen:
        return ValueError(f"{where} appears before {action._replace(kind=before)}")
    return ValueError(
        f"{where}: this micro-batch already had its backward; it is one B, or one I and one W"
    )


def _wrong_communication(plan: Plan, rank: int, action: Action) -> ValueError:
    where = f"plan {plan.name}: rank {rank}: {action}"
    if action.kind not in _COMMUNICATION or action.beside is not None:
        return ValueError(
            f"{where}: there is no action of kind {action.kind} with parts {action.parts}"
        )
    if not 0 <= action.chunk < plan.chunks:
        return ValueError(
            f"{where}: the plan has {counted(plan.chunks, 'chunk')} and {counted(plan.microbatches, 'micro-batch')}"
        )
    return ValueError(
        f"{where}: its micro-batch is {action.microbatch}; actions of a chunk or rank have -1"
    )


def _check_complete(plan: Plan, done: Sequence[Sequence[int]]) -> None:
    """Checks that all micro-batches are complete, except for backwards left to the next plan.

    Args:
        plan: the plan.
        done: for each rank, the progress of its micro-batches that `_walk` returned.
    """
    final = _FORWARD if plan.forward_only else _DONE
    count = plan.before + plan.microbatches
    if plan.ways == 1 and not plan.left and all(set(state) == {final} for state in done):
        return
    way = [_way(plan, done, microbatch) for microbatch in range(-plan.before, plan.microbatches)]
    for rank, state in enumerate(done):
        for at, reached in enumerate(state):
            chunk, number = divmod(at, count)
            microbatch, left = number - plan.before, plan.is_left(rank, number - plan.before)
            where = f"plan {plan.name}: rank {rank}: "
            if plan.way_of(chunk) != way[number]:
                if reached != _NOT_STARTED:
                    other = Action(Kind.F, microbatch, chunk)
                    raise ValueError(f"{where}{other}: this micro-batch takes the other direction")
            elif reached != (_FORWARD if left else final):
                kind = (
                    Kind.F if reached == _NOT_STARTED else Kind.W if reached == _INPUT else Kind.B
                )
                wrong = (
                    "belongs to the next plan" if left and reached != _NOT_STARTED else "is missing"
                )
                raise ValueError(f"{where}{Action(kind, microbatch, chunk)} {wrong}")


def _way(plan: Plan, done: Sequence[Sequence[int]], microbatch: int) -> int:
    """Returns the direction of a micro-batch: 1 if it ran on stage 0 of direction 1, else 0."""
    if plan.ways == 1:
        return 0
    rank, chunk = plan.locate(0, 1)
    return int(done[rank][chunk * plan.microbatches + microbatch] != _NOT_STARTED)


def check_reductions(plan: Plan) -> None:
    """Checks that each chunk with gradients is reduced once, after its last weight gradient.

    The previous step's gradients of a chunk must be reduced before this step adds the chunk's first
    weight gradient. Raises ValueError naming the rank and the action.
    """
    for rank, actions in enumerate(plan.ranks):
        parts = [part for action in actions for part in action.parts]
        remaining = Counter(
            (part.chunk, part.microbatch >= 0) for part in parts if part.kind in (Kind.B, Kind.W)
        )
        used = {
            key for key in remaining if not (key[1] and plan.is_left(rank, plan.microbatches - 1))
        }
        for part in parts:
            own = (part.chunk, False) not in used
            if part.kind in (Kind.B, Kind.W):
                remaining[part.chunk, part.microbatch >= 0] -= 1
                if part.microbatch >= 0 and not own:
                    reduce = Action(Kind.REDUCE, -1, part.chunk)
                    raise ValueError(
                        f"plan {plan.name}: rank {rank}: {part} appears before {reduce} of the previous step"
                    )
            if part.kind is not Kind.REDUCE:
                continue
            where = f"plan {plan.name}: rank {rank}: {part}"
            if (part.chunk, own) not in used:
                raise ValueError(
                    f"{where}: this chunk has no gradients, or they were reduced before"
                )
            if remaining[part.chunk, own]:
                raise ValueError(
                    f"{where} appears before the last weight gradient of chunk {part.chunk}"
                )
            used.discard((part.chunk, own))
        if used:
            raise ValueError(
                f"plan {plan.name}: rank {rank}: {Action(Kind.REDUCE, -1, min(used)[0])} is missing"
            )


def _check_gathers(plan: Plan) -> None:
    """Checks the gathers between each compute action and the previous one.

    There must be exactly one gather per chunk that the compute action uses. W uses no parameters,
    so no gather may precede it. Raises ValueError naming the rank and the action.
    """
    for rank, actions in enumerate(plan.ranks):
        begun: list[int] = []
        for action in actions:
            if action.kind is Kind.GATHER:
                begun.append(action.chunk)
            if action.kind not in COMPUTE:
                continue
            needed = [part.chunk for part in action.parts if part.kind is not Kind.W]
            if begun != needed and sorted(begun) != sorted(needed):
                found = f"gathers chunks {begun} before {action}, which needs {needed}"
                raise ValueError(f"plan {plan.name}: rank {rank} {found}")
            begun.clear()
        if begun:
            action = Action(Kind.GATHER, -1, begun[0])
            raise ValueError(f"plan {plan.name}: rank {rank}: {action}: no compute action follows")
