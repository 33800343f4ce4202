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
from threed.zero.state import State, drop_all, fetched_in_turn


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
    optimizer.flush()
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


def fill(
    optimizer: Optimizer,
    write: Callable[[str, Piece, Tensor], None],
    parts: tuple[str, ...] | None = None,
) -> None:
    """Calls `write(part, piece, out)` for every piece this rank holds, to set out [*piece.size], and gathers the
    parameters. If there are two versions of them and one is set, the other becomes the same."""
    late = parts is None and optimizer.layout.policy.delayed
    if parts is None:
        optimizer.discard()
    else:
        optimizer.publish_delayed()
        optimizer.flush()
        optimizer.let_device_read()
    with optimizer.changing():
        optimizer.gatherer.settle()  # a gather in flight may still read what is written here
        optimizer.gatherer.release_all()  # what is gathered now would be stale
        for state in states(optimizer):
            wanted = [part for part in state.storages if parts is None or part in parts]
            publish = not (late and state.bucket.group.key.trainable)
            with optimizer.held(state, wanted, write=True, publish=publish) as held:
                for record in records_of(state, parts):
                    write(record.part, record.piece, record.of(held[record.part]))
        if late:
            optimizer.restore_delayed()
        optimizer.gatherer.complete()
        optimizer.gatherer.settle()
        if optimizer.versions is not None:
            optimizer.versions.restore(whole=parts is None)


def initialise(
    optimizer: Optimizer,
    initial: Callable[[Piece], Tensor],
    again: bool,
    parts: tuple[str, ...] | None = (WEIGHT,),
) -> None:
    """Sets the weights to their initial values.

    Args:
        again: whether `initial` can give them again.
        parts: the parts to set, None for all, of which moments become zero. A new optimizer's are.
    """

    def write(part: str, piece: Piece, out: Tensor) -> None:
        out.copy_(initial(piece)) if part in (WEIGHT, PREVIOUS) else out.zero_()

    fill(optimizer, write, parts)
    optimizer.initial = initial if again else None
