"""Rotary positions (arXiv 2104.09864) in the half-split layout that Hugging Face uses: csrc/cuda/rotary.cu, in place."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from threed.ops import launch


def angles(length: int, size: int, theta: float, device: torch.device) -> Tensor:
    """The angle of every position and pair, fp32 [s d/2]."""
    exponent = torch.arange(0, size, 2, dtype=torch.float32, device=device) / size
    return torch.outer(torch.arange(length, dtype=torch.float32, device=device), 1.0 / theta**exponent)


def reference(x: Tensor, theta: float) -> Tensor:
    """Rotary positions on heads x [s b a d]."""
    angle = angles(x.shape[0], x.shape[-1], theta, x.device)[:, None, None].to(torch.promote_types(x.dtype, torch.float32))
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()), -1)


@functools.lru_cache(maxsize=16)
def table(length: int, size: int, theta: float, device: torch.device) -> Tensor:
    """Cosines and sines as the kernel reads them, fp32 [s 2 2 d/16 4]: the first fours of all packs, then the second."""
    angle = angles(length, size, theta, device)
    both = torch.stack((angle.cos(), angle.sin()), 1)
    return both.view(length, 2, size // 16, 2, 4).transpose(2, 3).contiguous()


def turn_(x: Tensor, sequences: int, heads: int, size: int, theta: float, *, back: bool = False) -> None:
    """Turns the first `heads` heads of `size` d in every row of x [(s b) width], in place; `back` undoes it.

    Rows are those of [s b width] with b = sequences. 4 bytes an element of these heads; one kernel.
    """
    rows, width = x.shape
    fits = size > 0 and size % 16 == 0 and heads * size <= width and width % 8 == 0 and rows % sequences == 0
    fits = fits and launch.packed(x) and rows < 2**31
    launch.check(fits, "rotary", "bf16 [(s b) width], contiguous and 16-byte aligned, heads of a multiple of 16", x)
    if rows and heads:
        turns = table(rows // sequences, size, theta, x.device)
        launch.start("rotary", x, turns, rows, width, sequences, heads, size, -1.0 if back else 1.0)
