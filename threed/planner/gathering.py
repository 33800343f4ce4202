"""Which parameters ZeRO-3 gathers in a step, and how many of them are whole at once.

Use: `gathering(stage_layers, plan.ranks[rank], prefetch=1).elements`.

A layer is gathered before its forward, and again before its backward where that reads weights. Where the rank turns
round it stays whole instead: a chunk's last layer from a forward to the backward right after it (of any micro-batch:
the weights are the same), its first one from a backward to the forward right after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from threed.planner.costs import LayerCost
from threed.schedules.action import COMPUTE, Action, Kind
from threed.schedules.window import walk

_TABLE = -1  # stands for the one tensor that layers with tied parameters share


class Gathering(NamedTuple):
    """elements: of all gathers of a step. most: how many gathered ones are whole at the worst moment."""

    elements: int
    most: int


def in_turn(microbatches: int) -> tuple[Action, ...]:
    """The compute actions of a rank without a pipeline: each micro-batch's forward and backward."""
    return tuple(Action(kind, microbatch) for microbatch in range(microbatches) for kind in (Kind.F, Kind.B))


def gathering(
    layers: Sequence[LayerCost], actions: Sequence[Action], *, prefetch: int = 1, resident: int = 0, chunk: int = 0
) -> Gathering:
    """Plays out the gathers of a rank's chunk with these layers, when the rank does these actions.

    prefetch: layers gathered ahead. resident: parameters with fewer elements are whole anyway. What does not compute
    is passed over, and chunks other than `chunk` count only as what comes between.
    """
    whole = _Whole([_sizes(number, layer, resident) for number, layer in enumerate(layers)])
    for units, keep_last in _passes(layers, actions, chunk):
        for step in walk(units, prefetch, keep_last):
            for unit in step.gather:
                whole.gather(unit)
            if step.release:
                whole.release(step.run)
    return Gathering(whole.elements, whole.most)


def _passes(layers: Sequence[LayerCost], actions: Sequence[Action], chunk: int) -> Iterator[tuple[list[int], bool]]:
    """The layers that each pass over the chunk gathers, in order, and whether the last of them stays whole."""
    forward = list(range(len(layers)))
    backward = [number for number in reversed(forward) if layers[number].backward_reads]
    compute = [action for action in actions if action.kind in COMPUTE]
    for action, then in zip(compute, [*compute[1:], None], strict=True):
        if action.chunk != chunk or action.kind is Kind.W:
            continue
        turning_to = (Kind.B, Kind.I) if action.kind is Kind.F else (Kind.F,)
        turns = then is not None and then.chunk == chunk and then.kind in turning_to
        here, there = (forward, backward) if action.kind is Kind.F else (backward, forward)
        yield here, turns and here[-1:] == there[:1]


def _sizes(number: int, layer: LayerCost, resident: int) -> dict[int, int]:
    """Elements of what a layer gathers: of its own, and of the table it shares."""
    shared = layer.tied_parameters if layer.tied_parameters >= resident else 0
    return {key: size for key, size in ((number, layer.sliced(resident) - shared), (_TABLE, shared)) if size}


class _Whole:
    """What is whole, for which layers, and what that took."""

    def __init__(self, sizes: list[dict[int, int]]) -> None:
        self.sizes = sizes
        self.holders: dict[int, set[int]] = {key: set() for part in sizes for key in part}
        self.elements = self.now = self.most = 0

    def gather(self, unit: int) -> None:
        for key, size in self.sizes[unit].items():
            if not self.holders[key]:
                self.elements += size
                self.now += size
            self.holders[key].add(unit)
        self.most = max(self.most, self.now)

    def release(self, unit: int) -> None:
        for key, size in self.sizes[unit].items():
            self.holders[key].remove(unit)
            self.now -= 0 if self.holders[key] else size
