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
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from threed import collectives
from threed.collectives import split
from threed.layers import tiled
from threed.layers.slicing import (
    Slicing,
    bias_gradient,
    for_autograd,
    goes_to_sink,
    sink_of,
    tile_gatherer_of,
)
from threed.ops import launch
from threed.ops.matmul import NATIVE, Matmul
from threed.sharding import ShardSpec, matrix, parameter, vector
from threed.topology import Axis, alone

LOCAL = alone()


class Terms(NamedTuple):
    """What y = f(x) W^T + b is made of, except x.

    Attributes:
        weights: W [out in], or its tiles, which are gathered one at a time.
        axis: the axis of f, which gathers x over it if `gather`. A single rank: no f.
        by: how it is multiplied.
    """

    weights: Sequence[Tensor]
    bias: Tensor | None = None
    axis: Axis = LOCAL
    gather: bool = False
    by: Matmul = NATIVE


class _Linear(torch.autograd.Function):
    """y = f(x) W^T + b. Autograd gets as `shown` those of weights and bias whose gradients pass through it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, terms: Terms, *shown: Tensor | None) -> Tensor:
        if terms.gather:
            x = collectives.all_gather(x, terms.axis)
        weights = terms.weights
        # Autograd does not save gathered tiles: hooks that offload saved tensors would read freed memory.
        kept = len(weights) == 1 or all(tile_gatherer_of(weight) is None for weight in weights)
        ctx.save_for_backward(x, *(weights if kept else ()))
        ctx.terms = terms
        # `data` is not a view, whose in-place changes (relu_()) autograd would refuse.
        return product(x, weights, terms.bias, terms.by).data

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        # Of the parameters themselves: what was saved comes back as another tensor where hooks have kept it.
        (x, *saved), terms = ctx.saved_tensors, ctx.terms
        dx, *rest = gradients(dy, x, saved or terms.weights, terms, ctx.needs_input_grad[0])
        return dx, None, *rest


def product(x: Tensor, weights: Sequence[Tensor], bias: Tensor | None, by: Matmul) -> Tensor:
    """Returns x W^T + b, [... in] -> [... out], of a weight or its tiles."""
    if len(weights) == 1:
        return by.linear(x, weights[0], bias)
    return tiled.product(x, weights, bias, by)


def weight_gradient(weight: Tensor, dy: Tensor, x: Tensor, by: Matmul = NATIVE) -> Tensor | None:
    """Adds dy^T x [out in] for y = x weight^T to the parameter's sink, or else returns it for autograd.

    dy, x: rows [m out] and [... in].
    """
    if not weight.requires_grad:
        return None
    a, b = dy.t(), x.flatten(0, -2)
    sink = sink_of(weight)
    if sink is None:
        return by.product(a, b)
    sink.add_product(a, b, by)
    return None


def gradients(
    dy: Tensor, x: Tensor, weights: Sequence[Tensor], terms: Terms, need_dx: bool
) -> tuple[Tensor | None, ...]:
    """Computes the gradients of x before f, of each weight and of the bias.

    Gradients of parameters (those of `terms`) that have a sink go there, and None is returned in their place. In a
    forward (`torch.autograd.grad` in a layer) only the gradient of x is computed, and it is differentiable.

    Args:
        x: after f.
        weights: values of the weights in `terms`.
        need_dx: whether the gradient of x is needed.

    Raises:
        RuntimeError: a differentiable gradient would have to be summed over tensor ranks or tiles.
    """
    (params, bias, axis, gather, by), dy = terms, dy.contiguous()
    rows, cut, dx, pending = dy.flatten(0, -2), len(weights) > 1, None, None
    grads: list[Tensor | None] = [None] * len(weights)
    in_forward, differentiable = _in_forward(terms), torch.is_grad_enabled()
    if (in_forward or differentiable) and (cut or axis.size > 1):
        where = "tiles" if cut else "tensor ranks"
        raise RuntimeError(
            f"torch.autograd.grad in a layer's forward, through a layer that is cut over {where}"
        )
    if in_forward:
        return dy @ weights[0], *grads, None

    def take(i: int, part: Tensor) -> None:
        grads[i] = weight_gradient(params[i], part, x, by)

    # A tile's gradient is computed while the next tile is being gathered.
    early = cut and need_dx and axis.size == 1
    if need_dx and differentiable:
        dx = dy @ weights[0]
    elif need_dx:
        if cut:
            dx = tiled.input_gradient(rows, weights, params, by, take if early else None)
        else:
            dx = by.input_gradient(rows, weights[0])
        dx = dx.view_as(x)
        if axis.size > 1:
            reduce = collectives.start_reduce_scatter if gather else collectives.start_all_reduce
            pending = reduce(dx, axis)
    if not cut:
        take(0, rows)
    elif not early:
        for i, part in tiled.parts(rows, weights):
            take(i, part)
    db = bias_gradient(bias, rows) if bias is not None and bias.requires_grad else None
    return dx if pending is None else pending.wait(), *grads, db


def _in_forward(terms: Terms) -> bool:
    """Returns whether a stage is running a forward; False if no parameter has a sink."""
    for param in (*terms.weights, terms.bias):
        sink = None if param is None else sink_of(param)
        if sink is not None:
            return sink.in_forward()
    return False


def linear(x: Tensor, terms: Terms) -> Tensor:
    """Returns f(x) W^T + b, [... in] -> [... out]; a weight may be a slice of a larger one."""
    shown = for_autograd(x, *terms.weights, terms.bias)
    out: Tensor = _Linear.apply(x, terms, *shown)
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
    """The base class of linear layers: a product, over `axis` with its f, which gathers if `gather`."""

    axis, gather, matmul = LOCAL, False, NATIVE
    traced: Traced | None = None

    def flops(self, tokens: int, seq: int) -> int:
        """Returns the FLOPs of a forward."""
        return 2 * tokens * sum(weight.numel() for weight in tiled.tiles_of(self))

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiplies x by the layer's weight and adds the bias."""
        if self.traced is not None and torch.compiler.is_compiling():
            return self._traced_product(self.traced, x, bias)
        weight = self._parameters.get("weight")
        weights = tiled.tiles_of(self) if weight is None else (weight,)
        return linear(x, Terms(weights, bias, self.axis, self.gather, self.matmul))

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
        tiled.add_weight(self, ShardSpec(tuple(weights), same, same), (rows, inputs), slicing.tile)
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
        tiled.add_weight(self, ShardSpec((piece,)), (outputs, last - first), slicing.tile)
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
        tiled.add_weight(self, spec, (outputs, inputs), tiles or slicing.tile)
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
        return linear(x, Terms((weight,), bias))

    def _get_name(self) -> str:
        return nn.Linear.__name__


def use_sinks(layer: nn.Module) -> None:
    """Lets torch's own linear layers among a layer's parts write to sinks, which a split backward can defer; those of
    derived classes, and those whose forward was replaced, stay with autograd."""
    for module in layer.modules():
        if type(module) is nn.Linear and "forward" not in module.__dict__:
            module.__class__ = SinkLinear
