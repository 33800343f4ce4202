"""Which sliced parameters ZeRO-3 gathers in a step, how often, and how many are whole at once.

Use: `gathering(units, reads, plan.ranks[rank], prefetch=1).times`.

A unit is gathered before its forward, and again before its backward where that reads weights. Where the rank turns
round it stays whole instead: a chunk's last unit from a forward to the backward right after it (of any micro-batch:
the weights are the same), its first one from a backward to the forward right after it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

from threed.schedules.action import COMPUTE, Action, Kind
from threed.schedules.window import walk

Key = TypeVar("Key", bound=Hashable)


class Gathering(NamedTuple, Generic[Key]):
    """times: how often each thing is gathered in a step. forward, backward: elements that are whole at the worst moment
    of forwards, and of each unit's backward."""

    times: Counter[Key]
    forward: int
    backward: list[int]

    @property
    def most(self) -> int:
        """Elements that are whole at the worst moment."""
        return max([self.forward, *self.backward])


def gathering(
    units: Sequence[Mapping[Key, int]], reads: Sequence[bool], actions: Sequence[Action], *, prefetch: int = 1,
    chunk: int = 0,
) -> Gathering[Key]:  # fmt: skip
    """Plays out the gathers of a rank's chunk, when the rank does these actions.

    units: what each gathers, and how many elements that is; what several share is gathered once while it is whole.
    reads: whether the backward of each reads weights. prefetch: units gathered ahead. Actions that do not compute are
    passed over, and chunks other than `chunk` count only as what comes between.
    """
    holders: dict[Key, set[int]] = {}
    times, now, forward, backward = Counter[Key](), 0, 0, [0] * len(units)
    for is_forward, order, keep_last in _passes(reads, actions, chunk):
        for step in walk(order, prefetch, keep_last):
            for unit in step.gather:
                for key, size in units[unit].items():
                    if not holders.setdefault(key, set()):
                        times[key] += 1
                        now += size
                    holders[key].add(unit)
            if is_forward:
                forward = max(forward, now)
            else:
                backward[step.run] = max(backward[step.run], now)
            if step.release:
                for key, size in units[step.run].items():
                    holders[key].remove(step.run)
                    now -= 0 if holders[key] else size
        # what stays whole beside it
        for unit in () if is_forward else set(range(len(units))).difference(order):
            backward[unit] = max(backward[unit], now)
    return Gathering(times, forward, backward)


def _passes(
    reads: Sequence[bool], actions: Sequence[Action], chunk: int
) -> Iterator[tuple[bool, list[int], bool]]:
    """Of each pass over the chunk: whether it is a forward; the units that it gathers, in order; and whether the last
    of them stays whole."""
    forward = list(range(len(reads)))
    backward = [number for number in reversed(forward) if reads[number]]
    compute = [part for action in actions if action.kind in COMPUTE for part in action.parts]
    for action, then in zip(compute, [*compute[1:], None], strict=True):
        if action.chunk != chunk or action.kind is Kind.W:
            continue
        turning_to = (Kind.B, Kind.I) if action.kind is Kind.F else (Kind.F,)
        turns = then is not None and then.chunk == chunk and then.kind in turning_to
        is_forward = action.kind is Kind.F
        here, there = (forward, backward) if is_forward else (backward, forward)
        yield is_forward, here, turns and here[-1:] == there[:1]
