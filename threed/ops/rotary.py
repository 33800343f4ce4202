"""Rotary positions (arXiv 2104.09864), half-split as in Hugging Face: in plain operations, and on GPUs in place
(csrc/cuda/rotary.cu).

theta, of all: the base of the frequencies, or a result of `ops.frequencies.frequencies`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from threed.ops import launch
from threed.ops.frequencies import Theta, inverse, scale_of, turned_of
from threed.ops.positions import Positions


def angles(positions: Positions, size: int, theta: Theta, device: torch.device) -> Tensor:
    """Returns the angle of every position and pair, fp32 [s d/2]."""
    each = inverse(theta, size, positions.length, device)
    return torch.outer(positions.indices(device, torch.float32), each)


@functools.lru_cache(maxsize=16)
def plain_table(
    positions: Positions, size: int, theta: Theta, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines [s 1 1 d], as `rotate` reads them."""
    angle = angles(positions, size, theta, device)
    angle = torch.cat((angle, angle), dim=-1).view(-1, 1, 1, turned_of(theta, size))
    cos, sin = angle.cos(), angle.sin()
    if (scale := scale_of(theta)) != 1.0:
        cos, sin = cos * scale, sin * scale
    return cos.to(dtype), sin.to(dtype)


def rotate(x: Tensor, theta: Theta, positions: Positions | None = None) -> Tensor:
    """Applies rotary positions to heads x [s b a d], in plain operations.

    Args:
        theta: the base of the frequencies, or a result of `ops.frequencies.frequencies`.
        positions: of the rows of x; by default x is a full sequence.
    """
    table = plain_table.__wrapped__ if torch.compiler.is_compiling() else plain_table
    positions = positions or Positions.all(x.shape[0])
    cos, sin = table(positions, x.shape[-1], theta, x.device, x.dtype)
    rest = None
    if (turned := turned_of(theta, x.shape[-1])) < x.shape[-1]:
        x, rest = x[..., :turned], x[..., turned:]
    left, right = x.chunk(2, dim=-1)
    y = x * cos + torch.cat((-right, left), dim=-1) * sin
    return y if rest is None else torch.cat((y, rest), dim=-1)


@functools.lru_cache(maxsize=16)
def table(positions: Positions, size: int, theta: Theta, device: torch.device) -> Tensor:
    """Returns cosines and sines as the kernel reads them, fp32 [s 2 2 d/16 4].

    Of each position the first fours of all packs come first, then the second ones.
    """
    angle = angles(positions, size, theta, device)
    both = torch.stack((angle.cos(), angle.sin()), 1)
    both = both if scale_of(theta) == 1.0 else both * scale_of(theta)
    return both.view(-1, 2, size // 16, 2, 4).transpose(2, 3).contiguous()


def fits(x: Tensor, size: int, theta: Theta = 0.0) -> bool:
    """Returns whether the kernel takes rows x of heads of this size, all of which is turned."""
    whole = size > 0 and size % 16 == 0 and turned_of(theta, size) == size
    return whole and x.shape[-1] % 8 == 0 and launch.ready(x) and launch.packed(x)


def turn_(
    x: Tensor, positions: Positions, heads: int, size: int, theta: Theta, *, back: bool = False
) -> None:
    """Rotates the first `heads` heads of `size` d in every row of x [(s b) width], in place.

    Rows are those of [s b width], where s are these positions. 4 bytes per element of the heads;
    one kernel. back: the inverse.
    """
    (rows, width), table_rows = x.shape, sum(last - first for first, last in positions.ranges)
    fits = size > 0 and size % 16 == 0 and heads * size <= width and width % 8 == 0
    fits = fits and (rows % table_rows == 0 if table_rows else not rows)
    fits = fits and turned_of(theta, size) == size and launch.packed(x) and rows < 2**31
    wanted = "bf16 [(s b) width], contiguous and 16-byte aligned, heads of a multiple of 16"
    launch.check(fits, "rotary", wanted, x)
    if rows and heads:
        turns = table(positions, size, theta, x.device)
        _start(x, turns, rows // table_rows, heads, size, -1.0 if back else 1.0)


@launch.operator(
    "rotary_(Tensor(a!) x, Tensor turns, int sequences, int heads, int size, float direction) -> ()",
    lambda *args: None, launches=1,
)  # fmt: skip
def _start(
    x: Tensor, turns: Tensor, sequences: int, heads: int, size: int, direction: float
) -> None:
    launch.start("rotary", x, turns, *x.shape, sequences, heads, size, direction)


class _Turned(torch.autograd.Function):
    """Splits x [s b width] into tensors of `heads` heads, of which the first `turned` are rotated, in x's memory."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, heads: tuple[int, ...], turned: int, size: int, theta: Theta,
        positions: Positions,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.of = (positions, turned, size, theta)
        turn_(x.view(-1, x.shape[-1]), *ctx.of)
        torch.autograd.graph.increment_version((x,))  # whoever saved it is told
        parts = x.split([size * n for n in heads], -1)
        return tuple(part.unflatten(-1, (-1, size)) for part in parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        dx = torch.cat([g.flatten(2) for g in gradients], -1)
        turn_(dx.view(-1, dx.shape[-1]), *ctx.of, back=True)
        return dx, None, None, None, None, None


def split_and_turn(
    x: Tensor, heads: tuple[int, ...], turned: int, size: int, theta: Theta, positions: Positions
) -> tuple[Tensor, ...]:
    """Returns tensors [s b n d] for n in `heads`, of x [s b width]; the first `turned` heads are rotated.

    They lie in x's memory, which must not be read afterwards.
    """
    parts: tuple[Tensor, ...] = _Turned.apply(x, heads, turned, size, theta, positions)
    return parts
