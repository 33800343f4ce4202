"""What a pipeline rank enqueues on an accelerator: when receives are enqueued, and what overlaps in pairs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest

from tests.accelerator.order import MAIN, Entry, Order
from tests.accelerator.pretend import Pretend, pretending
from tests.accelerator.watching import summary
from threed.config import Config
from threed.config.resolution import resolve
from threed.distributed.topology import Axis
from threed.engine import base
from threed.layers import sequence_chunks
from threed.pipeline.executor import Executor
from threed.pipeline.stage import Stage
from threed.schedules import Action
from threed.schedules.action import COMPUTE

Plant = Callable[[ExitStack], None]
pytestmark = pytest.mark.slow


def config_of(schedule: str, tp: int, layers: int, microbatches: int) -> Config:
    """Llama-3 8B with fewer layers and a small vocabulary, on two pipeline ranks."""
    given: dict[str, dict[str, Any]] = {
        "precision": {"dtype": "bf16"},
        "parallel": {"pp": 2, "tp": tp, "schedule": schedule, "optimistic_step": False},
        "model": {
            "arch": "llama", "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "seq": 8192,
            "vocab": 1024, "layers": layers,
        },
        "train": {"micro_batch": 1, "global_batch": microbatches, "steps": 10},
    }  # fmt: skip
    return resolve(Config.model_validate(given), given["model"]["vocab"], 2 * tp)


Ran = list[
    tuple[Action, int, int]
]  # a compute action, and the entries that it enqueued: [first, last)


@contextmanager
def noting_actions(order: Order) -> Iterator[Ran]:
    """Context manager that yields the compute actions of a step, with the entries that they enqueued."""
    ran, begin = Ran(), Executor.run

    def run(self: Executor, *args: Any) -> Any:
        handlers = self._handlers

        def noted(handle: Callable[[Action], None]) -> Callable[[Action], None]:
            def handled(action: Action) -> None:
                first = len(order.step)
                handle(action)
                ran.append((action, first, len(order.step)))

            return handled

        self._handlers = {k: noted(h) if k in COMPUTE else h for k, h in handlers.items()}
        try:
            return begin(self, *args)
        finally:
            self._handlers = handlers

    with patch.object(Executor, "run", run):
        yield ran


def nothing(stack: ExitStack) -> None:
    """Plants no fault."""


def receives_as_late_as_in_the_plan(stack: ExitStack) -> None:
    stack.enter_context(patch.object(Executor, "_post_ahead", lambda *_: None))


def one_communicator_for_both_streams(stack: ExitStack) -> None:
    stack.enter_context(patch.object(Axis, "give_channel", lambda *_: None))


def forward_before_backward(stack: ExitStack) -> None:
    """All of the forward is launched before the backward."""
    stack.enter_context(patch.object(Stage, "reuses_storages", True))


def on_one_stream(stack: ExitStack) -> None:
    stack.enter_context(patch.object(base, "Overlap", lambda *_: None))


@functools.cache
def step_of(
    rank: int, schedule: str, tp: int, layers: int, microbatches: int, plant: Plant = nothing
) -> tuple[Pretend, Ran]:
    """The second step of a rank, in which the forms of messages are known."""
    config = config_of(schedule, tp, layers, microbatches)
    with ExitStack() as stack, pretending(rank, 2 * tp) as device:
        plant(stack)
        engine = device.engine(config)
        device.step(engine)
        with noting_actions(device.order) as ran:
            device.step(engine)
    assert device.faults == [], summary(device.faults)
    return device, ran


# ------------------------------------------------------------------------------------------------------------- receives


def is_receive(entry: Entry) -> bool:
    return entry.name.startswith("recv")


def gaps(device: Pretend, ran: Ran) -> list[int]:
    """For each receive: how many compute actions were enqueued after it and before the action that waits for it.

    Receives before the first compute action are left out: there is no action to overlap with.
    """
    step, found = device.order.step, []
    for number, entry in enumerate(step):
        if is_receive(entry) and number >= ran[0][1]:
            user = next(
                at
                for at, (_, first, last) in enumerate(ran)
                if any(entry in other.after for other in step[first:last])
            )
            found.append(sum(first >= number for _, first, _ in ran[:user]))
    return found


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "dualpipev"])
def test_receives_are_enqueued_before_an_action_that_does_not_need_them(schedule: str) -> None:
    ahead = gaps(*step_of(1, schedule, 1, 2, 4))
    late = gaps(*step_of(1, schedule, 1, 2, 4, receives_as_late_as_in_the_plan))
    print(schedule, ahead, late)
    assert min(ahead) >= 1
    assert min(late) == 0


# ---------------------------------------------------------------------------------------------------------------- pairs

COMPUTING = (MAIN, "overlap")


def seconds(entry: Entry) -> float:
    """A model of an H100 with NVLink: 660 TFLOP/s, 2.75 TB/s, 340 GB/s between GPUs."""
    if entry.stream in COMPUTING:
        return 1.5e-6 + max(entry.flops / 660e12, entry.nbytes / 2.75e12)
    return 25e-6 + entry.nbytes / 340e9


def overlapped(device: Pretend, ran: Ran) -> tuple[float, float, int]:
    """Of the collectives in pairs, the share during which the other stream computes, of each member of a pair; and the
    smallest number of times that the host turns from one stream to the other in a pair.
    """
    order, ends, turns = device.order, device.order.ends(seconds), list[int]()
    shares = {True: list[bool](), False: list[bool]()}
    for action, first, last in ran:
        if action.beside is None:
            continue
        entries = order.step[first:last]
        kernels = [e for e in entries if e.stream in COMPUTING]
        turns.append(sum(a.stream != b.stream for a, b in pairwise(kernels)))
        for entry in entries:
            if entry.stream not in COMPUTING and (source := stream_of(entry)) is not None:
                begins, end = ends[entry] - seconds(entry), ends[entry]
                others = [k for k in kernels if k.stream != source]
                hidden = any(ends[k] > begins and ends[k] - seconds(k) < end for k in others)
                shares[source == MAIN].append(hidden)
    return *(sum(s) / max(len(s), 1) for s in shares.values()), min(turns)  # type: ignore[return-value]


def stream_of(entry: Entry) -> Any:
    """The stream from which a collective was enqueued."""
    return next((e.stream for e in entry.after if e.stream in COMPUTING), None)


def test_a_pair_computes_while_the_other_member_communicates() -> None:
    # Chunks of products overlap with collectives too; here only the other member of the pair counts.
    with patch.object(sequence_chunks, "CHUNKS", (1,)):
        main, side, turns = overlapped(*step_of(0, "dualpipe", 2, 8, 4))
    print(f"overlapped: {main:.0%} on the main stream, {side:.0%} on the other; {turns} turns")
    assert min(main, side) >= 0.5
    assert turns >= 6


@pytest.mark.seldom("on_one_stream")
@pytest.mark.parametrize(
    "plant", [one_communicator_for_both_streams, forward_before_backward, on_one_stream]
)
def test_pairs_that_overlap_less_are_found(plant: Plant) -> None:
    main, side, turns = overlapped(*step_of(0, "dualpipe", 2, 8, 4, plant))
    print(f"{plant.__name__}: {main:.0%} and {side:.0%}; {turns} turns")
    assert min(main, side) < 0.5 or turns < 6
