"""Covering sets of configurations: few and cheap cases in which every pair of settings that can meet does meet.

space = Space(SETTINGS, make, cost)
cases = space.covering(seed=0)        # every pair of settings
cases = space.touching(seed=0)        # every setting, for what other tests look at by pairs
"""

from __future__ import annotations

import functools
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

Case = TypeVar("Case")
Values = Mapping[str, object]
Pair = tuple[object, ...]


@dataclass(frozen=True)
class Space(Generic[Case]):
    """All cases of some settings.

    settings: what each may be. make: the case of one value each, in which what has no meaning is set to one value, so
    that duplicates are seen; None where there is no such case. A case has its settings as attributes, and is hashable.
    cost: what a case takes, in any unit. shape: what else there is to cover, one thing a case. together: of how many
    settings the values are to meet.
    """

    settings: Mapping[str, Sequence[object]]
    make: Callable[[Values], Case | None]
    cost: Callable[[Case], float]
    shape: Callable[[Case], object] = lambda case: None
    together: int = 2

    def pairs(self, case: Case) -> set[Pair]:
        """The pairs of settings that a case covers, and its shape."""
        items = [(name, getattr(case, name)) for name in self.settings]
        meeting = itertools.combinations(items, self.together)
        return {("shape", self.shape(case)), *(tuple(itertools.chain(*some)) for some in meeting)}

    def drawn(self, draw: random.Random, fixed: Values, count: int) -> Iterator[Case]:
        """Cases at random, but for some settings; as many draws as `count`, which may come to nothing."""
        for _ in range(count):
            case = self.make(
                {name: draw.choice(options) for name, options in self.settings.items()}
                | dict(fixed)
            )
            if case is not None:
                yield case

    def attained(self, draw: random.Random, count: int) -> dict[Pair, list[Case]]:
        """Every pair that some case covers, and such cases; `count` draws for each two values of two settings."""
        # in the order of drawing: a set's differs from process to process
        cases = dict[Case, None]()
        for (a, first), (b, second) in itertools.combinations(self.settings.items(), 2):
            for one, other in itertools.product(first, second):
                cases |= dict.fromkeys(self.drawn(draw, {a: one, b: other}, count))
        found: dict[Pair, list[Case]] = {}
        for case in cases:
            for pair in self.pairs(case):
                found.setdefault(pair, []).append(case)
        return found

    def touching(self, seed: int) -> list[Case]:
        """Very few cases, in which every setting has every value once, and every shape occurs."""
        return replace(self, together=1).covering(seed)

    def covering(self, seed: int, count: int = 12, sample: int = 400) -> list[Case]:
        """Returns few and cheap cases that cover every pair that any case does.

        Greedy: of a random sample the case with most new pairs for its cost. Then each case, the most expensive first,
        is replaced with the cheapest one that covers the pairs that no other case covers.
        """
        draw = random.Random(seed)
        pairs, cost = functools.cache(self.pairs), functools.cache(self.cost)
        found = self.attained(draw, count)
        missing, chosen = set(found), list[Case]()
        while missing:
            able = found[min(missing, key=repr)]
            some = draw.sample(able, min(len(able), sample))
            chosen.append(max(some, key=lambda case: len(pairs(case) & missing) / cost(case)))
            missing -= pairs(chosen[-1])
        return self._cheaper(chosen, found)

    def _cheaper(self, cases: list[Case], found: Mapping[Pair, list[Case]]) -> list[Case]:
        """Returns cases that cover the same pairs; `found` has the candidates by pair."""
        pairs = functools.cache(self.pairs)
        cost = functools.cache(self.cost)
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
