"""Completes schedules with split backwards: inserts the weight gradients into given orders.

Every micro-batch passes *positions* 0 .. 2n-1: the forwards of the n stages of the model, then
their backwards for the input (I) from the last stage to the first. An *order* lists the positions
that a rank runs. The weight gradient W of each I may run at any later time on the same rank: when
that rank would be idle, or when it needs memory.

Use: `flow = Flow.of(placement, microbatches, costs)` computes the positions and their times.
`filled = fill(flow, orders, limit)` inserts the weight gradients and simulates the result; `limit`
is the maximum number of live activations on a rank. `to_plan(name, flow, filled)` returns a `Plan`.
Source: arXiv 2401.10241, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from threed.schedules.action import Action, Kind
from threed.schedules.plan import Plan
from threed.schedules.simulation import Costs

Placement = tuple[tuple[int, ...], ...]
Orders = Sequence[Sequence[int]]
"""Per rank, the positions that it runs, in order and without W.

The i-th occurrence of a position in a rank's list, from 0, is the action for micro-batch i.
"""


def one_chunk(stages: int) -> Placement:
    """Returns the placement with one stage of the model per rank."""
    return tuple((rank,) for rank in range(stages))


def v_shape(stages: int) -> Placement:
    """Returns the placement with two stages per rank, down the ranks and up again.

    See arXiv 2401.10241, section 6.
    """
    return tuple((rank, 2 * stages - 1 - rank) for rank in range(stages))


@dataclass(frozen=True)
class Flow:
    """The positions of a schedule and their times.

    Attributes:
        placement: the stages of the model per rank.
        microbatches: number of micro-batches.
        rank: per position, its rank.
        chunk: per position, its chunk on that rank.
        time: per position, the time of F or I.
        weight: per position, the time of the W that belongs to an I; 0 for forwards.
        travel: per position, the time until the previous position's result arrives; 0 if the two
            positions are on one rank.
    """

    placement: Placement
    microbatches: int
    rank: tuple[int, ...]
    chunk: tuple[int, ...]
    time: tuple[float, ...]
    weight: tuple[float, ...]
    travel: tuple[float, ...]

    @property
    def ranks(self) -> int:
        """Number of pipeline ranks."""
        return len(self.placement)

    @property
    def chunks(self) -> int:
        """Number of stages of the model per rank."""
        return len(self.placement[0])

    @property
    def forwards(self) -> int:
        """Number of stages of the model. Positions below it are forwards."""
        return len(self.rank) // 2

    def positions(self, rank: int) -> list[int]:
        """Returns the positions of a rank, in the order in which a micro-batch reaches them."""
        return [position for position, of in enumerate(self.rank) if of == rank]

    @classmethod
    def of(cls, placement: Placement, microbatches: int, costs: Costs) -> Flow:
        """Returns the flow of a placement.

        Args:
            placement: per rank, the stages of the model on its chunks.
            microbatches: number of micro-batches.
            costs: times of the actions and messages.

        Raises:
            ValueError: a cost is a tuple, but does not have one time per stage.
        """
        plan = _empty("flow", placement, microbatches)
        stages = [*range(plan.total_stages), *reversed(range(plan.total_stages))]
        places = [plan.locate(stage) for stage in stages]
        kinds = [Kind.F] * plan.total_stages + [Kind.I] * plan.total_stages
        ranks = tuple(rank for rank, _ in places)
        return cls(
            placement,
            microbatches,
            ranks,
            tuple(chunk for _, chunk in places),
            tuple(
                costs.duration(Action(k, 0, c), r, plan)
                for k, (r, c) in zip(kinds, places, strict=True)
            ),
            tuple(
                costs.duration(Action(Kind.W, 0, c), r, plan) if k is Kind.I else 0.0
                for k, (r, c) in zip(kinds, places, strict=True)
            ),
            tuple(costs.send * (at > 0 and rank != ranks[at - 1]) for at, rank in enumerate(ranks)),
        )


@dataclass(frozen=True)
class Filled:
    """Orders with their weight gradients (W) inserted, and the simulated times.

    Attributes:
        makespan: time from the first start to the last end.
        span: the longest time of any rank from its first start to its last end.
        ranks: per rank, its actions in order: p for the F or I at position p, and -1 - p for the W
            of the I at position p.
    """

    makespan: float
    span: float
    ranks: tuple[tuple[int, ...], ...]

    def beats(self, other: Filled | None) -> bool:
        """Returns whether `self` has a smaller makespan, or an equal makespan and a smaller span.

        Values that differ only by rounding are equal. The result is True if `other` is None.
        """
        if other is None:
            return True
        own, compared = (self.makespan, self.span), (other.makespan, other.span)
        differ = [(a, b) for a, b in zip(own, compared, strict=True) if abs(a - b) > 1e-9 * b]
        return bool(differ) and differ[0][0] < differ[0][1]


class _Rank:
    """The state of one rank during a simulation."""

    def __init__(self, order: Sequence[int]):
        self.order = order
        self.at = 0  # index of the next action in `order`
        self.now = 0.0
        self.begin = 0.0
        self.activations = 0  # live activations; a micro-batch on one chunk counts as 1
        # positions of all I so far; the W of `waiting[first:]` have not run yet
        self.waiting: list[int] = []
        self.first = 0
        self.out: list[int] = []  # the actions so far, as in `Filled.ranks`


def fill(flow: Flow, orders: Orders, limit: int, patient: bool = False) -> Filled | None:
    """Inserts each W into the orders when the rank would be idle or needs memory.

    A rank runs its W in the order of the matching I. At the end of an order, all pending W are
    appended.

    Args:
        flow: the positions and their times.
        orders: per rank, its forwards and backwards in order.
        limit: maximum number of live activations on a rank; a micro-batch on one chunk counts as 1,
            from its F to the end of its W.
        patient: whether to postpone a W that takes longer than the current idle time.

    Returns:
        The orders with all W, and their times; None if the orders exceed the limit or deadlock.
    """
    made: list[list[float]] = [[] for _ in flow.rank]
    ranks = [_Rank(order) for order in orders]
    runnable = list(range(len(ranks)))
    while runnable:
        _advance(flow, ranks[runnable[-1]], made, runnable, limit, patient)
    if any(rank.at < len(rank.order) for rank in ranks):
        return None
    for rank in ranks:
        for position in rank.waiting[rank.first :]:
            rank.now += flow.weight[position]
            rank.out.append(-1 - position)
    return Filled(
        max(rank.now for rank in ranks),
        max(rank.now - rank.begin for rank in ranks),
        tuple(tuple(rank.out) for rank in ranks),
    )


def _advance(
    flow: Flow,
    rank: _Rank,
    made: list[list[float]],
    runnable: list[int],
    limit: int,
    patient: bool,
) -> None:
    """Runs the last rank in `runnable` until an input or memory is missing.

    Removes the rank from `runnable`, and appends the ranks that may wait for its results.
    """
    runnable.pop()
    forwards, weight, waiting, out = flow.forwards, flow.weight, rank.waiting, rank.out
    now, activations, first = rank.now, rank.activations, rank.first
    for at in range(rank.at, len(rank.order)):
        position = rank.order[at]
        results, start = made[position], 0.0
        if position:
            if len(results) == len(made[position - 1]):
                break
            start = made[position - 1][len(results)] + flow.travel[position]
        full = position < forwards and activations >= limit
        while first < len(waiting):
            wait, longer = start - now, weight[waiting[first]]
            if not full and (wait <= 0 or (wait < longer and patient)):
                break
            now += longer
            out.append(-1 - waiting[first])
            first += 1
            activations -= 1
            full = False
        if full:
            break
        if start > now:
            if not out:
                rank.begin = start
            now = start
        now += flow.time[position]
        results.append(now)
        out.append(position)
        if position < forwards:
            activations += 1
        else:
            waiting.append(position)
        if position + 1 < len(flow.rank) and flow.rank[position + 1] != flow.rank[position]:
            runnable.append(flow.rank[position + 1])
    else:
        at = len(rank.order)
    rank.at, rank.now, rank.activations, rank.first = at, now, activations, first


def to_plan(name: str, flow: Flow, filled: Filled) -> Plan:
    """Converts the result of `fill` to a `Plan`, with an `Action` per number in `filled.ranks`."""
    plan = _empty(name, flow.placement, flow.microbatches)
    ranks = tuple(_actions(flow, line) for line in filled.ranks)
    return Plan(name, plan.stages, plan.microbatches, plan.chunks, ranks, plan.placement)


def _actions(flow: Flow, line: Sequence[int]) -> tuple[Action, ...]:
    forwards, count = flow.forwards, dict.fromkeys(line, 0)
    kinds = {p: Kind.W if p < 0 else Kind.F if p < forwards else Kind.I for p in count}
    chunks = {p: flow.chunk[p if p >= 0 else -1 - p] for p in count}
    actions = []
    for position in line:
        microbatch = count[position]
        count[position] = microbatch + 1
        actions.append(Action(kinds[position], microbatch, chunks[position]))
    return tuple(actions)


def _empty(name: str, placement: Placement, microbatches: int) -> Plan:
    chunks = len(placement[0])
    ranks: tuple[tuple[Action, ...], ...] = ((),) * len(placement)
    return Plan(name, len(placement), microbatches, chunks, ranks, placement if chunks > 1 else ())
