"""Counter-based random numbers: Philox4x32-10 (Salmon et al., SC 2011) in torch integer arithmetic.

    normal(seed, "blocks.0.mlp.up.weight", shape, start, size)     # initial values of any slice
    keep_mask(seed, "blocks.0.mlp", step, samples, ...)            # dropout mask of any slice

Values depend only on the seed, names and global indices. So topology, micro-batch size,
recomputation and schedule do not change them. Philox maps a counter, a number of 128 bits, to four
random 32-bit words, which give the values of four elements: elements 4c to 4c + 3 of a tensor are
computed from counter c.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from threed.core import native

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF
_CHUNK = 1 << 16  # counters per chunk; a chunk stays in the cache during the rounds of Philox


def key(seed: int, name: str) -> tuple[int, int]:
    """Returns the 64-bit key of a named stream, as two words."""
    digest = hashlib.sha256(f"{seed}\0{name}".encode()).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")


def philox(
    counter: Sequence[Tensor | int], stream: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns four 32-bit words for every counter.

    A product of two 32-bit words overflows int64, but its low 64 bits are right, and masking
    removes the sign. A word given as a Python number stays a Python number, which does not overflow
    and needs no copy from the host to a GPU.

    Args:
        counter: four words of 32 bits, broadcastable tensors (int64) or Python numbers.
        stream: the key, two words.

    Returns:
        Four int64 tensors with 32-bit values.
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
    """Maps 32-bit words to the open interval (0, 1), fp64."""
    return (word.double() + 0.5) * 2.0**-32


def _normal_blocks(blocks: Tensor, stream: tuple[int, int]) -> Tensor:
    """Returns four standard normals per counter, fp32 [n 4]: Box-Muller in fp64, rounded to fp32.

    The rounding hides small differences between math libraries.

    Args:
        blocks: counters, int64 [n].
        stream: the key, two words.
    """
    native_normal = native.function("threed_normal", "vPPquui")  # csrc/cpu/philox.cpp
    if native_normal is None:
        return normal_blocks(blocks, stream)
    blocks, out = blocks.contiguous(), torch.empty(blocks.numel(), 4, dtype=torch.float32)
    native_normal(
        out.data_ptr(), blocks.data_ptr(), blocks.numel(), *stream, torch.get_num_threads()
    )
    return out


def normal_blocks(blocks: Tensor, stream: tuple[int, int]) -> Tensor:
    """Returns the values of `_normal_blocks` by torch operations.

    This is the fallback without a native library, and the reference in tests.
    """
    w0, w1, w2, w3 = philox((blocks & _MASK, blocks >> 32, 0, 0), stream)
    out = torch.empty(blocks.numel(), 4, dtype=torch.float32)
    for column, (a, b) in enumerate(((w0, w1), (w2, w3))):
        radius, angle = torch.sqrt(-2.0 * torch.log(_unit(a))), 2.0 * math.pi * _unit(b)
        out[:, 2 * column] = radius * torch.cos(angle)
        out[:, 2 * column + 1] = radius * torch.sin(angle)
    return out


def _normal_range(first: int, last: int, stream: tuple[int, int]) -> Tensor:
    """Returns the standard normals of the elements [first, last), fp32 [last - first]."""
    head, tail = first // 4, -(-last // 4)
    parts = [
        _normal_blocks(torch.arange(at, min(at + _CHUNK, tail)), stream).view(-1)
        for at in range(head, tail, _CHUNK)
    ]
    return torch.cat(parts)[first - 4 * head : last - 4 * head]


def normal(
    seed: int, name: str, shape: Sequence[int], start: Sequence[int], size: Sequence[int]
) -> Tensor:
    """Returns standard normals for a box of a global tensor, fp32 [*size].

    The box consists of contiguous runs of elements. Only the counters that cover these runs are
    evaluated.

    Args:
        seed: seed of the run.
        name: name of the global tensor.
        shape: shape of the global tensor.
        start: first index of the box, per dimension.
        size: size of the box, per dimension.
    """
    stream = key(seed, name)
    if 0 in size:
        return torch.empty(tuple(size))
    # The box has all indices of the dimensions after `cut`. So elements of the box that differ only
    # in dimension `cut` and later dimensions are a contiguous run of the tensor.
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
    # Maximum number of counters that a run covers. A counter has 4 elements, and the run may begin
    # at any of them.
    width = (run + 6) // 4
    blocks = (begins // 4).view(-1, 1) + torch.arange(width)
    lanes = _in_chunks(blocks.view(-1), stream).view(len(begins), 4 * width)
    return lanes.gather(1, (begins % 4).view(-1, 1) + torch.arange(run)).view(tuple(size))


def _in_chunks(blocks: Tensor, stream: tuple[int, int]) -> Tensor:
    return torch.cat([_normal_blocks(part, stream) for part in blocks.split(_CHUNK)])


def keep_mask(
    seed: int, name: str, step: int | Tensor, samples: Tensor, rows: tuple[int, int], columns: tuple[int, int], width: int,
    p: float,
) -> Tensor:  # fmt: skip
    """Returns a dropout mask, bool [rows b columns]: True keeps an element, with probability 1 - p.

    The mask is generated in chunks of rows, where a row is one position of one sample. A Philox
    counter gives the random numbers of four elements. Temporary memory is 125 bytes per counter of
    a chunk. A chunk has `_CHUNK` counters on a CPU (8.2 MB) and 16 `_CHUNK` counters on other
    devices (131 MB), or more if a single row needs more counters.

    Args:
        seed: seed of the run.
        name: name of the dropout module.
        step: number of the training step, a number or an int64 scalar tensor.
        samples: int64 [b], global sample indices.
        rows: [first, last) positions on this rank, of the global activation [s, width].
        columns: [first, last) columns on this rank.
        width: global number of columns.
        p: probability of dropping an element.
    """
    stream = key(seed, name)
    first = columns[0]
    run = columns[1] - columns[0]
    device = samples.device
    keep = torch.empty((rows[1] - rows[0]) * len(samples), run, dtype=torch.bool, device=device)
    aligned = width % 4 == first % 4 == 0
    # Number of Philox counters per row. A counter gives four columns, and unaligned columns may
    # begin in the middle of a counter.
    counters = -(-run // 4) if aligned else (run + 6) // 4
    column = torch.arange(max(run, counters), device=device)
    lines = max(1, (_CHUNK if device.type == "cpu" else 16 * _CHUNK) // max(counters, 1))
    # On the meta device only one chunk is run, because all chunks need the same temporary memory.
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
