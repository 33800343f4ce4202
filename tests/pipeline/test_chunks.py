"""Several chunks of the model on a rank: the plans that tests make, and training by them against one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.configs import Case
from tests.looping import OWN, Placement
from tests.test_equivalence import run_all
from threed.schedules import build, lower
from threed.schedules.all_forward_all_backward import forward_only
from threed.schedules.deadlock_check import check_rendezvous
from threed.schedules.plan_checks import legal

SHAPES = [(2, 1, 1), (4, 1, 1), (2, 2, 2)]  # pp, dp, tp


@pytest.mark.parametrize("microbatches", [1, 2, 3, 8])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("name", OWN)
def test_the_plans_are_legal_and_cannot_deadlock(name: str, stages: int, microbatches: int) -> None:
    plan = build(name, stages, microbatches)
    check_rendezvous(lower(plan, gathers=True))
    each = plan.chunks * (3 if "split" in name else 2)
    assert all(len(actions) == each * microbatches for actions in plan.ranks)


@pytest.mark.parametrize(
    "placement",
    [((0, 2), (1, 3)), ((0, 3), (1, 2)), ((0, 5, 6), (1, 4, 7), (2, 3, 8)), ((1,), (0,))],
)
def test_forwards_alone_go_over_any_placement(placement: Placement) -> None:
    for microbatches in (1, 2, 5):
        plan = forward_only(len(placement), microbatches, placement)
        legal(plan)
        check_rendezvous(lower(plan))
        assert plan.total_stages == sum(map(len, placement))


def cases() -> list[Case]:
    """Every stage of ZeRO on every shape, tied and not; plans, recompute and micro-batches in turn.

    Every second stage of ZeRO has two tensor ranks, where there are data ranks.
    """
    found, again = [], ["none", "full", "selective", "sliced", "half"]
    for number, (pp, dp, tp) in enumerate(SHAPES):
        for zero in (0, 1, 2, 3) if dp > 1 else (1,):
            at = 3 * number + zero
            schedule = (("looping", "vee") if pp > 2 else ("split-vee", "split-1f1b"))[
                (number + zero) % 2
            ]
            recompute = "full" if again[at % 5] == "sliced" and tp == 1 else again[at % 5]
            found.append(
                Case(
                    pp, dp, tp if zero in (1, 2) else 1, schedule=schedule, zero=zero, layers=6, recompute=recompute,
                    model=("gpt", "qwen-tied", "llama")[at % 3], microbatches=(2, 3, 8)[at % 3],
                    bucket_mib=(64.0, 0.03)[at % 2], prefetch=1 + at % 2,
                )
            )  # fmt: skip
    return found


IDLE = f"{Path(__file__).parents[1]}/data/schedules/idle_way.py:idle_way"


@pytest.mark.parametrize("rest", [False, pytest.param(True, marks=pytest.mark.grid)])
def test_chunks_and_split_backwards_equal_one_process(rest: bool) -> None:
    """Also where the model begins and ends on rank 0, whose tied table is one tensor there; and where no micro-batch
    comes to a chunk, whose gradients are summed after every micro-batch.

    Cases with every schedule, stage of ZeRO and model, or the others.
    """
    every = cases()
    every += [Case(2, 2, schedule=IDLE, zero=zero, layers=4, microbatches=2) for zero in (2, 3)]
    some = [every[number] for number in (1, 2, 4, 5, 7)]
    for field in ("schedule", "zero", "model", "microbatches", "bucket_mib"):
        assert {getattr(c, field) for c in some} == {getattr(c, field) for c in every}, field
    run_all([case for case in every if case not in some] if rest else some)
