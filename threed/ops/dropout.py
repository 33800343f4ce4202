"""Counter-based dropout (`threed.core.rng`), fused with bias and residual: csrc/cuda/dropout.cu.

out = residual + (x + bias) keep / (1 - p)

The mask `keep` has elements 0 and 1. It is not saved; the backward computes it again. In bf16 the
forward reads and writes 6 bytes of memory per element (4 without a residual), the backward 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from threed.core import rng
from threed.ops import launch
from threed.ops.positions import Positions


@dataclass(frozen=True, eq=False)
class Draw:
    """The arguments that determine the mask of an activation [s b h].

    Attributes:
        seed: seed of the run.
        name: global name of the dropout layer.
        step: number of the training step; an int64 scalar tensor in a CUDA graph, which would replay
            a number of the host.
        samples: int64 [b], global sample indices.
        positions: positions of the activation's rows in their sequences.
        p: probability of zeroing an element.
    """

    seed: int
    name: str
    step: int | Tensor
    samples: Tensor
    positions: Positions
    p: float

    @property
    def scale(self) -> float:
        """Factor of the elements that are kept."""
        return 1.0 / (1.0 - self.p)

    def mask(self, x: Tensor) -> Tensor:
        """Returns the mask of x [s b h]: bool, True for elements that are kept."""
        h, draw = x.shape[-1], (self.seed, self.name, self.step, self.samples)
        parts = [rng.keep_mask(*draw, rows, (0, h), h, self.p) for rows in self.positions.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def reference(
    x: Tensor, draw: Draw, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """Returns residual + dropout(x + bias) by torch's operations: x, residual [s b h], bias [h]."""
    y = (x if bias is None else x + bias) * draw.mask(x) * draw.scale
    return y if residual is None else residual + y


def fits(x: Tensor) -> bool:
    """Returns whether the kernel supports x [s b h]."""
    return x.dim() == 3 and x.shape[-1] % 8 == 0 and launch.ready(x) and launch.packed(x)


def dropout(
    x: Tensor, draw: Draw, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """Returns the same as `reference`, in bf16. Launches one kernel per range of positions.

    The gradient of x is `dropout` of the output's gradient, without bias and residual. Layers pass
    no bias, because the product before the dropout adds it.
    """
    ranges = [edge for part in draw.positions.ranges for edge in part]
    at, step = (draw.step, 0) if isinstance(draw.step, Tensor) else (None, draw.step & 0xFFFFFFFF)
    stream = (*rng.key(draw.seed, draw.name), step)
    return _start(x, bias, residual, draw.samples, at, ranges, *stream, draw.p)


@launch.operator(
    "dropout(Tensor x, Tensor? bias, Tensor? residual, Tensor samples, Tensor? at, int[] ranges, int key0, int key1, int step,"
    " float p) -> Tensor",
    lambda x, *rest: torch.empty_like(x),
    launches=lambda x, bias, residual, samples, at, ranges, *rest: len(ranges) // 2,
)  # fmt: skip
def _start(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, samples: Tensor, at: Tensor | None, ranges: list[int],
    key0: int, key1: int, step: int, p: float,
) -> Tensor:  # fmt: skip
    _check(x, bias, residual, samples, at, ranges, p)
    out, (_, b, h), begin = torch.empty_like(x), x.shape, 0
    for first, last in zip(ranges[::2], ranges[1::2], strict=True):
        end = begin + last - first
        part, target = x[begin:end], out[begin:end]
        added = None if residual is None else residual[begin:end]
        if part.numel():
            launch.start(
                "dropout", part, bias, added, samples, at, target, len(part) * b, h, b, first, key0, key1, step,
                int(p * 2**32), 1.0 / (1.0 - p),
            )  # fmt: skip
        begin = end
    return out


def _check(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, samples: Tensor, at: Tensor | None, ranges: list[int],
    p: float,
) -> None:  # fmt: skip
    """Raises ValueError if the kernel does not support these arguments."""
    h, of_ranges = x.shape[-1], sum(ranges[1::2]) - sum(ranges[::2])
    fits = x.dim() == 3 and h % 8 == 0 and 0 <= p < 1 and x.shape[0] * x.shape[1] < 2**31
    fits = fits and x.shape[0] == of_ranges
    fits = fits and (residual is None or residual.shape == x.shape)
    fits = fits and (bias is None or bias.numel() == h)
    fits = fits and all(launch.packed(t) for t in (x, bias, residual) if t is not None)
    fits = fits and (at is None or (at.dtype == torch.int64 and at.numel() == 1))
    fits = fits and samples.dtype == torch.int64 and samples.shape == x.shape[1:2]
    wanted = "bf16 [s b h] and [h], contiguous and 16-byte aligned, h a multiple of 8; samples int64 [b]; p below 1"
    launch.check(
        fits and samples.is_contiguous(),
        "dropout",
        f"{wanted}; s positions",
        x,
        bias,
        residual,
        samples,
    )


class _Fused(torch.autograd.Function):
    """Computes dropout by the kernel. No tensor is saved: the backward computes the mask again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, draw: Draw) -> Tensor:
        ctx.draw = draw
        return dropout(x, draw, residual=residual)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
        dx = dropout(dy.contiguous(), ctx.draw)
        return dx, dy if ctx.needs_input_grad[1] else None, None


def fused(x: Tensor, draw: Draw, residual: Tensor | None = None) -> Tensor:
    """Returns residual + dropout(x) for x [s b h], by `dropout`; the result is differentiable."""
    return _Fused.apply(x, residual, draw)
