"""Checks for values that are not finite (NaN or infinite) in checkpoints.

    restore = Restore(source, trained)   passed to `records.fill`; stops at the first bad tensor
    restore.problems                     empty, or one line
    tally = Tally()                      counts bad tensors in a conversion
    tally.passed(name, slab); tally.tell(path)

A run neither saves nor loads such values in the weights and moments of trained tensors, because
training cannot recover from them. Conversions pass them through and warn. Buffers and frozen
parameters may contain them: a mask may hold minus infinity.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from threed.checkpoint.files import CheckpointError, is_finite
from threed.checkpoint.lazy_tensors import TensorSource, saved_part
from threed.distributed.sharding import Piece


def narrowed(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a tensor converted to `dtype`.

    Args:
        name: name of the tensor, for the message.
        tensor: values to convert.
        dtype: floating-point dtype.

    Raises:
        CheckpointError: if a finite value becomes infinite.
    """
    out = tensor.to(dtype)
    largest = torch.finfo(dtype).max
    if torch.finfo(tensor.dtype).max > largest and out.isinf().sum() > tensor.isinf().sum():
        raise CheckpointError(
            f"{name} has values beyond {largest:.5g}, the largest of {dtype}: use another dtype"
        )
    return out


class Tally:
    """Counts the tensors of a conversion that have NaN or infinite values, for one warning."""

    def __init__(self) -> None:
        self.names: dict[str, None] = {}

    def passed(self, name: str, values: Tensor) -> Tensor:
        """Checks some rows of a tensor, and returns them."""
        if name not in self.names and not is_finite(values):
            self.names[name] = None
        return values

    def tell(self, path: Path) -> None:
        """Warns of the tensors found, if any. `path`: the folder that was written."""
        if self.names:
            count, first = len(self.names), next(iter(self.names))
            which = first if count == 1 else f"{count} tensors, of which the first is {first},"
            verb = "has" if count == 1 else "have"
            text = f"{which} {verb} values that are not finite (NaN or infinite): a run refuses to begin from them"
            warnings.warn(f"{path}: {text}", stacklevel=3)


class Restore:
    """Reads states from a checkpoint, as a callback of `records.fill`.

    It records the first tensor that cannot be read or has values that are not finite. After that it
    does nothing and raises nothing, because other ranks would hang in the next collective.

    Args:
        source: the checkpoint. Moments that it does not have are set to zero.
        names: names of the tensors that must be finite.

    Attributes:
        problems: empty, or one line.
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
