"""A plan that is there is made shorter along its critical path.

Use: `better, left = shorten(flow, filled, limit, effort)`, of a plan from `flow.fill`.

A plan ends when its critical path does: actions of which none can run later without moving the end. Only where two
neighbours on a rank both are on it can another order end earlier, so these change places: in every round those two
after which the longest way through either of them is the shortest. They may not change back for a few rounds, even if
the plan ends later at first, so that the search leaves orders that no single change makes better. Places of W change as
those of F and I do. Sources: van Laarhoven et al. 1992 (DOI 10.1287/opre.40.1.113: such a change never makes actions
wait for each other), Taillard 1994 (DOI 10.1287/ijoc.6.2.108: how long the way is, without playing the plan out) and
Nowicki and Smutnicki 1996 (DOI 10.1287/mnsc.42.6.797), all on the job shop.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from threed.schedules.flow import Filled, Flow

BARRED = 11  # rounds in which two actions that changed places may not change back
IN_VAIN = 200  # rounds without an earlier end, after which no more is tried


def shorten(flow: Flow, filled: Filled, limit: int, effort: float) -> tuple[Filled, float]:
    """Returns the plan with the smallest makespan found, at worst `filled`, and how much effort is left.

    limit: the most activations of one chunk and one micro-batch that a rank may hold. effort: how many actions to play
    out, forwards or backwards, at most.
    """
    work = _Work(flow)
    ranks = work.numbered(filled.ranks)
    times = work.begins(ranks)
    if times is None:
        raise ValueError("ranks of the plan wait for each other")
    best, best_ranks = times.makespan, [list(line) for line in ranks]
    barred: dict[tuple[int, int], int] = {}
    turn = vain = 0
    while effort > 0 and vain < IN_VAIN:
        turn, vain = turn + 1, vain + 1
        changes = list(_changes(work, ranks, times, limit))
        effort -= 6 * len(changes)
        free = [c for c in changes if barred.get((c.second, c.first), 0) < turn or c.longest < best * (1 - 1e-9)]
        chosen = _together(free, times.makespan * (1 - 1e-9))
        effort -= len(times.order)
        while chosen:
            effort -= len(times.order)
            _change(ranks, chosen)
            played = work.begins(ranks)
            if played and (len(chosen) == 1 or played.makespan < times.makespan):
                times = played
                barred |= {(change.first, change.second): turn + BARRED for change in chosen}
                break
            _change(ranks, chosen)
            chosen = chosen[: len(chosen) // 4 or len(chosen) - 1]
        if not chosen:
            break
        if times.makespan < best * (1 - 1e-9):
            best, best_ranks, vain = times.makespan, [list(line) for line in ranks], 0
    return work.filled(best_ranks), effort


def _together(changes: list[_Change], makespan: float) -> list[_Change]:
    """The best change, and with it all others that promise an earlier end and share no action: a plan that repeats
    itself for every micro-batch is as late in each."""
    changes.sort()
    chosen, taken = changes[:1], {action for change in changes[:1] for action in (change.first, change.second)}
    for change in changes[1:]:
        if change.longest >= makespan:
            break
        if change.first not in taken and change.second not in taken:
            chosen.append(change)
            taken |= {change.first, change.second}
    return chosen


class _Times(NamedTuple):
    """When every action begins, and an order of all in which none comes before what it needs."""

    begin: list[float]
    order: list[int]
    makespan: float


class _Change(NamedTuple):
    """Two neighbours on a rank, and how long the longest way through them is once they have changed places."""

    longest: float
    rank: int
    at: int
    first: int
    second: int


def _change(ranks: list[list[int]], changes: list[_Change]) -> None:
    """Changes the places of neighbours, or changes them back."""
    for _, rank, at, *_ in changes:
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
            following = {at: iter(self._numbers(at if at >= 0 else self.weights - 1 - at)) for at in set(line)}
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
            for action in line[done:]:
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

    def rests(self, times: _Times, after: list[int]) -> list[float]:
        """From the begin of every action, how long at least until the plan's end."""
        rest, time, lag = [0.0] * len(self.time), self.time, self.lag
        for action in reversed(times.order):
            longest = rest[after[action]] if after[action] >= 0 else 0.0
            for follower in self.needed_by[action]:
                longest = max(longest, rest[follower] + lag[follower])
            rest[action] = longest + time[action]
        return rest

    def filled(self, ranks: list[list[int]]) -> Filled:
        """The plan of these actions."""
        times = self.begins(ranks)
        if times is None:
            raise ValueError("ranks of the plan wait for each other")
        begin, time, above = times.begin, self.time, self.weights * self.count
        spans = [begin[line[-1]] + time[line[-1]] - begin[line[0]] for line in ranks]
        idle = tuple(span - sum(time[action] for action in line) for span, line in zip(spans, ranks, strict=True))
        lines = [[a // self.count if a < above else -1 - (a - above) // self.count for a in line] for line in ranks]
        return Filled(times.makespan, max(spans), idle, tuple(map(tuple, lines)))


def _changes(work: _Work, ranks: list[list[int]], times: _Times, limit: int) -> Iterator[_Change]:
    """Neighbours on the critical path that may change places."""
    begin, time, count, need = times.begin, work.time, work.count, work.need
    after = [-1] * len(time)
    for line in ranks:
        for first, second in pairwise(line):
            after[first] = second
    rest = work.rests(times, after)
    critical = times.makespan * (1 - 1e-9)
    for rank, line in enumerate(ranks):
        held, before = 0, -1
        for at, (first, second) in enumerate(pairwise(line)):
            if (
                begin[first] + rest[first] >= critical
                and begin[second] + rest[second] >= critical
                and first // count != second // count  # micro-batches of a position stay in order
                and need[second] != first
                and (held < limit or work.holds[second] < 1)
            ):
                yield _Change(
                    _longest(work, times, rest, before, first, second, after[second]), rank, at, first, second
                )
            held += work.holds[first]
            before = first


def _longest(work: _Work, times: _Times, rest: list[float], before: int, first: int, second: int, after: int) -> float:
    """The longest way through two neighbours once they have changed places, as Taillard estimates it."""
    time, lag, need, begin = work.time, work.lag, work.need, times.begin

    def earliest(action: int, free: float) -> float:
        needed = need[action]
        return free if needed < 0 else max(free, begin[needed] + time[needed] + lag[action])

    def remaining(action: int, following: float) -> float:
        return time[action] + max([following, *(rest[other] + lag[other] for other in work.needed_by[action])])

    now = earliest(second, begin[before] + time[before] if before >= 0 else 0.0)
    later = earliest(first, now + time[second])
    first_rest = remaining(first, rest[after] if after >= 0 else 0.0)
    return max(later + first_rest, now + remaining(second, first_rest))
