"""Orders in rounds of one forward and one backward on every rank, in which a rank leaves forwards out that come early.

Use: `round_orders(flow, limit, begin)`, then `flow.fill`.

Every stage stays at least one forward ahead of the next. One that is further ahead skips the forward of a round if it
would hold up the backward that comes to it next. Source: arXiv 2401.10241, section 3.1.
"""

from __future__ import annotations

from collections.abc import Sequence

from threed.schedules.flow import Flow


def round_orders(
    flow: Flow, limit: int, begin: Sequence[int], eager: bool = True
) -> list[list[int]]:
    """Returns per rank the order of forwards and backwards, with one chunk a rank.

    begin: per rank the forwards before its first backward, no fewer than on the next rank. limit: as of `flow.fill`.
    eager: whether a W may run in a wait that is shorter than it, while this is made up.
    """
    rounds = _Rounds(flow, limit, eager)
    for rank in range(flow.ranks):
        for _ in range(min(begin[rank], flow.microbatches)):
            rounds.run(rank)
    for number in range(flow.microbatches):
        for rank in rounds.forwards() if number else ():
            rounds.run(rank)
        for backward in range(flow.ranks, 2 * flow.ranks):
            rounds.run(backward)
    return rounds.orders


class _Rounds:
    """Where all ranks stand."""

    def __init__(self, flow: Flow, limit: int, eager: bool):
        self.flow, self.limit, self.eager = flow, limit, eager
        self.now = [0.0] * flow.ranks
        self.held, self.waiting = [0] * flow.ranks, [0] * flow.ranks
        self.made: list[list[float]] = [[] for _ in flow.rank]
        self.orders: list[list[int]] = [[] for _ in range(flow.ranks)]

    def run(self, position: int) -> None:
        """Runs the next micro-batch of a position, after the W that fit before it or have to make room."""
        flow, rank = self.flow, self.flow.rank[position]
        made, forward = self.made[position], position < flow.forwards
        start = self.made[position - 1][len(made)] + flow.travel[position] if position else 0.0
        weight = flow.weight[2 * flow.ranks - 1 - rank]
        while self.waiting[rank]:
            wait = start - self.now[rank]
            if not (
                (forward and self.held[rank] >= self.limit)
                or (wait > 0 and (self.eager or wait >= weight))
            ):
                break
            self.now[rank] += weight
            self.waiting[rank] -= 1
            self.held[rank] -= 1
        self.now[rank] = max(self.now[rank], start) + flow.time[position]
        made.append(self.now[rank])
        self.orders[rank].append(position)
        self.held[rank] += forward
        self.waiting[rank] += not forward

    def forwards(self) -> list[int]:
        """The ranks that run a forward in this round: none before one that does not."""
        ranks = range(self.flow.ranks)
        done = [len(self.made[rank]) for rank in ranks]
        ready = [
            done[rank] < self.flow.microbatches and not self._too_early(rank, done)
            for rank in ranks
        ]
        first = next((rank for rank in reversed(ranks) if not ready[rank]), -1) + 1
        return list(ranks)[first:]

    def _too_early(self, rank: int, done: list[int]) -> bool:
        """Whether a rank that is two forwards ahead of the next would be late for that one's next backward."""
        flow = self.flow
        if rank + 1 == flow.ranks or done[rank] < done[rank + 1] + 2:
            return False
        backward = 2 * flow.ranks - 2 - rank  # of the next rank
        comes = (
            self.now[rank + 1]
            + flow.time[rank + 1]
            + flow.time[backward]
            + flow.travel[backward + 1]
        )
        full = self.held[rank] >= self.limit
        return self.now[rank] + flow.time[rank] + full * flow.weight[backward + 1] > comes
