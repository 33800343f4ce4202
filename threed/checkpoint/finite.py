"""Checks for values that are not finite (NaN or infinite) in checkpoints.

    restore = Restore(source, trained)   callback of `zero.state.fill_states`
    restore.problems                     a list with one line about the first bad tensor, or empty
    tally = Tally()                      records the bad tensors of a conversion
    tally.passed(name, slab)             checks some rows of a tensor, and returns the rows
    tally.tell(path)                     warns of the bad tensors, if there are any

If a weight or moment of a trained tensor is NaN or infinite, a run does not save or load it,
because training cannot recover from such values. Conversions write such values unchanged and warn.
Buffers and frozen parameters may contain such values; for example, an attention mask contains minus
infinity.
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
    """Returns a tensor converted to `dtype`, after checking that no value overflows.

    Args:
        name: name of the tensor, for the message.
        tensor: values to convert.
        dtype: floating-point dtype.

    Raises:
        CheckpointError: if a finite value becomes infinite in `dtype`.
    """
    out = tensor.to(dtype)
    largest = torch.finfo(dtype).max
    if torch.finfo(tensor.dtype).max > largest and out.isinf().sum() > tensor.isinf().sum():
        raise CheckpointError(
            f"{name} has values beyond {largest:.5g}, the largest of {dtype}: use another dtype"
        )
    return out


class Tally:
    """Records which tensors of a conversion have NaN or infinite values, for a single warning."""

    def __init__(self) -> None:
        self.names: dict[str, None] = {}

    def passed(self, name: str, values: Tensor) -> Tensor:
        """Checks some rows of the tensor `name`, and returns the rows unchanged."""
        if name not in self.names and not is_finite(values):
            self.names[name] = None
        return values

    def tell(self, path: Path) -> None:
        """Warns of the recorded tensors, if there are any.

        Args:
            path: the folder that was written, for the message.
        """
        if self.names:
            count, first = len(self.names), next(iter(self.names))
            which = first if count == 1 else f"{count} tensors, of which the first is {first},"
            verb = "has" if count == 1 else "have"
            text = f"{which} {verb} values that are not finite (NaN or infinite): a run refuses to begin from them"
            warnings.warn(f"{path}: {text}", stacklevel=3)


class Restore:
    """Reads states from a checkpoint, as a callback of `zero.state.fill_states`.

    The first tensor that cannot be read or is not finite is recorded in `problems`, and later calls
    do nothing. No call raises an error, because the other ranks would then hang in their next
    collective.

    Args:
        source: tensors of the checkpoint. Moments that the checkpoint does not have are set to
            zero.
        names: names of the tensors whose values must be finite.

    Attributes:
        problems: a list with one line about the first bad tensor, or an empty list.
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
