"""zb-auto: searches for a schedule with split backwards, for given times and a memory limit.

Use: `zb_auto(stages=4, microbatches=8, costs=Costs(1.0, 1.2, 0.8, send=0.1), limit=6)`.

The search simulates many orders of forwards and backwards, with W placed by `split_backward.fill`,
until the makespan reaches its lower bound or EFFORT is spent. It then improves the best orders, up
to STARTS of them, along their critical paths (`critical_path.shorten`).

With one chunk per rank the search tries 1F1B with more forwards at the beginning. Some of these
orders skip a forward after every few backwards, so that fewer micro-batches are in flight later.
With two chunks it tries the orders of ZB-V, V-Half, V-Min and similar patterns. Sources: arXiv
2401.10241, section 3; arXiv 2405.15362.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import ceil, floor, isclose

from threed.schedules.critical_path import shorten
from threed.schedules.one_forward_one_backward import one_f_one_b
from threed.schedules.plan import Plan, SizesError
from threed.schedules.simulation import Costs, simulate
from threed.schedules.split_backward import Filled, Flow, Orders, fill, one_chunk, to_plan, v_shape
from threed.schedules.v_shape import Variant, orders_of, phases
from threed.schedules.zero_bubble import zb_h1, zb_h2

EFFORT = 1_000_000  # maximum number of actions to simulate in the search, and again in `shorten`
STARTS = 4  # number of plans that `shorten` starts from: the best plans that the search found


def zb_auto(
    stages: int,
    microbatches: int,
    costs: Costs | None = None,
    limit: float | None = None,
    chunks: int = 1,
) -> Plan:
    """Returns the plan with the smallest makespan that the search finds; it may not be optimal.

    Args:
        stages: number of pipeline ranks.
        microbatches: number of micro-batches per step.
        costs: measured times; None: equal times of F, I and W, and no message latency.
        limit: maximum of live activations on a rank, in micro-batches (see `peak_activations`).
            Activations are live from F to the end of W. None: the memory of ZB-H2
            (2 * stages - 1) with one chunk, or of ZB-V (`stages`) with two chunks.
        chunks: chunks per rank: 1, or 2 in the shape of a V.

    Returns:
        The plan. With one chunk it ends no later than any of the plans of 1F1B, ZB-H1 and ZB-H2
        that are within the limit.

    Raises:
        SizesError: chunks is not 1 or 2.
        ValueError: a limit below 1, or costs that do not match the stages.
    """
    if chunks not in (1, 2):
        problem = f"schedule zb-auto: chunks is {chunks}; it plans 1, or 2 in the shape of a V"
        raise SizesError(problem, chunks=2)
    limit = _default_limit(stages, chunks) if limit is None else limit
    if not limit >= 1:
        raise ValueError(f"schedule zb-auto: limit is {limit}; a rank holds at least 1 micro-batch")
    costs = costs or Costs(1, 1, 1)
    flow = Flow.of(one_chunk(stages) if chunks == 1 else v_shape(stages), microbatches, costs)
    search = _Search(flow, floor(min(limit, microbatches) * chunks))
    if chunks == 2:
        _search_v(search, costs)
        return to_plan("zb-auto", flow, search.shortened())
    _search_one(search)
    found = to_plan("zb-auto", flow, search.shortened())
    known = (plan(stages, microbatches) for plan in (one_f_one_b, zb_h1, zb_h2))
    return _earliest([found, *known], costs, limit)


def planned(
    stages: int,
    microbatches: int,
    chunks: int = 1,
    costs: Costs | None = None,
    limit: float | None = None,
) -> Plan:
    """Returns the plan of `zb_auto` under the smaller of `limit` and the default limit.

    `build` calls this function. The arguments have the same meaning as for `zb_auto`.
    """
    limit = None if limit is None else min(limit, _default_limit(stages, chunks))
    return zb_auto(stages, microbatches, costs, limit, chunks)


def _default_limit(stages: int, chunks: int) -> int:
    """Returns the number of micro-batches that a rank keeps in ZB-H2 (in ZB-V with two chunks)."""
    return 2 * stages - 1 if chunks == 1 else stages


def _earliest(plans: list[Plan], costs: Costs, limit: float) -> Plan:
    """Returns the plan within the limit with the smallest makespan, then the smallest span.

    `plans[0]` must be within the limit, so that there is a result. The limit is the largest number
    of micro-batches whose activations a rank may keep.
    """
    timelines = [simulate(plan, costs) for plan in plans]
    fitting = [
        at for at, timeline in enumerate(timelines) if max(timeline.peak_activations) <= limit
    ]
    return replace(
        plans[min(fitting, key=lambda at: (timelines[at].makespan, timelines[at].span))],
        name="zb-auto",
    )


class _Search:
    """A search: the best plans found, in order of their makespan, and the remaining effort."""

    def __init__(self, flow: Flow, limit: int):
        self.flow, self.limit = flow, limit
        self.effort = float(EFFORT)
        self.bound = max(_lower_bound(flow, rank) for rank in range(flow.ranks))
        self.found = list[Filled]()

    @property
    def is_over(self) -> bool:
        """Whether a plan was found, and either the best one is optimal or the effort is spent."""
        return bool(self.found) and (self.effort <= 0 or self.is_optimal)

    @property
    def is_optimal(self) -> bool:
        """Whether the makespan of the best plan equals its lower bound."""
        return self.found[0].makespan <= self.bound * (1 + 1e-9)

    def attempt(self, orders: Orders | None, patient: bool) -> Filled | None:
        """Simulates orders and keeps the result if it is one of the best.

        Returns the result; None if `orders` is None, if the search is over, or if the orders exceed
        the memory limit or deadlock.
        """
        if orders is None or self.is_over:
            return None
        self.effort -= 3 * self.flow.forwards * self.flow.microbatches
        filled = fill(self.flow, orders, self.limit, patient)
        if filled is not None:
            self.keep(filled)
        return filled

    def keep(self, filled: Filled) -> None:
        """Keeps a result if it is one of the `STARTS` best.

        Of results with equal makespan, only the one with the shortest span is kept.
        """
        together = [
            known for known in self.found if isclose(known.makespan, filled.makespan, rel_tol=1e-9)
        ]
        if all(filled.beats(known) for known in together):
            different = [known for known in self.found if known not in together]
            self.found = sorted([*different, filled], key=lambda each: each.makespan)[:STARTS]

    def shortened(self) -> Filled:
        """Shortens the plans found and returns the best result.

        Raises ValueError if no plan was found.
        """
        if not self.found:
            raise ValueError(
                f"schedule zb-auto: no plan found with at most {self.limit} activations of a chunk per rank"
            )
        effort = float(EFFORT)
        for start in list(self.found):
            if effort > 0 and not self.is_optimal:
                shorter, effort = shorten(self.flow, start, self.limit, effort)
                self.keep(shorter)
        return self.found[0]


def _lower_bound(flow: Flow, rank: int) -> float:
    """Returns a lower bound of the makespan, derived from the work of one rank.

    The bound is the time at which the first micro-batch reaches the rank, plus the time of all
    actions of the rank.
    """
    positions = flow.positions(rank)
    arrival = sum(flow.time[: positions[0]]) + sum(flow.travel[: positions[0] + 1])
    return arrival + flow.microbatches * sum(flow.time[p] + flow.weight[p] for p in positions)


# --- one chunk -------------------------------------------------------------------------------------------------------


def _search_one(search: _Search) -> None:
    """Tries 1F1B with many numbers of warm-up forwards, then the best ones with skipped forwards.

    Each order is tried with W in every idle time, and with W only in idle times that are long
    enough for it (`patient`).
    """
    flow = search.flow
    played: list[tuple[float, tuple[int, ...]]] = []
    for begin in dict.fromkeys(_beginnings(flow, search.limit)):
        orders = _one_f_one_b_orders(flow, begin)
        tried = [search.attempt(orders, patient) for patient in (False, True)]
        played += [(filled.makespan, begin) for filled in tried if filled]
    best = list(dict.fromkeys(begin for _, begin in sorted(played)))[:16]
    for every, begin, patient in product((3, 2, 4), best, (False, True)):
        search.attempt(_one_f_one_b_orders(flow, begin, every), patient)


def _one_f_one_b_orders(
    flow: Flow, begin: tuple[int, ...], every: int | None = None
) -> list[list[int]]:
    """Returns per rank the order of 1F1B with `begin[rank]` forwards before the first backward.

    Args:
        flow: the positions, with one chunk per rank.
        begin: for each rank, the number of forwards before its first backward.
        every: interval, in backwards, at which the first rank skips one forward, so that its number
            n of micro-batches in flight falls by 1. Rank r also skips forwards, to keep at most
            n - r micro-batches in flight. The number of rank r never falls below its number in
            1F1B (arXiv 2401.10241, section 3.1), which is p - r. None: no forward is skipped.
    """
    orders = []
    for rank, ahead in enumerate(begin):
        order, forwards, backward = list[int](), 0, 2 * flow.ranks - 1 - rank
        for number in range(flow.microbatches):
            in_flight = ahead
            if every is not None:
                fewer = min(ahead, begin[0] - rank - number // every)
                in_flight = max(flow.ranks - rank, fewer)
            missing = min(flow.microbatches, number + in_flight) - forwards
            order += [rank] * missing + [backward]
            forwards += max(0, missing)
        orders.append(order)
    return orders


def _beginnings(flow: Flow, limit: int) -> Iterator[tuple[int, ...]]:
    """Yields tuples to try: the number of warm-up forwards of each rank. Earlier ranks have more.

    Let f, b and t be the times of F, I and a message. A rank is not idle before its first I if it
    has 1 + (b + 2t) / f warm-up forwards more than the next rank. Tuples with other differences
    between ranks are also yielded. The memory limit bounds each number, so ranks may have equal
    numbers.
    """
    ranks, last = flow.ranks, len(flow.rank) - 1
    f = sum(flow.time[: flow.forwards]) / ranks or 1.0
    b = sum(flow.time[flow.forwards :]) / ranks
    travel = flow.travel[last]
    slopes = {
        1,
        1.25,
        1.5,
        1.75,
        2,
        2.5,
        3,
        1 + b / f,
        1 + (b + travel) / f,
        1 + (b + 2 * travel) / f,
    }
    slopes |= {1 + 2 * travel / f, 1 + (b / 2 + travel) / f}
    for slope, rounded, step, least in product(
        sorted(slopes), (floor, ceil), (0, 0.5, 1, 2), (1, 2)
    ):
        room = [max(1, limit - ceil(step * rank)) for rank in range(ranks)]
        warmups = [
            max(least, 1 + rounded(slope * (ranks - 1 - rank) - 1e-9 * (rounded is ceil)))
            for rank in range(ranks)
        ]
        yield tuple(min(pair) for pair in zip(room, warmups, strict=True))


# --- two chunks ------------------------------------------------------------------------------------------------------


def _search_v(search: _Search, costs: Costs) -> None:
    flow = search.flow
    unit = Flow.of(flow.placement, flow.microbatches, Costs(2, 2, 2))
    apart = Flow.of(flow.placement, flow.microbatches, Costs(2, 2, 2, send=0.3))
    seen: set[tuple[tuple[int, ...], ...]] = set()
    for orders in _v_orders(search, [unit, apart, flow] if costs.send else [unit, flow]):
        known = tuple(map(tuple, orders or ()))
        if orders is None or known in seen:
            continue
        seen.add(known)
        for patient in (False, True):
            search.attempt(orders, patient)


def _v_orders(search: _Search, flows: list[Flow]) -> Iterator[Orders | None]:
    """Yields the orders of ZB-V, then orders from patterns, until the search is over.

    Patterns whose memory is closest to the limit are first.

    Args:
        search: the search, with the memory limit.
        flows: the same placement with different times. List scheduling tries each pattern with each
            of these times.
    """
    limit, ranks = search.limit, search.flow.ranks
    yield phases(flows[0])
    fitting = 3 * limit / ranks - 1
    hops = sorted((1, 2, 3, 4, 5), key=lambda hop: abs(hop - fitting))
    yield from (orders_of(flows[0], Variant(hop, tight=True), limit) for hop in hops)
    for hop, flow, extra, eager, balanced in product(
        hops, flows, (3, 9), (True, False), (False, True)
    ):
        if search.is_over:
            return
        # A micro-batch on a stage has three actions. Each counts three times, because list
        # scheduling takes three times as long as `fill`.
        search.effort -= 9 * flow.forwards * flow.microbatches
        yield orders_of(flow, Variant(hop, extra, 0, balanced, eager), limit)
