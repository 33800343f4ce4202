"""Shorten a plan by tabu search along its critical path.

Use: `better, effort = shorten(flow, filled, limit, effort)`, where `split_backward.fill` returned
the plan `filled`.

The makespan of a plan is the length of its critical path. An action on this path cannot run later
without delaying the end of the plan. Another order can end earlier only if it swaps two actions
that are neighbors on a rank and consecutive on the critical path. The search runs in rounds. A
round rates each such swap by an estimate: the length of the longest path through the two actions
after the swap. The round makes the swap with the smallest estimate, even if the plan gets longer,
so that the search leaves local minima. The round also makes further swaps that are estimated to
shorten the plan, but no two swaps of a round share an action. The reversal of a swap is tabu for a
few rounds. Every F (forward), I (gradient of the input) and W (gradients of the weights) can be
swapped.

Sources, all on job-shop scheduling: van Laarhoven et al. 1992 (DOI 10.1287/opre.40.1.113: one such
swap never causes a deadlock), Taillard 1994 (DOI 10.1287/ijoc.6.2.108: estimate of the path length
without simulating the plan), Nowicki and Smutnicki 1996 (DOI 10.1287/mnsc.42.6.797: the choice of a
swap if all are tabu).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from threed.schedules.split_backward import Filled, Flow

TENURE = 11  # number of rounds for which the reversal of a swap is tabu
MAX_STALLED = 200  # number of rounds without improvement after which the search stops
_EPSILON = 1e-9  # tolerance for rounding, relative to the makespan


def shorten(flow: Flow, filled: Filled, limit: int, effort: float) -> tuple[Filled, float]:
    """Returns the shortest plan found, or `filled` if none is shorter, and the remaining effort.

    Args:
        flow: the positions of the schedule (see split_backward.py) and their times.
        filled: the plan to start from.
        limit: maximum number of live activations on a rank; a micro-batch on one chunk counts as 1.
        effort: approximate maximum number of actions to simulate. The returned remaining effort is
            this number minus the actions that were simulated.

    Raises:
        ValueError: the plan `filled` deadlocks.
    """
    work = _Actions(flow)
    ranks = work.numbered(filled.ranks)
    times = work.begins(ranks)
    if times is None:
        raise ValueError("ranks of the plan wait for each other")
    best, best_ranks = times, [list(line) for line in ranks]
    tabu: dict[tuple[int, int], int] = {}  # (first, second) -> last round in which the swap is tabu
    turn = stalled = 0
    while effort > 0 and stalled < MAX_STALLED:
        turn, stalled = turn + 1, stalled + 1
        swaps = sorted(_swaps(work, ranks, times, limit))
        effort -= 2 * len(times.order) + 6 * len(swaps)
        chosen = _chosen(swaps, tabu, turn, times.makespan, best.makespan)
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
        tabu |= {(swap.second, swap.first): turn + TENURE for swap in chosen}
        if times.makespan < best.makespan * (1 - _EPSILON):
            best, best_ranks, stalled = times, [list(line) for line in ranks], 0
    return work.filled(best_ranks, best), effort


class _Times(NamedTuple):
    """The start of every action, and all actions in an order that respects their dependencies.

    Attributes:
        begin: for each action, by its number (see `_Actions`), the start time.
        order: all action numbers; each action follows the actions that it depends on.
        makespan: the end of the last action.
    """

    begin: list[float]
    order: list[int]
    makespan: float


class _Swap(NamedTuple):
    """A swap of two neighbors on a rank.

    Attributes:
        longest: estimated length of the longest path through the two actions after the swap.
        rank: pipeline rank of the two actions.
        at: index of the first action in the rank's list.
        first: number of the first action (see `_Actions`).
        second: number of the action that follows the first action on the rank.
    """

    longest: float
    rank: int
    at: int
    first: int
    second: int


def _chosen(
    swaps: list[_Swap], tabu: dict[tuple[int, int], int], turn: int, makespan: float, best: float
) -> list[_Swap]:
    """Returns the best allowed swap, and further ones that are estimated to shorten the plan.

    No two returned swaps share an action. Several swaps per round help because a plan repeats a
    pattern for every micro-batch, and has the same delay in every repetition. A swap is allowed if
    it is not tabu, or if the result is estimated to be shorter than the best plan. If no swap is
    allowed, the swap whose tabu ends first is returned.
    """

    def tabu_until(swap: _Swap) -> int:
        return tabu.get((swap.first, swap.second), 0)

    free = [
        swap for swap in swaps if tabu_until(swap) < turn or swap.longest < best * (1 - _EPSILON)
    ]
    chosen, taken = list[_Swap](), set[int]()
    for swap in free or sorted(swaps, key=tabu_until)[:1]:
        if chosen and swap.longest >= makespan * (1 - _EPSILON):
            break
        if swap.first not in taken and swap.second not in taken:
            chosen.append(swap)
            taken |= {swap.first, swap.second}
    return chosen


def _swap(ranks: list[list[int]], swaps: list[_Swap]) -> None:
    """Swaps neighbors in `ranks`, in place. A second call with the same swaps reverts the first."""
    for _, rank, at, *_ in swaps:
        line = ranks[rank]
        line[at], line[at + 1] = line[at + 1], line[at]


class _Actions:
    """The duration and the dependencies of every action of a flow.

    An action is represented by a number, which is its index in the lists below. A position is the F
    or the I of one stage (see split_backward.py). Let n be the number of positions and M the number
    of micro-batches. For micro-batch m, the F or I at position p has the number p * M + m. The W
    that belongs to the I at position p has the number (n + p) * M + m.

    Attributes:
        time: duration of the action.
        need: number of the action that computes the input, or -1 if the action has no input.
        lag: time from the end of that action until the input arrives.
        needed_by: numbers of the actions that use the result.
        elsewhere: rank that uses the result, if it is another rank; otherwise -1.
        holds: change of the rank's live activations: 1 for F, 0 for I, -1 for W.
    """

    def __init__(self, flow: Flow):
        self.flow, self.count, self.weights = flow, flow.microbatches, len(flow.rank)
        size = 2 * self.weights * self.count
        self.time, self.lag, self.need = [0.0] * size, [0.0] * size, [-1] * size
        self.needed_by: list[list[int]] = [[] for _ in range(size)]
        self.elsewhere = [-1] * size
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
        """Returns, per rank, the number of each action of a plan.

        Args:
            ranks: the actions per rank, as in `Filled.ranks`.
        """
        numbers = []
        for line in ranks:
            following = {
                at: iter(self._numbers(at if at >= 0 else self.weights - 1 - at))
                for at in set(line)
            }
            numbers.append([next(following[at]) for at in line])
        return numbers

    def begins(self, ranks: list[list[int]]) -> _Times | None:
        """Returns the simulated times of a plan, or None if the plan deadlocks.

        Args:
            ranks: per rank, the numbers of its actions in order.
        """
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
        """Returns, per action, the length of the longest path from its start to the plan's end.

        Args:
            times: the simulated times of the plan.
            after: for each action, the number of the next action on the same rank, or -1.
        """
        tail, time, lag = [0.0] * len(self.time), self.time, self.lag
        for action in reversed(times.order):
            longest = tail[after[action]] if after[action] >= 0 else 0.0
            for follower in self.needed_by[action]:
                longest = max(longest, tail[follower] + lag[follower])
            tail[action] = longest + time[action]
        return tail

    def filled(self, ranks: list[list[int]], times: _Times) -> Filled:
        """Converts action numbers to a `Filled`.

        Args:
            ranks: per rank, the numbers of its actions in order.
            times: the simulated times of this order.
        """
        begin, time, above = times.begin, self.time, self.weights * self.count
        spans = [begin[line[-1]] + time[line[-1]] - begin[line[0]] for line in ranks]
        lines = [
            [a // self.count if a < above else -1 - (a - above) // self.count for a in line]
            for line in ranks
        ]
        return Filled(times.makespan, max(spans), tuple(map(tuple, lines)))


def _swaps(work: _Actions, ranks: list[list[int]], times: _Times, limit: int) -> Iterator[_Swap]:
    """Yields the swaps that may shorten a plan, each with an estimate of its effect.

    The two actions of a swap are neighbors on a rank, and the second one follows the first one on
    the critical path. A swap is not yielded if the second action uses the result of the first one,
    or if the swap would exceed the limit. Two F, two I or two W of the same stage are not swapped,
    either, because the micro-batches of a stage must stay in order.

    Args:
        work: the durations and dependencies of the actions.
        ranks: per rank, the numbers of its actions in order.
        times: the simulated times of this order.
        limit: maximum number of live activations on a rank; a micro-batch on one chunk counts as 1.
    """
    begin, time, count, need = times.begin, work.time, work.count, work.need
    after = [-1] * len(time)
    for line in ranks:
        for first, second in pairwise(line):
            after[first] = second
    tail = work.tails(times, after)
    critical, rounding = times.makespan * (1 - _EPSILON), times.makespan * _EPSILON
    for rank, line in enumerate(ranks):
        activations, before = 0, -1
        for at, (first, second) in enumerate(pairwise(line)):
            if (
                begin[first] + tail[first] >= critical
                and begin[second] + tail[second] >= critical
                and begin[second] - begin[first] <= time[first] + rounding  # no wait between them
                # not two F, two I or two W of one stage: the stage's micro-batches stay in order
                and first // count != second // count
                and need[second] != first
                and (activations < limit or work.holds[second] < 1)
            ):
                yield _Swap(
                    _longest(work, times, tail, before, first, second, after[second]),
                    rank,
                    at,
                    first,
                    second,
                )
            activations += work.holds[first]
            before = first


def _longest(
    work: _Actions,
    times: _Times,
    tail: list[float],
    before: int,
    first: int,
    second: int,
    after: int,
) -> float:
    """Returns an estimate of the longest path through two neighbors after they are swapped.

    The estimate assumes that all earlier actions keep their start times, and that the paths from
    all later actions to the end keep their lengths. It does not simulate the plan (Taillard 1994).

    Args:
        work: the durations and dependencies of the actions.
        times: the simulated times before the swap.
        tail: for each action, the length of the longest path from its start to the plan's end.
        before: the action that precedes the two on their rank, or -1.
        first: the first of the two actions before the swap.
        second: the second of the two actions before the swap.
        after: the action that follows the two on their rank, or -1.
    """
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
