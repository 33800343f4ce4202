"""Simulated times against published figures, and drawings of them."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from threed.schedules import Action, Costs, Kind, Plan, build, lower, simulate, svg
from threed.schedules.all_forward_all_backward import forward_only
from threed.schedules.simulation import idle_shares, span_and_bubble

SVG = "{http://www.w3.org/2000/svg}"
UNIT = Costs(forward=1, backward_input=1, backward_weight=1)

# arXiv 2401.10241 (zero bubble), tables 5 and 9: stages, micro-batches, T_F, T_B, T_W, T_comm (ms), bubble rate of 1F1B
ZERO_BUBBLE_1F1B = [
    (8, 24, 18.522, 18.086, 9.337, 0.601, 0.2431),
    (8, 32, 18.513, 18.086, 9.331, 0.626, 0.1985),
    (8, 64, 18.546, 18.097, 9.321, 0.762, 0.1240),
    (8, 24, 29.718, 29.444, 19.927, 0.527, 0.2347),
    (8, 32, 29.802, 29.428, 19.530, 0.577, 0.1898),
    (8, 64, 29.935, 29.621, 19.388, 0.535, 0.1091),
]


@pytest.mark.parametrize(("p", "m", "f", "b", "w", "send", "rate"), ZERO_BUBBLE_1F1B)
def test_bubble_rate_of_1f1b_is_that_of_2401_10241(
    p: int, m: int, f: float, b: float, w: float, send: float, rate: float
) -> None:
    timeline = simulate(build("1f1b", p, m), Costs(f, b, w, send=send))
    assert round(timeline.bubble, 4) == rate


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_unit_times_on_4_stages_and_8_microbatches_waste_3_of_11(name: str) -> None:
    timeline = simulate(build(name, 4, 8), UNIT)
    assert timeline.bubble == pytest.approx(3 / 11, abs=1e-15)
    assert timeline.span == timeline.makespan == 33
    assert timeline.messages == (8, 16, 16, 8)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_makespan_and_bubble_follow_1811_06965_and_2104_04473(name: str) -> None:
    """Bubble time (p-1)(F+B+W), as a part of the whole (p-1)/(m+p-1), when no message takes time."""
    for p in range(1, 9):
        for m in range(1, 18):
            timeline = simulate(build(name, p, m), Costs(1.0, 1.5, 0.5))
            assert timeline.makespan == pytest.approx(3.0 * (m + p - 1), rel=1e-12)
            assert timeline.bubble == pytest.approx((p - 1) / (m + p - 1), rel=1e-12, abs=1e-12)


def test_peak_activations_follow_2104_04473_section_2_2() -> None:
    for p in range(1, 9):
        for m in range(1, 18):
            assert simulate(build("gpipe", p, m), UNIT).peak_activations == (m,) * p
            assert simulate(build("1f1b", p, m), UNIT).peak_activations == tuple(
                min(p - s, m) for s in range(p)
            )
            assert simulate(forward_only(p, m), UNIT).peak_activations == (1,) * p


def test_activations_of_a_split_backward_are_held_to_the_end_of_w() -> None:
    actions = tuple(
        Action.parse(text) for text in "F0.0 I0.0 F0.1 W0.0 I0.1 F0.2 B0.2 W0.1".split()
    )
    assert simulate(Plan("split", 1, 3, 1, (actions,)), UNIT).peak_activations == (2,)


def test_every_boundary_is_crossed_once_each_way_per_microbatch() -> None:
    for p in range(1, 6):
        expected = tuple(7 * ((rank < p - 1) + (rank > 0)) for rank in range(p))
        assert simulate(build("1f1b", p, 7), UNIT).messages == expected
        assert simulate(forward_only(p, 7), UNIT).messages == (7,) * (p - 1) + (0,)


def test_chunks_share_the_costs_of_their_rank_and_turns_of_a_v_need_no_message() -> None:
    ranks = tuple(
        tuple(Action.parse(text) for text in line.split())
        for line in ("F0.0 F1.0 I1.0 W1.0 B0.0", "F0.0 F1.0 B1.0 B0.0")
    )
    plan = Plan("v", 2, 1, 2, ranks, placement=((0, 3), (1, 2)))
    timeline = simulate(plan, Costs(2, 2, 2, send=0.25))
    assert timeline.spans[0] == (
        (Action.parse("F0.0"), 0, 1),
        (Action.parse("F1.0"), 3.5, 4.5),
        (Action.parse("I1.0"), 4.5, 5.5),
        (Action.parse("W1.0"), 5.5, 6.5),
        (Action.parse("B0.0"), 10.0, 12.0),
    )
    assert timeline.spans[1] == (
        (Action.parse("F0.0"), 1.25, 2.25),
        (Action.parse("F1.0"), 2.25, 3.25),
        (Action.parse("B1.0"), 5.75, 7.75),
        (Action.parse("B0.0"), 7.75, 9.75),
    )
    assert timeline.peak_activations == (1.0, 1.0)
    assert timeline.messages == (2, 2)
    assert (timeline.makespan, timeline.bubble) == (12, 0.5)


def test_stages_may_have_their_own_costs() -> None:
    timeline = simulate(build("1f1b", 2, 2), Costs((1.0, 3.0), (1.0, 3.0), (1.0, 3.0)))
    assert [(start, end) for _, start, end in timeline.spans[1]] == [
        (1, 4),
        (4, 10),
        (10, 13),
        (13, 19),
    ]
    assert [(start, end) for _, start, end in timeline.spans[0]] == [
        (0, 1),
        (1, 2),
        (10, 12),
        (19, 21),
    ]
    # of the rank with the longest span, the first
    assert timeline.bubble == pytest.approx((21 - 6) / 21)
    with pytest.raises(ValueError, match="3 values for the 2 stages"):
        simulate(build("1f1b", 2, 2), Costs((1.0, 2.0, 3.0), 1, 1))


@pytest.mark.parametrize(
    "bad", [{"forward": -1}, {"send": -0.1}, {"backward_weight": (1.0, -1.0)}, {"forward": ()}]
)
def test_negative_or_empty_costs_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"costs: {next(iter(bad))} is"):
        Costs(**{"forward": 1, "backward_input": 1, "backward_weight": 1, **bad})


def test_a_step_that_takes_no_time_has_no_bubble() -> None:
    assert simulate(build("1f1b", 2, 2), Costs(0, 0, 0)).bubble == 0


times = st.floats(0.01, 10)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["gpipe", "1f1b"]),
    st.integers(1, 6),
    st.integers(1, 8),
    times,
    times,
    times,
    st.floats(0, 3),
)
def test_lowering_and_latency_leave_what_they_must(
    name: str, p: int, m: int, f: float, b: float, w: float, send: float
) -> None:
    plan = build(name, p, m)
    timeline = simulate(plan, Costs(f, b, w, send=send))
    assert simulate(lower(plan), Costs(f, b, w, send=send)) == timeline
    assert timeline.makespan >= m * (f + b + w) + (p - 1) * (f + b + w + 2 * send) - 1e-9
    for actions, given_actions in zip(timeline.spans, plan.ranks, strict=True):
        assert tuple(action for action, _, _ in actions) == given_actions
        assert all(before[2] <= after[1] for before, after in pairwise(actions))


def test_measured_spans_count_compute_only() -> None:
    forward, receive, backward = Action(Kind.F, 0), Action(Kind.RECV_B, 0), Action(Kind.B, 0)
    spans = [
        [(forward, 100.0, 101.0), (receive, 101.0, 104.0), (backward, 104.0, 106.0)],
        [(forward, 101.0, 103.0)],
        [],
    ]
    assert span_and_bubble(spans) == (6.0, 0.5)
    assert span_and_bubble([]) == (0.0, 0.0)


# --- drawing ---------------------------------------------------------------------------------------------------------


def boxes(text: str) -> dict[str, list[dict[str, str]]]:
    """The drawn actions of an SVG by their text form, each with its rectangle's attributes."""
    found: dict[str, list[dict[str, str]]] = {}
    for rect in ET.fromstring(text).iter(f"{SVG}rect"):
        for hint in rect:
            found.setdefault((hint.text or "").split(":")[0], []).append(dict(rect.attrib))
    return found


def test_svg_has_a_box_for_every_action_in_its_place() -> None:
    timeline = simulate(build("1f1b", 4, 8), UNIT)
    drawn = boxes(svg(timeline.spans))
    assert {name: len(rects) for name, rects in drawn.items()} == {
        f"{k}0.{mb}": 4 for k in "FB" for mb in range(8)
    }
    pixels = (830 - 64 - 22) / 33
    for rank, actions in enumerate(timeline.spans):
        for action, start, end in actions:
            rect = sorted(drawn[str(action)], key=lambda rect: float(rect["y"]))[rank]
            assert float(rect["x"]) == pytest.approx(64 + start * pixels, abs=0.01)
            assert float(rect["width"]) == pytest.approx((end - start) * pixels, abs=0.01)


def test_svg_shows_measured_seconds_as_milliseconds_from_zero() -> None:
    spans = [[(Action(Kind.F, 0), 1000.25, 1000.26), (Action(Kind.SEND_F, 0), 1000.26, 1000.28)]]
    text = svg(spans, title='a < b & "c"', subtitle="measured", unit="s")
    words = [element.text for element in ET.fromstring(text).iter(f"{SVG}text")]
    assert {'a < b & "c"', "measured", "rank 0", "time (ms)", "0", "10", "20"} <= set(words)
    drawn = boxes(text)
    assert float(drawn["SF0.0"][0]["height"]) < float(drawn["F0.0"][0]["height"])
    assert float(drawn["SF0.0"][0]["y"]) > float(drawn["F0.0"][0]["y"])


def test_svg_writes_microbatches_only_where_there_is_room() -> None:
    def numbers(microbatches: int) -> int:
        text = svg(simulate(build("gpipe", 2, microbatches), UNIT).spans, legend=False)
        return sum(
            element.get("fill") == "#ffffff" for element in ET.fromstring(text).iter(f"{SVG}text")
        )

    assert numbers(4) == 16
    assert numbers(400) == 0


def test_svg_of_nothing_is_still_a_picture() -> None:
    assert ET.fromstring(svg([])).tag.endswith("svg")
    assert boxes(svg([[], []])) == {}


@pytest.mark.parametrize(
    ("times", "idle", "slowest"),
    [
        ((1, 1, 1, 1), 3 / 11, 0),
        ((2, 1, 1, 1), 0.412, 0),
        ((1, 1, 2, 1), None, 2),
        ((1, 1, 1, 2), 0.474, 3),
    ],
)
def test_idle_shares_of_unequal_stages_tell_what_is_lost_and_which_stage_is_waited_for(
    times: tuple[float, ...], idle: float | None, slowest: int
) -> None:
    """The bubble of the longest rank says 5.9 % where the first of four stages takes twice as long, and 57.9 % where
    the last one does."""
    timeline = simulate(build("1f1b", 4, 8), Costs(times, times, times))
    shares = idle_shares(timeline.spans)
    busy = sum(end - start for row in timeline.spans for _, start, end in row)
    assert sum(shares) / 4 == pytest.approx(1 - busy / (4 * timeline.makespan))
    assert idle is None or sum(shares) / 4 == pytest.approx(idle, abs=5e-4)
    assert min(shares) == pytest.approx(shares[slowest])


def test_idle_shares_count_compute_alone_from_its_first_start_on_any_rank() -> None:
    def f(n: int) -> Action:
        return Action(Kind.F, n)

    receive = Action(Kind.RECV_F, 0)
    rows = [
        [(f(0), 10.0, 12.0), (f(1), 12.0, 14.0)],
        [(receive, 9.0, 12.0), (f(0), 12.0, 13.0)],
        [],
    ]
    assert idle_shares(rows) == pytest.approx([0.0, 0.75, 1.0])
    assert idle_shares([[], []]) == [0.0, 0.0]
