"""The zero-bubble schedules: published tables and formulas, legality, and what the planner promises."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import zero_bubble_peers
from threed import schedules
from threed.schedules import (
    Costs,
    Plan,
    Timeline,
    build,
    lower,
    one_f_one_b,
    simulate,
    validate,
    zb_auto,
    zb_h1,
    zb_h2,
)
from threed.schedules.list_scheduling import Priority, list_orders
from threed.schedules.split_backward import Flow, fill, one_chunk, to_plan, v_shape

UNIT = Costs(1, 1, 1)
CHUNK = Costs(2, 2, 2)  # with two chunks a rank every action takes 1

# arXiv 2401.10241, tables 5 and 9: stages, micro-batches, T_F, T_B, T_W, T_comm (ms), bubble rates of 1F1B, H1, H2
PUBLISHED = [
    (8, 24, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1585, 0.1083),
    (8, 32, 18.513, 18.086, 9.331, 0.626, 0.1985, 0.1242, 0.0837),
    (8, 64, 18.546, 18.097, 9.321, 0.762, 0.1240, 0.0674, 0.0444),
    (8, 24, 29.718, 29.444, 19.927, 0.527, 0.2347, 0.1323, 0.0698),
    (8, 32, 29.802, 29.428, 19.530, 0.577, 0.1898, 0.1045, 0.0559),
    (8, 64, 29.935, 29.621, 19.388, 0.535, 0.1091, 0.0554, 0.0294),
]
LIMITS: dict[str, Callable[[int], int]] = {
    "zb-h1": lambda p: p,
    "zb-h2": lambda p: 2 * p - 1,
    "zb-v": lambda p: p,
    "v-half": lambda p: (p + 2) // 2,
    "v-min": lambda p: (p + 4) // 3,
    "zb-auto": lambda p: 2 * p - 1,
}


def peak(timeline: Timeline) -> float:
    return max(timeline.peak_activations)


# --- one chunk a rank ------------------------------------------------------------------------------------------------


def test_bubble_rates_are_those_of_2401_10241_to_four_decimals() -> None:
    for p, m, f, b, w, send, *rates in PUBLISHED:
        played = [
            simulate(plan(p, m), Costs(f, b, w, send=send)) for plan in (one_f_one_b, zb_h1, zb_h2)
        ]
        assert [round(timeline.bubble, 4) for timeline in played] == rates


def test_unit_times_on_4_stages_and_8_microbatches_waste_3_of_27() -> None:
    timeline = simulate(build("zb-h1", 4, 8), UNIT)
    assert timeline.bubble == pytest.approx(3 / 27)
    assert timeline.messages == (8, 16, 16, 8)


def test_zb_h1_in_full() -> None:
    assert str(build("zb-h1", 3, 3)) == (
        "rank 0: F0.0 F0.1 F0.2 I0.0 W0.0 I0.1 W0.1 I0.2 W0.2\n"
        "rank 1: F0.0 F0.1 I0.0 F0.2 I0.1 W0.0 I0.2 W0.1 W0.2\n"
        "rank 2: F0.0 I0.0 F0.1 I0.1 F0.2 I0.2 W0.0 W0.1 W0.2"
    )


def test_bubble_and_peak_of_zb_h1_and_zb_h2_are_the_formulas() -> None:
    """(p-1)(F+B-W) and (p-1)(F+B-2W), exact where W is no longer than F and B; peaks p and 2p-1 from m = 2p-1 on."""
    for p in (2, 3, 5, 8, 16, 32):
        for f, b, w in ((1, 1, 1), (2, 3, 1)):
            m, costs = 2 * p + 3, Costs(f, b, w)
            one, two = simulate(zb_h1(p, m), costs), simulate(zb_h2(p, m), costs)
            assert one.bubble * one.span == pytest.approx((p - 1) * (f + b - w))
            assert two.bubble * two.span == pytest.approx((p - 1) * (f + b - 2 * w), abs=1e-9)
            assert (peak(one), peak(two)) == (p, 2 * p - 1)


# --- two chunks a rank, in a V ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["zb-v", "v-half", "v-min"])
def test_peaks_of_v_shapes_are_the_formulas(name: str) -> None:
    """p, floor((p+2)/2) and floor((p+4)/3) micro-batches (arXiv 2405.15362); no more than there are micro-batches."""
    for p in (1, 2, 3, 4, 5, 7, 9, 12, 16):
        for m in (1, 2 * p):
            timeline = simulate(build(name, p, m), CHUNK)
            assert peak(timeline) == min(m, LIMITS[name](p))
            assert len(set(timeline.peak_activations)) == 1 or m == 1


def test_zb_v_does_not_wait_where_f_i_and_w_are_equal() -> None:
    """From 2p micro-batches on no rank waits; from p on none ends later than it must (arXiv 2401.10241, section 6)."""
    for p in (2, 3, 4, 7, 8, 13, 16):
        for m in (p, 2 * p, 3 * p):
            timeline = simulate(build("zb-v", p, m), CHUNK)
            assert timeline.makespan == 6 * m + p - 1
            assert timeline.bubble == 0 or m < 2 * p


def test_v_half_and_v_min_wait_at_most_half_and_two_thirds_of_what_1f1b_does() -> None:
    """The papers say about a half and two thirds, an approximate reference: bounds, not formulas. 1F1B: 6(p-1)."""
    for p in (2, 3, 4, 5, 6, 7, 10, 13):
        half, least = (simulate(build(name, p, 2 * p), CHUNK) for name in ("v-half", "v-min"))
        assert half.bubble * half.span <= 3 * (p - 1) + 1e-9
        assert least.bubble * least.span <= 4 * (p - 1) + 1e-9


def test_the_v_placement_has_first_and_last_stage_on_rank_0() -> None:
    for name in ("zb-v", "v-half", "v-min"):
        assert build(name, 3, 4).placement == ((0, 5), (1, 4), (2, 3))
    assert zb_auto(3, 4, chunks=2).placement == ((0, 5), (1, 4), (2, 3))


# --- legality --------------------------------------------------------------------------------------------------------


def check(name: str, p: int, m: int) -> None:
    plan = build(name, p, m)
    validate(plan)
    validate(lower(plan))
    validate(lower(plan, gathers=True))
    assert plan.name == name
    assert peak(simulate(plan, UNIT)) <= min(m, LIMITS[name](p))


@pytest.mark.parametrize("name", LIMITS)
def test_small_sizes_are_legal_and_lower_without_deadlock(name: str) -> None:
    for p in (1, 2, 3, 5):
        for m in (1, 2, 3, p + 4):
            check(name, p, m)


@pytest.mark.grid
@pytest.mark.parametrize("name", LIMITS)
def test_every_size_is_legal_and_lowers_without_deadlock(name: str) -> None:
    for p in range(1, 13):
        for m in (*range(1, p + 3), 2 * p, 3 * p + 1):
            check(name, p, m)


@pytest.mark.grid
def test_formulas_hold_up_to_32_ranks() -> None:
    for p in range(1, 33):
        for m in (2 * p, 3 * p + 1):
            played = {
                name: simulate(build(name, p, m), CHUNK) for name in ("zb-v", "v-half", "v-min")
            }
            assert {name: peak(timeline) for name, timeline in played.items()} == {
                name: LIMITS[name](p) for name in played
            }
            assert played["zb-v"].bubble == 0
            assert played["v-half"].bubble * played["v-half"].span <= 3 * (p - 1) + 1e-9
            assert played["v-min"].bubble * played["v-min"].span <= 4 * (p - 1) + 1e-9
            assert played["zb-v"].makespan == 6 * m + p - 1


# --- the planner -----------------------------------------------------------------------------------------------------

times = st.floats(0.1, 10)


@st.composite
def costs_of(draw: st.DrawFn, stages: int) -> Costs:
    """One time for all stages of the model, or one for each."""
    each = st.tuples(*[times] * stages)
    kinds = [draw(st.one_of(times, each)) for _ in range(3)]
    return Costs(*kinds, send=draw(st.sampled_from([0.0, 0.3, 4.0])))


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 2), st.floats(1, 9), st.data())
def test_plans_of_zb_auto_are_legal_within_their_limit_and_never_behind(
    p: int, m: int, chunks: int, limit: float, data: st.DataObject
) -> None:
    costs = data.draw(costs_of(p * chunks))
    plan = zb_auto(p, m, costs, limit, chunks)
    validate(plan)
    validate(lower(plan))
    timeline = simulate(plan, costs)
    assert peak(timeline) <= limit
    assert plan == zb_auto(p, m, costs, limit, chunks)
    for other in (one_f_one_b, zb_h1, zb_h2) if chunks == 1 else ():
        known = simulate(other(p, m), costs)
        assert peak(known) > limit or timeline.makespan <= known.makespan


def test_zb_auto_waits_for_nothing_where_memory_and_times_allow() -> None:
    """ZB-2p of arXiv 2401.10241, section 3, with equal times: the first rank's work and the way to the last one."""
    assert simulate(build("zb-auto", 4, 12), UNIT).makespan == 12 * 3 + 3
    assert simulate(zb_auto(4, 12, chunks=2), CHUNK).makespan == 12 * 6 + 3


def test_zb_auto_reaches_the_least_possible_makespan_at_measured_times() -> None:
    """With 2p micro-batches of memory: the way to the last rank, and all its work (arXiv 2401.10241, ZB-2p)."""
    for p, m, f, b, w, send, *_ in (PUBLISHED[0], PUBLISHED[3]):
        costs = Costs(f, b, w, send=send)
        least = (p - 1) * (f + send) + m * (f + b + w)
        assert simulate(zb_auto(p, m, costs, limit=2 * p), costs).makespan == pytest.approx(
            least, rel=1e-9
        )


def test_zb_auto_leaves_forwards_out_where_messages_are_long() -> None:
    """What the heuristic of sail-sg/zero-bubble-pipeline-parallelism reaches with this memory; 334 without skipping."""
    costs = Costs(10, 14, 10, send=5)
    assert simulate(zb_auto(4, 8, costs, limit=6), costs).makespan <= 324
    assert simulate(zb_auto(6, 12, costs, limit=9), costs).makespan <= 498


def test_zb_auto_refuses_what_it_cannot_plan() -> None:
    with pytest.raises(ValueError, match=r"limit is 0\.5; a rank holds at least 1 micro-batch"):
        zb_auto(2, 4, limit=0.5)
    with pytest.raises(ValueError, match="chunks is 3; it plans 1, or 2 in the shape of a V"):
        schedules.build("zb-auto", 2, 4, chunks=3)
    with pytest.raises(ValueError, match="3 values for the 2 stages"):
        zb_auto(2, 4, Costs((1.0, 2.0, 3.0), 1, 1))


def test_the_comparison_with_sail_sg_refuses_a_folder_that_is_not_theirs(tmp_path: Path) -> None:
    with pytest.raises(
        SystemExit,
        match=r"has no zbv_greedy\.py: give the path of a working tree of https://github",
    ):
        zero_bubble_peers.main([str(tmp_path)])


# --- placing W -------------------------------------------------------------------------------------------------------


def filled(patient: bool, limit: int = 4) -> Plan | None:
    """1F1B's order on two ranks where I comes back late, with W longer than the waits."""
    flow = Flow.of(one_chunk(2), 3, Costs(1, 1, 3))
    found = fill(flow, [[0, 0, 3, 0, 3, 3], [1, 2, 1, 2, 1, 2]], limit, patient)
    if found is not None:
        assert found.makespan == simulate(to_plan("test", flow, found), Costs(1, 1, 3)).makespan
    return found and to_plan("test", flow, found)


def test_w_fills_waits_or_is_left_out_of_short_ones_where_memory_allows() -> None:
    eager, patient, tight = filled(False), filled(True), filled(True, limit=2)
    assert str(eager).splitlines()[1] == "rank 1: F0.0 I0.0 F0.1 I0.1 F0.2 I0.2 W0.0 W0.1 W0.2"
    assert str(patient).splitlines()[0] == "rank 0: F0.0 F0.1 I0.0 F0.2 I0.1 I0.2 W0.0 W0.1 W0.2"
    assert str(tight).splitlines()[0] == "rank 0: F0.0 F0.1 I0.0 W0.0 F0.2 I0.1 I0.2 W0.1 W0.2"
    assert filled(False, limit=1) is None


def test_list_scheduling_says_where_ranks_wait_for_each_other() -> None:
    """Where the first chunk may take all memory, no forward of the second can run."""
    flow = Flow.of(v_shape(2), 4, CHUNK)
    everything = Priority(tuple(range(8)), 6, (4,) * 4, (4,) * 4)
    assert (
        list_orders(flow, Priority(tuple(range(8)), 6, (1, 1, 2, 2), (1, 1, 2, 2)), 2) is not None
    )
    assert list_orders(flow, everything, 2) is None
