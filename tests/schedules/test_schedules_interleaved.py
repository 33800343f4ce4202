"""Interleaved 1F1B against the formulas of 2104.04473, for any number of micro-batches."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from threed.config import Config
from threed.config.checks import find_refusals
from threed.config.resolution import resolve
from threed.schedules import Costs, build, interleaved, lower, simulate, validate
from threed.schedules.one_forward_one_backward import rounds
from threed.schedules.registry import own_chunks

times = st.floats(0.05, 10)


def test_four_stages_with_eight_microbatches_begin_as_in_2104_04473() -> None:
    """Rounds of four, chunk by chunk; 2(p-s-1) + (v-1)p forwards before forward and backward alternate."""
    first = build("interleaved", 4, 8).ranks[0]
    assert " ".join(map(str, first[:20])) == (
        "F0.0 F0.1 F0.2 F0.3 F1.0 F1.1 F1.2 F1.3 F0.4 F0.5 F0.6 B1.0 F0.7 B1.1 F1.4 B1.2 F1.5 B1.3 F1.6 B0.0"
    )
    last = build("interleaved", 4, 8).ranks[3]
    assert " ".join(map(str, last[:10])) == "F0.0 F0.1 F0.2 F0.3 F1.0 B1.0 F1.1 B1.1 F1.2 B1.2"


def test_bubble_and_peak_follow_2104_04473_where_microbatches_are_a_multiple_of_the_stages() -> (
    None
):
    """Bubble time (p-1)(F+B+W)/v; peak (pv+p-1)/v on the first rank, once there are so many micro-batches."""
    for p in (2, 3, 4, 5, 8, 16, 32):
        for v in (1, 2, 3, 4):
            for m in {p, 2 * p, 3 * p} if p < 16 else {2 * p}:
                timeline = simulate(build("interleaved", p, m, v), Costs(1.0, 1.5, 0.5))
                assert timeline.makespan == pytest.approx(3.0 * (m + (p - 1) / v), rel=1e-12), (
                    p,
                    v,
                    m,
                )
                assert timeline.bubble == pytest.approx((p - 1) / (v * m + p - 1), rel=1e-12)
                peak = min(m * v, (v - 1) * p + 2 * p - 1) / v
                assert max(timeline.peak_activations) == timeline.peak_activations[0] == peak
    assert (
        simulate(build("interleaved", 8, 64, 3), Costs(1, 1, 1)).peak_activations[0]
        == (8 * 3 + 8 - 1) / 3
    )


def test_unit_times_on_4_stages_and_8_microbatches_waste_3_of_19() -> None:
    assert simulate(build("interleaved", 4, 8), Costs(1, 1, 1)).bubble == pytest.approx(
        3 / 19, abs=1e-15
    )


def test_messages_cross_every_boundary_but_the_ends_of_the_model() -> None:
    for p, m, v in ((2, 3, 2), (4, 9, 3), (1, 2, 3)):
        messages = simulate(build("interleaved", p, m, v), Costs(1, 1, 1)).messages
        assert sum(messages) == 2 * m * (p * v - 1) * (p > 1)  # pv-1 each way a micro-batch


def test_the_bubble_is_the_same_for_any_number_of_microbatches() -> None:
    """Rounds of at least p are all as good; fewer than p micro-batches wait for what is missing, at every chunk."""
    for p, v in ((2, 2), (3, 3), (4, 2), (7, 2), (8, 3), (16, 2)):
        for m in range(1, 3 * p + 2):
            plan = build("interleaved", p, m, v)
            waits = p - 1 + (v - 1) * max(0, p - m)
            timeline = simulate(plan, Costs(1.0, 1.5, 0.5))
            assert timeline.makespan == pytest.approx(3.0 * (m + waits / v), rel=1e-12), (p, v, m)
            largest = rounds(p, m)[0]
            assert timeline.peak_activations[0] == min(m * v, (v - 1) * largest + 2 * p - 1) / v
            if p <= 8:
                validate(lower(plan))


def test_rounds_are_even_and_at_least_as_large_as_there_are_ranks() -> None:
    assert rounds(4, 8) == [4, 4]
    assert rounds(4, 11) == [6, 5]
    assert rounds(4, 3) == [3]
    for p in range(1, 9):
        for m in range(1, 40):
            sizes = rounds(p, m)
            assert sum(sizes) == m
            assert sorted(sizes, reverse=True) == sizes
            assert sizes[0] - sizes[-1] <= 1
            assert sizes[-1] >= min(p, m)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 6), st.integers(1, 14), st.integers(1, 4), st.floats(0, 3))
def test_any_size_and_any_costs_play_out_and_lower(
    data: st.DataObject, p: int, m: int, v: int, send: float
) -> None:
    """Chunks that are not equal only cost time: no plan stalls, and none is faster than its slowest rank."""
    plan = build("interleaved", p, m, v)
    validate(plan)
    validate(lower(plan))
    validate(lower(plan, gathers=True))
    stages = st.lists(times, min_size=p * v, max_size=p * v).map(tuple)
    f, i, w = data.draw(stages), data.draw(stages), data.draw(stages)
    timeline = simulate(plan, Costs(f, i, w, send=send))
    work = [m * sum(f[s] + i[s] + w[s] for s in range(rank, p * v, p)) for rank in range(p)]
    assert timeline.makespan >= max(work) - 1e-9
    busy = [sum(end - start for _, start, end in spans) for spans in timeline.spans]
    assert busy == pytest.approx(work)


def test_chunks_are_two_unless_chosen() -> None:
    assert build("interleaved", 2, 4).chunks == own_chunks("interleaved") == 2
    assert build("interleaved", 3, 7, chunks=5).total_stages == 15
    with pytest.raises(
        ValueError, match="schedule interleaved: chunks is 0; it must be at least 1"
    ):
        interleaved(2, 4, 0)
    config = Config.model_validate({"parallel": {"schedule": "interleaved", "pp": 2}})
    assert resolve(config, vocab=64).parallel.chunks == 2
    for chunks in (None, 1, 2, 3):
        group = {"schedule": "interleaved", "pp": 2, "chunks": chunks}
        assert find_refusals(Config.model_validate({"parallel": group})) == []
