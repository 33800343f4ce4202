"""Cut a model by measured times: the cut whose step is the fastest on paper, within a limit of memory.

division = divide(times, planner, {"uniform": (cut, plan)})         # times: LayerTimes of every layer
division.ranges                                                     # layers of each stage
division.text()                                                     # what it leaves unequal, what it gains

A schedule that plans by times has no plan before the model is cut: `divide` cuts, then asks the
planner for a plan.

The slowest stage is not all that counts: under 1F1B the first stage's forwards and the last one's backwards are waited
for as well. So cuts are played out under the schedule in use. The search begins at the cuts that make the slowest stage
fastest, by time and by whatever else is given, and moves a layer over one boundary, or one over each of two, as long as
that helps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, combinations, pairwise
from math import ceil, floor
from typing import NamedTuple, TypeVar

from threed.disk import in_units
from threed.planner.partition import Held, balanced
from threed.schedules.plan import Plan
from threed.schedules.simulation import Costs, Timeline, most_kept, peak_activations, simulate

Ranges = tuple[range, ...]
Planner = Callable[[Costs | None, float | None], Plan]
"""Stages' times, and the most micro-batches that a rank may hold -> a plan; None: equal times, the schedule's own."""
_WORK = 400_000  # actions that a search plays out, about: a second or two
_BETTER = 1e-9  # relative; less is rounding
_Result = TypeVar("_Result")


class LayerTimes(NamedTuple):
    """Seconds of one layer for one micro-batch: forward, gradient of its input, gradient of its weights. What is
    computed again in the backward counts as the second."""

    forward: float
    backward_input: float
    backward_weight: float


class LayerBytes(NamedTuple):
    """Bytes of one layer on one rank: states, those kept of a micro-batch until its backward, and those needed beside
    them while it runs."""

    states: int
    kept: int
    beside: int


@dataclass(frozen=True)
class Division:
    """A cut by measured times, and the plan of a step.

    ranges: layers of each stage. plan: of a step; by these times where the schedule plans by times, and then for at
    most `limit` micro-batches on a rank, if that is not None. times: of every layer. seconds: of a step's forwards and
    backwards, as simulated. bubble: of them, the part in which a rank waits. imbalance: the slowest rank's work over
    the mean. gains: by name of another cut, its seconds over these. notices: what there is to say about the times.
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
        """The times of the stages."""
        return stage_costs(self.times, self.ranges)

    def text(self) -> str:
        """One line for people."""
        counts = ",".join(str(len(part)) for part in self.ranges)
        gains = ", ".join(
            f"{gain:.2f}x {'faster than' if gain >= 1 else 'the speed of'} {name}"
            for name, gain in self.gains.items()
        )
        predicted = f"; predicted {gains}" if gains else ""
        return f"measured: {counts} layers; slowest rank {self.imbalance:.2f}x the mean{predicted}"


def stage_costs(times: Sequence[LayerTimes], ranges: Sequence[range]) -> Costs:
    """What the stages of a cut cost a simulation."""
    forward, back, weights = (
        tuple(sum(times[n][part] for n in stage) for stage in ranges) for part in range(3)
    )
    return Costs(forward, back, weights)


def times_by_flops(flops: Sequence[float], again: Sequence[int]) -> list[LayerTimes]:
    """What layers would take if time went by FLOPs, in any unit.

    flops: forward and backward, which is twice a forward. again: numbers of the layers whose backward runs their
    forward once more.
    """
    return [
        LayerTimes(cost / 3, cost / 3 * (1 + (number in again)), cost / 3)
        for number, cost in enumerate(flops)
    ]


def divide(
    times: Sequence[LayerTimes],
    planner: Planner,
    others: Mapping[str, tuple[Sequence[range], Plan]],
    held: Sequence[LayerBytes] | None = None,
    limit: float | None = None,
) -> Division:
    """Returns the fastest cut that the search finds, with its plan.

    The search is by the plan for equal times. If the planner plans by times, the cut then gets the
    plan for its own times, if that is not slower. On paper no cut of `others` that fits is faster.
    The result is the same on every rank that has the same times.

    Args:
        planner: returns a plan for times of stages; where it does not fit, it is asked for fewer
            micro-batches.
        others: cuts to begin at and to compare with, with the plans that they would run, by name.
        held: bytes of the layers.
        limit: the most bytes that a rank may hold.

    Raises:
        ValueError: there are fewer layers than stages, or no cut fits the limit.
    """
    equal = planner(None, None)
    starts = [tuple(cut) for cut, _ in others.values()]
    most, found = _widest(equal, lambda most: _cut(times, planner(None, most), starts, held, limit))

    def plan_for_times(most: float | None) -> Plan:
        plan = planner(found.costs, most)
        excess, _ = _Search(times, plan, held, limit).price(found.ranges)
        if excess:
            raise ValueError(f"{excess:.0f} bytes above the limit")
        return plan

    # with two chunks a rank the search may need more than equal times do
    with contextlib.suppress(ValueError):
        within, plan = _widest(equal, plan_for_times)
        timeline = simulate(plan, found.costs)
        if timeline.makespan <= found.seconds * (1 + _BETTER):
            found = replace(found, plan=plan, seconds=timeline.makespan, bubble=timeline.bubble)
            most = within
    gains = {
        name: simulate(plan, stage_costs(times, cut)).makespan / found.seconds
        for name, (cut, plan) in others.items()
    }
    return replace(found, gains=gains, limit=most)


def _cut(
    times: Sequence[LayerTimes],
    plan: Plan,
    starts: Sequence[Ranges],
    held: Sequence[LayerBytes] | None,
    limit: float | None,
) -> Division:
    """Returns the fastest cut under one plan, by searches from several cuts; ValueError if none
    fits the limit."""
    search = _Search(times, plan, held, limit)
    best = min(map(search.descend, [search.balanced(), *starts]), key=search.price)
    excess, _ = search.price(best)
    if excess:
        raise ValueError(
            f"no cut was found that keeps every rank within {in_units(floor(limit or 0))}: the best one is"
            f" {in_units(ceil(excess))} above."
            " Use more stages or tensor ranks, recomputation, or a smaller micro-batch"
        )
    timeline, work = search.simulate(best), search.work(best)
    mean = sum(work) / len(work)
    imbalance = max(work) / mean if mean else 1.0
    return Division(best, plan, tuple(times), timeline.makespan, timeline.bubble, imbalance, {})


def _widest(plan: Plan, attempt: Callable[[float | None], _Result]) -> tuple[float | None, _Result]:
    """What `attempt` gives for the most micro-batches on a rank with which it does, and how many these are: None for
    those of `plan`. Raises its ValueError where it does not give anything for one."""
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
    """Cuts of one model under one plan, each played out once."""

    def __init__(
        self, times: Sequence[LayerTimes], plan: Plan, held: Sequence[LayerBytes] | None, limit: float | None
    ) -> None:  # fmt: skip
        if (held is None) != (limit is None):
            raise ValueError(
                "a memory bound needs both: bytes of the layers, and the limit of a rank"
            )
        self.times, self.plan, self.held, self.limit = times, plan, held or (), limit
        self.totals = [sum(layer) for layer in times]
        self.placement = [
            [plan.stage_of(rank, chunk) for chunk in range(plan.chunks)]
            for rank in range(plan.stages)
        ]
        # cuts that may still be played out
        self.left = max(20, _WORK // max(1, sum(map(len, plan.ranks))))
        self._prices: dict[Ranges, tuple[float, float]] = {}

    def balanced(self) -> Ranges:
        """The cut whose slowest stage is the fastest; with one chunk a rank, of those that fit."""
        stages = self.plan.total_stages
        if self.limit is None or self.plan.chunks > 1:
            return tuple(balanced(self.totals, stages))
        return tuple(balanced(self.totals, stages, self._held_by_stage(), floor(self.limit)))

    def simulate(self, cut: Ranges) -> Timeline:
        """The plan played out with the cut's times."""
        return simulate(self.plan, stage_costs(self.times, cut))

    def work(self, cut: Ranges) -> list[float]:
        """Seconds that each rank computes in a step."""
        stages = [sum(self.totals[n] for n in part) for part in cut]
        each = self.plan.microbatches / self.plan.ways
        return [each * sum(stages[stage] for stage in held) for held in self.placement]

    def price(self, cut: Ranges) -> tuple[float, float]:
        """Bytes above the limit, then the simulated time: the smaller the better."""
        if cut not in self._prices:
            self.left -= 1
            self._prices[cut] = self._excess(cut), self.simulate(cut).makespan
        return self._prices[cut]

    def descend(self, cut: Ranges) -> Ranges:
        """The best cut that small moves reach from this one."""
        while (better := self._better(cut)) is not None:
            cut = better
        return cut

    def _better(self, cut: Ranges) -> Ranges | None:
        """A neighbour that is better, if there is one; those that cannot be are not played out."""
        excess, seconds = self.price(cut)
        least = {other: max(self.work(other)) for other in _neighbours(cut)}
        for other in sorted(least, key=lambda other: least[other]):
            if self.left <= 0 or (not excess and least[other] >= seconds):
                return None
            above, then = self.price(other)
            if above < excess or (above == excess and then < seconds * (1 - _BETTER)):
                return other
        return None

    def _excess(self, cut: Ranges) -> float:
        if self.limit is None:
            return 0.0
        return max(0.0, *(self._held(rank, [cut[stage] for stage in self.placement[rank]]) - self.limit
                          for rank in range(self.plan.stages)))  # fmt: skip

    def _held(self, rank: int, chunks: Sequence[range]) -> int:
        """The most bytes that a rank holds with these chunks."""
        layers = [self.held[n] for chunk in chunks for n in chunk]
        kept = [sum(self.held[n].kept for n in chunk) for chunk in chunks]
        states = sum(layer.states for layer in layers)
        return states + most_kept(self.plan, rank, kept) + max(layer.beside for layer in layers)

    def _held_by_stage(self) -> Held:
        """The same as a function of stage and layers, where each rank has one stage."""
        ranks = {held[0]: rank for rank, held in enumerate(self.placement)}
        live = {stage: most_kept(self.plan, rank, [1]) for stage, rank in ranks.items()}
        states, kept = ([0, *accumulate(layer[part] for layer in self.held)] for part in range(2))

        def held(stage: int, start: int, stop: int) -> int:
            beside = max(layer.beside for layer in self.held[start:stop])
            return states[stop] - states[start] + live[stage] * (kept[stop] - kept[start]) + beside

        return held


def _neighbours(cut: Ranges) -> Iterator[Ranges]:
    """The cuts with one layer moved over one boundary, or one over each of two."""
    stops = [part.stop for part in cut]
    moves = [(at, step) for at in range(len(stops) - 1) for step in (-1, 1)]
    for chosen in [*combinations(moves, 1), *combinations(moves, 2)]:
        moved = list(stops)
        for at, step in chosen:
            moved[at] += step
        bounds = [0, *moved]
        if moved != stops and all(a < b for a, b in pairwise(bounds)):
            yield tuple(range(a, b) for a, b in pairwise(bounds))
