"""Values that are not finite: neither written into a checkpoint nor taken from one.

    checked(stream, names(extents))      the same stream; NotFiniteError at the first tensor that has some
    watch = Watch(write, trained)        for `fill_in_place`: notes the first tensor that has some
    watch.problems                       one line, or none

Weights and moments of what is trained must be finite, for a run that goes on from anything else is lost. Buffers and
frozen parameters need not be: a mask may well hold minus infinity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from threed.checkpoint.files import CheckpointError
from threed.sharding import Box, Piece
from threed.zero.records import Extent

Write = Callable[[str, Piece, Box, Tensor], None]


class NotFiniteError(CheckpointError):
    """A tensor with values that are infinite or not a number, by its name."""


def is_finite(values: Tensor) -> bool:
    """Whether all values of a tensor are finite; the host waits for it. No memory of its size is taken."""
    if not values.numel() or not values.is_floating_point():
        return True
    return bool(torch.isfinite(torch.stack(values.detach().aminmax())).all())  # both pass NaN on


def names(extents: Iterable[Extent]) -> list[str]:
    """Returns the names by which `checked` tells of tensors, "" for what need not be finite."""
    return [f"{e.part} of {e.name}" if e.state.bucket.group.key.trainable else "" for e in extents]


def checked(stream: Iterable[Tensor], names: Sequence[str]) -> Iterator[Tensor]:
    """Yields a stream's tensors. NotFiniteError at the first one that is not finite, if it has a name here.

    names: of the first tensors of the stream, "" where any value will do; what comes behind them is not looked at.
    """
    for number, values in enumerate(stream):
        name = names[number] if number < len(names) else ""
        if name and not is_finite(values):
            raise NotFiniteError(f"{name} has values that are not finite (NaN or infinite), and is not saved")
        yield values


class Watch:
    """Writes values, and notes which tensors are not finite. names: of those that must be."""

    def __init__(self, write: Write, names: Iterable[str]) -> None:
        self.write, self.names = write, frozenset(names)
        self.problems: list[str] = []

    def __call__(self, part: str, piece: Piece, box: Box, out: Tensor) -> None:
        self.write(part, piece, box, out)
        if not self.problems and piece.name in self.names and not is_finite(out):
            self.problems.append(f"{part} of {piece.name} has values that are not finite (NaN or infinite)")
