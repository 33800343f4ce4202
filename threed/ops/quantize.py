"""Quantization of blocks of 256 numbers to int8 or int4 with an fp32 scale.

It is used for ZeRO++ (arXiv 2306.10209); the kernels are in csrc/cuda/quantize.cu. The scale of a
block is its largest magnitude divided by 127 (7 for int4). If a number of a block is not finite,
the scale and all dequantized numbers of the block are NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from threed.core import device
from threed.ops import launch

BLOCK = 256
TOPS = {8: 127, 4: 7}  # largest quantized integer, by number of bits


def quantize_reference(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Quantizes x [n] in k = n / 256 blocks. Returns integers int8 [k 256] and scales [k].

    n must be a multiple of 256. The integers are not packed.
    """
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

    A block consists of 32 packs of eight numbers. In the packed block, group i of 16 bytes holds
    the packs i and i + 16 (in 4 bits: i, i + 8, i + 16 and i + 24). In 4 bits a byte holds two
    numbers: the low half is the first number plus 8, the high half is the second number in two's
    complement.
    """
    packs = 16 // bits
    rows = q.unflatten(-1, (32 // packs, packs, bits)).transpose(-3, -2)
    if bits == 8:
        return rows.contiguous().view(torch.int8).flatten(-3)
    low, high = (rows & 15).view(torch.int8) - 8, rows.contiguous().view(torch.int8) >> 4
    return torch.stack((low, high), -1).flatten(-4)


def dequantize_reference(q: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Returns the same sum as `dequantize`, by torch operations, in the dtype of the scales."""
    return (unpacked(q, bits).to(scales.dtype) * scales.unsqueeze(-1)).sum(0).flatten()


def quantize(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Quantizes x, bf16 [n], in k = n / 256 blocks.

    Reads and writes 3 bytes of memory per element (2.5 in 4 bits).

    Returns:
        Packed integers, uint8 [k 256*bits/8], and scales, fp32 [k].
    """
    fits = bits in TOPS and x.numel() % BLOCK == 0 and launch.packed(x)
    launch.check(
        fits,
        "quantize",
        "bf16 [n], contiguous and 16-byte aligned, n a multiple of 256, in 8 or 4 bits",
        x,
    )
    blocks = x.numel() // BLOCK
    out = x.new_empty(blocks, BLOCK * bits // 8, dtype=torch.uint8)
    scales = x.new_empty(blocks, dtype=torch.float32)
    if blocks:
        launch.start("quantize", x, out, scales, blocks, bits, _grid(x, blocks))
    return out, scales


def dequantize(q: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Dequantizes the blocks of r ranks, and returns their sum over the ranks, bf16 [n].

    Reads and writes r + 2 bytes of memory per element of the result (r/2 + 2 in 4 bits). Eight
    ranks are summed at a time, with scales that are rounded to multiples of 2^-23 times the largest
    of the eight scales. So the rounding error of a sum is at most 2^-21 times the largest magnitude
    that can be represented with the largest scale.

    Args:
        q: packed integers, uint8 [r k 256*bits/8].
        scales: scales from `quantize`, fp32 [r k]; they must not be negative.
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
        fits, "dequantize", "q uint8 [r k 256 bits/8] and scales fp32 [r k], contiguous", q, scales
    )
    ranks, blocks = scales.shape
    out = q.new_empty(blocks * BLOCK, dtype=torch.bfloat16)
    if blocks:
        launch.start(
            "dequantize", q, scales, out, blocks, ranks, bits, _grid(q, -(-blocks // (16 // bits)))
        )
    return out


def _grid(x: Tensor, warps: int) -> int:
    return min(8 * device.processors(x.device), -(-warps // 8))


@dataclass(frozen=True)
class Int8Blocks:
    """A codec for collectives (ZeRO++, arXiv 2306.10209): int8 blocks of 256 numbers with scales.

    The fp32 scale is the largest magnitude of the block divided by 127. A block with a number that
    is not finite decodes to NaN. A row of n numbers is padded to full blocks, so its message has
    260 · ceil(n / 256) bytes: the integers of all blocks, in the order of `packed`, then their
    scales. The GPU kernel and the plain operations produce the same message.
    """

    def encode(self, rows: Tensor) -> Tensor:
        padded = pad(rows, (0, -rows.shape[1] % BLOCK)).flatten()
        if launch.ready(padded) and launch.packed(padded) and not padded.is_meta:
            numbers, scales = quantize(padded, 8)
        else:
            integers, scales = quantize_reference(padded.float(), 8)
            numbers = packed(integers.view(-1, BLOCK), 8)
        parts = numbers.view(len(rows), -1), scales.view(len(rows), -1).view(torch.uint8)
        return torch.cat(parts, 1)

    def decode(self, messages: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        blocks = messages.shape[1] // (BLOCK + 4)
        numbers, scales = messages.split((blocks * BLOCK, 4 * blocks), 1)
        integers = unpacked(numbers.view(len(messages), blocks, BLOCK), 8).to(dtype)
        scales = scales.contiguous().view(torch.float32).to(dtype)
        return (integers * scales.unsqueeze(-1)).view(len(messages), -1)[:, :count]
