"""Rotary positions (arXiv 2104.09864), half-split as in Hugging Face, in place: csrc/cuda/rotary.cu.

theta, of all: the base of the frequencies, or what `ops.frequencies` makes of one.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from threed.ops import launch
from threed.ops.frequencies import Theta, inverse, scale_of, turned_of


def angles(length: int, size: int, theta: Theta, device: torch.device) -> Tensor:
    """The angle of every position and pair, fp32 [s d/2]."""
    each = inverse(theta, size, length, device)
    return torch.outer(torch.arange(length, dtype=torch.float32, device=device), each)


def reference(x: Tensor, theta: Theta) -> Tensor:
    """Rotary positions on heads x [s b a d]."""
    angle = angles(x.shape[0], x.shape[-1], theta, x.device)[:, None, None]
    cos, sin = angle.cos() * scale_of(theta), angle.sin() * scale_of(theta)
    turned = turned_of(theta, x.shape[-1])
    left, right = x[..., :turned].chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin, x[..., turned:]), -1)


@functools.lru_cache(maxsize=16)
def table(length: int, size: int, theta: Theta, device: torch.device) -> Tensor:
    """Cosines and sines as the kernel reads them, fp32 [s 2 2 d/16 4]: first fours of all packs, then second ones."""
    angle = angles(length, size, theta, device)
    both = torch.stack((angle.cos(), angle.sin()), 1)
    both = both if scale_of(theta) == 1.0 else both * scale_of(theta)
    return both.view(length, 2, size // 16, 2, 4).transpose(2, 3).contiguous()


def fits(x: Tensor, size: int, theta: Theta = 0.0) -> bool:
    """Returns whether the kernel takes rows x of heads of this size, all of which is turned."""
    whole = size > 0 and size % 16 == 0 and turned_of(theta, size) == size
    return whole and x.shape[-1] % 8 == 0 and launch.ready(x) and launch.packed(x)


def turn_(
    x: Tensor, sequences: int, heads: int, size: int, theta: Theta, *, back: bool = False
) -> None:
    """Turns the first `heads` heads of `size` d in every row of x [(s b) width], in place; `back` undoes it.

    Rows are those of [s b width] with b = sequences. 4 bytes an element of these heads; one kernel.
    """
    rows, width = x.shape
    fits = (
        size > 0
        and size % 16 == 0
        and heads * size <= width
        and width % 8 == 0
        and rows % sequences == 0
    )
    fits = fits and turned_of(theta, size) == size and launch.packed(x) and rows < 2**31
    launch.check(
        fits,
        "rotary",
        "bf16 [(s b) width], contiguous and 16-byte aligned, heads of a multiple of 16",
        x,
    )
    if rows and heads:
        _TURN(
            x,
            table(rows // sequences, size, theta, x.device),
            sequences,
            heads,
            size,
            -1.0 if back else 1.0,
        )


def _start(
    x: Tensor, turns: Tensor, sequences: int, heads: int, size: int, direction: float
) -> None:
    launch.start("rotary", x, turns, *x.shape, sequences, heads, size, direction)


_TURN = launch.define(
    "rotary_(Tensor(a!) x, Tensor turns, int sequences, int heads, int size, float direction) -> ()",
    _start, lambda *args: None, launches=1,
)  # fmt: skip


class _Turned(torch.autograd.Function):
    """Splits x [s b width] into tensors of `heads` heads, of which the first `turned` are turned, in x's memory."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, heads: tuple[int, ...], turned: int, size: int, theta: Theta
    ) -> tuple[Tensor, ...]:
        ctx.of = (turned, size, theta)
        turn_(x.view(-1, x.shape[-1]), x.shape[1], turned, size, theta)
        torch.autograd.graph.increment_version((x,))  # whoever saved it is told
        return tuple(
            part.unflatten(-1, (-1, size)) for part in x.split([size * n for n in heads], -1)
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        turned, size, theta = ctx.of
        dx = torch.cat([g.flatten(2) for g in gradients], -1)
        turn_(dx.view(-1, dx.shape[-1]), dx.shape[1], turned, size, theta, back=True)
        return dx, None, None, None, None


def split_and_turn(
    x: Tensor, heads: tuple[int, ...], turned: int, size: int, theta: Theta
) -> tuple[Tensor, ...]:
    """Tensors [s b n d] for n in `heads`, of x [s b width]: the first `turned` heads are turned by their positions.

    They lie in x's memory, which must not be read afterwards.
    """
    parts: tuple[Tensor, ...] = _Turned.apply(x, heads, turned, size, theta)
    return parts
