"""LayerNorm and RMSNorm: whole on every tensor rank, over its part of the sequence when sequences are cut.

partial, of both: as in `Slicing.shared`; True for a norm over heads, of which a rank sees its own only.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from threed.layers.slicing import Slicing, VectorGradient
from threed.ops import launch, norm
from threed.sharding import parameter, vector


class _Fused(torch.autograd.Function):
    """norm(x) by our kernel; with a residual x + residual, too, and the gradients of both meet in its backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, layer: bool
    ) -> Any:
        rows = [None if t is None else t.view(-1, t.shape[-1]) for t in (x, residual)]
        done = norm.forward(rows[0], weight, bias, eps, layer, rows[1])  # type: ignore[arg-type]
        ctx.save_for_backward(done.sum, weight, done.scales, *([done.means] if done.means is not None else []))
        ctx.params, ctx.added = (weight, bias), residual is not None
        return (done.sum.view_as(x), done.y.view_as(x)) if residual is not None else done.y.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        total, weight, scales, *means = ctx.saved_tensors
        *dsum, dy = (g.contiguous().view_as(total) for g in gradients)
        done = norm.Normalised(total, total, means[0] if means else None, scales)
        weight_param, bias_param = ctx.params
        dweight, dbias = VectorGradient(weight_param), None if bias_param is None else VectorGradient(bias_param)
        dx = norm.backward(
            dy, done, weight, dweight.out, dbias.out if dbias else None, add=dweight.add,
            add_bias=dbias is not None and dbias.add, residual=dsum[0] if dsum else None,
        ).view_as(gradients[0])  # fmt: skip
        return dx, dx if ctx.added else None, dweight.done(), dbias and dbias.done(), None, None


def fused(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, layer: bool) -> Any:
    """norm(x); with a residual (x + residual, its norm), in one kernel."""
    return _Fused.apply(x, residual, weight, bias, eps, layer)


def add_and_norm(module: nn.Module, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """x + residual, and what a norm (any module) makes of that."""
    if isinstance(module, LayerNorm | RMSNorm):
        bias = module.bias if isinstance(module, LayerNorm) else None
        if norm.fits(x, module.weight, bias) and launch.packed(residual):
            layer = isinstance(module, LayerNorm)
            both: tuple[Tensor, Tensor] = fused(x, residual, module.weight, bias, module.eps, layer)
            return both
    total = x + residual
    return total, module(total)


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dimension: [... h] -> [... h]."""

    def __init__(
        self, name: str, width: int, slicing: Slicing, *, eps: float = 1e-5, bias: bool = True,
        partial: bool | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.width, self.eps = width, eps
        spec = slicing.shared(vector(f"{name}.weight", width, value=1.0), partial=partial)
        self.weight = parameter(spec, (width,))
        spec = slicing.shared(vector(f"{name}.bias", width), partial=partial)
        self.bias = parameter(spec, (width,)) if bias else None

    def flops(self, tokens: int, seq: int) -> int:
        """None that count."""
        return 0

    def forward(self, x: Tensor) -> Tensor:
        if norm.fits(x, self.weight, self.bias):
            return fused(x, None, self.weight, self.bias, self.eps, True)
        return F.layer_norm(x, (self.width,), self.weight, self.bias, self.eps)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv 1910.07467): [... h] -> [... h]."""

    def __init__(
        self, name: str, width: int, slicing: Slicing, *, eps: float = 1e-5, partial: bool | None = None
    ) -> None:
        super().__init__()
        self.width, self.eps = width, eps
        spec = slicing.shared(vector(f"{name}.weight", width, value=1.0), partial=partial)
        self.weight = parameter(spec, (width,))

    def flops(self, tokens: int, seq: int) -> int:
        """None that count."""
        return 0

    def forward(self, x: Tensor) -> Tensor:
        if norm.fits(x, self.weight):
            return fused(x, None, self.weight, None, self.eps, False)
        return F.rms_norm(x, (self.width,), self.weight, self.eps)
