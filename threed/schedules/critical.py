"""A plan that is there is made shorter along its critical path.

Use: `better, left = shorten(flow, filled, limit, effort)`, of a plan from `flow.fill`.

A plan ends when its critical path does: actions of which none can run later without moving the end. Another order ends
earlier only if two neighbours on a rank change places that follow one another on that path. So in every round those
are swapped after which the longest path through them is the shortest, and with them all others that promise an earlier
end. The best swap is made even if the plan then ends later, so that the search leaves orders that no single swap makes
better, and may not be undone for a few rounds. W is swapped as F and I are. Sources, all on the job shop: van Laarhoven
et al. 1992 (DOI 10.1287/opre.40.1.113: one such swap never makes actions wait for each other), Taillard 1994 (DOI
10.1287/ijoc.6.2.108: how long the path is, without playing the plan out), Nowicki and Smutnicki 1996 (DOI
10.1287/mnsc.42.6.797: which one, where all are barred).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from threed.schedules.flow import Filled, Flow

TENURE = 11  # rounds in which a swap may not be undone
IN_VAIN = 200  # rounds without an earlier end, after which no more is tried
_EPSILON = 1e-9  # of the makespan: differences by rounding do not count


def shorten(flow: Flow, filled: Filled, limit: int, effort: float) -> tuple[Filled, float]:
    """Returns the plan with the smallest makespan found, at worst `filled`, and how much effort is left.

    limit: the most activations of one chunk and one micro-batch that a rank may hold. effort: how many actions to play
    out at most, in the order of time or against it.
    """
    work = _Work(flow)
    ranks = work.numbered(filled.ranks)
    times = work.begins(ranks)
    if times is None:
        raise ValueError("ranks of the plan wait for each other")
    best, best_ranks = times, [list(line) for line in ranks]
    barred: dict[tuple[int, int], int] = {}  # until which round
    turn = vain = 0
    while effort > 0 and vain < IN_VAIN:
        turn, vain = turn + 1, vain + 1
        swaps = sorted(_swaps(work, ranks, times, limit))
        effort -= 2 * len(times.order) + 6 * len(swaps)
        chosen = _chosen(swaps, barred, turn, times.makespan, best.makespan)
        while chosen:
            _swap(ranks, chosen)
            played = work.begins(ranks)
            if played and (len(chosen) == 1 or played.makespan < times.makespan):
                times = played
                break
            _swap(ranks, chosen)
            effort -= len(times.order)
            chosen = chosen[: len(chosen) // 4 or len(chosen) - 1]
        if not chosen:
            break
        barred |= {(swap.second, swap.first): turn + TENURE for swap in chosen}
        if times.makespan < best.makespan * (1 - _EPSILON):
            best, best_ranks, vain = times, [list(line) for line in ranks], 0
    return work.filled(best_ranks, best), effort


class _Times(NamedTuple):
    """When every action begins, and an order of all in which none comes before what it needs."""

    begin: list[float]
    order: list[int]
    makespan: float


class _Swap(NamedTuple):
    """Two neighbours on a rank, and how long the longest path through them is once they have changed places."""

    longest: float
    rank: int
    at: int
    first: int
    second: int


def _chosen(
    swaps: list[_Swap], barred: dict[tuple[int, int], int], turn: int, makespan: float, best: float
) -> list[_Swap]:
    """The best swap that is free, and with it all others that promise an earlier end and share no action.

    A plan that repeats itself for every micro-batch is as late in each. Free are swaps that are not barred, and those
    that promise an earlier end than the best plan; where none is, the one that is barred for the shortest time.
    """

    def until(swap: _Swap) -> int:
        return barred.get((swap.first, swap.second), 0)

    free = [swap for swap in swaps if until(swap) < turn or swap.longest < best * (1 - _EPSILON)]
    chosen, taken = list[_Swap](), set[int]()
    for swap in free or sorted(swaps, key=until)[:1]:
        if chosen and swap.longest >= makespan * (1 - _EPSILON):
            break
        if swap.first not in taken and swap.second not in taken:
            chosen.append(swap)
            taken |= {swap.first, swap.second}
    return chosen


def _swap(ranks: list[list[int]], swaps: list[_Swap]) -> None:
    """Lets neighbours change places, or change back."""
    for _, rank, at, *_ in swaps:
        line = ranks[rank]
        line[at], line[at + 1] = line[at + 1], line[at]


class _Work:
    """What there is to do. Actions have numbers: those of position p from p * microbatches on, a W those of a position
    above all, `len(flow.rank) +` that of its I. need: what an action waits for, and how long that is on its way."""

    def __init__(self, flow: Flow):
        self.flow, self.count, self.weights = flow, flow.microbatches, len(flow.rank)
        size = 2 * self.weights * self.count
        self.time, self.lag, self.need = [0.0] * size, [0.0] * size, [-1] * size
        self.needed_by: list[list[int]] = [[] for _ in range(size)]
        self.elsewhere = [-1] * size  # the rank that may have waited for this action
        self.holds = [0] * size
        for position, rank in enumerate(flow.rank):
            forward = position < flow.forwards
            for action in self._numbers(position):
                self.time[action], self.holds[action] = flow.time[position], int(forward)
                if position:
                    self._needs(action, action - self.count, flow.travel[position])
                    if flow.rank[position - 1] != rank:
                        self.elsewhere[action - self.count] = rank
                if not forward:
                    weight = action + self.weights * self.count
                    self.time[weight], self.holds[weight] = flow.weight[position], -1
                    self._needs(weight, action, 0.0)

    def _numbers(self, position: int) -> range:
        return range(position * self.count, (position + 1) * self.count)

    def _needs(self, action: int, need: int, lag: float) -> None:
        self.need[action], self.lag[action] = need, lag
        self.needed_by[need].append(action)

    def numbered(self, ranks: tuple[tuple[int, ...], ...]) -> list[list[int]]:
        """The actions of a plan by their numbers."""
        numbers = []
        for line in ranks:
            following = {
                at: iter(self._numbers(at if at >= 0 else self.weights - 1 - at))
                for at in set(line)
            }
            numbers.append([next(following[at]) for at in line])
        return numbers

    def begins(self, ranks: list[list[int]]) -> _Times | None:
        """Plays ranks out; None where they come to wait for each other."""
        begin, order = [-1.0] * len(self.time), list[int]()
        at, now = [0] * len(ranks), [0.0] * len(ranks)
        time, need, lag, elsewhere = self.time, self.need, self.lag, self.elsewhere
        runnable = list(range(len(ranks)))
        while runnable:
            rank = runnable.pop()
            line, clock, done = ranks[rank], now[rank], at[rank]
            while done < len(line):
                action = line[done]
                before = need[action]
                if before >= 0:
                    if begin[before] < 0:
                        break
                    clock = max(clock, begin[before] + time[before] + lag[action])
                begin[action] = clock
                clock += time[action]
                order.append(action)
                done += 1
                if elsewhere[action] >= 0:
                    runnable.append(elsewhere[action])
            at[rank], now[rank] = done, clock
        if any(done < len(line) for done, line in zip(at, ranks, strict=True)):
            return None
        return _Times(begin, order, max(now))

    def tails(self, times: _Times, after: list[int]) -> list[float]:
        """From the begin of every action, how long at least until the plan's end. after: what follows on its rank."""
        tail, time, lag = [0.0] * len(self.time), self.time, self.lag
        for action in reversed(times.order):
            longest = tail[after[action]] if after[action] >= 0 else 0.0
            for follower in self.needed_by[action]:
                longest = max(longest, tail[follower] + lag[follower])
            tail[action] = longest + time[action]
        return tail

    def filled(self, ranks: list[list[int]], times: _Times) -> Filled:
        """The plan of these actions."""
        begin, time, above = times.begin, self.time, self.weights * self.count
        spans = [begin[line[-1]] + time[line[-1]] - begin[line[0]] for line in ranks]
        lines = [
            [a // self.count if a < above else -1 - (a - above) // self.count for a in line]
            for line in ranks
        ]
        return Filled(times.makespan, max(spans), tuple(map(tuple, lines)))


def _swaps(work: _Work, ranks: list[list[int]], times: _Times, limit: int) -> Iterator[_Swap]:
    """Neighbours that follow one another on the critical path and may change places."""
    begin, time, count, need = times.begin, work.time, work.count, work.need
    after = [-1] * len(time)
    for line in ranks:
        for first, second in pairwise(line):
            after[first] = second
    tail = work.tails(times, after)
    critical, rounding = times.makespan * (1 - _EPSILON), times.makespan * _EPSILON
    for rank, line in enumerate(ranks):
        held, before = 0, -1
        for at, (first, second) in enumerate(pairwise(line)):
            if (
                begin[first] + tail[first] >= critical
                and begin[second] + tail[second] >= critical
                and begin[second] - begin[first] <= time[first] + rounding  # no wait between them
                and first // count != second // count  # micro-batches of a position stay in order
                and need[second] != first
                and (held < limit or work.holds[second] < 1)
            ):
                yield _Swap(
                    _longest(work, times, tail, before, first, second, after[second]),
                    rank,
                    at,
                    first,
                    second,
                )
            held += work.holds[first]
            before = first


def _longest(
    work: _Work, times: _Times, tail: list[float], before: int, first: int, second: int, after: int
) -> float:
    """The longest path through two neighbours once they have changed places, as Taillard estimates it."""
    time, lag, need, begin = work.time, work.lag, work.need, times.begin

    def earliest(action: int, free: float) -> float:
        needed = need[action]
        return free if needed < 0 else max(free, begin[needed] + time[needed] + lag[action])

    def remaining(action: int, following: float) -> float:
        return time[action] + max(
            [following, *(tail[other] + lag[other] for other in work.needed_by[action])]
        )

    now = earliest(second, begin[before] + time[before] if before >= 0 else 0.0)
    later = earliest(first, now + time[second])
    first_tail = remaining(first, tail[after] if after >= 0 else 0.0)
    return max(later + first_tail, now + remaining(second, first_tail))
