"""Partitions a model by measured times: the fastest simulated step within a memory limit.

    division = divide(times, planner, {"uniform": (ranges, plan)}) # times: a LayerTimes per layer
    division.ranges                                                # layers of each stage
    division.text()                                                # imbalance, and predicted gain

Some schedules are planned from the times of the stages, so their plan depends on the partition.
`divide` partitions the model with the plan for equal stage times, then calls the planner with the
stage times of this partition.

The slowest stage alone does not determine the time of a step. Under 1F1B, the ranks also wait for
the first stage's forwards and the last stage's backwards. So partitions are compared by simulating
the schedule in use. The search starts from the partition that minimizes the time of the slowest
stage, and from each of the given baselines. As long as the simulated step becomes faster, the
search moves one layer over one stage boundary, or one layer over each of two boundaries.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, combinations, pairwise
from math import ceil, floor
from typing import NamedTuple, TypeVar

from threed.core.disk import in_units
from threed.models.partition import StageBytes, balanced
from threed.schedules.plan import Plan
from threed.schedules.simulation import Costs, Timeline, most_kept, peak_activations, simulate

Ranges = tuple[range, ...]
Planner = Callable[[Costs | None, float | None], Plan]
"""A function that returns a plan, called with the stage times (None: equal times) and the maximum
number of micro-batches in memory per rank (None: no limit)."""
# Maximum number of actions that one search simulates, over all partitions. The simulation of this
# number takes 1 or 2 seconds. A search may always simulate 20 partitions, even if this exceeds the
# maximum.
_ACTIONS = 400_000
_MIN_GAIN = 1e-9  # smallest relative improvement; smaller ones are attributed to rounding
_Result = TypeVar("_Result")


class LayerTimes(NamedTuple):
    """Seconds of one layer for one micro-batch.

    Attributes:
        forward: time of the forward.
        backward_input: time of the action I, which computes the gradient of the input. It includes
            the time of recomputation.
        backward_weight: time of the action W, which computes the gradients of the weights.
    """

    forward: float
    backward_input: float
    backward_weight: float


class LayerBytes(NamedTuple):
    """Bytes of one layer on one rank.

    Attributes:
        states: parameters, gradients and optimizer states.
        kept: activations of one micro-batch that are kept until its backward.
        workspace: temporary memory while the layer runs.
    """

    states: int
    kept: int
    workspace: int


@dataclass(frozen=True)
class Division:
    """A partition by measured times, with the plan of a step.

    Attributes:
        ranges: layers of each stage.
        plan: plan of a step, made from `times` if the schedule is planned from times.
        times: times of every layer.
        seconds: simulated time of a step's forwards and backwards.
        bubble: idle fraction of the rank with the longest span, as in `Timeline.bubble`.
        imbalance: time of computation of the slowest rank, divided by the mean over all ranks.
        gains: for each baseline, by name: the simulated time of a step with the baseline, divided
            by `seconds`.
        notices: remarks on the measurement, for the user.
        limit: maximum number of micro-batches in memory per rank for which the plan was made; None:
            no limit.
    """

    ranges: Ranges
    plan: Plan
    times: tuple[LayerTimes, ...]
    seconds: float
    bubble: float
    imbalance: float
    gains: Mapping[str, float]
    notices: tuple[str, ...] = ()
    limit: float | None = None

    @property
    def costs(self) -> Costs:
        """The times of the stages, as costs for a simulation."""
        return stage_costs(self.times, self.ranges)

    def text(self) -> str:
        """Returns a one-line summary."""
        counts = ",".join(str(len(part)) for part in self.ranges)
        gains = ", ".join(
            f"{gain:.2f}x {'faster than' if gain >= 1 else 'the speed of'} {name}"
            for name, gain in self.gains.items()
        )
        predicted = f"; predicted {gains}" if gains else ""
        return f"measured: {counts} layers; slowest rank {self.imbalance:.2f}x the mean{predicted}"


def stage_costs(times: Sequence[LayerTimes], ranges: Sequence[range]) -> Costs:
    """Returns the times of the stages of a partition, for simulation."""
    forward, back, weights = (
        tuple(sum(times[n][part] for n in stage) for stage in ranges) for part in range(3)
    )
    return Costs(forward, back, weights)


def times_by_flops(flops: Sequence[float], again: Sequence[int]) -> list[LayerTimes]:
    """Returns layer times in proportion to FLOPs, in arbitrary units.

    Args:
        flops: FLOPs per layer, the sum of forward and backward without recomputation. The actions
            F, I and W each take a third of them.
        again: indices of the layers that are recomputed, whose backward therefore includes a
            forward.
    """
    return [
        LayerTimes(cost / 3, cost / 3 * (1 + (number in again)), cost / 3)
        for number, cost in enumerate(flops)
    ]


def divide(
    times: Sequence[LayerTimes],
    planner: Planner,
    baselines: Mapping[str, tuple[Sequence[range], Plan]],
    layer_bytes: Sequence[LayerBytes] | None = None,
    limit: float | None = None,
) -> Division:
    """Returns the fastest partition that the search finds, with its plan.

    The search simulates the planner's plan for equal stage times. Afterwards the planner is called
    with the stage times of the partition that was found. The new plan is used unless it is slower.
    In simulation, no baseline that fits the limit is faster than the result. Ranks that pass the
    same times get the same result.

    Args:
        times: times of every layer.
        planner: returns a plan for stage times. If the plan does not fit the memory limit, the
            planner is called again with a limit on micro-batches.
        baselines: by name, (partition, plan) pairs. The search starts from these partitions, and
            the result is compared with them.
        layer_bytes: bytes of every layer; required if `limit` is given.
        limit: memory limit of a rank in bytes. None: no limit.

    Raises:
        ValueError: if there are fewer layers than stages, or if no partition fits the limit.
    """
    equal = planner(None, None)
    starts = [tuple(cut) for cut, _ in baselines.values()]
    most, found = _largest_limit(
        equal, lambda most: _cut(times, planner(None, most), starts, layer_bytes, limit)
    )

    def plan_for_times(most: float | None) -> Plan:
        plan = planner(found.costs, most)
        excess, _ = _Search(times, plan, layer_bytes, limit).price(found.ranges)
        if excess:
            raise ValueError(f"{excess:.0f} bytes above the limit")
        return plan

    # With two chunks per rank, the plan for the stage times of this partition may need more memory
    # than the plan for equal times. If it does not fit, the plan for equal times is kept.
    with contextlib.suppress(ValueError):
        within, plan = _largest_limit(equal, plan_for_times)
        timeline = simulate(plan, found.costs)
        if timeline.makespan <= found.seconds * (1 + _MIN_GAIN):
            found = replace(found, plan=plan, seconds=timeline.makespan, bubble=timeline.bubble)
            most = within
    gains = {
        name: simulate(plan, stage_costs(times, cut)).makespan / found.seconds
        for name, (cut, plan) in baselines.items()
    }
    return replace(found, gains=gains, limit=most)


def _cut(
    times: Sequence[LayerTimes],
    plan: Plan,
    starts: Sequence[Ranges],
    layer_bytes: Sequence[LayerBytes] | None,
    limit: float | None,
) -> Division:
    """Returns the fastest partition under one plan, searching from several starts.

    Raises:
        ValueError: if no partition fits the limit.
    """
    search = _Search(times, plan, layer_bytes, limit)
    best = min(map(search.descend, [search.balanced(), *starts]), key=search.price)
    excess, _ = search.price(best)
    if excess:
        raise ValueError(
            f"no partition was found that keeps every rank within {in_units(floor(limit or 0))}: the best one is"
            f" {in_units(ceil(excess))} above."
            " Use more stages or tensor ranks, recomputation, or a smaller micro-batch"
        )
    timeline, work = search.simulate(best), search.work(best)
    mean = sum(work) / len(work)
    imbalance = max(work) / mean if mean else 1.0
    return Division(best, plan, tuple(times), timeline.makespan, timeline.bubble, imbalance, {})


def _largest_limit(
    plan: Plan, attempt: Callable[[float | None], _Result]
) -> tuple[float | None, _Result]:
    """Returns the result of `attempt` for the largest limit on micro-batches at which it succeeds.

    Args:
        plan: the plan without a limit. Only limits below its number of micro-batches in memory are
            tried.
        attempt: called with None (no limit) first, then with limits found by bisection. It raises
            ValueError if it fails.

    Returns:
        The limit (None: no limit), and the result of `attempt` for it.

    Raises:
        ValueError: if `attempt` fails for a limit of one micro-batch.
    """
    try:
        return None, attempt(None)
    except ValueError:
        fits, found = plan.chunks, attempt(1.0)
    fails = round(max(peak_activations(plan, rank) for rank in range(plan.stages)) * plan.chunks)
    while fails - fits > 1:
        middle = (fits + fails) // 2
        try:
            fits, found = middle, attempt(middle / plan.chunks)
        except ValueError:
            fails = middle
    return fits / plan.chunks, found


class _Search:
    """A search over partitions of one model under one plan. Simulates each partition only once.

    A neighbor of a partition differs from it in one stage boundary, or in two, each moved by one
    layer.
    """

    def __init__(
        self, times: Sequence[LayerTimes], plan: Plan, layer_bytes: Sequence[LayerBytes] | None, limit: float | None
    ) -> None:  # fmt: skip
        if (layer_bytes is None) != (limit is None):
            raise ValueError(
                "a memory limit needs both the bytes of the layers and the limit of a rank"
            )
        self.times, self.plan, self.layer_bytes, self.limit = times, plan, layer_bytes or (), limit
        self.totals = [sum(layer) for layer in times]
        self.placement = [
            [plan.stage_of(rank, chunk) for chunk in range(plan.chunks)]
            for rank in range(plan.stages)
        ]
        # number of partitions that may still be simulated
        self.remaining = max(20, _ACTIONS // max(1, sum(map(len, plan.ranks))))
        self._prices: dict[Ranges, tuple[float, float]] = {}

    def balanced(self) -> Ranges:
        """Returns the partition that minimizes the time of the slowest stage.

        With one chunk per rank, partitions above the memory limit are excluded.
        """
        stages = self.plan.total_stages
        if self.limit is None or self.plan.chunks > 1:
            return tuple(balanced(self.totals, stages))
        return tuple(balanced(self.totals, stages, self._bytes_by_stage(), floor(self.limit)))

    def simulate(self, cut: Ranges) -> Timeline:
        """Returns the simulation of the plan with the partition's times."""
        return simulate(self.plan, stage_costs(self.times, cut))

    def work(self, cut: Ranges) -> list[float]:
        """Returns each rank's seconds of computation in a step."""
        stages = [sum(self.totals[n] for n in part) for part in cut]
        each = self.plan.microbatches / self.plan.ways
        return [
            each * sum(stages[stage] for stage in rank_stages) for rank_stages in self.placement
        ]

    def price(self, cut: Ranges) -> tuple[float, float]:
        """Returns (bytes above the memory limit, simulated time); a smaller pair is better."""
        if cut not in self._prices:
            self.remaining -= 1
            self._prices[cut] = self._excess(cut), self.simulate(cut).makespan
        return self._prices[cut]

    def descend(self, cut: Ranges) -> Ranges:
        """Moves to a better neighbor as long as there is one; returns the last partition."""
        while (better := self._better(cut)) is not None:
            cut = better
        return cut

    def _better(self, cut: Ranges) -> Ranges | None:
        """Returns a better partition among the neighbors, or None if no neighbor is better.

        Neighbors that cannot be faster are not simulated.
        """
        excess, seconds = self.price(cut)
        least = {neighbor: max(self.work(neighbor)) for neighbor in _neighbors(cut)}
        for neighbor in sorted(least, key=lambda neighbor: least[neighbor]):
            if self.remaining <= 0 or (not excess and least[neighbor] >= seconds):
                return None
            above, then = self.price(neighbor)
            if above < excess or (above == excess and then < seconds * (1 - _MIN_GAIN)):
                return neighbor
        return None

    def _excess(self, cut: Ranges) -> float:
        """Returns the bytes above the memory limit on the worst rank; 0 if all ranks fit."""
        if self.limit is None:
            return 0.0
        return max(0.0, *(self._rank_bytes(rank, [cut[stage] for stage in self.placement[rank]]) - self.limit
                          for rank in range(self.plan.stages)))  # fmt: skip

    def _rank_bytes(self, rank: int, chunks: Sequence[range]) -> int:
        """Returns the peak memory of a rank in bytes.

        Args:
            rank: pipeline rank.
            chunks: for each chunk of the rank, the indices of its layers.
        """
        layers = [self.layer_bytes[n] for chunk in chunks for n in chunk]
        kept = [sum(self.layer_bytes[n].kept for n in chunk) for chunk in chunks]
        states = sum(layer.states for layer in layers)
        return states + most_kept(self.plan, rank, kept) + max(layer.workspace for layer in layers)

    def _bytes_by_stage(self) -> StageBytes:
        """Returns a fast variant of `_rank_bytes` for plans with one stage per rank.

        The returned function has the parameters (stage, start, stop) and returns the peak bytes of
        a stage with the layers start .. stop - 1. It uses prefix sums over the layers.
        """
        ranks = {stages[0]: rank for rank, stages in enumerate(self.placement)}
        live = {stage: most_kept(self.plan, rank, [1]) for stage, rank in ranks.items()}
        states, kept = (
            [0, *accumulate(layer[part] for layer in self.layer_bytes)] for part in range(2)
        )

        def stage_bytes(stage: int, start: int, stop: int) -> int:
            workspace = max(layer.workspace for layer in self.layer_bytes[start:stop])
            return (
                states[stop] - states[start] + live[stage] * (kept[stop] - kept[start]) + workspace
            )

        return stage_bytes


def _neighbors(cut: Ranges) -> Iterator[Ranges]:
    """Yields the neighbors of a partition, as defined in `_Search`."""
    stops = [part.stop for part in cut]
    moves = [(at, step) for at in range(len(stops) - 1) for step in (-1, 1)]
    for chosen in [*combinations(moves, 1), *combinations(moves, 2)]:
        moved = list(stops)
        for at, step in chosen:
            moved[at] += step
        bounds = [0, *moved]
        if moved != stops and all(a < b for a, b in pairwise(bounds)):
            yield tuple(range(a, b) for a, b in pairwise(bounds))
