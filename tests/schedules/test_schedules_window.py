"""The order of gathers, runs and releases within a pass, and across passes, for any units and any number ahead."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from threed.schedules.prefetch_order import Step, first_units, walk

units_of_a_pass = st.lists(st.integers(0, 50), unique=True, max_size=12)
aheads = st.integers(0, 14)


def play(units: list[int], ahead: int, keep_last: bool, whole: set[int]) -> list[int]:
    """Does what the steps of a pass say to `whole`; how many units were whole at once, step by step.

    Raises AssertionError where a unit is gathered though the same pass has it already, or runs without being whole.
    """
    counts, gathered = [], set[int]()
    for step in walk(units, ahead, keep_last):
        assert gathered.isdisjoint(step.gather), f"gathered twice: {step}"
        gathered.update(step.gather)
        whole |= set(step.gather)
        counts.append(len(whole))
        assert step.run in whole, f"not whole: {step}"
        if step.release:
            whole.remove(step.run)
    assert gathered == set(units)
    return counts


def test_a_pass_in_full() -> None:
    assert list(walk((5, 3, 8, 1), ahead=1)) == [
        Step((5, 3), 5, True), Step((8,), 3, True), Step((1,), 8, True), Step((), 1, True),
    ]  # fmt: skip
    assert list(walk((5, 3), ahead=0, keep_last=True)) == [
        Step((5,), 5, True),
        Step((3,), 3, False),
    ]
    assert list(walk((), ahead=1, keep_last=True)) == []


@given(units_of_a_pass, aheads, st.booleans())
def test_every_unit_runs_once_in_order_while_it_is_whole(
    units: list[int], ahead: int, keep_last: bool
) -> None:
    assert [step.run for step in walk(units, ahead, keep_last)] == units
    gathers = [unit for step in walk(units, ahead, keep_last) for unit in step.gather]
    assert gathers == units  # in the same order: what is needed first is on its way first
    whole: set[int] = set()
    play(units, ahead, keep_last, whole)
    assert whole == (set(units[-1:]) if keep_last else set())


@given(units_of_a_pass, aheads, st.booleans())
def test_the_window_is_full_and_no_larger(units: list[int], ahead: int, keep_last: bool) -> None:
    """While a unit runs it and the next `ahead` are whole, as far as there are so many: no more, and no fewer."""
    counts = play(units, ahead, keep_last, set())
    assert counts == [min(ahead + 1, len(units) - at) for at in range(len(units))]


@given(units_of_a_pass, aheads)
def test_the_first_units_are_those_that_the_first_step_gathers(
    units: list[int], ahead: int
) -> None:
    first = next(iter(walk(units, ahead)), Step((), -1, True))
    assert first_units(units, ahead) == first.gather == tuple(units[: ahead + 1])


@given(
    st.lists(st.integers(0, 50), unique=True, min_size=1, max_size=9),
    aheads,
    st.lists(st.booleans(), max_size=8),
)
def test_passes_that_turn_round_hold_no_more(
    units: list[int], ahead: int, backward: list[bool]
) -> None:
    """Forwards and backwards in any order, the unit where they turn kept, the first ones begun before the pass."""
    whole: set[int] = set()
    passes = [units[::-1] if back else units for back in backward]
    for here, there in pairwise([*passes, []]):
        keep = here[-1:] == there[:1]
        assert max(play(here, ahead, keep, whole)) <= ahead + 1
        assert whole == (set(there[:1]) if keep else set())
        whole |= set(first_units(there, ahead))
        assert len(whole) <= ahead + 1
    assert whole == set()


@pytest.mark.parametrize("ahead", [0, 1, 2, 7])
def test_a_pass_over_nothing_gathers_nothing(ahead: int) -> None:
    """Such as the backward of a stage whose layers all read no weights there."""
    assert first_units((), ahead) == ()
    assert play([], ahead, True, set()) == []
