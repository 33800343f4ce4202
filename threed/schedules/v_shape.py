"""ZB-V, V-Half and V-Min: split backwards on ranks that hold two stages of the model each, down the ranks and up again.

Use: `zb_v(stages=4, microbatches=8)`; `v_half` and `v_min` take the same and need less memory. They are planned for F,
I and W of one length: `zb_auto(..., chunks=2)` plans for measured ones.

A micro-batch ends on the rank on which it began, so that first and last stage share a rank, and every rank holds the
same number of activations. With F, I and W of one length ZB-V does not wait at all from first to last action, with the
activations of 1F1B's first rank; V-Half holds about a half of these and waits about a half of what 1F1B does, V-Min a
third and two thirds. Sources: Qi et al. 2024, arXiv 2401.10241, section 6; Qi et al. 2024, arXiv 2405.15362.

ZB-V has an order of its own. V-Half and V-Min begin with a pattern that repeats for every micro-batch within the memory
limit. Of several orders that follow it (the pattern itself with its beginning and end as early as possible, and list
scheduling) the one that ends first, with W where ranks would wait or need memory, is improved along its critical path.
"""

from __future__ import annotations

from itertools import accumulate, chain, cycle
from math import inf
from typing import NamedTuple

from threed.schedules.critical import shorten
from threed.schedules.flow import Flow, Orders, fill, to_plan, v_shape
from threed.schedules.list_scheduling import Priority, list_orders
from threed.schedules.plan import Plan
from threed.schedules.simulation import Costs

PERIOD = 6  # two forwards, two I and two W for every micro-batch on every rank
UNIT = Costs(2, 2, 2)  # every action of one chunk takes 1
_EFFORT = 100_000  # of `shorten`


def zb_v(stages: int, microbatches: int) -> Plan:
    """Holds at most `stages` micro-batches on every rank."""
    unit = Flow.of(v_shape(stages), microbatches, UNIT)
    filled = fill(unit, phases(unit), 2 * stages)
    assert filled is not None
    return to_plan("zb-v", unit, filled)


def v_half(stages: int, microbatches: int) -> Plan:
    """Holds at most (stages + 2) // 2 micro-batches on every rank."""
    return _best("v-half", stages, microbatches, (stages + 2) // 2, [Variant(2, tight=True)])


def v_min(stages: int, microbatches: int) -> Plan:
    """Holds at most (stages + 4) // 3 micro-batches on every rank."""
    variants = [
        Variant(1, tight=True),
        Variant(1, 4),
        Variant(1, 2),
        Variant(1, 2, more=1),
        Variant(1, 2, more=1, balanced=True),
    ]
    return _best("v-min", stages, microbatches, (stages + 4) // 3, variants)


class Variant(NamedTuple):
    """One way to get orders from the pattern in which a forward takes `hop` units from rank to rank on the way down.

    tight: the pattern's own, begun and ended as early as may be. Else list scheduling, where a micro-batch may take
    `extra` units longer than in the pattern, and `more` chunks may be in flight. balanced: before its first I of its
    first stage a rank keeps room for its second chunk, and lets it use all. eager: see `Priority`.
    """

    hop: int
    extra: int = 0
    more: int = 0
    balanced: bool = False
    eager: bool = False
    tight: bool = False


def _best(name: str, stages: int, microbatches: int, limit: int, variants: list[Variant]) -> Plan:
    """Returns the plan of the variant that ends first, improved along its critical path."""
    unit, chunks = Flow.of(v_shape(stages), microbatches, UNIT), 2 * limit
    orders = [orders_of(unit, variant, chunks) for variant in variants]
    filled = [fill(unit, order, chunks) for order in orders if order is not None]
    best = min((each for each in filled if each), key=lambda each: (each.makespan, each.span))
    return to_plan(name, unit, shorten(unit, best, chunks, _EFFORT)[0])


def orders_of(unit: Flow, variant: Variant, limit: int) -> Orders | None:
    """The orders of one variant; None where there are none. limit: chunks of a micro-batch that a rank may hold."""
    ranks = unit.ranks
    begin = pattern(ranks, variant.hop)
    if variant.tight:
        return _Tightening(unit, begin, limit).orders() if variant.hop in _GAPS else None
    caps = []
    for position in range(2 * ranks):
        life = begin[4 * ranks - 1 - position] - begin[position] + variant.extra
        cap = -(-life // PERIOD) + variant.more
        caps.append(max(1, min(limit - 1, cap)) if position < ranks else cap)
    at_first = caps
    if variant.balanced:
        down = [limit - min(rank + 1, limit // 2) for rank in range(ranks)]
        at_first = down + [limit] * ranks
    return list_orders(
        unit, Priority(begin, PERIOD, tuple(caps), tuple(at_first), variant.eager), limit
    )


def phases(unit: Flow) -> Orders:
    """ZB-V's own order (arXiv 2401.10241, section 6), for as many micro-batches as there are.

    Rank r, with its down chunk's F and I and its up chunk's f and i: F until the first f comes back, f and F in turn
    until the first i, the up chunk's f and i until the first I, then F, I, f and i in turn.
    """
    orders = []
    for rank in range(unit.ranks):
        down, up, i, last = unit.positions(rank)
        above = unit.ranks - 1 - rank
        begin = [down] * (2 * above) + [down, up] * (rank + 1) + [i] + [up, i] * above
        done = dict.fromkeys((down, up, i, last), 0)
        before, order = {up: down, i: up, last: i}, list[int]()
        for position in chain(begin, cycle((down, last, up, i))):
            if done[last] == unit.microbatches:
                break
            if done[position] < min(unit.microbatches, done.get(before.get(position, -1), inf)):
                done[position] += 1
                order.append(position)
        orders.append(order)
    return orders


# Units between a first rank's second forward and its I, for patterns in which no two actions meet.
_GAPS = {1: lambda ranks: 2 if ranks % 3 == 0 else 0, 2: lambda ranks: 0 if ranks % 2 else 3}


def pattern(ranks: int, hop: int) -> tuple[int, ...]:
    """When a micro-batch comes to every position, from rank to rank in 1 unit on the way up and `hop` on the way down.

    1 is V-Min and 2 V-Half (arXiv 2405.15362, section 3 and appendix); 5 fills the memory of ZB-V.
    """
    gap = _GAPS[hop](ranks) if hop in _GAPS else 0
    begin, now = [], 0
    for position in range(4 * ranks):
        way, step = divmod(position, ranks)
        if step:
            now += 1 if way % 2 else hop
        elif way:
            now += {1: 2 if hop == 2 else 1, 2: gap + 1, 3: 1}[way]
        begin.append(now)
    return tuple(begin)


class _Tightening:
    """A pattern for all micro-batches in slots of one unit, whose beginning and end are moved to earlier free slots.

    Between the first micro-batch's end and the last one's begin nothing moves, so that nothing meets.
    """

    def __init__(self, unit: Flow, begin: tuple[int, ...], limit: int):
        self.unit, self.limit = unit, limit
        self.last = len(begin)  # W of position p is written p + last
        times = {**dict(enumerate(begin)), **self._weights(begin)}
        count = unit.microbatches
        self.times = {
            position: [time + PERIOD * mb for mb in range(count)]
            for position, time in times.items()
        }
        self.moving = (begin[-1], begin[0] + PERIOD * (count - 1))
        slots = max(times.values()) + PERIOD * count + 1
        self.taken = [bytearray(slots) for _ in range(unit.ranks)]
        # at first what changes in a slot, then how many there are
        self.held = [[0] * slots for _ in range(unit.ranks)]

    def _weights(self, begin: tuple[int, ...]) -> dict[int, int]:
        """The first slots after I that nothing else has, in any period."""
        weights = {}
        for rank in range(self.unit.ranks):
            positions = self.unit.positions(rank)
            used = {begin[position] % PERIOD for position in positions}
            for position in positions[2:]:
                slot = next(
                    s
                    for s in range(begin[position] + 1, begin[position] + 9)
                    if s % PERIOD not in used
                )
                used.add(slot % PERIOD)
                weights[position + self.last] = slot
        return weights

    def orders(self) -> Orders | None:
        """The orders of forwards and backwards; None where actions of the pattern meet."""
        actions = sorted(
            (time, p, mb) for p, times in self.times.items() for mb, time in enumerate(times)
        )
        for time, position, _ in actions:
            rank = self.unit.rank[position % self.last]
            if self.taken[rank][time]:
                return None
            self.taken[rank][time] = 1
            self.held[rank][time] += self._change(position)
        self.held = [list(accumulate(changes)) for changes in self.held]
        for time, position, microbatch in actions:
            if not self.moving[0] <= time <= self.moving[1]:
                self._move(time, position, microbatch)
        by_rank = [self.unit.positions(rank) for rank in range(self.unit.ranks)]
        return [
            [
                position
                for _, position in sorted((time, p) for p in positions for time in self.times[p])
            ]
            for positions in by_rank
        ]

    def _change(self, position: int) -> int:
        """How many activations more the rank holds after this action."""
        return 1 if position < self.unit.forwards else -1 if position >= self.last else 0

    def _hold(self, rank: int, position: int, slots: range) -> None:
        """Counts the change of an action in these slots."""
        change, held = self._change(position), self.held[rank]
        for slot in slots if change else ():
            held[slot] += change

    def _move(self, time: int, position: int, microbatch: int) -> None:
        """Moves an action to the earliest free slot after what it needs, if memory allows."""
        rank, times = self.unit.rank[position % self.last], self.times[position]
        need = position - (self.last if position >= self.last else 1)
        earliest = max(
            self.times[need][microbatch] + 1 if position else 0,
            times[microbatch - 1] + 1 if microbatch else 0,
        )
        if position < self.unit.forwards:
            slot = time
            while slot > earliest and self.held[rank][slot - 1] < self.limit:
                slot -= 1
            earliest = slot
        slot = self.taken[rank].find(0, earliest, time)
        if slot >= 0:
            self.taken[rank][time], self.taken[rank][slot] = 0, 1
            times[microbatch] = slot
            self._hold(rank, position, range(slot, time))
