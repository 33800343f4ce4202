"""The optimizer's state as boxes of global tensors: what is initialised, saved, loaded and collected.

Every bucket slice is a series of runs, every run a few boxes of one global tensor. A record is one box of one part
(weight, exp_avg, exp_avg_sq) with the memory it lives in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from threed.sharding import Box, Piece, boxes
from threed.zero.optimizer import Optimizer

PARTS = ("weight", "exp_avg", "exp_avg_sq")


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


def records(optimizer: Optimizer, parts: tuple[str, ...] = PARTS) -> Iterator[Record]:
    """Every box this rank holds, part by part within each run, in storage order."""
    for state, bucket in zip(optimizer.states, optimizer.layout.buckets, strict=True):
        held = {"weight": state.master, "exp_avg": state.exp_avg, "exp_avg_sq": state.exp_avg_sq}
        for run in bucket.runs():
            for box in boxes(run.piece, run.first, run.last):
                at = run.offset + box.offset
                for part in parts:
                    values = held[part][at : at + box.numel].view(box.size)
                    yield Record(part, run.piece, box, values, bucket.group.owned)


def fill(optimizer: Optimizer, source: Callable[[str, Piece, Box], Tensor], parts: tuple[str, ...] = PARTS) -> None:
    """Sets every box this rank holds from `source(part, piece, box)` [*box.size] and makes the parameters whole."""
    optimizer.settle()  # a step's gather may still read what is written here
    for record in records(optimizer, parts):
        record.values.copy_(source(record.part, record.piece, record.box))
    if "weight" in parts:
        for number in range(len(optimizer.states)):
            optimizer.publish(number)
        optimizer.settle()
