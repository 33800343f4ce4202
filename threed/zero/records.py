"""The optimizer's state as pieces of global tensors: for initialisation, saving, loading and collecting.

What a rank updates of a bucket is a series of runs, every run a few pieces of one global tensor. A record is one piece of
one part (the weight, or a tensor of the optimizer's rule) in a state's tensor; `read` yields the values, bucket by bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from threed.sharding import Piece
from threed.zero.optimizer import Optimizer
from threed.zero.state import PREVIOUS as PREVIOUS
from threed.zero.state import WEIGHT as WEIGHT
from threed.zero.state import Initial, State, drop_all, fetched_in_turn


@dataclass(frozen=True, eq=False)
class Record:
    """A piece of the part `part` of a global tensor; its offset is that in a state's tensor.

    owned: whether this rank's copy is the one that counts, if several ranks hold one.
    """

    part: str
    piece: Piece
    state: State

    @property
    def owned(self) -> bool:
        return self.state.bucket.group.owned

    @property
    def dtype(self) -> torch.dtype:
        return self.state.storages[self.part].dtype

    @property
    def nbytes(self) -> int:
        return self.piece.numel * self.dtype.itemsize

    def of(self, slice_: Tensor) -> Tensor:
        """Returns the piece [*piece.size], as a view of the state's tensor [n]."""
        piece = self.piece
        return slice_[piece.offset : piece.offset + piece.numel].view(piece.size)


def records(optimizer: Optimizer, parts: tuple[str, ...] | None = None) -> Iterator[Record]:
    """Yields every piece this rank holds, part by part within each run, in buffer order; by default all parts."""
    for state in states(optimizer):
        yield from records_of(state, parts)


def states(optimizer: Optimizer) -> list[State]:
    """Returns the states of everything this rank updates, of frozen parameters, and of the version before."""
    return [*optimizer.states, *optimizer.frozen, *optimizer.earlier]


def records_of(state: State, parts: tuple[str, ...] | None = None) -> Iterator[Record]:
    """Yields every piece of a state, part by part within each run; by default of all parts."""
    wanted = [part for part in state.storages if parts is None or part in parts]
    for run in state.bucket.runs():
        for piece in run.pieces():
            yield from (Record(part, piece, state) for part in wanted)


def read(optimizer: Optimizer, wanted: Iterable[Record]) -> Iterator[tuple[Record, Tensor]]:
    """Yields records with their values [*piece.size]: views of this rank's state, valid until the next iteration."""
    optimizer.wait()
    by_state = [
        (state, list(some)) for state, some in groupby(wanted, key=lambda record: record.state)
    ]
    fetched = (
        (state, state.fetch(dict.fromkeys(record.part for record in some)))
        for state, some in by_state
    )
    for (_, buffers), (_, some) in zip(fetched_in_turn(fetched), by_state, strict=True):
        try:
            for record in some:
                yield record, record.of(buffers[record.part].wait())
        finally:
            drop_all(buffers)


def fill_in_place(
    optimizer: Optimizer,
    write: Callable[[str, Piece, Tensor], None],
    parts: tuple[str, ...] | None = None,
) -> None:
    """Calls `write(part, piece, out)` for every piece this rank holds, to set out [*piece.size], and gathers the
    parameters. If there are two versions of them and one is set, the other becomes the same."""
    late = parts is None and optimizer.layout.policy.delayed
    with optimizer.overwriting(everything=parts is None):
        for state in states(optimizer):
            wanted = [part for part in state.storages if parts is None or part in parts]
            publish = not (late and state.bucket.group.key.trainable)
            with optimizer.staged(state, wanted, write=True, publish=publish) as values:
                for record in records_of(state, parts):
                    write(record.part, record.piece, record.of(values[record.part]))


def initialise(
    optimizer: Optimizer, initial: Initial, again: bool, everything: bool = False
) -> None:
    """Sets the weights to their initial values.

    Args:
        optimizer: has the states.
        initial: returns the values of a piece.
        again: whether it can be called later, for a load that fails.
        everything: set all other states to zero, which they are in a new optimizer.
    """

    def write(part: str, piece: Piece, out: Tensor) -> None:
        out.copy_(initial(piece)) if part in (WEIGHT, PREVIOUS) else out.zero_()

    fill_in_place(optimizer, write, None if everything else (WEIGHT,))
    if again:
        optimizer.consistency.mark_initialised(initial)
