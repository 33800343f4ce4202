"""List scheduling: orders of forwards and backwards under a memory limit, from a priority for every action.

Use: `orders = list_orders(flow, Priority(...), limit)`, then `flow.fill`.

The ranks are played through time. A rank that is free takes, among the actions whose input is there and whose memory
is allowed, the one with the lowest priority number; W where there is none, or where its memory is full.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from math import inf

from threed.schedules.flow import Flow


@dataclass(frozen=True)
class Priority:
    """What comes first. An action's number is begin[position] + period * micro-batch: when it would run in a pattern
    that repeats itself for every micro-batch.

    in_flight: per forward position, the most micro-batches between it and the end of their W; at_first: the same until
    the rank's first I of its first stage. Where a rank's memory is full, W runs before anything else if `eager`.
    """

    begin: tuple[int, ...]
    period: int
    in_flight: tuple[int, ...]
    at_first: tuple[int, ...]
    eager: bool = False


def list_orders(flow: Flow, priority: Priority, limit: int) -> list[list[int]] | None:
    """Returns per rank the order of its forwards and backwards.

    limit: the most activations of one chunk and one micro-batch that a rank may hold, from F to the end of W. Returns
    None where the ranks come to wait for each other, as in a rank without room for a second chunk.
    """
    ranks = _Ranks(flow, priority, limit)
    events = [(0.0, rank) for rank in range(flow.ranks)]
    while events:
        now, rank = heapq.heappop(events)
        if now < ranks.free[rank]:
            continue
        position = ranks.choose(rank, now)
        if ranks.waiting[rank] and (position < 0 or (priority.eager and ranks.held[rank] >= limit)):
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
    """Where all ranks stand."""

    def __init__(self, flow: Flow, priority: Priority, limit: int):
        self.flow, self.priority, self.limit = flow, priority, limit
        self.positions = [flow.positions(rank) for rank in range(flow.ranks)]
        self.made: list[list[float]] = [[] for _ in flow.rank]
        self.flying = [0] * flow.forwards
        self.free, self.held = [0.0] * flow.ranks, [0] * flow.ranks
        # positions whose W has not run
        self.waiting: list[list[int]] = [[] for _ in self.positions]
        self.orders: list[list[int]] = [[] for _ in self.positions]

    def choose(self, rank: int, now: float) -> int:
        """Returns the position to take, or -1 if none can run."""
        flow, made, begin, period = self.flow, self.made, self.priority.begin, self.priority.period
        full = self.held[rank] >= self.limit
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
        """Runs the next micro-batch of a position and returns when it ends."""
        end = self.free[rank] = now + self.flow.time[position]
        self.made[position].append(end)
        self.orders[rank].append(position)
        if position < self.flow.forwards:
            self.held[rank] += 1
            self.flying[position] += 1
        else:
            self.waiting[rank].append(position)
        return end

    def weight(self, rank: int, now: float) -> None:
        """Runs the oldest W that waits."""
        position = self.waiting[rank].pop(0)
        self.free[rank] = now + self.flow.weight[position]
        self.held[rank] -= 1
        self.flying[len(self.flow.rank) - 1 - position] -= 1
