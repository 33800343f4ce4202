"""Quantisation of blocks of 256 numbers to int8 or int4 with an fp32 scale.

ZeRO++ (arXiv 2306.10209): csrc/cuda/quantise.cu. A block's scale is its largest magnitude over 127
(or 7). If a number of a block is not finite, the scale is NaN, and so are the dequantised numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from threed.core import device
from threed.ops import launch

BLOCK = 256
TOPS = {8: 127, 4: 7}


def quantise_reference(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Returns integers int8 [k 256], not packed, and scales [k] of x [n], n a multiple of 256."""
    blocks = x.view(-1, BLOCK)
    scales = blocks.abs().amax(1) / TOPS[bits]
    scales = torch.where(blocks.isfinite().all(1), scales, torch.nan)
    integers = (
        (blocks / scales.view(-1, 1)).nan_to_num(0, 0, 0).round().clamp(-TOPS[bits], TOPS[bits])
    )
    return integers.to(torch.int8), scales


def packed(integers: Tensor, bits: int) -> Tensor:
    """Packs integers int8 [... k 256] to uint8 [... k 256*bits/8]. For the order see `unpacked`."""
    packs = 16 // bits
    rows = integers.unflatten(-1, (packs, 32 // packs, 8)).transpose(-3, -2)
    if bits == 8:
        return rows.contiguous().view(torch.uint8).flatten(-3)
    return ((rows[..., ::2] + 8) | (rows[..., 1::2] << 4)).view(torch.uint8).flatten(-3)


def unpacked(q: Tensor, bits: int) -> Tensor:
    """Unpacks uint8 [... k 256*bits/8] to integers int8 [... k 256].

    16 bytes hold packs of eight numbers that are as far apart in the block as possible: the block's
    first pack is in the first 16 bytes, its second pack in the next 16. In 4 bits a byte holds two
    numbers. The first one, plus 8, is in the low half.
    """
    packs = 16 // bits
    rows = q.unflatten(-1, (32 // packs, packs, bits)).transpose(-3, -2)
    if bits == 8:
        return rows.contiguous().view(torch.int8).flatten(-3)
    low, high = (rows & 15).view(torch.int8) - 8, rows.contiguous().view(torch.int8) >> 4
    return torch.stack((low, high), -1).flatten(-4)


def dequantise_reference(q: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Computes `dequantise` with torch operations; the result has the dtype of the scales."""
    return (unpacked(q, bits).to(scales.dtype) * scales.unsqueeze(-1)).sum(0).flatten()


def quantise(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Returns packed integers, uint8 [k 256*bits/8], and scales, fp32 [k], of x, bf16 [n].

    Moves 3 bytes per element (2.5 in 4 bits).
    """
    fits = bits in TOPS and x.numel() % BLOCK == 0 and launch.packed(x)
    launch.check(
        fits,
        "quantise",
        "bf16 [n], contiguous and 16-byte aligned, n a multiple of 256, in 8 or 4 bits",
        x,
    )
    blocks = x.numel() // BLOCK
    out = x.new_empty(blocks, BLOCK * bits // 8, dtype=torch.uint8)
    scales = x.new_empty(blocks, dtype=torch.float32)
    if blocks:
        launch.start("quantise", x, out, scales, blocks, bits, _grid(x, blocks))
    return out, scales


def dequantise(q: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Dequantises the blocks of r ranks, and returns their sum over the ranks, bf16 [n].

    Moves r + 2 bytes per element (r/2 + 2 in 4 bits). Ranks are summed eight at a time; the error
    is at most 2^-21 of the largest number that their scales allow.

    Args:
        q: packed integers, uint8 [r k 256*bits/8].
        scales: scales from `quantise`, fp32 [r k]; they must not be negative.
        bits: 8 or 4.
    """
    fits = (
        bits in TOPS
        and q.dtype == torch.uint8
        and q.shape == (*scales.shape, BLOCK * bits // 8)
        and q.dim() == 3
    )
    fits = fits and q.is_contiguous() and launch.aligned(q)
    fits = fits and scales.dtype == torch.float32 and scales.is_contiguous()
    launch.check(
        fits, "dequantise", "q uint8 [r k 256 bits/8] and scales fp32 [r k], contiguous", q, scales
    )
    ranks, blocks = scales.shape
    out = q.new_empty(blocks * BLOCK, dtype=torch.bfloat16)
    if blocks:
        launch.start(
            "dequantise", q, scales, out, blocks, ranks, bits, _grid(q, -(-blocks // (16 // bits)))
        )
    return out


def _grid(x: Tensor, warps: int) -> int:
    return min(8 * device.processors(x.device), -(-warps // 8))


@dataclass(frozen=True)
class Int8Blocks:
    """A codec for collectives (ZeRO++, arXiv 2306.10209): int8 blocks of 256 numbers with scales.

    The fp32 scale is the largest magnitude of the block divided by 127. A block with a number that
    is not finite decodes to NaN. The last block of a row is padded: a message has 260 · ceil(n /
    256) bytes, in the order of `packed`. The kernel and the plain operations produce the same
    message.
    """

    def encode(self, rows: Tensor) -> Tensor:
        padded = pad(rows, (0, -rows.shape[1] % BLOCK)).flatten()
        if launch.ready(padded) and launch.packed(padded) and not padded.is_meta:
            numbers, scales = quantise(padded, 8)
        else:
            integers, scales = quantise_reference(padded.float(), 8)
            numbers = packed(integers.view(-1, BLOCK), 8)
        parts = numbers.view(len(rows), -1), scales.view(len(rows), -1).view(torch.uint8)
        return torch.cat(parts, 1)

    def decode(self, messages: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        blocks = messages.shape[1] // (BLOCK + 4)
        numbers, scales = messages.split((blocks * BLOCK, 4 * blocks), 1)
        integers = unpacked(numbers.view(len(messages), blocks, BLOCK), 8).to(dtype)
        scales = scales.contiguous().view(torch.float32).to(dtype)
        return (integers * scales.unsqueeze(-1)).view(len(messages), -1)[:, :count]
