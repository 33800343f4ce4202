"""LayerNorm and RMSNorm, replicated over tensor ranks.

With sequence parallelism each rank normalizes its part of the sequence. The argument `partial` is
passed to `Slicing.shared`. It is True for a norm of query or key heads, because each rank
normalizes only its own heads and so computes only a part of the weight's gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from threed.distributed.sharding import parameter, vector
from threed.layers.slicing import Slicing, VectorGradient, for_autograd, is_plain
from threed.ops import head_norm, launch, norm, sums
from threed.ops.frequencies import Theta
from threed.ops.head_norm import HeadNorm
from threed.ops.positions import Positions


class _Fused(torch.autograd.Function):
    """Computes norm(s) by the fused kernel; s is x + residual + before, without those that are None.

    If `with_sum`, the forward returns (s, norm(s)), and the backward adds the gradient of the
    output s to the gradient through the norm. `params` are weight, bias and `before`, a bias that is
    added before the norm. `tracked` are the same three tensors, or None if autograd needs no
    gradient for them (`for_autograd`).
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, params: tuple[Tensor, Tensor | None, Tensor | None], eps: float,
        layer: bool, with_sum: bool, *tracked: Tensor | None,
    ) -> Any:  # fmt: skip
        rows, added, (weight, bias, before) = x.view(-1, x.shape[-1]), residual, params
        result = norm.forward(
            rows, weight, bias, eps, layer, None if added is None else added.view_as(rows), before
        )
        ctx.save_for_backward(result.sum, params[0], result.scales, result.means)
        ctx.params, ctx.added = params, added is not None
        y = result.y.view_as(x)
        return (result.sum.view_as(x), y) if with_sum else y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (*dsum, dy), (total, weight, scales, means) = gradients, ctx.saved_tensors
        dweight = VectorGradient(ctx.params[0])
        dbias, dbefore = (None if p is None else VectorGradient(p) for p in ctx.params[1:])
        dx = norm.backward(
            dy.contiguous().view_as(total), norm.Normalized(total, total, means, scales), weight, dweight.out,
            dbias.out if dbias else None, add=dweight.add,
            add_bias=dbias is not None and dbias.add,
            residual=dsum[0].contiguous().view_as(total) if dsum else None,
            dbefore=dbefore.out if dbefore else None, add_before=dbefore is not None and dbefore.add,
        ).view_as(dy)  # fmt: skip
        ended = [one.done() if one else None for one in (dweight, dbias, dbefore)]
        # If an input was None or frozen, autograd accepts only None as its gradient.
        tracked = [
            g if needed else None for g, needed in zip(ended, ctx.needs_input_grad[6:], strict=True)
        ]
        return dx, dx if ctx.added else None, None, None, None, None, *tracked


def sum_and_norm(
    module: nn.Module,
    x: Tensor,
    residual: Tensor | None = None,
    before: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns (s, module(s)) for s = x + residual + before, by one kernel if possible.

    Without a residual, s is x.

    Args:
        module: the norm.
        x: [... h].
        residual: [... h] to add, or None.
        before: parameter [h] to add, or None.
    """
    if (
        is_plain(module, LayerNorm, RMSNorm)
        and module.fits(x)
        and (residual is None or launch.packed(residual))
    ):
        return module.fused(x, residual, before, with_sum=True)
    x = x if before is None else x + before
    total = x if residual is None else x + residual
    return total, module(total)


def adds_bias(module: nn.Module, x: Tensor, bias: Tensor) -> bool:
    """Returns whether kernels add this bias [h] to rows like x [... h], and sum its gradient."""
    fits = is_plain(module, LayerNorm, RMSNorm) and module.fits(x) and launch.packed(bias)
    return fits and sums.column_fits(x.flatten(0, -2))


class Norm(nn.Module):
    """Base class of LayerNorm and RMSNorm.

    Attributes:
        layer: whether the norm is a LayerNorm; otherwise it is an RMSNorm.
        eps: constant added to the variance or mean square.
        offset: constant added to the weight.
        weight: the weight [h].
        bias: the bias [h], or None.
    """

    layer = False
    eps: float
    offset = 0.0
    weight: Tensor
    bias: Tensor | None

    def flops(self, tokens: int, seq: int) -> int:
        """Returns 0 FLOPs, because a norm has no matrix product.

        Args:
            tokens: number of tokens of the micro-batch.
            seq: sequence length.
        """
        return 0

    def fits(self, x: Tensor) -> bool:
        """Returns whether the fused kernel supports x."""
        return not self.offset and launch.ready(x) and norm.fits(x, self.weight, self.bias)

    def fused(
        self, x: Tensor, residual: Tensor | None, before: Tensor | None = None, *, with_sum: bool
    ) -> Any:
        """Returns norm(x + residual + before) by the fused kernel, or a pair if `with_sum`.

        Args:
            x: [... h].
            residual: [... h]; None for the norm of x.
            before: parameter [h]; None to add nothing.
            with_sum: whether to return the pair (input of the norm, output).
        """
        params = (self.weight, self.bias, before)
        return _Fused.apply(
            x, residual, params, self.eps, self.layer, with_sum, *for_autograd(x, *params)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Returns the norm of x over its last dimension, [... h] -> [... h]."""
        return self.fused(x, None, with_sum=False) if self.fits(x) else self.plain(x)

    def plain(self, x: Tensor) -> Tensor:
        """Returns the norm of x [... h], computed by operations of torch."""
        raise NotImplementedError


class LayerNorm(Norm):
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dimension: [... h] -> [... h].

    Args:
        name: global name, the prefix of the parameters' names.
        width: size h of the normalized dimension.
        slicing: parallel layout.
        eps: constant added to the variance.
        bias: whether there is a bias.
        partial: whether gradients are partial, as in `Slicing.shared`.
    """

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

    def plain(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (self.width,), self.weight, self.bias, self.eps)


class RMSNorm(Norm):
    """x / sqrt(mean(x^2) + eps) * (weight + offset) over the last dimension: [... h] -> [... h].

    See arXiv 1910.07467.

    Args:
        name: global name, the prefix of the weight's name.
        width: size h of the normalized dimension.
        slicing: parallel layout.
        eps: constant added to the mean square.
        partial: whether the gradient is partial, as in `Slicing.shared`.
        offset: constant added to the weight; 1 in Gemma, where weights are initialized to zero. If
            it is not 0, the norm and weight + offset are computed in fp32 or wider.
    """

    def __init__(
        self, name: str, width: int, slicing: Slicing, *, eps: float = 1e-5, partial: bool | None = None,
        offset: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.width, self.eps, self.offset = width, eps, offset
        spec = slicing.shared(vector(f"{name}.weight", width, value=1.0 - offset), partial=partial)
        self.weight, self.bias = parameter(spec, (width,)), None

    def plain(self, x: Tensor) -> Tensor:
        if self.offset:
            wide = torch.promote_types(x.dtype, torch.float32)
            return F.rms_norm(
                x.to(wide), (self.width,), self.weight.to(wide) + self.offset, self.eps
            ).to(x.dtype)
        return F.rms_norm(x, (self.width,), self.weight, self.eps)


class _Heads(torch.autograd.Function):
    """Splits x [s b (a+2k)d] into heads, with norms and rotary positions of queries and keys.

    `weights` are those of both norms. `tracked` are the same tensors, or None (`for_autograd`).
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: tuple[Tensor, Tensor], by: HeadNorm, *tracked: Tensor | None
    ) -> tuple[Tensor, ...]:
        (queries, keys), size = by.heads, by.size
        turned = head_norm.forward(x, weights, by).split([queries * size, keys * size], -1)
        ctx.save_for_backward(x, *weights)
        ctx.weights, ctx.by = weights, by
        value = x[..., (queries + keys) * size :]
        return tuple(part.unflatten(-1, (-1, size)) for part in (*turned, value))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (x, *weights), sinks = ctx.saved_tensors, [VectorGradient(w) for w in ctx.weights]
        outs, adds = zip(*((sink.out, sink.add) for sink in sinks), strict=True)
        dq, dk, dv = gradients
        dx = head_norm.backward((dq, dk, dv), x, tuple(weights), ctx.by, outs, adds)
        ended = [sink.done() for sink in sinks]
        tracked = (
            g if needed else None for g, needed in zip(ended, ctx.needs_input_grad[3:], strict=True)
        )
        return dx, None, None, *tracked


def norm_and_rotate(
    norms: tuple[RMSNorm | None, RMSNorm | None], x: Tensor, heads: tuple[int, int], size: int, theta: Theta,
    positions: Positions,
) -> tuple[Tensor, ...] | None:  # fmt: skip
    """Splits x into queries [s b a d], keys and values [s b k d]; normalizes and rotates by one kernel.

    Returns None if the kernel does not support these arguments.

    Args:
        norms: norms of query and key heads.
        x: rows of a query, k key and k value heads, [s b (a+2k)d].
        heads: (a, k).
        size: head's size d.
        theta: base of the rotary frequencies, or a result of `ops.frequencies.frequencies`.
        positions: positions of the rows of x.
    """
    query, key = norms
    if query is None or key is None or not (is_plain(query, RMSNorm) and is_plain(key, RMSNorm)):
        return None
    weights = query.weight, key.weight
    if not head_norm.fits(x, size, theta, *weights):
        return None
    by = HeadNorm(heads, size, theta, positions, query.offset, query.eps)
    return _Heads.apply(x, weights, by, *for_autograd(x, *weights))
