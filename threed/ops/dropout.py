"""Dropout by counters (`threed.rng`), with the bias and the residual around it, in one pass: csrc/cuda/dropout.cu.

    out = residual + (x + bias) keep / (1 - p)     6 bytes an element of bf16; backward 4: the mask is drawn again
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from threed import rng
from threed.ops import launch


@dataclass(frozen=True, eq=False)
class Draw:
    """What the mask of an activation [s b h] is a function of. samples: int64 [b], global; first: the global position of
    the first row."""

    seed: int
    name: str
    step: int
    samples: Tensor
    first: int
    p: float


def reference(x: Tensor, draw: Draw, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """The same in plain operations: x and residual [s b h], bias [h]."""
    h, rows = x.shape[-1], (draw.first, draw.first + x.shape[0])
    keep = rng.keep_mask(draw.seed, draw.name, draw.step, draw.samples, rows, (0, h), h, draw.p)
    y = (x if bias is None else x + bias) * keep * (1.0 / (1.0 - draw.p))
    return y if residual is None else residual + y


def dropout(x: Tensor, draw: Draw, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """As `reference`, of bf16; for the backward without bias and residual. One kernel."""
    h = x.shape[-1]
    fits = x.dim() == 3 and h % 8 == 0 and 0 <= draw.p < 1 and x.shape[0] * x.shape[1] < 2**31
    fits = fits and (residual is None or residual.shape == x.shape) and (bias is None or bias.numel() == h)
    fits = fits and all(launch.packed(t) for t in (x, bias, residual) if t is not None)
    fits = fits and draw.samples.dtype == torch.int64 and draw.samples.shape == x.shape[1:2]
    fits = fits and draw.samples.is_contiguous()
    wanted = "bf16 [s b h] and [h], contiguous and 16-byte aligned, h a multiple of 8; samples int64 [b]"
    launch.check(fits, "dropout", wanted, x, bias, residual, draw.samples)
    out = torch.empty_like(x)
    if x.numel():
        key0, key1 = rng.key(draw.seed, draw.name)
        launch.start(
            "dropout", x, bias, residual, draw.samples, out, x.shape[0] * x.shape[1], h, x.shape[1], draw.first, key0,
            key1, draw.step & 0xFFFFFFFF, int(draw.p * 2**32), 1.0 / (1.0 - draw.p),
        )  # fmt: skip
    return out
