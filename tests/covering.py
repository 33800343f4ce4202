"""Covering sets: few and cheap cases that contain every possible pair of two settings' values.

space = Space(SETTINGS, make, cost)
cases = space.covering(seed=0)        # contain every pair of values
cases = space.touching(seed=0)        # contain every value; for tests whose pairs other tests cover

@pytest.mark.parametrize(("shape", "bias"), in_turns(3, SHAPES, (False, True)))    # a third of all runs always
@pytest.mark.parametrize(("shape", "bias"), some_always(CASES, 3))                 # a third of listed cases always
"""

from __future__ import annotations

import functools
import itertools
import operator
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import pytest

Case = TypeVar("Case")
Values = Mapping[str, object]
Pair = tuple[object, ...]


def in_turns(step: int, *options: Sequence[object]) -> list[Any]:
    """Returns all combinations of options as parameters of a test.

    Every `step`-th combination runs always, the others only with the grid.

    Raises:
        AssertionError: if a value occurs in no combination that runs always.
    """
    every = list(itertools.product(*options))
    for values, *seen in zip(options, *every[::step], strict=True):
        assert all(value in seen for value in values), f"choose another step than {step}"
    marks = [() if number % step == 0 else pytest.mark.grid for number in range(len(every))]
    return [pytest.param(*values, marks=mark) for values, mark in zip(every, marks, strict=True)]


def some_always(cases: Sequence[tuple[Any, ...]], step: int) -> list[Any]:
    """Returns cases as parameters of a test: some run always, the others only with the grid.

    Always run every `step`-th case, and each further case with a value that no earlier one of them has.
    """
    always = set(range(0, len(cases), step))
    seen = {pair for number in always for pair in enumerate(cases[number])}
    for number, case in enumerate(cases):
        if not seen.issuperset(enumerate(case)):
            always.add(number)
            seen.update(enumerate(case))
    return [
        pytest.param(*case, marks=() if number in always else pytest.mark.grid)
        for number, case in enumerate(cases)
    ]


@dataclass(frozen=True)
class Space(Generic[Case]):
    """All cases of some settings.

    Attributes:
        settings: name of each setting -> its values.
        make: returns the case for one value per setting, or None if there is no such case. It sets
            settings without effect to a fixed value, so that equal cases are recognized. A case is
            hashable, and has the settings as attributes.
        cost: returns the cost of a case, in any unit.
        shape: returns another property of a case; every value of it is covered too.
        together: number of settings whose combinations of values are covered; 2 means pairs.
        paired: names of the settings whose combinations are covered; None means all. Of the other
            settings, each value is covered.
    """

    settings: Mapping[str, Sequence[object]]
    make: Callable[[Values], Case | None]
    cost: Callable[[Case], float]
    shape: Callable[[Case], object] = lambda case: None
    together: int = 2
    paired: Sequence[str] | None = None

    def pairs(self, case: Case) -> set[Pair]:
        """Returns the combinations of values that a case covers, and its shape."""
        items = [(name, getattr(case, name)) for name in self.settings]
        single = [] if self.paired is None else items
        if self.paired is not None:
            items = [item for item in items if item[0] in self.paired]
        meeting = itertools.combinations(items, self.together)
        # the first way is much faster, and the usual one
        joined = (
            itertools.starmap(operator.add, meeting)
            if self.together == 2
            else (tuple(itertools.chain(*some)) for some in meeting)
        )
        return {("shape", self.shape(case)), *single, *joined}

    def drawn(self, draw: random.Random, fixed: Values, count: int) -> Iterator[Case]:
        """Yields up to `count` random cases, with given values of some settings.

        There are `count` draws; a draw for which `make` returns None yields no case.
        """
        for _ in range(count):
            case = self.make(
                {name: draw.choice(options) for name, options in self.settings.items()}
                | dict(fixed)
            )
            if case is not None:
                yield case

    def attained(
        self, draw: random.Random, count: int, pairs: Callable[[Case], set[Pair]] | None = None
    ) -> dict[Pair, list[Case]]:
        """Returns every pair that some case covers, with the cases that cover it.

        The cases are drawn at random, `count` times for each combination of two settings' values.
        `pairs` is `self.pairs`, possibly with a cache.
        """
        # a dict, because its order is the same in every process
        cases, pairs = dict[Case, None](), pairs or self.pairs
        for (a, first), (b, second) in itertools.combinations(self.settings.items(), 2):
            for one, other in itertools.product(first, second):
                cases |= dict.fromkeys(self.drawn(draw, {a: one, b: other}, count))
        found: dict[Pair, list[Case]] = {}
        for case in cases:
            for pair in pairs(case):
                found.setdefault(pair, []).append(case)
        return found

    def touching(self, seed: int) -> list[Case]:
        """Returns very few cases in which every value of every setting and every shape occurs."""
        return replace(self, together=1, paired=None).covering(seed)

    def covering(self, seed: int, count: int = 12, sample: int = 400) -> list[Case]:
        """Returns few and cheap cases that cover every pair that any case covers.

        The search is greedy: from a random sample, it takes the case with the most new pairs per
        cost. Then it goes through the cases, the most expensive first, and replaces each by the
        cheapest case that covers the pairs that only this case covers.
        """
        draw = random.Random(seed)
        pairs, cost = functools.cache(self.pairs), functools.cache(self.cost)
        found = self.attained(draw, count, pairs)
        missing, chosen = set(found), list[Case]()
        for first in sorted(found, key=repr):
            if first not in missing:
                continue
            able = found[first]
            some = draw.sample(able, min(len(able), sample))
            chosen.append(max(some, key=lambda case: len(pairs(case) & missing) / cost(case)))
            missing -= pairs(chosen[-1])
        return _cheaper(chosen, found, pairs, cost)


def _cheaper(
    cases: list[Case],
    found: Mapping[Pair, list[Case]],
    pairs: Callable[[Case], set[Pair]],
    cost: Callable[[Case], float],
) -> list[Case]:
    """Returns cheaper cases that cover the same pairs as `cases`.

    Args:
        cases: the cases to replace.
        found: for every pair, all known cases that cover it.
        pairs: returns the pairs that a case covers.
        cost: returns the cost of a case.
    """
    times, chosen = Counter(pair for case in cases for pair in pairs(case)), list(cases)
    changed = True
    while changed:
        changed = False
        for case in sorted(chosen, key=cost, reverse=True):
            only = [pair for pair in pairs(case) if times[pair] == 1]
            fewest = min((found[pair] for pair in only), key=len, default=[])
            able = [
                other
                for other in fewest
                if cost(other) < cost(case) and pairs(other).issuperset(only)
            ]
            if only and not able:
                continue
            chosen.remove(case)
            times.subtract(pairs(case))
            for better in [min(able, key=cost)] if only else []:
                chosen.append(better)
                times.update(pairs(better))
            changed = True
    return chosen
