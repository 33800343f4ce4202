"""Values that are not finite: neither written into a checkpoint by a run nor taken from one; conversions pass them on.

    checked(stream, names(extents))      the same stream; NotFiniteError at the first tensor that has some
    restore = Restore(source, trained)   for `fill_in_place`: notes the first tensor that has some
    restore.problems                     one line, or none
    tally = Tally(); tally.passed(name, slab); tally.tell(path)      of a conversion: counts tensors that have some

Weights and moments of what is trained must be finite, for a run that goes on from anything else is lost. Buffers and
frozen parameters need not be: a mask may well hold minus infinity.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from threed.checkpoint.files import CheckpointError
from threed.checkpoint.lazy_tensors import TensorSource, saved_part
from threed.sharding import Piece
from threed.zero.records import Extent


class NotFiniteError(CheckpointError):
    """A tensor with values that are infinite or not a number, by its name."""


def is_finite(values: Tensor) -> bool:
    """Whether all values of a tensor are finite; the host waits for it. No memory of its size is taken."""
    if not values.numel() or not values.is_floating_point():
        return True
    return bool(torch.isfinite(torch.stack(values.detach().aminmax())).all())  # both pass NaN on


def narrowed(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a tensor in another format; CheckpointError if a number becomes infinite."""
    out = tensor.to(dtype)
    largest = torch.finfo(dtype).max
    if torch.finfo(tensor.dtype).max > largest and out.isinf().sum() > tensor.isinf().sum():
        raise CheckpointError(
            f"{name} has values beyond {largest:.5g}, the largest of {dtype}: use another dtype"
        )
    return out


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
            raise NotFiniteError(
                f"{name} has values that are not finite (NaN or infinite), and is not saved"
            )
        yield values


class Tally:
    """Tensors of a conversion that have values which are not finite: they are counted as they pass, and told once."""

    def __init__(self) -> None:
        self.names: dict[str, None] = {}

    def passed(self, name: str, values: Tensor) -> Tensor:
        """Looks at some rows of a tensor; returns them."""
        if name not in self.names and not is_finite(values):
            self.names[name] = None
        return values

    def tell(self, path: Path) -> None:
        """Warns of what was found in the folder that was written, if anything was."""
        if self.names:
            count, first = len(self.names), next(iter(self.names))
            which = first if count == 1 else f"{count} tensors, of which the first is {first},"
            verb = "has" if count == 1 else "have"
            text = f"{which} {verb} values that are not finite (NaN or infinite): a run refuses to begin from them"
            warnings.warn(f"{path}: {text}", stacklevel=3)


class Restore:
    """Sets states from a checkpoint, for `fill_in_place`, and notes the first tensor that has values that are not
    finite, or that cannot be read.

    After that it does nothing, and raises nothing: the other ranks would wait for this one.

    Args:
        source: the checkpoint. Moments that it does not have are set to zero.
        names: of the tensors that must be finite.
    """

    def __init__(self, source: TensorSource, names: Iterable[str]) -> None:
        self.source, self.names = source, frozenset(names)
        self.problems: list[str] = []

    def __call__(self, part: str, piece: Piece, out: Tensor) -> None:
        if self.problems:
            return
        saved = saved_part(part, self.source.parts[piece.name])
        if saved is None:
            out.zero_()
            return
        try:
            self.source.tensor(saved, piece.name).read(piece.start, out)
        except CheckpointError as error:
            self.problems.append(str(error))
            return
        if piece.name in self.names and not is_finite(out):
            self.problems.append(
                f"{part} of {piece.name} has values that are not finite (NaN or infinite)"
            )
