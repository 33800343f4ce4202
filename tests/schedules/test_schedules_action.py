"""Actions and plans: text form, places of stages, neighbors."""

from __future__ import annotations

import dataclasses

import pytest

from threed.schedules import Action, Kind, Plan, build

TEXTS = {
    "F0.3": Action(Kind.F, 3),
    "B1.12": Action(Kind.B, 12, 1),
    "I0.0": Action(Kind.I, 0),
    "W2.5": Action(Kind.W, 5, 2),
    "SF0.3": Action(Kind.SEND_F, 3),
    "RF0.3": Action(Kind.RECV_F, 3),
    "SB0.3": Action(Kind.SEND_B, 3),
    "RB10.3": Action(Kind.RECV_B, 3, 10),
    "GATHER1": Action(Kind.GATHER, -1, 1),
    "REDUCE0": Action(Kind.REDUCE, -1),
    "VALIDATE0": Action(Kind.VALIDATE, -1),
    "NORM0": Action(Kind.NORM, -1),
    "UPDATE0": Action(Kind.UPDATE, -1),
    "B0.-2": Action(Kind.B, -2),
    "F0.3+B1.2": Action(Kind.FB, 3, 0, Action(Kind.B, 2, 1)),
    "F1.0+I0.4": Action(Kind.FB, 0, 1, Action(Kind.I, 4)),
}


@pytest.mark.parametrize("text", TEXTS)
def test_text_form_goes_both_ways(text: str) -> None:
    assert Action.parse(text) == TEXTS[text]
    assert str(TEXTS[text]) == text


def test_every_kind_has_a_text_form() -> None:
    assert {action.kind for action in TEXTS.values()} == set(Kind)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "F",
        "F0",
        "F0.",
        "X0.1",
        "f0.1",
        "F0.1.2",
        "F-1.0",
        "REDUCE",
        "REDUCE0.1",
        "F0.1 ",
        "FB0.1",
        "F0.1+W0.0",
        "B0.1+F0.0",
        "F0.1+B0.0+B0.2",
    ],
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="invalid action"):
        Action.parse(text)


def test_actions_and_plans_are_frozen() -> None:
    with pytest.raises(AttributeError):
        Action(Kind.F, 0).chunk = 1  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        build("gpipe", 2, 2).name = "other"  # type: ignore[misc]


def test_stages_lie_round_robin_unless_placed() -> None:
    plan = Plan("x", stages=3, microbatches=1, chunks=2, ranks=((), (), ()))
    assert [[plan.stage_of(rank, chunk) for chunk in range(2)] for rank in range(3)] == [
        [0, 3],
        [1, 4],
        [2, 5],
    ]
    assert all(plan.stage_of(*plan.locate(stage)) == stage for stage in range(6))
    shaped = dataclasses.replace(plan, placement=((0, 5), (1, 4), (2, 3)))
    assert [shaped.locate(stage) for stage in range(6)] == [
        (0, 0),
        (1, 0),
        (2, 0),
        (2, 1),
        (1, 1),
        (0, 1),
    ]
    for wrong in (plan, shaped):
        with pytest.raises(ValueError, match="no rank holds stage 6"):
            wrong.locate(6)


def test_neighbors_follow_the_model_and_end_with_it() -> None:
    plan = Plan("v", 2, 1, 2, ((), ()), placement=((0, 3), (1, 2)))
    assert plan.consumer(0, Action.parse("F0.0")) == (1, 0)
    assert plan.consumer(1, Action.parse("F0.0")) == (1, 1)  # the turn of the V stays on its rank
    assert plan.consumer(0, Action.parse("F1.0")) is None
    assert plan.producer(0, Action.parse("F0.0")) is None
    assert plan.producer(0, Action.parse("I1.0")) is None
    assert plan.producer(1, Action.parse("RB0.0")) == (1, 1)
    assert plan.consumer(1, Action.parse("SB0.0")) == (0, 0)
    assert plan.consumer(1, Action.parse("W0.0")) is None
    assert plan.producer(1, Action.parse("REDUCE0")) is None


def test_a_plan_reads_as_lines() -> None:
    assert (
        str(build("1f1b", 2, 3))
        == "rank 0: F0.0 F0.1 B0.0 F0.2 B0.1 B0.2\nrank 1: F0.0 B0.0 F0.1 B0.1 F0.2 B0.2"
    )
