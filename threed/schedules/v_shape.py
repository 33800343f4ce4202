"""ZB-V, V-Half and V-Min: split backwards, with two model stages per rank in the shape of a V.

Use: `zb_v(stages=4, microbatches=8)`; `v_half` and `v_min` have the same arguments and need less
memory. All three assume equal times of F, I and W; `zb_auto(..., chunks=2)` uses measured times.

The first and the last stage of the model are on one rank, and all ranks keep the same number of
activations. Compared with 1F1B, and with equal times of F, I and W:

- ZB-V: a rank keeps as many activations as the first rank of 1F1B, and is never idle between its
  first and its last action.
- V-Half: a rank keeps about half as many activations as the first rank of 1F1B, and is idle for
  about half as long as in 1F1B.
- V-Min: a rank keeps about a third as many activations as the first rank of 1F1B, and is idle for
  about two thirds as long as in 1F1B.

Sources: Qi et al. 2024, arXiv 2401.10241, section 6; Qi et al. 2024, arXiv 2405.15362.

ZB-V has a fixed order. V-Half and V-Min start with a pattern for one micro-batch that can be
repeated for every micro-batch within the memory limit. The order of V-Half is the repeated pattern,
with its beginning and end moved as early as possible. V-Min also tries four orders from list
scheduling. W is placed when ranks would be idle or need memory. The order with the smallest
makespan is then improved along its critical path.
"""

from __future__ import annotations

from itertools import accumulate, chain, cycle
from math import inf
from typing import NamedTuple

from threed.schedules.critical_path import shorten
from threed.schedules.list_scheduling import Priority, list_orders
from threed.schedules.plan import Plan
from threed.schedules.simulation import Costs
from threed.schedules.split_backward import Flow, Orders, fill, to_plan, v_shape

# time of one micro-batch on a rank, if F, I and W take 1 unit each on each of the two chunks
PERIOD = 6
# times of F, I and W for both chunks of a rank together
UNIT = Costs(2, 2, 2)
_EFFORT = 100_000  # maximum number of actions that `shorten` simulates


def zb_v(stages: int, microbatches: int) -> Plan:
    """Returns the plan of ZB-V. A rank keeps the activations of at most `stages` micro-batches.

    Args:
        stages: number of pipeline ranks.
        microbatches: number of micro-batches per step.
    """
    unit = Flow.of(v_shape(stages), microbatches, UNIT)
    filled = fill(unit, phases(unit), 2 * stages)
    assert filled is not None
    return to_plan("zb-v", unit, filled)


def v_half(stages: int, microbatches: int) -> Plan:
    """Returns the plan of V-Half.

    A rank keeps the activations of at most (stages + 2) // 2 micro-batches.

    Args:
        stages: number of pipeline ranks.
        microbatches: number of micro-batches per step.
    """
    return _best("v-half", stages, microbatches, (stages + 2) // 2, [Variant(2, tight=True)])


def v_min(stages: int, microbatches: int) -> Plan:
    """Returns the plan of V-Min.

    A rank keeps the activations of at most (stages + 4) // 3 micro-batches.

    Args:
        stages: number of pipeline ranks.
        microbatches: number of micro-batches per step.
    """
    variants = [
        Variant(1, tight=True),
        Variant(1, 4),
        Variant(1, 2),
        Variant(1, 2, more=1),
        Variant(1, 2, more=1, balanced=True),
    ]
    return _best("v-min", stages, microbatches, (stages + 4) // 3, variants)


class Variant(NamedTuple):
    """A way to derive orders from a pattern. The unit of time is one F, I or W of a chunk.

    Attributes:
        hop: in the pattern, the time from the start of F or I on a rank to its start on the next
            rank, while a micro-batch moves down (from the first rank to the last).
        extra: for list scheduling: time by which an activation may live longer than in the pattern.
        more: for list scheduling: additional micro-batches in flight per stage.
        balanced: for list scheduling: whether a rank reserves memory for its second chunk until it
            has run the first I of its first stage.
        eager: for list scheduling: see `Priority`.
        tight: whether to use the repeated pattern, with its beginning and end moved as early as
            possible, instead of list scheduling.
    """

    hop: int
    extra: int = 0
    more: int = 0
    balanced: bool = False
    eager: bool = False
    tight: bool = False


def _best(name: str, stages: int, microbatches: int, limit: int, variants: list[Variant]) -> Plan:
    """Returns the plan of the variant with the smallest makespan, improved by `shorten`."""
    unit, chunks = Flow.of(v_shape(stages), microbatches, UNIT), 2 * limit
    orders = [orders_of(unit, variant, chunks) for variant in variants]
    filled = [fill(unit, order, chunks) for order in orders if order is not None]
    best = min((each for each in filled if each), key=lambda each: (each.makespan, each.span))
    return to_plan(name, unit, shorten(unit, best, chunks, _EFFORT)[0])


def orders_of(unit: Flow, variant: Variant, limit: int) -> Orders | None:
    """Returns the orders of one variant, or None if the variant leads to no valid order.

    Args:
        unit: the flow of a placement in the shape of a V. With `Variant.tight`, every F, I and W of
            a chunk must take 1 unit of time.
        variant: how to derive the orders.
        limit: maximum number of live activations on a rank; a micro-batch on one chunk counts as 1.
    """
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
    """Returns ZB-V's order (arXiv 2401.10241, section 6) for any number of micro-batches.

    F and I are the actions of a rank's down chunk, f and i the actions of its up chunk. The rank
    runs F until the first f is available, then F and f in turn until the first i, then f and i in
    turn until the first I, then F, I, f and i in turn.
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


# The key is `hop` (see `pattern`). The value is a function of the number of ranks. It returns how
# many time units the first rank is idle between the last forward of a micro-batch and its first I.
# With this gap, no actions of the repeated pattern collide.
_GAPS = {1: lambda ranks: 2 if ranks % 3 == 0 else 0, 2: lambda ranks: 0 if ranks % 2 else 3}


def pattern(ranks: int, hop: int) -> tuple[int, ...]:
    """Returns the start of every position for one micro-batch, in units.

    From rank to rank a micro-batch takes `hop` units on the way down (from the first rank to the
    last), and 1 unit on the way up. hop=1 is V-Min and hop=2 is V-Half (arXiv 2405.15362, section 3
    and appendix). hop=5 needs as much memory as ZB-V.
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
    """A pattern repeated for all micro-batches, with its beginning and end moved to earlier slots.

    A slot is one unit of time. Actions between the last I of the first micro-batch and the first F
    of the last micro-batch do not move, since the pattern is in its steady state there.
    """

    def __init__(self, unit: Flow, begin: tuple[int, ...], limit: int):
        self.unit, self.limit = unit, limit
        # numbers of actions: an F or I has the number of its position, and the W that belongs to
        # the I at position p has the number p + last
        self.last = len(begin)
        times = {**dict(enumerate(begin)), **self._weights(begin)}
        count = unit.microbatches
        self.times = {
            position: [time + PERIOD * mb for mb in range(count)]
            for position, time in times.items()
        }
        self.moving = (begin[-1], begin[0] + PERIOD * (count - 1))
        slots = max(times.values()) + PERIOD * count + 1
        self.taken = [bytearray(slots) for _ in range(unit.ranks)]
        # per rank and slot: first the changes of live activations, later their running sums
        self.activations = [[0] * slots for _ in range(unit.ranks)]

    def _weights(self, begin: tuple[int, ...]) -> dict[int, int]:
        """Returns the start of each W: the first slot after its I that is free in every period."""
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
        """Returns the orders of forwards and backwards, or None if actions collide."""
        actions = sorted(
            (time, p, mb) for p, times in self.times.items() for mb, time in enumerate(times)
        )
        for time, position, _ in actions:
            rank = self.unit.rank[position % self.last]
            if self.taken[rank][time]:
                return None
            self.taken[rank][time] = 1
            self.activations[rank][time] += self._change(position)
        self.activations = [list(accumulate(changes)) for changes in self.activations]
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
        """Returns the change of live activations by an action: 1 for F, 0 for I, -1 for W."""
        return 1 if position < self.unit.forwards else -1 if position >= self.last else 0

    def _hold(self, rank: int, position: int, slots: range) -> None:
        """Adds the change of live activations by an action to the sums of the given slots."""
        change, activations = self._change(position), self.activations[rank]
        for slot in slots if change else ():
            activations[slot] += change

    def _move(self, time: int, position: int, microbatch: int) -> None:
        """Moves an action to the earliest free slot after its input, if memory allows."""
        rank, times = self.unit.rank[position % self.last], self.times[position]
        need = position - (self.last if position >= self.last else 1)
        earliest = max(
            self.times[need][microbatch] + 1 if position else 0,
            times[microbatch - 1] + 1 if microbatch else 0,
        )
        if position < self.unit.forwards:
            slot = time
            while slot > earliest and self.activations[rank][slot - 1] < self.limit:
                slot -= 1
            earliest = slot
        slot = self.taken[rank].find(0, earliest, time)
        if slot >= 0:
            self.taken[rank][time], self.taken[rank][slot] = 0, 1
            times[microbatch] = slot
            self._hold(rank, position, range(slot, time))
