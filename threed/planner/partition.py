"""Cut a list of layers into pipeline stages of consecutive layers, none empty, nothing left out.

Use: `balanced([cost.flops for cost in costs], stages=4)` gives four `range`s of layer indices.

`balanced` makes the slowest stage as fast as can be, exactly; `uniform` counts layers only; `explicit` takes your
counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from math import lcm

from threed.disk import in_units

# (stage, start, stop) -> the price of giving layers start .. stop - 1 to the stage; None where that is not allowed
Score = Callable[[int, int, int], int | None]
Held = Callable[[int, int, int], int]  # the same -> the bytes that the stage then holds


def balanced(
    costs: Sequence[float], stages: int, held: Held | None = None, limit: int | None = None
) -> list[range]:
    """Cut so that the largest sum of costs of a stage is the smallest possible.

    Of several best cuts it takes the most even one (the smallest sum of squares), and of several
    such the one with fewest layers on the last stage, then on the one before, and so on. Dynamic
    programming over exact integers, so that ties are ties; it takes stages x layers^2 steps.

    Args:
        held: returns the bytes that a stage holds with some layers.
        limit: the most bytes that a stage may hold.

    Raises:
        ValueError: there are fewer layers than stages, or no cut fits the limit.
    """
    _check_stages(len(costs), stages)
    if (held is None) != (limit is None):
        raise ValueError("a memory bound needs both: bytes of the layers, and the limit of a stage")
    total = _prefix_sums(costs)

    def price(stage: int, start: int, stop: int) -> int | None:
        fits = held is None or limit is None or held(stage, start, stop) <= limit
        return total[stop] - total[start] if fits else None

    slowest = _optimum(len(costs), stages, price, max)
    if slowest is None and held is not None and limit is not None:
        raise _no_cut(held, limit, len(costs), stages)
    assert slowest is not None  # without a limit there is a cut

    def square(stage: int, start: int, stop: int) -> int | None:
        paid = price(stage, start, stop)
        return None if paid is None or paid > slowest[0] else paid * paid

    best = _optimum(len(costs), stages, square, lambda a, b: a + b)
    return (best or slowest)[1]


def uniform(n: int, stages: int) -> list[range]:
    """Cut n layers so that counts differ by at most one, the larger ones first."""
    return explicit([n // stages + (stage < n % stages) for stage in range(stages)], n, stages)


def explicit(counts: Sequence[int], n: int, stages: int) -> list[range]:
    """Cut n layers into stages of the given counts.

    Raises ValueError unless there is one for each stage and they add up to n.
    """
    _check_stages(n, stages)
    text = ",".join(map(str, counts))
    if len(counts) != stages:
        raise ValueError(
            f"partition {text}: {len(counts)} counts for {stages} stages; give one for each"
        )
    if min(counts) < 1:
        raise ValueError(f"partition {text}: every stage needs at least one layer")
    if sum(counts) != n:
        raise ValueError(
            f"partition {text} adds up to {sum(counts)}; the model has {n} layers, embedding and head included"
        )
    stops = [sum(counts[: stage + 1]) for stage in range(stages)]
    return [range(stop - count, stop) for count, stop in zip(counts, stops, strict=True)]


def _check_stages(n: int, stages: int) -> None:
    if stages < 1:
        raise ValueError(f"{stages} stages: there must be at least one")
    if n < stages:
        raise ValueError(
            f"{n} layers cannot fill {stages} stages: use at most {n}, embedding and head included"
        )


def _prefix_sums(costs: Sequence[float]) -> list[int]:
    """Returns running sums as integers in a common unit: nothing is rounded."""
    exact = [Fraction(value) for value in costs]
    if any(value < 0 for value in exact):
        raise ValueError("a layer's cost is negative")
    unit = lcm(*(value.denominator for value in exact))
    return [0, *accumulate(int(value * unit) for value in exact)]


def _no_cut(held: Held, limit: int, n: int, stages: int) -> ValueError:
    """Returns the error if no cut fits the limit: which limit one would fit."""
    least = _optimum(n, stages, held, max)
    needed = least[0] if least else 0
    given, best = in_units(limit), in_units(needed)
    if given == best:  # the difference is less than the unit shows
        given, best = f"{limit} bytes", f"{needed} bytes"
    return ValueError(
        f"no cut of {n} layers into {stages} stages keeps every stage within {given}: the best one needs {best}."
        " Use more stages or tensor ranks, recomputation, or a smaller micro-batch"
    )


def _optimum(
    n: int, stages: int, score: Score, merge: Callable[[int, int], int]
) -> tuple[int, list[range]] | None:
    """The cheapest cut by the merged scores of its stages, of equal ones that with the latest cuts; None: no cut."""
    # best[stop]: of the first `stage` stages over the first `stop` layers, the price and where the last of them starts
    best: list[dict[int, tuple[int, int]]] = [{0: (0, 0)}]
    for stage in range(stages):
        row: dict[int, tuple[int, int]] = {}
        for stop in range(stage + 1, n - (stages - stage) + 2):
            options = []
            for start, (price, _) in best[-1].items():
                if start < stop and (added := score(stage, start, stop)) is not None:
                    options.append((merge(price, added), start))
            if options:
                row[stop] = min(options, key=lambda option: (option[0], -option[1]))
        best.append(row)
    if n not in best[-1]:
        return None
    cuts = [n]
    for row in reversed(best[1:]):
        cuts.append(row[cuts[-1]][1])
    cuts.reverse()
    return best[-1][n][0], [range(start, stop) for start, stop in pairwise(cuts)]
