"""Random numbers as a function, not a state: Philox4x32-10 (Salmon et al., SC 2011) in torch integer arithmetic.

    normal(seed, "blocks.0.mlp.up.weight", shape, start, size)     the initial values of any slice
    keep_mask(seed, "blocks.0.mlp", step, samples, ...)            a dropout mask of any slice

What comes out depends on names and global indices only, so the topology, the micro-batch size, recomputation and the
schedule cannot change it. Four 32-bit words come from one counter; element e is word e % 4 of counter e // 4.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from threed import native

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF
_CHUNK = 1 << 16  # counters at a time: ten rounds over arrays that stay in the cache


def key(seed: int, name: str) -> tuple[int, int]:
    """The 64-bit key of a stream, as two words."""
    digest = hashlib.sha256(f"{seed}\0{name}".encode()).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")


def philox(
    counter: Sequence[Tensor | int], stream: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four words (int64 tensors holding 32 bits each) for every counter of four broadcastable 32-bit words.

    A 32 x 32-bit product wraps in int64, but its bits are right modulo 2^64, and masking undoes the sign. Numbers of
    Python stay such, where the product does not wrap at all: no scalar of the host meets a tensor of a GPU.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = stream
    for _ in range(10):
        p0, p1 = c0 * _M0, c2 * _M1
        c0 = ((p1 >> 32) & _MASK) ^ c1 ^ k0
        c1 = p1 & _MASK
        c2 = ((p0 >> 32) & _MASK) ^ c3 ^ k1
        c3 = p0 & _MASK
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return cast(tuple[Tensor, Tensor, Tensor, Tensor], (c0, c1, c2, c3))


def _unit(word: Tensor) -> Tensor:
    """32 bits -> the open interval (0, 1), fp64."""
    return (word.double() + 0.5) * 2.0**-32


def _normal_blocks(blocks: Tensor, stream: tuple[int, int]) -> Tensor:
    """Four standard normals [n 4] for each counter, by Box-Muller in fp64 (so that fp32 rounding hides libm)."""
    native_normal = native.function("threed_normal", "vPPquui")  # csrc/cpu/philox.cpp
    if native_normal is None:
        return normal_blocks(blocks, stream)
    blocks, out = blocks.contiguous(), torch.empty(blocks.numel(), 4, dtype=torch.float32)
    native_normal(
        out.data_ptr(), blocks.data_ptr(), blocks.numel(), *stream, torch.get_num_threads()
    )
    return out


def normal_blocks(blocks: Tensor, stream: tuple[int, int]) -> Tensor:
    """The same in torch operations: what runs without a compiler, and what the native twin is tested against."""
    w0, w1, w2, w3 = philox((blocks & _MASK, blocks >> 32, 0, 0), stream)
    out = torch.empty(blocks.numel(), 4, dtype=torch.float32)
    for column, (a, b) in enumerate(((w0, w1), (w2, w3))):
        radius, angle = torch.sqrt(-2.0 * torch.log(_unit(a))), 2.0 * math.pi * _unit(b)
        out[:, 2 * column] = radius * torch.cos(angle)
        out[:, 2 * column + 1] = radius * torch.sin(angle)
    return out


def _normal_range(first: int, last: int, stream: tuple[int, int]) -> Tensor:
    """The normals of the elements [first, last)."""
    head, tail = first // 4, -(-last // 4)
    parts = [
        _normal_blocks(torch.arange(at, min(at + _CHUNK, tail)), stream).view(-1)
        for at in range(head, tail, _CHUNK)
    ]
    return torch.cat(parts)[first - 4 * head : last - 4 * head]


def normal(
    seed: int, name: str, shape: Sequence[int], start: Sequence[int], size: Sequence[int]
) -> Tensor:
    """Standard normals, fp32 [*size]: the box at `start` of the global tensor `name` of `shape`.

    Only the box is made: the runs of elements that lie side by side, each with its unaligned ends.
    """
    stream = key(seed, name)
    if 0 in size:
        return torch.empty(tuple(size))
    # from here on runs are whole
    cut = max((d for d in range(len(shape)) if size[d] != shape[d]), default=0)
    run = math.prod(size[cut:])
    begins = torch.zeros(1, dtype=torch.int64)
    for d in range(cut):
        index = torch.arange(start[d], start[d] + size[d]) * math.prod(shape[d + 1 :])
        begins = (begins.view(-1, 1) + index).view(-1)
    begins += start[cut] * math.prod(shape[cut + 1 :]) if shape else 0
    if len(begins) == 1:
        first = int(begins)
        return _normal_range(first, first + run, stream).view(tuple(size))
    width = (run + 6) // 4  # the blocks that cover a run wherever it begins
    blocks = (begins // 4).view(-1, 1) + torch.arange(width)
    lanes = _in_chunks(blocks.view(-1), stream).view(len(begins), 4 * width)
    return lanes.gather(1, (begins % 4).view(-1, 1) + torch.arange(run)).view(tuple(size))


def _in_chunks(blocks: Tensor, stream: tuple[int, int]) -> Tensor:
    return torch.cat([_normal_blocks(part, stream) for part in blocks.split(_CHUNK)])


def keep_mask(
    seed: int, name: str, step: int, samples: Tensor, rows: tuple[int, int], columns: tuple[int, int], width: int,
    p: float,
) -> Tensor:  # fmt: skip
    """Which elements dropout keeps: bool [rows b columns], each with probability 1 - p.

    samples: int64 [b], global sample indices; rows and columns: the ranges of the [s, width] activation held here.
    Made in blocks of positions: beside the mask itself, 125 bytes for each of `_CHUNK` counters at a time, 8.2 MB
    on a CPU and 131 MB elsewhere, or for those of one position's columns where they are more.
    """
    stream = key(seed, name)
    first = columns[0]
    run = columns[1] - columns[0]
    device = samples.device
    keep = torch.empty((rows[1] - rows[0]) * len(samples), run, dtype=torch.bool, device=device)
    aligned = width % 4 == first % 4 == 0
    # that cover a run, in the second case wherever it begins
    counters = -(-run // 4) if aligned else (run + 6) // 4
    column = torch.arange(max(run, counters), device=device)
    lines = max(1, (_CHUNK if device.type == "cpu" else 16 * _CHUNK) // max(counters, 1))
    # one block shows what it takes
    for at in range(0, min(len(keep), lines) if keep.is_meta else len(keep), lines):
        out = keep[at : at + lines]
        line = torch.arange(at, at + len(out), device=device).view(-1, 1)
        begin = (line // len(samples) + rows[0]) * width + first
        sample = samples[line % len(samples)]
        words = philox(
            (begin // 4 + column[:counters], sample & _MASK, sample >> 32, step & _MASK), stream
        )
        drawn = torch.stack([word >= int(p * 2**32) for word in words], -1).flatten(1)
        out.copy_(drawn[:, :run] if aligned else drawn.gather(1, begin % 4 + column[:run]))
    return keep.view(rows[1] - rows[0], len(samples), run)
