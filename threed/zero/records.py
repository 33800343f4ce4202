"""The optimizer's states as pieces of global tensors, for initialization, saving and loading.

A state belongs to this rank's portion of a bucket. It has several parts: the weight, and the
tensors of the update rule (moments). Each part is a flat tensor [n], which contains pieces (boxes)
of several global tensors, one after the other (`Piece`). A `Record` is one piece in one part.
`read` yields the values of records, bucket by bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from threed.distributed.sharding import Piece
from threed.zero.optimizer import Optimizer
from threed.zero.state import PREVIOUS as PREVIOUS
from threed.zero.state import WEIGHT as WEIGHT
from threed.zero.state import Initial, State, drop_all, fetched_in_turn


@dataclass(frozen=True, eq=False)
class Record:
    """A piece of a global tensor in one part of a state.

    Attributes:
        part: name of the part: "weight", or the name of a tensor of the update rule.
        piece: the piece; `piece.offset` is its position in the part's flat tensor, in elements.
        state: the state that contains the part.
        owned: whether this rank saves the piece. If several ranks hold replicas of the piece, only
            one of them saves it.
        dtype: dtype of the part.
        nbytes: bytes of the piece.
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
        """Returns the values of the piece, [*piece.size], as a view of the part's tensor.

        Args:
            slice_: flat tensor of the part, [n].
        """
        piece = self.piece
        return slice_[piece.offset : piece.offset + piece.numel].view(piece.size)


def records(optimizer: Optimizer, parts: tuple[str, ...] | None = None) -> Iterator[Record]:
    """Yields the records of all states of this rank, in buffer order.

    Args:
        optimizer: the optimizer that holds the states.
        parts: names of the parts to include; by default all parts.
    """
    for state in states(optimizer):
        yield from records_of(state, parts)


def states(optimizer: Optimizer) -> list[State]:
    """Returns all states of this rank: the optimizer's `states`, `frozen` and `earlier`."""
    return [*optimizer.states, *optimizer.frozen, *optimizer.earlier]


def records_of(state: State, parts: tuple[str, ...] | None = None) -> Iterator[Record]:
    """Yields the records of one state, in buffer order: for each piece, one record per part.

    Args:
        state: state of a bucket.
        parts: names of the parts to include; by default all parts.
    """
    wanted = [part for part in state.storages if parts is None or part in parts]
    for run in state.bucket.runs():
        for piece in run.pieces():
            yield from (Record(part, piece, state) for part in wanted)


def read(optimizer: Optimizer, wanted: Iterable[Record]) -> Iterator[tuple[Record, Tensor]]:
    """Yields each record with the values of its piece, shape [*piece.size].

    The values are views of the state's buffers, and are only valid until the next iteration.

    Args:
        optimizer: the optimizer that holds the states.
        wanted: the records to read. Records of the same state must be consecutive.
    """
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
    """Sets the values of this rank's pieces of all states, and gathers the parameters. Collective.

    If there are two versions of the parameters (2BW) and `parts` is given, the previous version
    becomes a copy of the newest version.

    Args:
        optimizer: the optimizer that holds the states.
        write: `write(part, piece, out)` is called for every piece of every part, and writes the
            values to `out` [*piece.size].
        parts: names of the parts to set; by default all parts.
    """
    late = parts is None and optimizer.layout.policy.delayed
    with optimizer.overwriting(everything=parts is None):
        for state in states(optimizer):
            wanted = [part for part in state.storages if parts is None or part in parts]
            publish = not (late and state.bucket.group.key.trainable)
            with optimizer.staged(state, wanted, write=True, publish=publish) as values:
                for record in records_of(state, parts):
                    write(record.part, record.piece, record.of(values[record.part]))


def initialize(
    optimizer: Optimizer, initial: Initial, again: bool, everything: bool = False
) -> None:
    """Sets the weights to their initial values. Collective.

    Args:
        optimizer: the optimizer that holds the states.
        initial: function from a piece to its initial values.
        again: whether to keep `initial` after this call, so that it can compute the initial weights
            again after a failed load.
        everything: whether to set all parts other than weights to 0, as in a new optimizer. If
            False, these parts are left unchanged.
    """

    def write(part: str, piece: Piece, out: Tensor) -> None:
        out.copy_(initial(piece)) if part in (WEIGHT, PREVIOUS) else out.zero_()

    fill_in_place(optimizer, write, None if everything else (WEIGHT,))
    if again:
        optimizer.consistency.mark_initialized(initial)
