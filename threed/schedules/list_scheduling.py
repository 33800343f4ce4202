"""List scheduling: orders forwards and backwards by priorities, under a memory limit.

Use: `orders = list_orders(flow, Priority(...), limit)`; then `split_backward.fill(flow, orders,
limit)` inserts the W.

F is a forward, I a backward for the gradient of the input, and W a backward for the gradients of
the weights. The ranks are simulated over time. An F or I can run if its input is available. An F
also needs free memory: the rank must be below `limit`, and the stage below `Priority.in_flight`. A
free rank runs, of all F and I that can run, the one with the lowest priority number. If none can
run, the rank runs its oldest pending W. With `Priority.eager`, a rank with full memory runs its
oldest pending W even if an I can run. Positions and orders are defined in split_backward.py.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from math import inf

from threed.schedules.split_backward import Flow


@dataclass(frozen=True)
class Priority:
    """The priorities of all actions.

    The priority number of an action is begin[position] + period * micro-batch: its start time in a
    pattern that repeats for every micro-batch. The action with the lowest number runs first.

    Attributes:
        begin: per position, its start in the pattern.
        period: time between two micro-batches in the pattern.
        in_flight: per forward position, the maximum number of micro-batches that have started this
            forward and have not finished the W of the same stage.
        at_first: replaces `in_flight` on a rank until the rank has run the first I of its first
            stage.
        eager: whether a rank with full memory runs a pending W before any F or I.
    """

    begin: tuple[int, ...]
    period: int
    in_flight: tuple[int, ...]
    at_first: tuple[int, ...]
    eager: bool = False


def list_orders(flow: Flow, priority: Priority, limit: int) -> list[list[int]] | None:
    """Returns the order of forwards and backwards per rank.

    Args:
        flow: the positions and their times.
        priority: the priorities of the actions.
        limit: maximum number of live activations on a rank; a micro-batch on one chunk counts as 1,
            from its F to the end of its W.

    Returns:
        Per rank, its positions in order, without W; None if the ranks deadlock, for example because
        the limit leaves no memory for the second chunk.
    """
    ranks = _Ranks(flow, priority, limit)
    events = [(0.0, rank) for rank in range(flow.ranks)]
    while events:
        now, rank = heapq.heappop(events)
        if now < ranks.free[rank]:
            continue
        position = ranks.choose(rank, now)
        if ranks.waiting[rank] and (
            position < 0 or (priority.eager and ranks.activations[rank] >= limit)
        ):
            ranks.weight(rank, now)
            heapq.heappush(events, (ranks.free[rank], rank))
        elif position >= 0:
            end = ranks.run(rank, position, now)
            heapq.heappush(events, (end, rank))
            if position + 1 < len(flow.rank) and flow.rank[position + 1] != rank:
                heapq.heappush(events, (end + flow.travel[position + 1], flow.rank[position + 1]))
    complete = all(len(order) == 2 * flow.chunks * flow.microbatches for order in ranks.orders)
    return ranks.orders if complete else None


class _Ranks:
    """The simulated state of all ranks: finished actions, pending W and live activations."""

    def __init__(self, flow: Flow, priority: Priority, limit: int):
        self.flow, self.priority, self.limit = flow, priority, limit
        self.positions = [flow.positions(rank) for rank in range(flow.ranks)]
        self.made: list[list[float]] = [[] for _ in flow.rank]
        self.flying = [0] * flow.forwards
        self.free, self.activations = [0.0] * flow.ranks, [0] * flow.ranks
        # per rank, the positions of the I with a pending W, oldest first
        self.waiting: list[list[int]] = [[] for _ in self.positions]
        self.orders: list[list[int]] = [[] for _ in self.positions]

    def choose(self, rank: int, now: float) -> int:
        """Returns the position that a rank runs next, or -1 if the rank can run no F and no I.

        A position is the F or the I of one stage (see split_backward.py).

        Args:
            rank: pipeline rank.
            now: simulated time.
        """
        flow, made, begin, period = self.flow, self.made, self.priority.begin, self.priority.period
        full = self.activations[rank] >= self.limit
        caps = self.priority.in_flight if made[self.positions[rank][-1]] else self.priority.at_first
        chosen, lowest = -1, inf
        for position in self.positions[rank]:
            number = len(made[position])
            if number == flow.microbatches:
                continue
            if position < flow.forwards and (full or self.flying[position] >= caps[position]):
                continue
            if position:
                before = made[position - 1]
                if number == len(before) or before[number] + flow.travel[position] > now:
                    continue
            if begin[position] + period * number < lowest:
                chosen, lowest = position, begin[position] + period * number
        return chosen

    def run(self, rank: int, position: int, now: float) -> float:
        """Simulates the F or I at a position for its next micro-batch; returns the end time."""
        end = self.free[rank] = now + self.flow.time[position]
        self.made[position].append(end)
        self.orders[rank].append(position)
        if position < self.flow.forwards:
            self.activations[rank] += 1
            self.flying[position] += 1
        else:
            self.waiting[rank].append(position)
        return end

    def weight(self, rank: int, now: float) -> None:
        """Simulates the oldest pending W of a rank."""
        position = self.waiting[rank].pop(0)
        self.free[rank] = now + self.flow.weight[position]
        self.activations[rank] -= 1
        self.flying[len(self.flow.rank) - 1 - position] -= 1
