"""LayerNorm and RMSNorm: whole on every tensor rank, over its part of the sequence when sequences are cut.

partial, of both: as in `Slicing.shared`; True for a norm over heads, of which a rank sees its own only.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from threed.layers.slicing import Slicing, VectorGradient, for_autograd
from threed.ops import launch, norm
from threed.sharding import parameter, vector


class _Fused(torch.autograd.Function):
    """norm(s) by our kernel, s = x + residual or x itself; if `both`, s as well: then the gradients that come by way of
    the norm and past it meet in its backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, shown_weight: Tensor | None, shown_bias: Tensor | None,
        params: tuple[Tensor, Tensor | None], eps: float, layer: bool, both: bool,
    ) -> Any:  # fmt: skip
        rows, (weight, bias) = x.view(-1, x.shape[-1]), params
        done = norm.forward(rows, weight, bias, eps, layer, None if residual is None else residual.view_as(rows))
        ctx.save_for_backward(done.sum, weight, done.scales, *([done.means] if done.means is not None else []))
        ctx.params, ctx.added = params, residual is not None
        y = done.y.view_as(x)
        return (done.sum.view_as(x), y) if both else y

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
        return dx, dx if ctx.added else None, dweight.done(), dbias and dbias.done(), None, None, None, None


def _fused(
    x: Tensor, residual: Tensor | None, params: tuple[Tensor, Tensor | None], eps: float, layer: bool, both: bool
) -> Any:
    return _Fused.apply(x, residual, *for_autograd(x, *params), params, eps, layer, both)


def sum_and_norm(module: nn.Module, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x + residual (x itself without one), and what a norm, any module, makes of that."""
    ours = type(module) in (LayerNorm, RMSNorm) and not (module._forward_hooks or module._forward_pre_hooks)
    if ours and module.fits(x) and (residual is None or launch.packed(residual)):  # type: ignore[operator]
        both: tuple[Tensor, Tensor] = module.fused(x, residual, both=True)  # type: ignore[operator]
        return both
    total = x if residual is None else x + residual
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

    def fits(self, x: Tensor) -> bool:
        """Whether our kernel takes x."""
        return launch.ready(x) and norm.fits(x, self.weight, self.bias)

    def fused(self, x: Tensor, residual: Tensor | None, *, both: bool) -> Any:
        """The norm of x + residual by our kernel; if `both`, the sum before it."""
        return _fused(x, residual, (self.weight, self.bias), self.eps, True, both)

    def forward(self, x: Tensor) -> Tensor:
        if self.fits(x):
            y: Tensor = self.fused(x, None, both=False)
            return y
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

    def fits(self, x: Tensor) -> bool:
        """Whether our kernel takes x."""
        return launch.ready(x) and norm.fits(x, self.weight)

    def fused(self, x: Tensor, residual: Tensor | None, *, both: bool) -> Any:
        """The norm of x + residual by our kernel; if `both`, the sum before it."""
        return _fused(x, residual, (self.weight, None), self.eps, False, both)

    def forward(self, x: Tensor) -> Tensor:
        if self.fits(x):
            y: Tensor = self.fused(x, None, both=False)
            return y
        return F.rms_norm(x, (self.width,), self.weight, self.eps)
