"""Plans made wrong at random: `validate` rejects each of them, and says where.

A plan that is right, lowered, gets one fault: an action left out, doubled, retargeted or put before what it needs, or
two messages of a channel exchanged on one side. Each fault makes a plan that would hang, fail, or train something else.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.schedules.test_schedules_plans import random_plans
from threed.schedules import Action, Kind, Plan, available, build, lower, together, validate
from threed.schedules.action import COMPUTE, RECEIVES, SENDS

OURS = available()  # without what other tests register


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Lowered plans: random ones, some with pairs, and those that have names; with and without gathers."""
    kind = draw(st.sampled_from(("one way", "two ways", "named")))
    if kind != "named":
        plan = draw(random_plans() if kind == "one way" else two_way_plans())
        plan = with_pairs(plan, draw(st.randoms(use_true_random=False)))
    else:
        name = draw(st.sampled_from(OURS))
        stages = draw(st.integers(1, 4))
        count = draw(st.integers(1, 8))
        try:
            plan = build(name, stages, count)
        except ValueError:  # not every schedule has these numbers
            assume(False)
    return lower(plan, gathers=draw(st.booleans()))


@st.composite
def two_way_plans(draw: st.DrawFn) -> Plan:
    """Bidirectional plans that a random but valid order of execution gives; even micro-batches go down the ranks."""
    stages, count = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    random = draw(st.randoms(use_true_random=False))
    back = Kind.I if draw(st.booleans()) else Kind.B
    ranks: list[list[Action]] = [[] for _ in range(stages)]
    ready = {(Kind.F, 0, m) for m in range(count)}
    while ready:
        kind, stage, m = random.choice(sorted(ready))
        ready.remove((kind, stage, m))
        way = m % 2
        ranks[stages - 1 - stage if way else stage].append(Action(kind, m, way))
        if kind is Kind.F:
            ready.add((Kind.F, stage + 1, m) if stage + 1 < stages else (back, stage, m))
        elif kind is back:
            ready |= ({(Kind.W, stage, m)} if back is Kind.I else set()) | (
                {(back, stage - 1, m)} if stage else set()
            )
    placement = tuple((rank, stages - 1 - rank) for rank in range(stages))
    return Plan("two ways", stages, count, 2, tuple(map(tuple, ranks)), placement, ways=2)


def with_pairs(plan: Plan, draw: random.Random) -> Plan:
    """Some neighbors, a forward and a backward, as pairs; the plan as it is where that would stall."""
    ranks = []
    for actions in plan.ranks:
        out: list[Action] = []
        for action in actions:
            kinds = {action.kind, out[-1].kind} if out else set()
            if Kind.F in kinds and kinds & {Kind.B, Kind.I} and draw.random() < 0.5:
                backward, forward = sorted((out.pop(), action), key=lambda one: one.kind is Kind.F)
                out.append(together(forward, backward))
            else:
                out.append(action)
        ranks.append(tuple(out))
    paired = replace(plan, ranks=tuple(ranks))
    try:
        validate(paired)
    except ValueError:
        return plan
    return paired


# --- faults: of a plan and a rank, that rank's list with a fault, or None where it cannot have this one ---------------

Fault = Callable[[Plan, int, random.Random], list[Action] | None]


def drop(plan: Plan, rank: int, draw: random.Random) -> list[Action] | None:
    actions = list(plan.ranks[rank])
    del actions[draw.randrange(len(actions))]
    left = [
        action
        for other, mine in enumerate(plan.ranks)
        for action in (actions if other == rank else mine)
    ]
    # a right plan, not lowered
    return actions if any(action.kind not in COMPUTE for action in left) else None


def double(plan: Plan, rank: int, draw: random.Random) -> list[Action]:
    actions = list(plan.ranks[rank])
    actions.insert(draw.randrange(len(actions) + 1), draw.choice(actions))
    return actions


def retarget(plan: Plan, rank: int, draw: random.Random) -> list[Action] | None:
    actions = list(plan.ranks[rank])
    at = draw.randrange(len(actions))
    action, what = actions[at], draw.choice(("microbatch", "chunk", "kind", "beside"))
    others = {
        "microbatch": range(-1, plan.microbatches + 1),
        "chunk": range(-1, plan.chunks + 1),
        "kind": tuple(Kind),
        "beside": (None, Action(Kind.B, 0), Action(Kind.I, 0, plan.chunks - 1), Action(Kind.W, 0)),
    }
    value = draw.choice([value for value in others[what] if value != getattr(action, what)])
    actions[at] = action._replace(**{what: value})
    return actions


def move_before_need(plan: Plan, rank: int, draw: random.Random) -> list[Action] | None:
    actions = list(plan.ranks[rank])
    at = draw.randrange(len(actions))
    earlier = list(needs(plan, rank, at))
    if not earlier:
        return None
    actions.insert(draw.randrange(draw.choice(earlier) + 1), actions.pop(at))
    return actions


def needs(plan: Plan, rank: int, at: int) -> Iterator[int]:
    """The places of actions of this rank that must stand before the one at `at`."""
    actions = plan.ranks[rank]
    compute = [number for number, action in enumerate(actions[:at]) if action.kind in COMPUTE]
    if actions[at].kind is Kind.GATHER:  # not before the compute action before
        yield from compute[-1:]
    for part in actions[at].parts:
        for number, action in enumerate(actions[:at]):
            for other in action.parts:
                own = other.chunk == part.chunk and other.microbatch == part.microbatch
                if own and (other.kind, part.kind) in BEFORE:
                    yield number
                if (
                    part.kind is Kind.REDUCE
                    and other.kind in (Kind.B, Kind.W)
                    and other.chunk == part.chunk
                ):
                    yield number
                made_here = (
                    plan.producer(rank, part) == (rank, other.chunk)
                    and other.microbatch == part.microbatch
                )
                if made_here and (other.kind, part.kind) in MAKES:
                    yield number


BACKWARD = (Kind.B, Kind.I)
BEFORE = {
    *((Kind.F, kind) for kind in (*BACKWARD, Kind.SEND_F)), (Kind.I, Kind.W), (Kind.RECV_F, Kind.F),
    *((kind, Kind.SEND_B) for kind in BACKWARD), *((Kind.RECV_B, kind) for kind in BACKWARD),
}  # fmt: skip
MAKES = {(Kind.F, Kind.F), *((one, other) for one in BACKWARD for other in BACKWARD)}


def exchange_messages(plan: Plan, rank: int, draw: random.Random) -> list[Action] | None:
    actions = list(plan.ranks[rank])
    channels: dict[tuple[bool, int], list[int]] = {}
    for at, action in enumerate(actions):
        if action.kind in SENDS | RECEIVES:
            sends = action.kind in SENDS
            peer = plan.consumer(rank, action) if sends else plan.producer(rank, action)
            assert peer is not None
            channels.setdefault((sends, peer[0]), []).append(at)
    places = [channel for channel in channels.values() if len(channel) > 1]
    if not places:
        return None
    one, other = draw.sample(draw.choice(places), 2)
    actions[one], actions[other] = actions[other], actions[one]
    return actions


def reduce_early(plan: Plan, rank: int, draw: random.Random) -> list[Action] | None:
    return _move_kind(plan, rank, draw, Kind.REDUCE)


def weights_first(plan: Plan, rank: int, draw: random.Random) -> list[Action] | None:
    return _move_kind(plan, rank, draw, Kind.W)


def _move_kind(plan: Plan, rank: int, draw: random.Random, kind: Kind) -> list[Action] | None:
    """An action of a kind somewhere before what it needs."""
    actions = list(plan.ranks[rank])
    places = [at for at, action in enumerate(actions) if action.kind is kind]
    if not places:
        return None
    at = draw.choice(places)
    last = max(needs(plan, rank, at))
    actions.insert(draw.randrange(last + 1), actions.pop(at))
    return actions


FAULTS: tuple[Fault, ...] = (
    drop, double, retarget, move_before_need, exchange_messages, reduce_early, weights_first,
)  # fmt: skip


def check(plan: Plan, seed: int, each: int) -> None:
    """The plan passes; with one fault it is rejected, by rank and action."""
    validate(plan)
    draw = random.Random(seed)
    for fault in FAULTS:
        for _ in range(each):
            rank = draw.randrange(plan.stages)
            actions = fault(plan, rank, draw)
            if actions is None or tuple(actions) == plan.ranks[rank]:
                continue
            wrong = replace(
                plan, ranks=(*plan.ranks[:rank], tuple(actions), *plan.ranks[rank + 1 :])
            )
            message = verdict(wrong)
            assert re.search(r"rank \d+.*[A-Z]-?\d", message), (
                f"{fault.__name__}: {message!r}\n{wrong}\nof\n{plan}"
            )


def verdict(plan: Plan) -> str:
    """What `validate` says; nothing of a plan that is right."""
    try:
        validate(plan)
    except ValueError as error:
        return str(error)
    return ""


@settings(max_examples=120, deadline=None)
@given(plans(), st.integers(0, 2**32))
def test_a_plan_with_a_fault_is_rejected(plan: Plan, seed: int) -> None:
    check(plan, seed, each=3)


@pytest.mark.grid
@settings(max_examples=5000, deadline=None)
@given(plans(), st.integers(0, 2**32))
def test_many_plans_with_many_faults_are_rejected(plan: Plan, seed: int) -> None:
    check(plan, seed, each=12)
