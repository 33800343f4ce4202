"""What a schedule with split backwards has to place, and how long it takes when forwards and backwards have an order.

Use: `flow = Flow.of(placement, microbatches, costs)`, then `fill(flow, orders, limit, patient)` places the weight
gradients and gives the makespan; `to_plan(name, flow, filled)` is the plan.

Every micro-batch goes through *positions* 0 .. 2n-1: the forwards of the n stages of the model, then their backwards
for the input (I) from the last stage to the first. The weight gradient W that each I leaves behind may run at any later
time on the same rank: where that rank would wait, or where it needs memory. Source: arXiv 2401.10241, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from threed.schedules.action import Action, Kind
from threed.schedules.plan import Plan
from threed.schedules.simulation import Costs

Placement = tuple[tuple[int, ...], ...]
Orders = Sequence[Sequence[int]]
"""For every rank the positions whose next micro-batch it takes, one after the other; without W."""


def one_chunk(stages: int) -> Placement:
    """One stage of the model on every rank."""
    return tuple((rank,) for rank in range(stages))


def v_shape(stages: int) -> Placement:
    """Two stages of the model on every rank: down the ranks and up again (arXiv 2401.10241, section 6)."""
    return tuple((rank, 2 * stages - 1 - rank) for rank in range(stages))


@dataclass(frozen=True)
class Flow:
    """What there is to place. Per position: the rank and its chunk, the time of F or I, the time of the W that an I
    leaves (0 of a forward), and how long the result of the position before is on its way."""

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
        """Number of stages of the model on every rank."""
        return len(self.placement[0])

    @property
    def forwards(self) -> int:
        """Number of stages of the model: positions below it are forwards."""
        return len(self.rank) // 2

    def positions(self, rank: int) -> list[int]:
        """The positions of a rank, in the order in which a micro-batch comes to them."""
        return [position for position, of in enumerate(self.rank) if of == rank]

    @classmethod
    def of(cls, placement: Placement, microbatches: int, costs: Costs) -> Flow:
        """Returns what there is to place. Raises ValueError for costs that do not fit the placement."""
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
    """Orders with their W, played out. ranks: per rank what it does, a position or, of a W, -1 - the position of its I.

    span: the longest time from first start to last end of one rank.
    """

    makespan: float
    span: float
    ranks: tuple[tuple[int, ...], ...]

    def beats(self, other: Filled | None) -> bool:
        """Whether it ends earlier, or then and with a shorter span; differences by rounding do not count."""
        if other is None:
            return True
        ours, theirs = (self.makespan, self.span), (other.makespan, other.span)
        differ = [(a, b) for a, b in zip(ours, theirs, strict=True) if abs(a - b) > 1e-9 * b]
        return bool(differ) and differ[0][0] < differ[0][1]


class _Rank:
    """Where one rank stands while a flow is played out."""

    def __init__(self, order: Sequence[int]):
        self.order = order
        self.at = 0  # in its order
        self.now = 0.0
        self.begin = 0.0
        self.held = 0  # activations of one chunk and one micro-batch
        self.waiting: list[int] = []  # positions whose W has not run, from `first` on
        self.first = 0
        self.out: list[int] = []


def fill(flow: Flow, orders: Orders, limit: int, patient: bool = False) -> Filled | None:
    """Places every W where the rank would wait or needs memory, in the order of their I.

    Args:
        limit: the most activations of one chunk and one micro-batch that a rank may hold, from F to
            the end of W.
        patient: a W that is longer than a wait does not run in it.

    Returns:
        None if the orders cannot keep to the limit, or if ranks wait for each other.
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
    """Runs the rank at the end of `runnable` until its next action has no input yet; adds who can go on then."""
    runnable.pop()
    forwards, weight, waiting, out = flow.forwards, flow.weight, rank.waiting, rank.out
    now, held, first = rank.now, rank.held, rank.first
    for at in range(rank.at, len(rank.order)):
        position = rank.order[at]
        results, start = made[position], 0.0
        if position:
            if len(results) == len(made[position - 1]):
                break
            start = made[position - 1][len(results)] + flow.travel[position]
        full = position < forwards and held >= limit
        while first < len(waiting):
            wait, longer = start - now, weight[waiting[first]]
            if not full and (wait <= 0 or (wait < longer and patient)):
                break
            now += longer
            out.append(-1 - waiting[first])
            first += 1
            held -= 1
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
            held += 1
        else:
            waiting.append(position)
        if position + 1 < len(flow.rank) and flow.rank[position + 1] != flow.rank[position]:
            runnable.append(flow.rank[position + 1])
    else:
        at = len(rank.order)
    rank.at, rank.now, rank.held, rank.first = at, now, held, first


def to_plan(name: str, flow: Flow, filled: Filled) -> Plan:
    """The plan of orders that were filled."""
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
