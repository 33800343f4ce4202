"""How numbers are encoded while they travel in a reduce-scatter or an all-gather.

    Cast(torch.bfloat16)      another dtype
    Int8Blocks()              blocks of 256 numbers as int8 and a scale (ZeRO++, Wang et al. 2023, arXiv 2306.10209)

A codec maps rows of numbers [r n] to messages [r m] and back. Every rank uses decoded numbers, the rank that has the
originals included, so that results do not depend on which rank owns what.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from threed.ops import launch
from threed.ops.quantise import BLOCK, packed, quantise, quantise_reference, unpacked


class Codec(Protocol):
    """Encodes and decodes messages."""

    def encode(self, rows: Tensor) -> Tensor:
        """Returns the messages [r m] of rows [r n]."""

    def decode(self, messages: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        """Returns rows [r count] of a dtype from messages [r m]."""


@dataclass(frozen=True)
class Cast:
    """Sends numbers as another dtype; with None as they are. A backend can sum such messages as they are."""

    dtype: torch.dtype | None = None

    def encode(self, rows: Tensor) -> Tensor:
        return rows if self.dtype is None else rows.to(self.dtype)

    def decode(self, messages: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        return messages.to(dtype)


EXACT = Cast()


@dataclass(frozen=True)
class Int8Blocks:
    """Sends 256 numbers as 256 bytes and an fp32 scale: their largest magnitude divided by 127.

    A block with a number that is not finite decodes to NaN. The last block of a row is padded: a message has
    260 · ceil(n / 256) bytes, in the order of `ops.quantise.packed`, whichever of kernel and plain operations made it.
    """

    def encode(self, rows: Tensor) -> Tensor:
        padded = pad(rows, (0, -rows.shape[1] % BLOCK)).flatten()
        if launch.ready(padded) and launch.packed(padded) and not padded.is_meta:
            numbers, scales = quantise(padded, 8)
        else:
            whole, scales = quantise_reference(padded.float(), 8)
            numbers = packed(whole.view(-1, BLOCK), 8)
        parts = numbers.view(len(rows), -1), scales.view(len(rows), -1).view(torch.uint8)
        return torch.cat(parts, 1)

    def decode(self, messages: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        blocks = messages.shape[1] // (BLOCK + 4)
        numbers, scales = messages.split((blocks * BLOCK, 4 * blocks), 1)
        whole = unpacked(numbers.view(len(messages), blocks, BLOCK), 8).to(dtype)
        scales = scales.contiguous().view(torch.float32).to(dtype)
        return (whole * scales.unsqueeze(-1)).view(len(messages), -1)[:, :count]
