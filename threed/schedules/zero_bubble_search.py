"""zb-auto: a schedule with split backwards, found by a search with given times and a memory limit.

Use: `zb_auto(stages=4, microbatches=8, costs=Costs(1.0, 1.2, 0.8, send=0.1), limit=6)`.

Phases: play out many orders of forwards and backwards, with W placed by `flow.fill`, until no plan can end earlier or
EFFORT is spent; then improve the best few along their critical paths (`critical.shorten`). With one chunk per rank the
orders are those of 1F1B with more forwards at the beginning, some of them with fewer in flight after every few
backwards. With two chunks they are those of ZB-V, V-Half, V-Min and similar patterns.
Sources: arXiv 2401.10241, section 3; arXiv 2405.15362.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import ceil, floor, isclose

from threed.schedules.critical import shorten
from threed.schedules.flow import Filled, Flow, Orders, fill, one_chunk, to_plan, v_shape
from threed.schedules.one_forward_one_backward import one_f_one_b
from threed.schedules.plan import Plan, SizesError
from threed.schedules.simulation import Costs, simulate
from threed.schedules.v_shape import Variant, orders_of, phases
from threed.schedules.zero_bubble import zb_h1, zb_h2

EFFORT = 1_000_000  # actions to place at most while looking for a plan, and again while shortening the best
STARTS = 4  # how many of the best are shortened


def zb_auto(
    stages: int,
    microbatches: int,
    costs: Costs | None = None,
    limit: float | None = None,
    chunks: int = 1,
) -> Plan:
    """Returns the plan with the smallest makespan found at these costs, with at most `limit` activations on a rank.

    It is looked for, not proven to be the best. costs: measured ones; by default F, I and W take equal times and
    messages none. limit: micro-batches over all chunks of the rank, from F to the end of W; by default ZB-H2's
    2 * stages - 1, and with two chunks ZB-V's `stages`. With one chunk the plan ends no later than 1F1B, ZB-H1 and
    ZB-H2 where these keep to the limit. Raises ValueError for a limit below 1, for more than two chunks, and for costs
    that do not fit.
    """
    if chunks not in (1, 2):
        problem = f"schedule zb-auto: chunks is {chunks}; it plans 1, or 2 in the shape of a V"
        raise SizesError(problem, chunks=2)
    limit = _own_limit(stages, chunks) if limit is None else limit
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
    """`zb_auto` at its default limit, or at `limit` where that is less."""
    least = None if limit is None else min(limit, _own_limit(stages, chunks))
    return zb_auto(stages, microbatches, costs, least, chunks)


def _own_limit(stages: int, chunks: int) -> int:
    """Micro-batches that ZB-H2, or with two chunks ZB-V, keeps on a rank."""
    return 2 * stages - 1 if chunks == 1 else stages


def _earliest(plans: list[Plan], costs: Costs, limit: float) -> Plan:
    """The plan that ends first of those within the limit, which the first of them is; of several the one whose ranks
    are through soonest."""
    timelines = [simulate(plan, costs) for plan in plans]
    fitting = [
        at for at, timeline in enumerate(timelines) if max(timeline.peak_activations) <= limit
    ]
    return replace(
        plans[min(fitting, key=lambda at: (timelines[at].makespan, timelines[at].span))],
        name="zb-auto",
    )


class _Search:
    """The best of what was tried, first the one that ends first, and how much more may be tried."""

    def __init__(self, flow: Flow, limit: int):
        self.flow, self.limit = flow, limit
        self.left = float(EFFORT)
        self.bound = max(_least(flow, rank) for rank in range(flow.ranks))
        self.found = list[Filled]()

    @property
    def over(self) -> bool:
        """Whether nothing can end earlier, or no more may be tried."""
        return bool(self.found) and (self.left <= 0 or self.reached)

    @property
    def reached(self) -> bool:
        """Whether nothing can end earlier than the best."""
        return self.found[0].makespan <= self.bound * (1 + 1e-9)

    def attempt(self, orders: Orders | None, patient: bool) -> Filled | None:
        """Plays orders out; what came of it, if it could be played and there was reason to."""
        if orders is None or self.over:
            return None
        self.left -= 3 * self.flow.forwards * self.flow.microbatches
        filled = fill(self.flow, orders, self.limit, patient)
        if filled is not None:
            self.keep(filled)
        return filled

    def keep(self, filled: Filled) -> None:
        """Keeps it if it is one of the best; of those that end together the one with the shortest span."""
        together = [
            known for known in self.found if isclose(known.makespan, filled.makespan, rel_tol=1e-9)
        ]
        if all(filled.beats(known) for known in together):
            others = [known for known in self.found if known not in together]
            self.found = sorted([*others, filled], key=lambda each: each.makespan)[:STARTS]

    def shortened(self) -> Filled:
        """The best of what was tried, and of what can be made of the best few."""
        if not self.found:
            raise ValueError(
                f"schedule zb-auto: no plan found within {self.limit} chunks of a micro-batch a rank"
            )
        left = float(EFFORT)
        for start in list(self.found):
            if left > 0 and not self.reached:
                shorter, left = shorten(self.flow, start, self.limit, left)
                self.keep(shorter)
        return self.found[0]


def _least(flow: Flow, rank: int) -> float:
    """No plan ends earlier: the first micro-batch's way to this rank, and all the rank's work."""
    positions = flow.positions(rank)
    arrival = sum(flow.time[: positions[0]]) + sum(flow.travel[: positions[0] + 1])
    return arrival + flow.microbatches * sum(flow.time[p] + flow.weight[p] for p in positions)


# --- one chunk -------------------------------------------------------------------------------------------------------


def _search_one(search: _Search) -> None:
    """Tries 1F1B with many beginnings, then the best beginnings with forwards left out.

    W fills short waits as well, or only long ones if ranks are patient.
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

    every: the first rank leaves one forward out after so many backwards. Each other rank does so once it has
    only one forward less in flight than the rank before (skipping forwards: arXiv 2401.10241, section 3.1).
    """
    orders = []
    for rank, ahead in enumerate(begin):
        order, forwards, backward = list[int](), 0, 2 * flow.ranks - 1 - rank
        for number in range(flow.microbatches):
            wanted = ahead
            if every is not None:
                fewer = min(ahead, begin[0] - rank - number // every)
                wanted = max(flow.ranks - rank, fewer)
            missing = min(flow.microbatches, number + wanted) - forwards
            order += [rank] * missing + [backward]
            forwards += max(0, missing)
        orders.append(order)
    return orders


def _beginnings(flow: Flow, limit: int) -> Iterator[tuple[int, ...]]:
    """Numbers of forwards at the beginning: more by a slope from rank to rank towards the first, up to the limit.

    A forward more on every rank than on the next hides a message's way there and back, two also an I.
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
        wanted = [
            max(least, 1 + rounded(slope * (ranks - 1 - rank) - 1e-9 * (rounded is ceil)))
            for rank in range(ranks)
        ]
        yield tuple(min(pair) for pair in zip(room, wanted, strict=True))


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
    """Those of ZB-V, then of patterns whose memory is nearest to the limit, in the times of each of these flows."""
    limit, ranks = search.limit, search.flow.ranks
    yield phases(flows[0])
    fitting = 3 * limit / ranks - 1
    hops = sorted((1, 2, 3, 4, 5), key=lambda hop: abs(hop - fitting))
    yield from (orders_of(flows[0], Variant(hop, tight=True), limit) for hop in hops)
    for hop, flow, extra, eager, balanced in product(
        hops, flows, (3, 9), (True, False), (False, True)
    ):
        if search.over:
            return
        # list scheduling takes three times as long as filling
        search.left -= 9 * flow.forwards * flow.microbatches
        yield orders_of(flow, Variant(hop, extra, 0, balanced, eager), limit)
