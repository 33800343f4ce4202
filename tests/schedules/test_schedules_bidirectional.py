"""Chimera, DualPipe and DualPipeV against their published bubbles and activations, and what they refuse."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from threed.schedules import Costs, Kind, Plan, Timeline, build, lower, simulate, svg, validate

SVG = "{http://www.w3.org/2000/svg}"
ALL = ("chimera", "dualpipe", "dualpipev")
times = st.floats(0.05, 10)


def idle(timeline: Timeline) -> float:
    """How long the rank waits that waits longest, from the start of the step to its end."""
    return max(
        timeline.makespan - sum(end - start for _, start, end in spans) for spans in timeline.spans
    )


def sizes(name: str, stages: range) -> Iterator[tuple[int, int]]:
    """Stages and micro-batches that a schedule takes, the least number and some more."""
    for p in stages:
        if name == "dualpipev":
            yield from ((p, m) for m in (2 * p, 2 * p + 1, 3 * p + 2))
        elif p % 2 == 0:
            least = 2 if name == "chimera" else 2 * p
            yield from ((p, m) for m in sorted({least, 2 * p, 2 * p + 2, 3 * p + p % 4}))


def flips(plan: Plan) -> list[list[str]]:
    """What each rank does, seen from the other end of a bidirectional plan."""
    half = plan.microbatches // 2

    def turn(text: str) -> str:
        if "+" in text:
            return "+".join(map(turn, text.split("+")))
        kind, chunk, mb = text[0], int(text[1]), int(text[3:])
        return f"{kind}{1 - chunk}.{(mb + half) % plan.microbatches}"

    return [[turn(str(action)) for action in actions] for actions in reversed(plan.ranks)]


# --- what they are ---------------------------------------------------------------------------------------------------


def test_chimera_on_four_stages_in_full() -> None:
    """Two micro-batches each way, the copy of the model for the way down on chunk 0 and the other on chunk 1."""
    assert str(build("chimera", 4, 4)) == (
        "rank 0: F0.0 F0.1 F1.2 B1.2 F1.3 B1.3 B0.0 B0.1\n"
        "rank 1: F0.0 F1.2 F0.1 F1.3 B1.2 B0.0 B1.3 B0.1\n"
        "rank 2: F1.2 F0.0 F1.3 F0.1 B0.0 B1.2 B0.1 B1.3\n"
        "rank 3: F1.2 F1.3 F0.0 B0.0 F0.1 B0.1 B1.2 B1.3"
    )


def test_chimera_begins_the_next_unit_in_the_holes_of_the_last() -> None:
    assert str(build("chimera", 4, 8)).splitlines()[0] == (
        "rank 0: F0.0 F0.1 F1.4 B1.4 F1.5 B1.5 B0.0 F0.2 B0.1 F0.3 F1.6 B1.6 F1.7 B1.7 B0.2 B0.3"
    )


def test_dualpipe_on_two_ranks_in_full() -> None:
    """One rank to the turn on either side: pairs but for the first, and the last backward of each way in two parts."""
    assert str(build("dualpipe", 2, 4)).splitlines()[0] == (
        "rank 0: F0.0 F1.2 F0.1 B1.2 F1.3+B0.0 B1.3 I0.1 W0.1"
    )


def test_dualpipe_has_the_phases_of_the_published_example() -> None:
    """Eight ranks and twenty micro-batches, the size that DeepSeek-V3's report draws: how often each rank does what."""
    plan = build("dualpipe", 8, 20)
    for rank, actions in enumerate(plan.ranks):
        r = min(rank, 7 - rank)
        count = {kind: sum(action.kind is kind for action in actions) for kind in Kind}
        pairs = 2 * (10 - 8 + r + 1) + (4 - r - 1) - (r == 3)
        assert count[Kind.FB] == pairs
        assert count[Kind.F] == 20 - pairs
        assert count[Kind.I] == count[Kind.W] == 2 * (4 - r - 1) + r + 1
        assert count[Kind.B] == 20 - pairs - count[Kind.I]
        assert [action.kind for action in actions[-r - 1 :]] == [Kind.W] * (r + 1)


def test_both_ends_of_a_bidirectional_plan_do_the_same() -> None:
    for name in ("chimera", "dualpipe"):
        for p, m in ((2, 4), (4, 12), (6, 14), (8, 20)):
            plan = build(name, p, m)
            assert [[str(action) for action in actions] for actions in plan.ranks] == flips(plan)


def test_places_of_stages() -> None:
    for name in ("chimera", "dualpipe"):
        plan = build(name, 4, 8)
        assert plan.placement == ((0, 3), (1, 2), (2, 1), (3, 0))
        assert (plan.ways, plan.total_stages) == (2, 4)
        assert [plan.locate(0, way) for way in (0, 1)] == [(0, 0), (3, 1)]
        assert {action.microbatch for action in plan.ranks[0] if action.chunk == 1 and action.kind is Kind.B} <= {
            4, 5, 6, 7,
        }  # fmt: skip
    plan = build("dualpipev", 4, 8)
    assert plan.placement == ((0, 7), (1, 6), (2, 5), (3, 4))
    assert (plan.ways, plan.total_stages) == (1, 8)


@pytest.mark.parametrize("name", ALL)
def test_every_size_is_legal_and_lowers_without_deadlock(name: str) -> None:
    for p, m in sizes(name, range(1, 9)):
        plan = build(name, p, m)
        validate(plan)
        validate(lower(plan))
        validate(lower(plan, gathers=True))


@pytest.mark.grid
@pytest.mark.parametrize("name", ALL)
def test_larger_sizes_are_legal_and_lower_without_deadlock(name: str) -> None:
    for p, m in sizes(name, range(9, 33)):
        validate(lower(build(name, p, m)))


@pytest.mark.parametrize("name", ALL)
def test_messages_cross_every_boundary_but_a_turn(name: str) -> None:
    for p, m in sizes(name, range(1, 7)):
        plan = build(name, p, m)
        # of 2p stages, without the turn on the last rank
        each_way = 2 * (p - 1) if name == "dualpipev" else p - 1
        assert sum(simulate(plan, Costs(1, 1, 1)).messages) == 2 * m * each_way


# --- published figures -----------------------------------------------------------------------------------------------


def test_bubble_of_chimera_is_that_of_2107_06925() -> None:
    """D-2 slots where a backward takes one slot too, for any number of units: (D-2)/(2m+D-2) of the step."""
    for d in range(2, 33, 2):
        for units in (1, 2, 3) if d < 16 else (1, 2):
            m = d * units
            timeline = simulate(build("chimera", d, m), Costs(1, 0.5, 0.5))
            assert timeline.makespan == 2 * m + d - 2
            assert timeline.bubble == pytest.approx((d - 2) / (2 * m + d - 2), abs=1e-15)


def test_bubble_of_chimera_where_the_backward_takes_longer() -> None:
    """The other published ratio, (D-2)/(1.5m+D-2) with backwards twice as long, holds for one unit. Each further unit
    waits (D-2)(b-f) more, which the paper calls the bubbles in the middle of direct concatenation."""
    for d in range(2, 33, 2):
        timeline = simulate(build("chimera", d, d), Costs(1, 1, 1))
        assert timeline.bubble == pytest.approx((d - 2) / (1.5 * d + d - 2), abs=1e-15)
    for d in (2, 4, 8, 12):
        for units in (1, 2, 5):
            for f, b in ((1.0, 1.5), (1.0, 3.0), (2.0, 1.0)):
                timeline = simulate(build("chimera", d, d * units), Costs(f, b / 2, b / 2))
                waits = (d - 2) * (max(f, b) + (units - 1) * abs(b - f))
                assert timeline.makespan == pytest.approx(d * units * (f + b) + waits, rel=1e-12), (
                    d,
                    units,
                    f,
                    b,
                )


def test_a_unit_of_chimera_that_is_not_full_waits_for_what_is_missing() -> None:
    for d in (2, 4, 6, 8):
        for m in range(2, 3 * d + 1, 2):
            timeline = simulate(build("chimera", d, m), Costs(1, 0.5, 0.5))
            assert timeline.makespan == 2 * m + d - 2 + (-m % d)


def test_activations_of_chimera_lie_between_those_of_2107_06925() -> None:
    for d in range(2, 33, 2):
        for m in (d, 2 * d, 2 * d + 2):
            peaks = simulate(build("chimera", d, m), Costs(1, 1, 1)).peak_activations
            assert (min(peaks), max(peaks)) == (d / 2 + 1, d)
            assert peaks[0] == peaks[-1] == d / 2 + 1


EXACT = [
    (1, 1, 1, 3.0),
    (1, 1, 1, 2.2),
    (1, 1, 0.5, 2.0),
]  # F, I, W, F&B of one stage: F = I and W no longer


def test_bubble_and_activations_of_dualpipe_are_the_published_ones() -> None:
    """(PP/2-1)(F&B+B-3W) and PP+1, on PP stages of the model; of DualPipeV a rank has two of them."""
    for name, chunk in (("dualpipe", 1.0), ("dualpipev", 2.0)):
        for pp in range(2, 33, 2):
            p = int(pp // chunk)
            for m in (2 * p, 3 * p + p % 2) if pp <= 16 else (2 * p,):
                plan = build(name, p, m)
                for f, i, w, both in EXACT if pp <= 8 else EXACT[:2]:
                    costs = Costs(f * chunk, i * chunk, w * chunk, overlapped=both * chunk)
                    timeline = simulate(plan, costs)
                    assert idle(timeline) == pytest.approx(
                        (pp / 2 - 1) * (both + i - 2 * w), abs=1e-9
                    ), (name, p, m)
                    assert {peak * chunk for peak in timeline.peak_activations} == {pp + 1}


def test_dualpipe_of_8_stages_in_unit_times_waits_6_slots() -> None:
    timeline = simulate(build("dualpipe", 8, 20), Costs(1, 1, 1, overlapped=3))
    assert (timeline.makespan, idle(timeline)) == (66, 6)
    assert timeline.bubble == pytest.approx(6 / 66)
    assert timeline.peak_activations == (9,) * 8


def test_pairs_that_overlap_well_save_their_time() -> None:
    apart = simulate(build("dualpipev", 4, 16), Costs(2, 2, 2))
    overlapped = simulate(build("dualpipev", 4, 16), Costs(2, 2, 2, overlapped=4))
    assert overlapped.makespan < 0.75 * apart.makespan


@pytest.mark.parametrize(
    ("f", "i", "w", "both"), [(1, 1.5, 1, 3.5), (1, 1.2, 0.9, 2.4), (1, 0.9, 1.1, 3.0)]
)
def test_elsewhere_the_published_bubble_of_dualpipe_is_approximate(
    f: float, i: float, w: float, both: float
) -> None:
    """Approximate: where F, I and W differ the formula is off, by (P/2-1)(|F-I| + 2|F-W|) at most."""
    for p in (4, 8, 16):
        expected = (p / 2 - 1) * (both + i - 2 * w)
        waits = idle(simulate(build("dualpipe", p, 2 * p), Costs(f, i, w, overlapped=both)))
        assert abs(waits - expected) <= (p / 2 - 1) * (abs(f - i) + 2 * abs(f - w)) + 1e-9


# --- any costs -------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(ALL), st.integers(1, 3), st.integers(0, 9), st.floats(0, 3))
def test_any_size_and_any_costs_play_out_and_lower(
    data: st.DataObject, name: str, half: int, more: int, send: float
) -> None:
    p = half if name == "dualpipev" else 2 * half
    m = 2 + 2 * more if name == "chimera" else 2 * p + (more if name == "dualpipev" else 2 * more)
    plan = build(name, p, m)
    validate(plan)
    validate(lower(plan))
    stages = st.lists(times, min_size=plan.total_stages, max_size=plan.total_stages).map(tuple)
    f, i, w = data.draw(stages), data.draw(stages), data.draw(stages)
    costs = Costs(f, i, w, send=send)
    timeline = simulate(plan, costs)
    work = [
        sum(f[stage] + i[stage] + w[stage] for stage in held) * m / plan.ways
        for held in plan.placement
    ]  # each way of a bidirectional plan has half of the micro-batches
    busy = [sum(end - start for _, start, end in spans) for spans in timeline.spans]
    assert busy == pytest.approx(work)
    assert timeline.makespan >= max(work) - 1e-9
    assert simulate(lower(plan), costs) == timeline


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "stages", "microbatches", "message"),
    [
        ("chimera", 3, 6, r"schedule chimera: 3 stages; .* must be even: use 4 stages"),
        (
            "chimera",
            4,
            7,
            r"schedule chimera: 7 micro-batches; .* must be even: use 8 micro-batches",
        ),
        ("dualpipe", 1, 4, r"schedule dualpipe: 1 stage; .* must be even: use 2 stages"),
        (
            "dualpipe",
            4,
            9,
            r"schedule dualpipe: 9 micro-batches; .* must be even: use 10 micro-batches",
        ),
        (
            "dualpipe",
            4,
            1,
            r"schedule dualpipe: 1 micro-batch; 4 stages need at least 8: use 8 micro-batches",
        ),
        (
            "dualpipe",
            4,
            6,
            r"schedule dualpipe: 6 micro-batches; 4 stages need at least 8: use 8 micro-batches",
        ),
        (
            "dualpipev",
            3,
            5,
            r"schedule dualpipev: 5 micro-batches; 3 stages need at least 6: use 6 micro-batches",
        ),
        (
            "dualpipev",
            1,
            1,
            r"schedule dualpipev: 1 micro-batch; 1 stage needs at least 2: use 2 micro-batches",
        ),
    ],
)
def test_sizes_that_a_schedule_cannot_have_are_refused(
    name: str, stages: int, microbatches: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build(name, stages, microbatches)


@pytest.mark.parametrize("name", ALL)
def test_they_have_two_chunks_on_a_rank(name: str) -> None:
    assert build(name, 2, 4, chunks=2) == build(name, 2, 4)
    with pytest.raises(ValueError, match=f"schedule {name}: chunks is 3; this schedule has 2"):
        build(name, 2, 4, chunks=3)


# --- drawing ---------------------------------------------------------------------------------------------------------


def test_a_pair_is_drawn_as_two_halves_and_the_other_direction_is_paler() -> None:
    plan = build("dualpipe", 2, 4)
    text = svg(simulate(plan, Costs(1, 1, 1)).spans, ways=plan.ways)
    root = ET.fromstring(text)
    drawn = [
        rect
        for rect in root.iter(f"{SVG}rect")
        if (rect.findtext(f"{SVG}title") or "").startswith("F1.3+B0.0:")
    ]
    upper, lower_half = sorted(drawn, key=lambda rect: float(rect.attrib["y"]))
    assert float(upper.attrib["height"]) == float(lower_half.attrib["height"])
    assert float(upper.attrib["y"]) + float(upper.attrib["height"]) == float(lower_half.attrib["y"])
    assert [upper.attrib[key] for key in ("x", "width")] == [
        lower_half.attrib[key] for key in ("x", "width")
    ]
    fills = {
        (rect.findtext(f"{SVG}title") or "").split(":")[0]: rect.attrib["fill"]
        for rect in root.iter(f"{SVG}rect")
    }
    assert fills["F0.0"] == fills["F0.1"] == "#4477aa"
    assert upper.attrib["fill"] == fills["F1.2"] == "#a2bbd4"  # half white
    assert lower_half.attrib["fill"] == "#3f9c5a"
    words = {element.text for element in root.iter(f"{SVG}text")}
    assert {"forward with backward", "paler: the other direction", "idle"} <= words


def test_later_chunks_are_paler() -> None:
    text = svg(simulate(build("interleaved", 2, 4, 3), Costs(1, 1, 1)).spans)
    assert all(fill in text for fill in ("#4477aa", "#7399bf", "#a2bbd4", "paler: later chunks"))
    assert "paler" not in svg(simulate(build("1f1b", 2, 4), Costs(1, 1, 1)).spans)
