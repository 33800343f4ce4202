"""No plan hangs under NCCL's rules, at any speed of the ranks; and plans hang if messages are in another order."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from tests.accelerator.communicators import Hang, Recorder, devices, played, recorded
from tests.accelerator.pretend import device
from tests.random_plans import random_plan
from threed import schedules
from threed.distributed.collectives import Pending
from threed.pipeline.executor import Executor
from threed.schedules import Plan
from threed.schedules.action import COMPUTE, RECEIVES, Action, Kind
from threed.schedules.deadlock_check import validate
from threed.schedules.double_buffered import drain, first
from threed.schedules.simulation import Costs

CASES, ALL = 200, 10_000
QUEUES = (0, 8, 8, 4, 1)  # CUDA has 8 by default; 0: one per stream
NAMES = schedules.available()
Plant = Callable[[ExitStack], None]
Change = Callable[[Plan], Plan]


@pytest.fixture(autouse=True)
def _device() -> None:
    """Skips a test if this torch has no backends made in Python."""
    device()


def drawn_steps(draw: random.Random) -> list[Plan]:
    """The lowered plans of a run: random, or of a schedule."""
    while True:
        stages = draw.choice([2, 3, 4])
        if draw.random() < 0.7:
            plan = random_plan(draw.randrange(2**32), stages, draw.randrange(2, 7))
            return [schedules.lower(plan)] * 2
        name = draw.choice(NAMES)
        times = (draw.uniform(0.1, 3) for _ in range(3))
        given = {"costs": Costs(*times), "chunks": draw.choice((1, 2))} if name == "zb-auto" else {}
        try:
            plan = schedules.build(name, stages, draw.randrange(2, 13), **given)
        except schedules.SizesError:
            continue
        steps = [first(plan), plan, drain(plan)] if plan.asynchronous else [plan] * 2
        lowered = [schedules.lower(step) for step in steps]
        validate(lowered[0])
        return lowered


def nothing(stack: ExitStack) -> None:
    """Plants no fault."""


def unchanged(plan: Plan) -> Plan:
    """The same plan."""
    return plan


def hangs(seeds: range, plant: Plant = nothing, change: Change = unchanged) -> Iterator[str]:
    """Yields the cases of these seeds that hang."""
    with ExitStack() as stack:
        use = stack.enter_context(devices())
        plant(stack)
        for seed in seeds:
            draw = random.Random(seed)
            steps, tp, varying = drawn_steps(draw), draw.choice([1, 1, 2]), draw.random() < 0.1
            sizes = [draw.choice([1, 1, 2]) for _ in range(steps[0].microbatches)]
            queues = draw.choice(QUEUES)
            try:
                programs = recorded([*map(change, steps)], sizes, tp, use, varying)
                played(programs, draw, queues, tp)
            except Hang as error:
                yield f"seed {seed}, {steps[0].name}, {queues} queues: {error}"


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_no_plan_hangs(part: int) -> None:
    assert list(hangs(range(part * CASES // 4, (part + 1) * CASES // 4))) == []


@pytest.mark.grid
def test_neither_do_others() -> None:
    assert list(hangs(range(CASES, ALL))) == []


# ------------------------------------------------------------------------------------------------------ planted faults


def one_communicator_per_pair_of_ranks(stack: ExitStack) -> None:
    def shared(self: Recorder, source: int, target: int, gradients: bool) -> Hashable:
        return min(source, target), max(source, target)

    stack.enter_context(patch.object(Recorder, "communicator", shared))


def one_communicator_per_direction(stack: ExitStack) -> None:
    """A receive that waits for another one blocks the compute action in a hardware queue."""

    def shared(self: Recorder, source: int, target: int, gradients: bool) -> Hashable:
        return source, target

    stack.enter_context(patch.object(Recorder, "communicator", shared))


def ahead_in_the_opposite_order(stack: ExitStack) -> None:
    """Receives of one gap are posted last first."""
    ahead = Executor._post_ahead

    def reversed_(self: Executor, actions: Sequence[Action], start: int) -> None:
        end = next(
            (n for n in range(start, len(actions)) if actions[n].kind in COMPUTE), len(actions)
        )
        ahead(self, [*actions[:start], *actions[start:end][::-1], *actions[end:]], start)

    stack.enter_context(patch.object(Executor, "_post_ahead", reversed_))


def ahead_and_waited_for_at_once(stack: ExitStack) -> None:
    receive = Recorder.receive

    def blocking(self: Recorder, *given: Any) -> list[Pending]:
        pending = receive(self, *given)
        for part in pending:
            part.wait()
        return pending

    stack.enter_context(patch.object(Recorder, "receive", blocking))


def forms_ahead(stack: ExitStack) -> None:
    """The host waits for a form before it enqueues the action that the message depends on."""
    ahead = Executor._post_ahead

    def eager(self: Executor, actions: Sequence[Action], start: int) -> None:
        ahead(self, actions, start)
        for n in range(start, len(actions)):
            if actions[n].kind in COMPUTE:
                return
            message = (actions[n].kind, actions[n].microbatch, actions[n].chunk)
            if actions[n].kind is Kind.RECV_B and self._key("out", actions[n]) not in self._forms:
                return  # nothing arrives that states this form
            if actions[n].kind in RECEIVES and message not in self._posted:
                self._receive(actions[n])
                self._posted.add(message)

    stack.enter_context(patch.object(Executor, "_post_ahead", eager))


def several_of_a_rank_ahead(stack: ExitStack) -> None:
    """A receive that waits for another one blocks the compute action in a hardware queue."""
    begin = Recorder.__init__

    def unlimited(self: Recorder, *args: object) -> None:
        begin(self, *args)  # type: ignore[arg-type]
        self.posts_ahead = 99

    stack.enter_context(patch.object(Recorder, "__init__", unlimited))


def received_in_order_of_use(plan: Plan) -> Plan:
    """Each rank has its receives directly before the actions that use them."""
    ranks = []
    for actions in plan.ranks:
        waiting, new = [a for a in actions if a.kind in RECEIVES], list[Action]()
        for action in actions:
            if action.kind in COMPUTE:
                parts = {(p.microbatch, p.chunk, p.kind == "F") for p in action.parts}
                used = [
                    r
                    for r in waiting
                    if action.kind != "W" and (r.microbatch, r.chunk, r.kind == "RF") in parts
                ]
                new += used
                waiting = [r for r in waiting if r not in used]
            if action.kind not in RECEIVES:
                new.append(action)
        ranks.append((*new, *waiting))
    return replace(plan, ranks=tuple(ranks))


MISORDERED: list[tuple[Plant, Change]] = [
    (one_communicator_per_pair_of_ranks, unchanged),
    (one_communicator_per_direction, unchanged),
    (ahead_in_the_opposite_order, unchanged),
    (ahead_and_waited_for_at_once, unchanged),
    (forms_ahead, unchanged),
    (several_of_a_rank_ahead, unchanged),
    (nothing, received_in_order_of_use),
]


@pytest.mark.parametrize(("plant", "change"), MISORDERED)
def test_other_orders_hang(plant: Plant, change: Change) -> None:
    assert next(hangs(range(200), plant, change), None)
