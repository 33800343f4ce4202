"""Counts the gathers of ZeRO-3 in a step, and computes the peak of gathered parameters.

    gathering(units, reads, plan.ranks[rank], prefetch=1).times

A unit (layer) is gathered before its forward. It is gathered again before its backward if `reads`
is true for the unit, that is, if the backward reads weights. A unit that runs last in one pass of
the chunk and first in the next pass stays gathered between the two passes: the last unit of the
chunk between a forward and a backward, and the first unit between a backward and a forward. The two
passes may be of different micro-batches, because all micro-batches use the same weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

from threed.schedules.action import COMPUTE, Action, Kind
from threed.schedules.prefetch_order import walk

Key = TypeVar("Key", bound=Hashable)


class Gathering(NamedTuple, Generic[Key]):
    """The gathers of one chunk in a step.

    Attributes:
        times: number of gathers per group of parameters.
        forward: maximum number of elements that are gathered at the same time in forwards.
        backward: per unit, the maximum number of elements that are gathered at the same time during
            the backward of the unit.
    """

    times: Counter[Key]
    forward: int
    backward: list[int]

    @property
    def most(self) -> int:
        """The maximum number of elements that are gathered at the same time in the step."""
        return max([self.forward, *self.backward])


def gathering(
    units: Sequence[Mapping[Key, int]], reads: Sequence[bool], actions: Sequence[Action], *, prefetch: int = 1,
    chunk: int = 0,
) -> Gathering[Key]:  # fmt: skip
    """Simulates the gathers of one chunk of a rank.

    Args:
        units: per unit, the groups of parameters that it gathers, with their numbers of elements.
            If several units use a group at the same time, it is gathered only once, and is released
            after the last of these units.
        reads: per unit, whether its backward reads weights.
        actions: all actions of the rank in a step. Actions without computation are ignored. If a
            pass of another chunk runs between two passes of this chunk, no unit stays gathered
            between the two passes.
        prefetch: number of units that are gathered ahead of the running unit.
        chunk: number of the chunk.
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
        # A unit whose backward reads no weights is not gathered. But while this backward runs,
        # other units may be gathered, and take memory.
        for unit in () if is_forward else set(range(len(units))).difference(order):
            backward[unit] = max(backward[unit], now)
    return Gathering(times, forward, backward)


def _passes(
    reads: Sequence[bool], actions: Sequence[Action], chunk: int
) -> Iterator[tuple[bool, list[int], bool]]:
    """Yields the passes of a chunk in a step, in order.

    Yields:
        (is_forward, units, keep_last) for each pass: whether the pass is a forward; the units that
        the pass gathers, in order; whether the last of these units stays gathered for the next
        pass.
    """
    forward = list(range(len(reads)))
    backward = [number for number in reversed(forward) if reads[number]]
    compute = [part for action in actions if action.kind in COMPUTE for part in action.parts]
    for action, then in zip(compute, [*compute[1:], None], strict=True):
        if action.chunk != chunk or action.kind is Kind.W:
            continue
        turning_to = (Kind.B, Kind.I) if action.kind is Kind.F else (Kind.F,)
        turns = then is not None and then.chunk == chunk and then.kind in turning_to
        is_forward = action.kind is Kind.F
        gathered, next_gathered = (forward, backward) if is_forward else (backward, forward)
        yield is_forward, gathered, turns and gathered[-1:] == next_gathered[:1]
