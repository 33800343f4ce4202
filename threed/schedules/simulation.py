"""How long a plan takes, how much of that is waiting, and how much each rank must remember.

Use: `simulate(build("1f1b", stages=4, microbatches=8), Costs(forward=1, backward_input=1, backward_weight=1)).bubble`.

Phases: play the plan out with its costs (play.py), then read makespan, bubble, peak activations and messages off the
times. `span_and_bubble` and `idle_shares` do the same for measured times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import fmean

from threed.schedules.action import COMPUTE, Action, Kind
from threed.schedules.plan import Plan
from threed.schedules.play import Span, Spans, play

Cost = float | tuple[float, ...]


@dataclass(frozen=True)
class Costs:
    """What compute and messages cost, in any unit of time.

    A number is the time of one micro-batch over all chunks of a rank: one of V chunks takes 1/V of it. A tuple has
    the time of every stage of the model instead (stages x chunks values, in model order), for stages that are not
    equal. `send` is the latency of one message, which keeps neither rank busy. `overlapped` is a forward that runs
    together with a full backward, in schedules that pair them (default: their sum); of two stages, their mean.
    """

    forward: Cost
    backward_input: Cost
    backward_weight: Cost
    send: float = 0.0
    overlapped: Cost | None = None

    def __post_init__(self) -> None:
        for name, cost in vars(self).items():
            times = cost if isinstance(cost, tuple) else (0.0 if cost is None else cost,)
            if not times or not all(0 <= time < math.inf for time in times):  # nor is nan
                raise ValueError(
                    f"costs: {name} is {cost}; times are finite and not negative, and a tuple has one for every stage"
                )

    def duration(self, action: Action, rank: int, plan: Plan) -> float:
        """How long a rank's compute action takes."""
        if action.beside is not None and self.overlapped is not None:
            return self._of_pair(self.overlapped, action, rank, plan)
        parts = {
            Kind.F: (self.forward,),
            Kind.B: (self.backward_input, self.backward_weight),
            Kind.I: (self.backward_input,),
            Kind.W: (self.backward_weight,),
        }
        return sum(
            _of_stage(cost, plan.stage_of(rank, part.chunk), plan)
            for part in action.parts
            for cost in parts[part.kind]
        )

    def _of_pair(self, cost: Cost, pair: Action, rank: int, plan: Plan) -> float:
        """Of a forward with a full backward; without the time of the weights' gradient where that comes later."""
        stages = [plan.stage_of(rank, part.chunk) for part in pair.parts]
        whole = sum(_of_stage(cost, stage, plan) for stage in stages) / 2
        later = pair.parts[1].kind is Kind.I
        return max(0.0, whole - later * _of_stage(self.backward_weight, stages[1], plan))


def _of_stage(cost: Cost, stage: int, plan: Plan) -> float:
    if not isinstance(cost, tuple):
        return cost * plan.ways / plan.chunks
    if len(cost) != plan.total_stages:
        raise ValueError(
            f"costs: {len(cost)} values for the {plan.total_stages} stages of plan {plan.name}"
        )
    return cost[stage]


@dataclass(frozen=True)
class Timeline:
    """A plan played out.

    `makespan` is the time from start to end; `span` the longest time from first start to last end of one rank, and
    `bubble` the part of it in which that rank does not compute (the convention of arXiv 2401.10241, section 5).
    `peak_activations`: per rank, from the start of F to the end of B or W, in micro-batches over all chunks of the
    rank. `messages`: per rank, sends in one step. `spans`: per rank, (action, start, end) of every compute action.
    """

    makespan: float
    span: float
    bubble: float
    peak_activations: tuple[float, ...]
    messages: tuple[int, ...]
    spans: Spans


def simulate(plan: Plan, costs: Costs) -> Timeline:
    """Play the plan out with these costs; communication in it is ignored, since messages keep no rank busy.

    Raises ValueError naming rank and action where the plan is not legal or stalls.
    """
    spans = play(plan, lambda action, rank: costs.duration(action, rank, plan), costs.send)
    span, bubble = span_and_bubble(spans)
    return Timeline(
        makespan=max((actions[-1][2] for actions in spans if actions), default=0.0),
        span=span,
        bubble=bubble,
        peak_activations=tuple(peak_activations(plan, rank) for rank in range(plan.stages)),
        messages=tuple(_messages(plan, rank) for rank in range(plan.stages)),
        spans=spans,
    )


def span_and_bubble(spans: Sequence[Sequence[Span]]) -> tuple[float, float]:
    """The longest first-start-to-last-end of one rank, and the part of it in which that rank does not compute.

    Only compute actions count, so measured times of transfers and waits may be among them. Of ranks with equal spans
    the first.
    """
    extents = []
    for actions in spans:
        busy = [(start, end) for action, start, end in actions if action.kind in COMPUTE]
        if busy:
            extents.append((max(end for _, end in busy) - min(start for start, _ in busy), busy))
    span, busy = max(extents, key=lambda extent: extent[0], default=(0.0, []))
    return span, (span - sum(end - start for start, end in busy)) / span if span > 0 else 0.0


def idle_shares(spans: Sequence[Sequence[Span]]) -> list[float]:
    """Returns per rank the share of a step in which it does not compute.

    A step lasts from the first start to the last end of the compute actions of all ranks. The mean of the shares is the
    share of time lost, also for unequal stages, for which the bubble of `span_and_bubble` is misleading. The rank with
    the smallest share is the one that the others wait for.
    """
    rows = [
        [(start, end) for action, start, end in actions if action.kind in COMPUTE]
        for actions in spans
    ]
    times = [time for row in rows for time in row]
    length = max(end for _, end in times) - min(start for start, _ in times) if times else 0.0
    return [
        1 - sum(end - start for start, end in row) / length if length > 0 else 0.0 for row in rows
    ]


def replay(plan: Plan, measured: Sequence[Sequence[Span]]) -> Spans:
    """Returns the plan played out with the times that its actions took, messages taking none: what was to be expected.

    measured: per rank, (action, start, end), communication passed over. An action takes the mean of those of its kind
    on its chunk. Raises ValueError where a rank's actions are not those of the plan.
    """
    means = [_means(spans) for spans in measured]

    def duration(action: Action, rank: int) -> float:
        if _sort(action) not in means[rank]:
            raise ValueError(f"plan {plan.name}: rank {rank}: no {action} was measured")
        return means[rank][_sort(action)]

    return play(plan, duration)


def _sort(action: Action) -> tuple[tuple[Kind, int], ...]:
    return tuple((part.kind, part.chunk) for part in action.parts)


def _means(spans: Sequence[Span]) -> dict[tuple[tuple[Kind, int], ...], float]:
    times: dict[tuple[tuple[Kind, int], ...], list[float]] = {}
    for action, start, end in spans:
        times.setdefault(_sort(action), []).append(end - start)
    return {sort: fmean(found) for sort, found in times.items()}


def peak_activations(plan: Plan, rank: int) -> float:
    """Returns the most micro-batches, over all chunks of the rank, whose activations it holds at once.

    In a bidirectional plan a micro-batch is on half of the chunks.
    """
    return float(Fraction(most_kept(plan, rank, [1] * plan.chunks) * plan.ways, plan.chunks))


def most_kept(plan: Plan, rank: int, kept: Sequence[int]) -> int:
    """Returns the most that a rank holds of activations at once, if each chunk keeps `kept` of a micro-batch.

    A rank's actions never overlap, so their order alone decides. A pair holds both of its micro-batches.
    """
    releasing = (Kind.F,) if plan.forward_only else (Kind.B, Kind.W)
    alive = peak = kept[0] * plan.begun[rank] if plan.begun else 0
    for action in plan.ranks[rank]:
        if action.kind is Kind.F or action.kind is Kind.FB:
            alive += kept[action.chunk]
            peak = max(peak, alive)
        last = action.beside or action
        if last.kind in releasing:
            alive -= kept[last.chunk]
    return peak


def _messages(plan: Plan, rank: int) -> int:
    crosses: dict[tuple[Kind, int], bool] = {}
    count = 0
    for action in plan.ranks[rank]:
        for part in action.parts if action.kind in COMPUTE else ():
            key = part.kind, part.chunk
            if key not in crosses:
                target = plan.consumer(rank, part)
                crosses[key] = target is not None and target[0] != rank
            count += crosses[key]
    return count
