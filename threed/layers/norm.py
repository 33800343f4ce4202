"""LayerNorm and RMSNorm: whole on every tensor rank, over its part of the sequence when sequences are cut.

partial, of both: as in `Slicing.shared`; True for a norm over heads, of which a rank sees its own only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from threed.layers.running import runs
from threed.layers.slicing import Slicing, VectorGradient, for_autograd, sink_of
from threed.ops import launch, norm
from threed.ops.tape import Tape
from threed.sharding import parameter, vector


class _Fused(torch.autograd.Function):
    """norm(s) by our kernel, s = x + residual or x itself; if `both`, s as well: then the gradients that come by way of
    the norm and past it meet in its backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, shown_weight: Tensor | None, shown_bias: Tensor | None,
        params: tuple[Tensor, Tensor | None], eps: float, layer: bool, both: bool,
    ) -> Any:  # fmt: skip
        total, y, saved = _forward(x, residual, params, eps, layer)
        ctx.save_for_backward(*saved)
        ctx.params, ctx.added = params, residual is not None
        return (total, y) if both else y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        *dsum, dy = gradients
        dx, *of_params = _backward(ctx.params, dy, dsum[0] if dsum else None, *ctx.saved_tensors)
        return dx, dx if ctx.added else None, *of_params, None, None, None, None


def _forward(
    x: Tensor,
    residual: Tensor | None,
    params: tuple[Tensor, Tensor | None],
    eps: float,
    layer: bool,
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """x + residual, its norm, and what the backward needs."""
    rows, (weight, bias) = x.view(-1, x.shape[-1]), params
    done = norm.forward(
        rows, weight, bias, eps, layer, None if residual is None else residual.view_as(rows)
    )
    means = () if done.means is None else (done.means,)
    return done.sum.view_as(x), done.y.view_as(x), (done.sum, weight, done.scales, *means)


def _backward(
    params: tuple[Tensor, Tensor | None], dy: Tensor, dsum: Tensor | None, total: Tensor, weight: Tensor,
    scales: Tensor, *means: Tensor,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """The gradients of the sum, where dsum comes past the norm, and of weight and bias where they have no sink."""
    rows, residual = (
        dy.contiguous().view_as(total),
        None if dsum is None else dsum.contiguous().view_as(total),
    )
    done = norm.Normalised(total, total, means[0] if means else None, scales)
    dweight, dbias = (
        VectorGradient(params[0]),
        None if params[1] is None else VectorGradient(params[1]),
    )
    dx = norm.backward(
        rows, done, weight, dweight.out, dbias.out if dbias else None, add=dweight.add,
        add_bias=dbias is not None and dbias.add, residual=residual,
    )  # fmt: skip
    return dx.view_as(dy), dweight.done(), None if dbias is None else dbias.done()


def _back_of_layer_norm(
    params: tuple[Tensor, Tensor | None], dy: Tensor, dsum: Tensor | None, x: Tensor, means: Tensor, scales: Tensor,
    weight: Tensor, bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    wanted = [param is not None and param.requires_grad for param in params]
    dx, *found = torch.ops.aten.native_layer_norm_backward(
        dy, x, weight.shape, means, scales, weight, bias, [True, *wanted]
    )
    for param, gradient in zip(params, found, strict=True):
        if param is not None and param.requires_grad and (sink := sink_of(param)) is not None:
            sink.add(gradient)
    return dx if dsum is None else dx.add_(dsum)


def sum_and_norm(
    module: nn.Module, x: Tensor, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """x + residual (x itself without one), and what a norm, any module, makes of that."""
    ours = type(module) in (LayerNorm, RMSNorm) and not (
        module._forward_hooks or module._forward_pre_hooks
    )
    if ours and module.fits(x) and (residual is None or launch.packed(residual)):  # type: ignore[operator]
        both: tuple[Tensor, Tensor] = module.fused(x, residual, both=True)  # type: ignore[operator]
        return both
    total = x if residual is None else x + residual
    return total, module(total)


class Norm(nn.Module):
    """What LayerNorm and RMSNorm have in common."""

    layer = False
    eps: float
    offset = 0.0
    weight: Tensor
    bias: Tensor | None

    def flops(self, tokens: int, seq: int) -> int:
        """None that count."""
        return 0

    def fits(self, x: Tensor) -> bool:
        """Whether our kernel takes x."""
        return not self.offset and launch.ready(x) and norm.fits(x, *self._params())

    def fused(self, x: Tensor, residual: Tensor | None, *, both: bool) -> Any:
        """The norm of x + residual by our kernel; if `both`, the sum before it."""
        params = self._params()
        return _Fused.apply(
            x, residual, *for_autograd(x, *params), params, self.eps, self.layer, both
        )

    def can_run(self) -> bool:
        """Whether its weight is a parameter; see `takes`."""
        return "weight" in self._parameters

    def takes(self, x: Tensor) -> bool:
        """Whether `run` and `run_sum` take x: our kernel must, or torch's norm be one operation of autograd's."""
        return self.layer or self.fits(x)

    def run(self, x: Tensor, tape: Tape) -> Tensor:
        """The layer on a tape."""
        y, back, saved = self._run(x, None)
        tape.note(lambda dy, *saved: back(dy, None, *saved), *saved)
        return y

    def run_sum(
        self, x: Tensor, tape: Tape, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """x + residual and its norm, on a tape: a step of two gradients, the norm's and the sum's."""
        y, back, saved = self._run(x, residual)
        tape.note(back, *saved)
        return saved[0].view_as(x), y

    def _run(
        self, x: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Callable[..., Tensor], tuple[Tensor, ...]]:
        """The norm, its backward, and what that needs; of this the sum comes first."""
        params = self._params()
        if self.fits(x) and (residual is None or launch.packed(residual)):
            _, y, saved = _forward(x, residual, params, self.eps, self.layer)
            return y, lambda *given: _backward(params, *given)[0], saved
        if not self.layer:
            raise RuntimeError(
                f"RMSNorm on a tape: our kernel does not take {x.dtype} {list(x.shape)}"
            )
        total = x if residual is None else x + residual
        y, means, scales = torch.native_layer_norm(total, params[0].shape, *params, self.eps)
        shown = params[:1] if params[1] is None else params
        return y, functools.partial(_back_of_layer_norm, params), (total, means, scales, *shown)

    def _params(self) -> tuple[Tensor, Tensor | None]:
        return self.weight, self.bias


@runs
class LayerNorm(Norm):
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dimension: [... h] -> [... h]."""

    layer = True

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

    def forward(self, x: Tensor) -> Tensor:
        if self.fits(x):
            y: Tensor = self.fused(x, None, both=False)
            return y
        return F.layer_norm(x, (self.width,), self.weight, self.bias, self.eps)


@runs
class RMSNorm(Norm):
    """x / sqrt(mean(x^2) + eps) * (weight + offset) over the last dimension (arXiv 1910.07467): [... h] -> [... h].

    offset: 1 in Gemma, whose weights begin at zero; then it is computed in fp32 at least, for 1 + weight is.
    """

    def __init__(
        self, name: str, width: int, slicing: Slicing, *, eps: float = 1e-5, partial: bool | None = None,
        offset: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.width, self.eps, self.offset = width, eps, offset
        spec = slicing.shared(vector(f"{name}.weight", width, value=1.0 - offset), partial=partial)
        self.weight, self.bias = parameter(spec, (width,)), None

    def forward(self, x: Tensor) -> Tensor:
        if self.fits(x):
            y: Tensor = self.fused(x, None, both=False)
            return y
        if self.offset:
            wide = torch.promote_types(x.dtype, torch.float32)
            return F.rms_norm(
                x.to(wide), (self.width,), self.weight.to(wide) + self.offset, self.eps
            ).to(x.dtype)
        return F.rms_norm(x, (self.width,), self.weight, self.eps)
