"""Partitions a list of layers into pipeline stages of consecutive layers; no stage is empty.

    balanced([cost.flops for cost in costs], stages=4)       # four ranges of layer indices

`balanced` minimizes the cost of the slowest stage, exactly. `uniform` makes stages with equal
numbers of layers, as far as possible. `explicit` uses given numbers of layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from math import lcm

from threed.core.disk import in_units
from threed.core.messages import counted

# (stage, start, stop) -> cost of layers start .. stop - 1 on the stage; None if not allowed
Score = Callable[[int, int, int], int | None]
StageBytes = Callable[[int, int, int], int]  # (stage, start, stop) -> bytes on the stage


def balanced(
    costs: Sequence[float],
    stages: int,
    stage_bytes: StageBytes | None = None,
    limit: int | None = None,
) -> list[range]:
    """Returns the partition with the smallest maximum of stage costs.

    Of several such partitions it returns the most even one (with the smallest sum of squared stage
    costs). Of several most even ones it returns the one with the fewest layers on the last stage,
    then on the stage before, and so on. The search is a dynamic program with stages × layers²
    steps. It computes with exact integers, so that equal costs compare as equal.

    Args:
        costs: cost of every layer.
        stages: number of stages.
        stage_bytes: returns the bytes on a stage with the layers start .. stop - 1; required if
            `limit` is given.
        limit: memory limit of a stage in bytes.

    Returns:
        The layers of each stage.

    Raises:
        ValueError: if there are fewer layers than stages, or if no partition fits the limit.
    """
    _check_stages(len(costs), stages)
    if (stage_bytes is None) != (limit is None):
        raise ValueError(
            "a memory limit needs both the bytes of the layers and the limit of a stage"
        )
    total = _prefix_sums(costs)

    def price(stage: int, start: int, stop: int) -> int | None:
        fits = stage_bytes is None or limit is None or stage_bytes(stage, start, stop) <= limit
        return total[stop] - total[start] if fits else None

    slowest = _optimum(len(costs), stages, price, max)
    if slowest is None and stage_bytes is not None and limit is not None:
        raise _no_cut(stage_bytes, limit, len(costs), stages)
    assert slowest is not None  # if there is no limit, some partition is always allowed

    def square(stage: int, start: int, stop: int) -> int | None:
        paid = price(stage, start, stop)
        return None if paid is None or paid > slowest[0] else paid * paid

    best = _optimum(len(costs), stages, square, lambda a, b: a + b)
    return (best or slowest)[1]


def uniform(n: int, stages: int) -> list[range]:
    """Partitions n layers into stages with sizes that differ by at most one, larger ones first."""
    return explicit([n // stages + (stage < n % stages) for stage in range(stages)], n, stages)


def explicit(counts: Sequence[int], n: int, stages: int) -> list[range]:
    """Partitions n layers into stages of the given sizes.

    Raises:
        ValueError: if `counts` does not have one positive size per stage, or if the sizes do not add
            up to n.
    """
    _check_stages(n, stages)
    text = ",".join(map(str, counts))
    if len(counts) != stages:
        raise ValueError(
            f"partition {text}: {counted(len(counts), 'count')} for {counted(stages, 'stage')}; give one for each"
        )
    if min(counts) < 1:
        raise ValueError(f"partition {text}: every stage needs at least one layer")
    if sum(counts) != n:
        raise ValueError(
            f"partition {text} adds up to {sum(counts)}; the model has {counted(n, 'layer')}, embedding and head included"
        )
    stops = [sum(counts[: stage + 1]) for stage in range(stages)]
    return [range(stop - count, stop) for count, stop in zip(counts, stops, strict=True)]


def _check_stages(n: int, stages: int) -> None:
    if stages < 1:
        raise ValueError(f"{stages} stages: there must be at least one")
    if n < stages:
        raise ValueError(
            f"{counted(n, 'layer')} cannot fill {stages} stages: use at most {n}, embedding and head included"
        )


def _prefix_sums(costs: Sequence[float]) -> list[int]:
    """Returns the prefix sums of the costs, from 0, as exact integers.

    All costs are multiplied by the same factor: the smallest one that makes every cost an integer.
    """
    exact = [Fraction(value) for value in costs]
    if any(value < 0 for value in exact):
        raise ValueError("a layer's cost is negative")
    unit = lcm(*(value.denominator for value in exact))
    return [0, *accumulate(int(value * unit) for value in exact)]


def _no_cut(stage_bytes: StageBytes, limit: int, n: int, stages: int) -> ValueError:
    """Returns the error for the case that no partition fits the limit.

    The message includes the smallest limit for which a partition exists.
    """
    least = _optimum(n, stages, stage_bytes, max)
    needed = least[0] if least else 0
    given, best = in_units(limit), in_units(needed)
    if given == best:  # both are equal after rounding, so the message gives both in bytes
        given, best = f"{limit} bytes", f"{needed} bytes"
    return ValueError(
        f"no partition of {counted(n, 'layer')} into {counted(stages, 'stage')}"
        f" keeps every stage within {given}: the best one needs {best}."
        " Use more stages or tensor ranks, recomputation, or a smaller micro-batch"
    )


def _optimum(
    n: int, stages: int, score: Score, merge: Callable[[int, int], int]
) -> tuple[int, list[range]] | None:
    """Returns the smallest score and a partition with it; None if no partition is allowed.

    The score of a partition combines the scores of its stages by `merge`. Of several partitions
    with the smallest score, the one with the fewest layers on the last stage is chosen; the earlier
    stages are chosen by the same rule.
    """
    # best[stage][stop] is a pair: the smallest score of a partition of the first `stop` layers into
    # `stage` stages, and the first layer of the last stage of this partition

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
