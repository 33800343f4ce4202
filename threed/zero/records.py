"""The optimizer's state as boxes of global tensors: what is initialised, saved, loaded and collected.

Every bucket slice is a series of runs, every run a few boxes of one global tensor. A record is one box of one part
(the weight, or what the optimizer's rule keeps beside it) with the memory it lives in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from threed.sharding import Box, Piece, boxes
from threed.zero.optimizer import Optimizer

WEIGHT = "weight"


@dataclass(frozen=True, eq=False)
class Record:
    """A box of the part `part` of a global tensor; `values` [*box.size] is a view of this rank's state.

    owned: whether this rank's copy is the one that counts, where several ranks hold it.
    """

    part: str
    piece: Piece
    box: Box
    values: Tensor
    owned: bool


def records(optimizer: Optimizer, parts: tuple[str, ...] | None = None) -> Iterator[Record]:
    """Every box this rank holds, part by part within each run, in storage order; by default all parts."""
    for state in (*optimizer.states, *optimizer.frozen):
        held = {WEIGHT: state.master, **state.moments}
        for run in state.bucket.runs():
            for box in boxes(run.piece, run.first, run.last):
                at = run.offset + box.offset
                for part in held if parts is None else held.keys() & set(parts):
                    values = held[part][at : at + box.numel].view(box.size)
                    yield Record(part, run.piece, box, values, state.bucket.group.owned)


def fill(
    optimizer: Optimizer, source: Callable[[str, Piece, Box], Tensor], parts: tuple[str, ...] | None = None
) -> None:
    """Sets every box this rank holds from `source(part, piece, box)` [*box.size] and makes the parameters whole."""
    optimizer.gatherer.settle()  # a step's gather may still read what is written here
    optimizer.gatherer.release_all()  # and what is whole now would be old
    for record in records(optimizer, parts):
        record.values.copy_(source(record.part, record.piece, record.box))
    for state in (*optimizer.states, *optimizer.frozen):
        optimizer.publish(state)
    optimizer.gatherer.settle()
