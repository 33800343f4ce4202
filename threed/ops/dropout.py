"""Dropout by counters (`threed.rng`), with the bias and the residual around it, in one pass: csrc/cuda/dropout.cu.

out = residual + (x + bias) keep / (1 - p)     6 bytes an element of bf16; backward 4: the mask is drawn again
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from threed import rng
from threed.ops import launch


@dataclass(frozen=True, eq=False)
class Draw:
    """What the mask of an activation [s b h] is a function of.

    samples: int64 [b], global indices. first: the global position of the first row.
    """

    seed: int
    name: str
    step: int
    samples: Tensor
    first: int
    p: float

    @property
    def scale(self) -> float:
        """What is left is multiplied by it."""
        return 1.0 / (1.0 - self.p)

    def mask(self, x: Tensor) -> Tensor:
        """What is left of x [s b h]: bool, of its shape."""
        h, rows = x.shape[-1], (self.first, self.first + x.shape[0])
        return rng.keep_mask(self.seed, self.name, self.step, self.samples, rows, (0, h), h, self.p)


def reference(
    x: Tensor, draw: Draw, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """The same in plain operations: x and residual [s b h], bias [h]."""
    y = (x if bias is None else x + bias) * draw.mask(x) * draw.scale
    return y if residual is None else residual + y


def fits(x: Tensor) -> bool:
    """Returns whether the kernel takes x [s b h]."""
    return x.dim() == 3 and x.shape[-1] % 8 == 0 and launch.ready(x) and launch.packed(x)


def dropout(
    x: Tensor, draw: Draw, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """As `reference`, of bf16; for the backward without bias and residual. One kernel."""
    key0, key1 = rng.key(draw.seed, draw.name)
    out: Tensor = _DROPOUT(
        x, bias, residual, draw.samples, draw.first, key0, key1, draw.step & 0xFFFFFFFF, draw.p
    )
    return out


def _start(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, samples: Tensor, first: int, key0: int, key1: int,
    step: int, p: float,
) -> Tensor:  # fmt: skip
    h = x.shape[-1]
    fits = x.dim() == 3 and h % 8 == 0 and 0 <= p < 1 and x.shape[0] * x.shape[1] < 2**31
    fits = (
        fits
        and (residual is None or residual.shape == x.shape)
        and (bias is None or bias.numel() == h)
    )
    fits = fits and all(launch.packed(t) for t in (x, bias, residual) if t is not None)
    fits = (
        fits
        and samples.dtype == torch.int64
        and samples.shape == x.shape[1:2]
        and samples.is_contiguous()
    )
    wanted = "bf16 [s b h] and [h], contiguous and 16-byte aligned, h a multiple of 8; samples int64 [b]; p below 1"
    launch.check(fits, "dropout", wanted, x, bias, residual, samples)
    out = torch.empty_like(x)
    if x.numel():
        launch.start(
            "dropout", x, bias, residual, samples, out, x.shape[0] * x.shape[1], h, x.shape[1], first, key0, key1, step,
            int(p * 2**32), 1.0 / (1.0 - p),
        )  # fmt: skip
    return out


_DROPOUT = launch.define(
    "dropout(Tensor x, Tensor? bias, Tensor? residual, Tensor samples, int first, int key0, int key1, int step,"
    " float p) -> Tensor",
    _start, lambda x, *rest: torch.empty_like(x), launches=1,
)  # fmt: skip


class _Fused(torch.autograd.Function):
    """Dropout by the kernel. Saves nothing: the backward draws the mask again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, draw: Draw) -> Tensor:
        ctx.draw = draw
        return dropout(x, draw)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dropout(dy.contiguous(), ctx.draw), None


def fused(x: Tensor, draw: Draw) -> Tensor:
    """As `dropout` without bias and residual, differentiable."""
    y: Tensor = _Fused.apply(x, draw)
    return y
