"""Linear layers: column- and row-parallel (Megatron-LM, arXiv 1909.08053, section 3), and whole on every tensor rank.

    Y = X A^T.   Column-parallel cuts A by rows (outputs), row-parallel by columns (inputs):

        column   Y_i = f(X) A_i^T        f: identity forward, all-reduce backward
        row      Y   = g(sum X_i A_i^T)  g: all-reduce forward, identity backward

With sequence parallelism f gathers [s/t b h] to [s b h] and reduce-scatters backward, g the other way round: the same
bytes. The sum of the input's gradient travels while the weight's gradient is computed.

With `Slicing.tile` this rank's matrix is cut by rows again, into tiles that are whole one at a time (`layers.tiled`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from threed import collectives
from threed.collectives import split
from threed.layers.slicing import (
    Slicing,
    bias_gradient,
    for_autograd,
    goes_to_sink,
    sink_of,
    weight_gradient,
)
from threed.layers.tiled import LOCAL, add_weight, tiled_linear, tiles_of
from threed.ops import launch, matmul
from threed.sharding import ShardSpec, matrix, parameter, vector
from threed.topology import Axis


class _Linear(torch.autograd.Function):
    """y = f(x) w^T + b, where f belongs to `axis` (one rank: nothing) and gathers if `gather`.

    w and b are `params`. Autograd gets them as `weight` and `bias` if their gradients pass through it.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, axis: Axis, gather: bool,
        params: tuple[Tensor, Tensor | None],
    ) -> Tensor:  # fmt: skip
        if gather:
            x = collectives.all_gather(x, axis)
        ctx.save_for_backward(x, params[0])
        ctx.params, ctx.of_f = params, (axis, gather)
        y = matmul.linear(x, *params)
        # Not a view to autograd, which would refuse a relu_() behind it.
        return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y

    @staticmethod
    def backward(
        ctx: Any, dy: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        # Of the parameters themselves: what was saved comes back as another tensor where hooks have kept it.
        x, weight = ctx.saved_tensors
        return (
            *gradients(dy, x, weight, ctx.params, ctx.of_f, ctx.needs_input_grad[0]),
            None,
            None,
            None,
        )


def gradients(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    params: tuple[Tensor, Tensor | None],
    of_f: tuple[Axis, bool],
    need_dx: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Computes the gradients of x before f, weight and bias for y = x weight^T + bias.

    Gradients of `params` (weight and bias) that have a sink go there, and None is returned in their place. In a forward
    (`torch.autograd.grad` in a layer) only the gradient of x is computed, and it is differentiable.

    Args:
        of_f: the axis, and whether f gathered over it.
        need_dx: whether the gradient of x is needed.

    Raises:
        RuntimeError: a differentiable gradient would have to be summed over tensor ranks.
    """
    dy, (axis, gather), dx, pending = dy.contiguous(), of_f, None, None
    in_forward, differentiable = _in_forward(params), torch.is_grad_enabled()
    if axis.size > 1 and (in_forward or differentiable):
        raise RuntimeError(
            "torch.autograd.grad in a layer's forward, through a layer that is cut over tensor ranks"
        )
    if in_forward:
        return dy @ weight, None, None
    rows = dy.flatten(0, -2)
    if need_dx and differentiable:
        dx = dy @ weight
    elif need_dx:
        dx = matmul.input_gradient(rows, weight).view(*dy.shape[:-1], weight.shape[1])
        if axis.size > 1:
            reduce = collectives.start_reduce_scatter if gather else collectives.start_all_reduce
            pending = reduce(dx, axis)
    dw = weight_gradient(params[0], rows, x)
    db = (
        bias_gradient(params[1], rows)
        if params[1] is not None and params[1].requires_grad
        else None
    )
    return dx if pending is None else pending.wait(), dw, db


def _in_forward(params: tuple[Tensor, Tensor | None]) -> bool:
    """Returns whether a stage is running a forward; False if no parameter has a sink."""
    for param in params:
        sink = None if param is None else sink_of(param)
        if sink is not None:
            return sink.in_forward()
    return False


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, axis: Axis = LOCAL, gather: bool = False
) -> Tensor:
    """x [... in] -> [... out], with this layer's f on `axis`; weight [out in] may be a slice of a larger one."""
    shown = for_autograd(x, weight, bias)
    out: Tensor = _Linear.apply(x, *shown, axis, gather, (weight, bias))
    return out


class _AddBias(torch.autograd.Function):
    """y + b, whose gradient of b goes to its sink without a tensor of its own."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor) -> Tensor:
        ctx.bias = bias
        return y + bias

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None]:
        return dy, bias_gradient(ctx.bias, dy.contiguous().flatten(0, -2)) if ctx.needs_input_grad[
            1
        ] else None


@dataclass(frozen=True, eq=False)
class Traced:
    """What a graph of torch.compile needs of a linear layer (`layers.compiled`).

    layer, axis: stand for the layer and its axis. outputs: its columns of y. asks: in place of the weight, where that
    is cut into tiles: an empty tensor that requires a gradient, so that y does.
    """

    layer: Any
    axis: Any
    outputs: int
    asks: Tensor | None


class Product(nn.Module):
    """What the linear layers have in common: the product, over `axis` with its f, which gathers if `gather`."""

    axis, gather = LOCAL, False
    traced: Traced | None = None

    def flops(self, tokens: int, seq: int) -> int:
        """FLOPs of a forward."""
        return 2 * tokens * sum(weight.numel() for weight in tiles_of(self))

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """What the layer's weight makes of x: in one product, or tile by tile."""
        if self.traced is not None and torch.compiler.is_compiling():
            return self._traced_product(self.traced, x, bias)
        weight = self._parameters.get("weight")
        if weight is not None:
            return linear(x, weight, bias, self.axis, self.gather)
        return tiled_linear(x, tiles_of(self), bias, self.axis, self.gather)

    def _traced_product(self, by: Traced, x: Tensor, bias: Tensor | None) -> Tensor:
        parts = self.axis.size if self.gather else 1
        whole = torch.ops.threed.gather_from(x.detach(), parts, by.axis) if self.gather else x
        weight = self.weight if by.asks is None else by.asks
        out: Tensor = torch.ops.threed.product(x, whole, weight, bias, by.outputs, parts, by.layer)
        return out


class ColumnLinear(Product):
    """A linear layer cut by outputs: x [s b h] (or [s/t b h] when sequences are cut) -> [s b out/t].

    outputs: the global matrices packed into it, as (name, out) pairs; each is cut by itself into whole multiples of
    `multiple` (a head's size), as evenly as can be. shared: so many neighbouring ranks hold the same part (key/value
    heads fewer than ranks); their gradients are parts of one sum. local: x is whole already, and f is the caller's.
    """

    def __init__(
        self, name: str, inputs: int, outputs: Sequence[tuple[str, int]], slicing: Slicing, *, std: float = 0.02,
        bias: bool = True, multiple: int = 1, shared: int = 1, local: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        tp = slicing.tp
        self.axis, self.gather = (LOCAL, False) if local else (tp, slicing.sequence_parallel)
        weights, biases, rows = [], [], 0
        for part, out in outputs:
            first, last = (
                multiple * n for n in split(out // multiple, tp.size // shared, tp.index // shared)
            )
            weights.append(
                matrix(f"{name}.{part}.weight", (out, inputs), 0, (first, last), std, rows * inputs)
            )
            biases.append(vector(f"{name}.{part}.bias", out, (first, last), offset=rows))
            rows += last - first
        same = f"tp/{shared}" if shared > 1 else None
        add_weight(self, ShardSpec(tuple(weights), same, same), (rows, inputs), slicing.tile)
        self.bias = (
            parameter(ShardSpec(tuple(biases), same, same, decay=False), (rows,)) if bias else None
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.bias)


class RowLinear(Product):
    """A linear layer cut by inputs: x [s b in/t] -> [s b out] (or [s/t b out] when sequences are cut).

    The bias is added once, after the sum; when sequences are cut its gradient is partial.
    """

    def __init__(
        self, name: str, inputs: int, outputs: int, slicing: Slicing, *, std: float = 0.02, bias: bool = True,
        multiple: int = 1,
    ) -> None:  # fmt: skip
        super().__init__()
        self.slicing = slicing
        tp = slicing.tp
        first, last = (multiple * n for n in split(inputs // multiple, tp.size, tp.index))
        piece = matrix(f"{name}.weight", (outputs, inputs), 1, (first, last), std)
        add_weight(self, ShardSpec((piece,)), (outputs, last - first), slicing.tile)
        self.bias = (
            parameter(slicing.shared(vector(f"{name}.bias", outputs)), (outputs,)) if bias else None
        )

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias
        if self.slicing.tp.size == 1:
            return self.product(x, bias)
        y = self.slicing.reduce(self.product(x, None))
        if bias is None:
            return y
        added: Tensor = _AddBias.apply(y, bias) if launch.ready(y) else y + bias
        return added


class ReplicatedLinear(Product):
    """A linear layer that every tensor rank holds whole, without communication: x [... in] -> [... out].

    For what is too small to cut (a router, a projection to a low rank), or what works on positions between blocks:
    there x may be [s b in] or this rank's [s/t b in]. partial: for other inputs, as in `Slicing.shared`; None: x is
    between blocks. tiles: cut into so many that are whole one at a time, by default `Slicing.tile`; fewer where there
    are fewer outputs. Weight [out in] and bias [out] are the global tensors `name`.weight and `name`.bias.
    """

    def __init__(
        self, name: str, inputs: int, outputs: int, slicing: Slicing, *, tiles: int | None = None, std: float = 0.02,
        bias: bool = True, partial: bool | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        piece = matrix(f"{name}.weight", (outputs, inputs), 0, (0, outputs), std)
        spec = slicing.shared(piece, partial=partial, decay=True)
        add_weight(self, spec, (outputs, inputs), tiles or slicing.tile)
        spec = slicing.shared(vector(f"{name}.bias", outputs), partial=partial)
        self.bias = parameter(spec, (outputs,)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.bias)


class SinkLinear(nn.Linear):
    """torch's linear layer, whose weight's gradient goes to its sink without passing through autograd, if it may."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        mixed = torch.compiler.is_compiling() or torch._C._is_any_autocast_enabled()
        if (
            mixed
            or x.dim() < 2
            or x.dtype != weight.dtype
            or not (goes_to_sink(weight) and goes_to_sink(bias))
        ):
            return super().forward(x)
        return linear(x, weight, bias)

    def _get_name(self) -> str:
        return nn.Linear.__name__


def use_sinks(layer: nn.Module) -> None:
    """Lets torch's own linear layers among a layer's parts write to sinks, which a split backward can defer; those of
    derived classes, and those whose forward was replaced, stay with autograd."""
    for module in layer.modules():
        if type(module) is nn.Linear and "forward" not in module.__dict__:
            module.__class__ = SinkLinear
