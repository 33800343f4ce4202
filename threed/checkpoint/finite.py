"""Values that are not finite: neither written into a checkpoint by a run nor taken from one; conversions pass them on.

    restore = Restore(source, trained)   for `records.fill`: notes the first tensor that has some
    restore.problems                     one line, or none
    tally = Tally(); tally.passed(name, slab); tally.tell(path)      of a conversion: counts tensors that have some

Weights and moments of what is trained must be finite, for a run that goes on from anything else is lost. Buffers and
frozen parameters need not be: a mask may well hold minus infinity.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from threed.checkpoint.files import CheckpointError, is_finite
from threed.checkpoint.lazy_tensors import TensorSource, saved_part
from threed.sharding import Piece


def narrowed(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a tensor in another format; CheckpointError if a number becomes infinite."""
    out = tensor.to(dtype)
    largest = torch.finfo(dtype).max
    if torch.finfo(tensor.dtype).max > largest and out.isinf().sum() > tensor.isinf().sum():
        raise CheckpointError(
            f"{name} has values beyond {largest:.5g}, the largest of {dtype}: use another dtype"
        )
    return out


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
    """Sets states from a checkpoint, for `records.fill`, and notes the first tensor that has values that are not
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
