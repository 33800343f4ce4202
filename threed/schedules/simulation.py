"""Simulated times of a plan: makespan, bubble and peak activation memory per rank.

    plan = build("1f1b", stages=4, microbatches=8)
    simulate(plan, Costs(forward=1, backward_input=1, backward_weight=1)).bubble

`simulate` runs the plan with given costs (event_simulation.py). It computes the makespan and the
bubble from the times, and peak activations and message counts from the order of actions.
`span_and_bubble` and `idle_shares` accept measured times, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import fmean

from threed.schedules.action import COMPUTE, Action, Kind
from threed.schedules.event_simulation import Span, Spans, play
from threed.schedules.plan import Plan

Cost = float | tuple[float, ...]


@dataclass(frozen=True)
class Costs:
    """Costs of compute actions and messages, in any unit of time.

    A cost that is a number is the time of one micro-batch on a rank, over all chunks of the rank
    that the micro-batch passes. If there are V such chunks, each takes 1/V of that time. A cost
    that is a tuple has one time per stage of the model, in model order, for stages of unequal cost.

    Attributes:
        forward: time of F.
        backward_input: time of I.
        backward_weight: time of W. B takes `backward_input` + `backward_weight`.
        send: latency of one message, during which both ranks can compute.
        overlapped: time of a forward together with a full backward, in schedules that pair them. If
            the two are on different stages, their time is the mean of both stages' values. None:
            the sum of forward and backward.
    """

    forward: Cost
    backward_input: Cost
    backward_weight: Cost
    send: float = 0.0
    overlapped: Cost | None = None

    def __post_init__(self) -> None:
        for name, cost in vars(self).items():
            times = cost if isinstance(cost, tuple) else (0.0 if cost is None else cost,)
            if not times or not all(0 <= time < math.inf for time in times):  # rejects nan, too
                raise ValueError(
                    f"costs: {name} is {cost}; times are finite and not negative, and a tuple has one per stage"
                )

    def duration(self, action: Action, rank: int, plan: Plan) -> float:
        """Returns the time of a compute action.

        Args:
            action: a compute action.
            rank: pipeline rank that runs the action.
            plan: plan that contains the action; it maps each chunk of a rank to a model stage.
        """
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
        """Returns the time of a forward paired with a B or an I.

        `overlapped` is the time with a B. For an I, the time of the missing W is subtracted.
        """
        stages = [plan.stage_of(rank, part.chunk) for part in pair.parts]
        full = sum(_of_stage(cost, stage, plan) for stage in stages) / 2
        later = pair.parts[1].kind is Kind.I
        return max(0.0, full - later * _of_stage(self.backward_weight, stages[1], plan))


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
    """The result of simulating a plan.

    Attributes:
        makespan: time from the first start to the last end.
        span: the longest time of any rank from its first start to its last end.
        bubble: idle fraction of the rank with the longest span, within its span (as in arXiv
            2401.10241, section 5).
        peak_activations: per rank, the maximum of live activations, in micro-batches. Activations
            are live from the start of F to the end of B or W. If a rank has V chunks, the
            activations of a micro-batch on one chunk count as 1/V of a micro-batch (2/V in a
            bidirectional plan).
        messages: per rank, the number of sends per step.
        spans: per rank, (action, start, end) of every compute action.
    """

    makespan: float
    span: float
    bubble: float
    peak_activations: tuple[float, ...]
    messages: tuple[int, ...]
    spans: Spans


def simulate(plan: Plan, costs: Costs) -> Timeline:
    """Simulates a plan with given costs.

    A message costs latency only; communication actions in the plan are ignored.

    Args:
        plan: the plan, with or without communication.
        costs: times of compute actions and messages.

    Returns:
        The times of all actions, and the makespan, bubble, peak activations and messages.

    Raises:
        ValueError: the plan is invalid or deadlocks; the message names the rank and the action.
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
    """Returns (span, bubble) of the rank with the longest span.

    The span of a rank is the time from its first start to its last end. The bubble is the idle
    fraction of this rank within its span. Communication actions are ignored, so measured spans may
    contain transfers and waits. If several ranks have the longest span, the first of them is used.
    """
    extents = []
    for actions in spans:
        busy = [(start, end) for action, start, end in actions if action.kind in COMPUTE]
        if busy:
            extents.append((max(end for _, end in busy) - min(start for start, _ in busy), busy))
    span, busy = max(extents, key=lambda extent: extent[0], default=(0.0, []))
    return span, (span - sum(end - start for start, end in busy)) / span if span > 0 else 0.0


def idle_shares(spans: Sequence[Sequence[Span]]) -> list[float]:
    """Returns the idle fraction of each rank within a step.

    A step lasts from the first start to the last end of the compute actions of all ranks. The mean
    of the fractions is the fraction of all ranks' time that is lost. These fractions are meaningful
    for stages of unequal cost, too, for which the bubble of `span_and_bubble` is misleading. The
    rank with the smallest fraction is the bottleneck.
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
    """Returns the spans of a plan, simulated with measured action times and no message latency.

    The difference between the measured spans and the returned spans is the cost of communication.

    Args:
        plan: the plan that was run.
        measured: per rank, (action, start, end); communication is ignored. Each action takes the
            mean of all measured actions of its kind on its chunk.

    Raises:
        ValueError: an action of the plan was not measured.
    """
    means = [_means(spans) for spans in measured]

    def duration(action: Action, rank: int) -> float:
        if _action_type(action) not in means[rank]:
            raise ValueError(f"plan {plan.name}: rank {rank}: no {action} was measured")
        return means[rank][_action_type(action)]

    return play(plan, duration)


def _action_type(action: Action) -> tuple[tuple[Kind, int], ...]:
    return tuple((part.kind, part.chunk) for part in action.parts)


def _means(spans: Sequence[Span]) -> dict[tuple[tuple[Kind, int], ...], float]:
    times: dict[tuple[tuple[Kind, int], ...], list[float]] = {}
    for action, start, end in spans:
        times.setdefault(_action_type(action), []).append(end - start)
    return {kind: fmean(found) for kind, found in times.items()}


def peak_activations(plan: Plan, rank: int) -> float:
    """Returns the peak amount of live activations on a rank, in micro-batches.

    The activations of a micro-batch in one chunk count as 1/V of a micro-batch. V is the number of
    the rank's chunks that a micro-batch passes: all, or half of them in a bidirectional plan.
    """
    return float(Fraction(most_kept(plan, rank, [1] * plan.chunks) * plan.ways, plan.chunks))


def most_kept(plan: Plan, rank: int, kept: Sequence[int]) -> int:
    """Returns the peak amount of live activations on a rank, in the unit of `kept`.

    Only the order of actions matters, because actions of a rank never overlap in time. While an
    action runs a forward together with a backward (FB), the activations of both are live.

    Args:
        plan: the plan, with or without communication.
        rank: pipeline rank.
        kept: per chunk, the activations of one micro-batch, in any integer unit such as bytes.
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
