"""Is a plan right, before a tensor moves? Every error names the rank and the action.

Use: `legal(plan)` checks what every rank does on its own; `validate(plan)` also plays the plan out, and checks its
communication if it has any: nothing missing, doubled, misordered, unmatched, used before it arrives, or deadlocked
where transfers block both sides, and no gradient summed before it is complete.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from numbers import Integral

from threed.schedules.action import COMPUTE, PER_CHUNK, RECEIVES, SENDS, Action, Kind
from threed.schedules.asynchronous import check_open, check_updates
from threed.schedules.plan import Plan

_NOTHING, _FORWARD, _INPUT, _DONE = range(4)  # what a rank has done of a micro-batch on a chunk
_STEP = {
    Kind.F: (_NOTHING, _FORWARD),
    Kind.B: (_FORWARD, _DONE),
    Kind.I: (_FORWARD, _INPUT),
    Kind.W: (_INPUT, _DONE),
}
_COMMUNICATION = SENDS | RECEIVES | PER_CHUNK
_REQUIRED_BEFORE = {Kind.F: None, Kind.B: Kind.F, Kind.I: Kind.F, Kind.W: Kind.I}


def legal(plan: Plan) -> None:
    """Checks that every stage computes every micro-batch once and in order.

    Each (stage, micro-batch) has one F, and then one B or one I and W; or F alone everywhere. In a bidirectional plan a
    micro-batch does so on all stages of one way; in an asynchronous one what the plans before and after have is not in
    it. With reductions, gathers or updates, every rank has all of them. Raises ValueError naming rank and action.
    """
    sizes = (plan.stages, plan.microbatches, plan.chunks)
    fewest = (1, 0 if plan.begun else 1, 1)  # what drains a pipeline begins no micro-batch
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
    """Checks that ranks have actions, and these kinds and whole numbers. Raises ValueError naming rank and action."""
    for rank, actions in enumerate(plan.ranks):
        for action in actions:
            if type(action) is not Action or not all(
                map(_is_well_made, (action, action.beside or action))
            ):
                shown = tuple(action) if isinstance(action, Action) else action
                raise ValueError(
                    f"plan {plan.name}: rank {rank}: {shown!r} is no Action; write Action(Kind.F, 3), whole numbers,"
                    " or Action.parse('F0.3')"
                )


def _is_well_made(action: Action) -> bool:
    """Whether the parts of an action are what they should be. The text "F" equals the kind, and is not it."""
    if type(action) is not Action or type(action.kind) is not Kind:
        return False
    _, microbatch, chunk, _ = action
    return type(microbatch) is type(chunk) is int or (
        isinstance(microbatch, Integral) and isinstance(chunk, Integral)
    )


def _check_placement(plan: Plan) -> None:
    if plan.ways not in (1, 2) or plan.chunks % plan.ways:
        raise ValueError(
            f"plan {plan.name}: {plan.ways} ways for {plan.chunks} chunks; there are 1 or 2, alike"
        )
    if not plan.placement and plan.ways == 1:
        return
    shape = [len(chunks) for chunks in plan.placement]
    held = [
        sorted(
            chunks[at]
            for chunks in plan.placement
            for at in range(len(chunks))
            if plan.way_of(at) == way
        )
        for way in range(plan.ways)
    ]
    if held != [list(range(plan.total_stages))] * plan.ways or shape != [plan.chunks] * plan.stages:
        raise ValueError(
            f"plan {plan.name}: the placement {plan.placement} must give each of {plan.stages} ranks {plan.chunks} of "
            f"the stages 0 .. {plan.total_stages - 1}, each stage {'once' if plan.ways == 1 else 'once on each way'}"
        )


def _walk(plan: Plan, rank: int) -> list[int]:
    """What the rank has done at the end, of micro-batch m on chunk c at [c * count + before + m]: of `count`, so many
    are of the step before."""
    chunks, earlier, count = plan.chunks, plan.before, plan.before + plan.microbatches
    taken_over = [
        _FORWARD if plan.is_open(rank, microbatch) else _DONE for microbatch in range(-earlier, 0)
    ]
    state = (taken_over + [_NOTHING] * plan.microbatches) * chunks
    for number, action in enumerate(plan.ranks[rank]):
        kind, microbatch, chunk, beside = action
        if kind not in COMPUTE:
            known = kind in _COMMUNICATION and beside is None and 0 <= chunk < chunks
            if not known or (microbatch < -earlier if kind not in PER_CHUNK else microbatch != -1):
                raise _wrong_communication(plan, rank, action)
            continue
        if kind is Kind.FB or beside is not None:
            _check_pair(plan, rank, action)
            parts: Sequence[Action] = (
                action.parts[1],
                action.parts[0],
            )  # the backward's forward is an earlier one
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
            f"plan {plan.name}: rank {rank}: {action}: a pair is a forward beside a B or an I"
        )


def _wrong(plan: Plan, rank: int, number: int, action: Action) -> ValueError:
    """What is wrong with an action that cannot follow those before it."""
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
            f"{where}: there are {plan.chunks} chunks and {plan.microbatches} micro-batches"
        )
    if action in seen:
        return ValueError(f"{where} appears twice")
    if action.microbatch < 0 and (
        action.kind is Kind.F or not plan.is_open(rank, action.microbatch)
    ):
        return ValueError(f"{where}: the step before has done this")
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
            f"{where}: there are {plan.chunks} chunks and {plan.microbatches} micro-batches"
        )
    return ValueError(
        f"{where}: its micro-batch is {action.microbatch}; it is -1 of what concerns a whole chunk"
    )


def _check_complete(plan: Plan, done: Sequence[Sequence[int]]) -> None:
    """Checks what ranks have done at the end, as `_walk` returns it."""
    whole = _FORWARD if plan.forward_only else _DONE
    count = plan.before + plan.microbatches
    if plan.ways == 1 and not plan.left and all(set(state) == {whole} for state in done):
        return
    way = [_way(plan, done, microbatch) for microbatch in range(-plan.before, plan.microbatches)]
    for rank, state in enumerate(done):
        for at, reached in enumerate(state):
            chunk, number = divmod(at, count)
            microbatch, left = number - plan.before, plan.is_left(rank, number - plan.before)
            where = f"plan {plan.name}: rank {rank}: "
            if plan.way_of(chunk) != way[number]:
                if reached != _NOTHING:
                    other = Action(Kind.F, microbatch, chunk)
                    raise ValueError(f"{where}{other}: this micro-batch goes the other way")
            elif reached != (_FORWARD if left else whole):
                kind = Kind.F if reached == _NOTHING else Kind.W if reached == _INPUT else Kind.B
                wrong = "is the next plan's" if left and reached != _NOTHING else "is missing"
                raise ValueError(f"{where}{Action(kind, microbatch, chunk)} {wrong}")


def _way(plan: Plan, done: Sequence[Sequence[int]], microbatch: int) -> int:
    """The way that a micro-batch takes: that of the rank that begins with it."""
    if plan.ways == 1:
        return 0
    rank, chunk = plan.locate(0, 1)
    return int(done[rank][chunk * plan.microbatches + microbatch] != _NOTHING)


def check_reductions(plan: Plan) -> None:
    """Checks that each chunk with gradients is reduced once, when they are complete, and before those of the next step
    come. Raises ValueError naming rank and action."""
    for rank, actions in enumerate(plan.ranks):
        parts = [part for action in actions for part in action.parts]
        left = Counter(
            (part.chunk, part.microbatch >= 0) for part in parts if part.kind in (Kind.B, Kind.W)
        )
        used = {key for key in left if not (key[1] and plan.is_left(rank, plan.microbatches - 1))}
        for part in parts:
            own = (part.chunk, False) not in used
            if part.kind in (Kind.B, Kind.W):
                left[part.chunk, part.microbatch >= 0] -= 1
                if part.microbatch >= 0 and not own:
                    reduce = Action(Kind.REDUCE, -1, part.chunk)
                    raise ValueError(
                        f"plan {plan.name}: rank {rank}: {part} appears before {reduce} of the step before"
                    )
            if part.kind is not Kind.REDUCE:
                continue
            where = f"plan {plan.name}: rank {rank}: {part}"
            if (part.chunk, own) not in used:
                raise ValueError(
                    f"{where}: this chunk has no gradients, or they were reduced before"
                )
            if left[part.chunk, own]:
                raise ValueError(
                    f"{where} appears before the last weight gradient of chunk {part.chunk}"
                )
            used.discard((part.chunk, own))
        if used:
            raise ValueError(
                f"plan {plan.name}: rank {rank}: {Action(Kind.REDUCE, -1, min(used)[0])} is missing"
            )


def _check_gathers(plan: Plan) -> None:
    """Where one F, B or I has its gather, all have: after the compute action before, for W needs no parameters."""
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
            raise ValueError(
                f"plan {plan.name}: rank {rank}: {action}: no compute action comes after it"
            )
