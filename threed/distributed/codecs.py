"""How tensors are encoded for a reduce-scatter or an all-gather."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Codec(Protocol):
    """Encodes rows of numbers [r n] as messages [r m] for a reduce-scatter or an all-gather.

    r is the number of rows, one per rank. Every rank uses the decoded numbers, even for the rows
    that it encoded itself. So results do not depend on which rank owns which part.
    """

    def encode(self, rows: Tensor) -> Tensor:
        """Returns the messages [r m] for rows [r n]."""

    def decode(self, messages: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        """Returns rows [r count] of `dtype` from messages [r m]."""


@dataclass(frozen=True)
class Cast:
    """A `Codec` that casts numbers to another dtype; by default, it sends them unchanged.

    A communication backend can sum the messages itself, because they are ordinary numbers.
    """

    dtype: torch.dtype | None = None

    def encode(self, rows: Tensor) -> Tensor:
        return rows if self.dtype is None else rows.to(self.dtype)

    def decode(self, messages: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        return messages.to(dtype)


EXACT = Cast()
