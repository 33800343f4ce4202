"""Positions of a rank's tokens in their sequence, as ranges.

Positions.all(8)                        ranges ((0, 8),): a rank with the full sequence
Positions(((0, 2), (6, 8)), 8)          a rank whose rows 0 ... 3 are positions 0, 1, 6 and 7
in_documents(documents)                 positions that begin at 0 in every document of a sequence
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Label of a token without a loss, as in torch's cross_entropy; all labels below 0 have this meaning.
IGNORED = -100
Range = tuple[int, int]  # (first, last): the positions first .. last - 1


class Positions(NamedTuple):
    """Positions of the rows of activations [s b h] in their sequences.

    The class is hashable, so that positions can be keys of cached tables.

    Attributes:
        ranges: ranges of positions, in the order of the rows.
        length: full length of the sequence.
    """

    ranges: tuple[Range, ...]
    length: int

    @classmethod
    def all(cls, length: int) -> Positions:
        """Returns all positions of a sequence."""
        return cls(((0, length),), length)

    def rows(self, full: Tensor) -> Tensor:
        """Returns the rows of `full` [length ...] at these positions.

        The result is a view if the positions are a single range, else a copy.
        """
        parts = [full[first:last] for first, last in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def indices(self, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
        """Returns the positions as a tensor [s].

        Args:
            device: device of the result.
            dtype: dtype of the result.
        """
        parts = [torch.arange(*part, dtype=dtype, device=device) for part in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def in_documents(documents: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the position of each token in its document, and the length of this document.

    Both are int64 [s b].

    Args:
        documents: number of each token's document, int64 [b s], not decreasing along s.
    """
    documents = documents.contiguous()
    begins = torch.searchsorted(documents, documents)
    ends = torch.searchsorted(documents, documents, right=True)
    index = torch.arange(documents.shape[1], device=documents.device)
    # If numbers decrease, which is reported as an error in the data, no position may be negative.
    return (index - begins).clamp_min(0).t(), (ends - begins).t()
