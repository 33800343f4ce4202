"""Partition of layers into stages, against all cuts there are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.formulas import Decoder, transformer_costs
from threed.models.partition import balanced, explicit, uniform


def brute_force(
    costs: Sequence[float],
    stages: int,
    rows: Sequence[Sequence[float]] | None = None,
    limit: float = 0,
) -> list[range] | None:
    """The best of all cuts: smallest maximum, then smallest sum of squares, then fewest layers on the last stages."""
    best: tuple[tuple[float, float, list[int]], list[range]] | None = None
    for inner in combinations(range(1, len(costs)), stages - 1):
        cut = [range(start, stop) for start, stop in pairwise((0, *inner, len(costs)))]
        if rows is not None and any(
            sum(row[part.start : part.stop]) > limit for row, part in zip(rows, cut, strict=True)
        ):
            continue
        sums = [sum(costs[part.start : part.stop]) for part in cut]
        key = (
            max(sums),
            sum(total * total for total in sums),
            [len(part) for part in reversed(cut)],
        )
        best = min(best, (key, cut), key=lambda found: found[0]) if best else (key, cut)
    return best[1] if best else None


def held_by(rows: Sequence[Sequence[int]]) -> Callable[[int, int, int], int]:
    """Bytes as a sum over the layers of a stage, by a row of them for each stage."""
    return lambda stage, start, stop: sum(rows[stage][start:stop])


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_balanced_is_the_best_of_all_cuts(data: st.DataObject) -> None:
    costs = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=9))
    stages = data.draw(st.integers(1, len(costs)))
    assert balanced(costs, stages) == brute_force(costs, stages)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_balanced_under_a_memory_bound_is_the_best_of_those_that_fit(data: st.DataObject) -> None:
    costs = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=8))
    stages = data.draw(st.integers(1, len(costs)))
    row = st.lists(st.integers(0, 5), min_size=len(costs), max_size=len(costs))
    per_stage = data.draw(st.booleans())
    rows = (
        data.draw(st.lists(row, min_size=stages, max_size=stages))
        if per_stage
        else [data.draw(row)] * stages
    )
    limit = data.draw(st.integers(0, 15))
    expected = brute_force(costs, stages, rows, limit)
    if expected is not None:
        assert balanced(costs, stages, held_by(rows), limit) == expected
    else:
        with pytest.raises(ValueError, match="no partition of"):
            balanced(costs, stages, held_by(rows), limit)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0, 1e18), min_size=1, max_size=8), st.integers(1, 8))
def test_balanced_takes_any_floats(costs: list[float], stages: int) -> None:
    stages = min(stages, len(costs))
    cut = balanced(costs, stages)
    assert [part.start for part in cut] == [0, *(part.stop for part in cut[:-1])]
    assert cut[-1].stop == len(costs)
    assert min(map(len, cut)) >= 1
    slowest = max(sum(costs[part.start : part.stop]) for part in cut)
    best = brute_force(costs, stages) or []
    assert slowest == pytest.approx(
        max(sum(costs[part.start : part.stop]) for part in best), rel=1e-12
    )


def test_rounding_makes_no_tie_and_breaks_none() -> None:
    """Sums of floats depend on the order in which they are formed; here they are exact."""
    assert balanced([0.1] * 6, 3) == [range(2), range(2, 4), range(4, 6)]
    assert balanced([1e16, 1.0, 1.0, 1e16], 2) == [range(2), range(2, 4)]


def test_ties_leave_the_last_stages_fewer_layers() -> None:
    assert [len(part) for part in balanced([1] * 7, 4)] == [2, 2, 2, 1]
    assert [len(part) for part in balanced([1] * 9, 4)] == [
        3,
        2,
        2,
        2,
    ]  # as even as can be, not 3 3 2 1
    assert [len(part) for part in balanced([1, 0, 0, 1], 2)] == [3, 1]
    assert [len(part) for part in balanced([1, 0, 1, 0, 1], 3)] == [2, 2, 1]


def test_the_vocabulary_head_costs_blocks_so_the_last_stage_gets_fewer() -> None:
    costs = transformer_costs(Decoder(hidden=256, heads=8, ffn=1024, vocab=16384, seq=256), 8)
    cut = balanced([cost.flops for cost in costs], 4)
    assert costs[-1].flops > 4 * costs[1].flops
    assert cut == [
        range(4),
        range(4, 7),
        range(7, 9),
        range(9, 10),
    ]  # embedding and 3 blocks, 3, 2, the head alone


def test_bytes_may_depend_on_the_stage_as_live_microbatches_do() -> None:
    """1F1B on 3 stages keeps 3, 2 and 1 micro-batches: a bound moves layers to the last stage."""
    rows = [[live] * 6 for live in (3, 2, 1)]
    assert [len(part) for part in balanced([1] * 6, 3)] == [2, 2, 2]
    assert [len(part) for part in balanced([1] * 6, 3, held_by(rows), 4)] == [1, 2, 3]


def test_refusals_say_what_to_do() -> None:
    with pytest.raises(ValueError, match="3 layers cannot fill 4 stages: use at most 3"):
        balanced([1, 1, 1], 4)
    with pytest.raises(ValueError, match="within 9 bytes: the best one needs 10 bytes"):
        balanced([1, 2, 3], 2, held_by([[5, 5, 5]] * 2), 9)
    with pytest.raises(ValueError, match=r"within 10\.5 MiB: the best one needs 11\.7 MiB\. Use"):
        balanced([1, 2], 2, held_by([[12272400, 5]] * 2), int(0.01025 * 2**30))
    with pytest.raises(ValueError, match=r"within 2048 bytes: the best one needs 2049 bytes\. Use"):
        balanced([1, 2], 2, held_by([[2049, 5]] * 2), 2048)
    with pytest.raises(ValueError, match="needs both"):
        balanced([1, 2, 3], 2, held_by([[5, 5, 5]] * 2))
    with pytest.raises(ValueError, match="negative"):
        balanced([1, -2, 3], 2)
    with pytest.raises(ValueError, match="at least one"):
        uniform(3, 0)


def test_uniform_counts_layers() -> None:
    assert [len(part) for part in uniform(11, 4)] == [3, 3, 3, 2]
    assert uniform(4, 4) == [range(n, n + 1) for n in range(4)]
    with pytest.raises(ValueError, match="3 layers cannot fill 4 stages"):
        uniform(3, 4)


def test_explicit_takes_what_is_given_and_nothing_else() -> None:
    assert explicit([3, 2, 2], 7, 3) == [range(3), range(3, 5), range(5, 7)]
    for counts, message in (
        ([3, 4], "partition 3,4: 2 counts for 3 stages"),
        ([3, 0, 4], "at least one layer"),
        ([3, 2, 1], "adds up to 6; the model has 7 layers"),
    ):
        with pytest.raises(ValueError, match=message):
            explicit(counts, 7, 3)
