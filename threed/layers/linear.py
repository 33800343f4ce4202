"""Linear layers: column-parallel, row-parallel and replicated.

In Y = X A^T, a column-parallel layer shards A by rows (outputs), a row-parallel layer by columns
(inputs) (Megatron-LM, arXiv 1909.08053, section 3):

        column   Y_i = f(X) A_i^T    f: identity forward, all-reduce backward
        row      Y   = g(X_i A_i^T)  g: all-reduce forward, identity backward

With sequence parallelism f all-gathers [s/t b h] to [s b h] and reduce-scatters in the backward; g
does the reverse. These collectives send as many bytes as the all-reduces that they replace. The
reduction of the input's gradient overlaps with the computation of the weight's gradient.

The gradients of weight and bias are added to their gradient sinks (`slicing.GradSink`). Without a
sink they are returned to autograd.

If `Slicing.tile` is above 1, this rank's matrix is split by rows into tiles. At most two tiles are
gathered at the same time (`layers.tiled`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from threed.distributed import collectives
from threed.distributed.collectives import done, split
from threed.distributed.sharding import ShardSpec, matrix, parameter, vector
from threed.distributed.topology import Axis, alone
from threed.layers import sequence_chunks, tiled
from threed.layers.sequence_chunks import Chunks, Factor, Overlap, SymmetricMemory
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

LOCAL = alone()


class Terms(NamedTuple):
    """The arguments of y = f(x) W^T + b other than x, with f as in the module's docstring.

    Attributes:
        weights: one tensor W [out in], or the tiles of W in order.
        bias: b [out].
        axis: axis over which f communicates. If it has a single rank, f is the identity.
        gather: whether f gathers x over `axis`.
        by: implementation of the matrix products.
        regather: whether the backward gathers x again, instead of keeping the gathered x.
        symmetric: whether products in chunks use symmetric memory (`distributed.symmetric_memory`).
    """

    weights: Sequence[Tensor]
    bias: Tensor | None = None
    axis: Axis = LOCAL
    gather: bool = False
    by: Matmul = NATIVE
    regather: bool = False
    symmetric: bool = False

    def overlap(self, x: Tensor, rows: int) -> Overlap | None:
        """Returns how the product overlaps with the collective of sequence parallelism, or None.

        Args:
            x: input of the layer, [... b in].
            rows: number of positions per rank, s/t.
        """
        if len(self.weights) > 1:  # every chunk would gather all tiles
            return None
        weight, features = self.weights[0], self.weights[0].shape[self.gather]
        part, inputs = weight.shape[not self.gather], x.shape[1:-1].numel()
        chunks = sequence_chunks.count(rows, inputs, features, part, weight.itemsize, self.axis)
        if chunks == 1:
            return None
        if self.symmetric and not x.is_meta:
            return SymmetricMemory(self.axis)
        return Chunks(self.axis, chunks)


class _Linear(torch.autograd.Function):
    """Computes y = f(x) W^T + b.

    tracked: the weights, then the bias. The backward returns their gradients to autograd. An entry
    is None if autograd needs no gradient for this parameter (`for_autograd`).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, terms: Terms, *tracked: Tensor | None) -> Tensor:
        weights, shard = terms.weights, x
        ctx.terms = terms
        ctx.overlap = overlap = terms.overlap(x, x.shape[0]) if terms.gather else None
        if overlap is not None:
            factor = Factor(weights[0], terms.by, terms.bias)
            y, kept_x = overlap.gather_and_multiply(x, factor, not terms.regather)
            ctx.save_for_backward(shard if kept_x is None else kept_x, *weights)
            return y
        if terms.gather:
            x = collectives.all_gather(x, terms.axis)
        # Tiles with a gatherer are not saved: their memory is freed after use, so hooks that
        # offload saved tensors would read freed memory.
        kept = len(weights) == 1 or all(tile_gatherer_of(weight) is None for weight in weights)
        ctx.save_for_backward(shard if terms.regather else x, *(weights if kept else ()))
        # The product may be a view. Autograd would reject in-place operations, such as relu_(), on
        # a view that was made in a Function. `.data` is never a view.
        return product(x, weights, terms.bias, terms.by).data

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        # Gradients go to the sinks of the parameters in `terms`. The saved tensors may have no
        # sinks, because saved-tensor hooks may return copies of the parameters.
        (x, *saved), terms = ctx.saved_tensors, ctx.terms
        dx, *rest = gradients(
            dy, x, saved or terms.weights, terms, ctx.needs_input_grad[0], ctx.overlap
        )
        return dx, None, *rest


def product(x: Tensor, weights: Sequence[Tensor], bias: Tensor | None, by: Matmul) -> Tensor:
    """Returns x W^T + b, [... in] -> [... out]; `weights` contains W or its tiles."""
    if len(weights) == 1:
        return by.linear(x, weights[0], bias)
    return tiled.product(x, weights, bias, by)


def weight_gradient(weight: Tensor, dy: Tensor, x: Tensor, by: Matmul = NATIVE) -> Tensor | None:
    """Computes a weight's gradient, dy^T x for y = x weight^T, and adds it to the weight's sink.

    Args:
        weight: parameter [out in].
        dy: gradient of y as rows [m out].
        x: input of the layer, [... in]; flattened to rows it is [m in].
        by: implementation of the matrix product.

    Returns:
        The gradient [out in] for autograd, if the weight has no sink. None if the gradient was
        added to a sink, or if the weight is frozen.
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
    dy: Tensor, x: Tensor, weights: Sequence[Tensor], terms: Terms, need_dx: bool,
    overlap: Overlap | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Computes the gradients of x before f, of each weight and of the bias. Collective.

    If a parameter in `terms` has a `GradSink`, its gradient is added to the sink.

    A layer may call `torch.autograd.grad` in its forward. This function then computes only the
    gradient of x. With `create_graph` this gradient is differentiable.

    Args:
        dy: gradient of y, [... out].
        x: input after f, [... in]; with `terms.regather` the input before f.
        weights: values of the weights in `terms`: the saved tensors, which need not have sinks.
        terms: arguments of the forward.
        need_dx: whether the gradient of x is needed.
        overlap: how the forward gathered x.

    Returns:
        The gradients of x before f, of each weight, and of the bias; None for a gradient that is
        not needed or was added to a sink.

    Raises:
        RuntimeError: if the layer is sharded over tensor ranks or split into tiles, and the
            gradient is requested in a forward or must be differentiable.
    """
    (params, bias, axis, gather, by, regather, _), dy = terms, dy.contiguous()
    rows, cut, dx, pending = dy.flatten(0, -2), len(weights) > 1, None, None
    grads: list[Tensor | None] = [None] * len(weights)
    in_forward, differentiable = _in_forward(terms), torch.is_grad_enabled()
    if (in_forward or differentiable) and (cut or axis.size > 1):
        where = "split into tiles" if cut else "sharded over tensor ranks"
        raise RuntimeError(
            f"torch.autograd.grad in a layer's forward, through a linear layer that is {where}"
        )
    if in_forward:
        return dy @ weights[0], *grads, None

    trained = any(param.requires_grad for param in params)
    # overlaps with the product of the input's gradient
    gathering = collectives.start_all_gather(x, axis) if regather and trained else done(x)

    def take(i: int, part: Tensor) -> None:
        grads[i] = weight_gradient(params[i], part, gathering.wait(), by)

    # A tile's gradient is computed while the next tile is being gathered.
    overlapped = cut and need_dx and axis.size == 1
    if need_dx and differentiable:
        dx = dy @ weights[0]
    elif need_dx:
        if cut:
            dx = tiled.input_gradient(rows, weights, params, by, take if overlapped else None)
        else:
            dx = by.input_gradient(rows, weights[0])
        dx = dx.view(*dy.shape[:-1], -1)
        if axis.size > 1:
            reduce = collectives.start_reduce_scatter if gather else collectives.start_all_reduce
            pending = reduce(dx, axis)
    if overlap is not None and not regather and trained:
        take(0, overlap.gathered_order(dy).flatten(0, -2))
    elif not cut:
        take(0, rows)
    elif not overlapped:
        for i, part in tiled.parts(rows, weights):
            take(i, part)
    db = bias_gradient(bias, rows) if bias is not None and bias.requires_grad else None
    return dx if pending is None else pending.wait(), *grads, db


def _in_forward(terms: Terms) -> bool:
    """Returns whether the stage that owns these parameters is running a forward.

    The first `GradSink` of the weights and the bias gives the answer. Without a sink it is False.
    """
    for param in (*terms.weights, terms.bias):
        sink = None if param is None else sink_of(param)
        if sink is not None:
            return sink.in_forward()
    return False


def linear(x: Tensor, terms: Terms) -> Tensor:
    """Returns f(x) W^T + b, [... in] -> [... out]. A weight may be a slice of a larger tensor."""
    tracked = for_autograd(x, *terms.weights, terms.bias)
    return _Linear.apply(x, terms, *tracked)


class _Reduced(torch.autograd.Function):
    """Computes y = g(x W^T) with sequence parallelism: x [s b in] -> y [s/t b out].

    tracked: the weight, as in `_Linear`.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, terms: Terms, overlap: Overlap, tracked: Tensor | None
    ) -> Tensor:
        (weight,) = terms.weights
        ctx.save_for_backward(x, weight)
        ctx.terms, ctx.overlap = terms, overlap
        return overlap.multiply_and_scatter(x, Factor(weight, terms.by))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, None, Tensor | None]:
        (x, weight), terms, overlap = ctx.saved_tensors, ctx.terms, ctx.overlap
        if torch.is_grad_enabled():
            raise RuntimeError(
                "torch.autograd.grad with create_graph=True, through a linear layer that is sharded over tensor ranks"
            )
        (param,) = terms.weights
        trained = param.requires_grad and not _in_forward(terms)
        factor = Factor(weight, terms.by, transposed=False)
        dx, full = overlap.gather_and_multiply(dy, factor, trained)
        if full is None:
            return dx, None, None, None
        x = overlap.gathered_order(x)
        return dx, None, None, weight_gradient(param, full.flatten(0, -2), x, terms.by)


class _AddBias(torch.autograd.Function):
    """Returns y + b. The backward adds b's gradient to its sink without a temporary tensor.

    tracked: the bias, as in `_Linear`.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, tracked: Tensor | None, bias: Tensor) -> Tensor:
        ctx.bias = bias
        return y + bias

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
        if not ctx.bias.requires_grad:
            return dy, None, None
        return dy, bias_gradient(ctx.bias, dy.contiguous().flatten(0, -2)), None


@dataclass(frozen=True, eq=False)
class Traced:
    """Arguments of the custom operators that run a linear layer in a compiled graph.

    `layers.compiled` defines these operators.

    Attributes:
        layer: the layer, wrapped in an `Opaque`, which torch.compile does not trace.
        axis: the layer's axis, wrapped in an `Opaque`.
        outputs: number of output features on this rank.
        anchor: for a tiled layer, an empty tensor that is passed in place of the weight. It
            requires a gradient if any tile does, so that the layer's output requires a gradient
            too. None for a layer without tiles.
    """

    layer: Any
    axis: Any
    outputs: int
    anchor: Tensor | None


class Product(nn.Module):
    """Base class of linear layers.

    Attributes:
        axis: axis of f, as in `Terms`.
        gather: whether f gathers x, as in `Terms`.
        matmul: implementation of the matrix products.
        regather: whether the backward gathers x again, as in `Terms`. A compiled layer keeps it.
        symmetric: whether products in chunks use symmetric memory, as in `Terms`.
        traced: arguments of the layer's custom operators, set by `compile_layer`; None if the layer
            is not compiled.
    """

    axis, gather, matmul, regather = LOCAL, False, NATIVE, False
    symmetric = False
    traced: Traced | None = None

    def set_regather(self, regather: bool) -> bool:
        """Sets whether the backward gathers x again; returns the previous setting.

        Args:
            regather: the new setting.
        """
        before, self.regather = self.regather, regather
        return before

    def flops(self, tokens: int, seq: int) -> int:
        """Returns the FLOPs of a forward.

        Args:
            tokens: number of tokens of the micro-batch.
            seq: sequence length.
        """
        return 2 * tokens * sum(weight.numel() for weight in tiled.tiles_of(self))

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Returns x W^T + bias.

        Args:
            x: the i input features of this rank, [... i].
            bias: bias of the o output features of this rank, [o]; None for no bias.
        """
        if self.traced is not None and torch.compiler.is_compiling():
            return self._traced_product(self.traced, x, bias)
        weight = self._parameters.get("weight")
        weights = tiled.tiles_of(self) if weight is None else (weight,)
        regather = self.gather and self.regather
        terms = Terms(weights, bias, self.axis, self.gather, self.matmul, regather, self.symmetric)
        return linear(x, terms)

    def _traced_product(self, by: Traced, x: Tensor, bias: Tensor | None) -> Tensor:
        parts = self.axis.size if self.gather else 1
        gathered = torch.ops.threed.gather_from(x.detach(), parts, by.axis) if self.gather else x
        weight = self.weight if by.anchor is None else by.anchor
        return torch.ops.threed.product(x, gathered, weight, bias, by.outputs, parts, by.layer)


class ColumnLinear(Product):
    """A linear layer sharded by outputs: x [s b h] (or [s/t b h]) -> [s b out/t].

    x is [s/t b h] with sequence parallelism.

    Args:
        name: global name, the prefix of the parameters' names.
        inputs: number of input features h.
        outputs: (name, out) of each global matrix packed into the layer; out is its number of
            output features. Each matrix is sharded separately, as evenly as possible in multiples
            of `multiple`.
        slicing: parallel layout.
        std: standard deviation of the initial weights.
        bias: whether there is a bias.
        multiple: size of a unit of output features that is never split, such as a head.
        shared: number of neighboring ranks that hold the same shard (above 1 if there are fewer
            key/value heads than ranks). The gradients of these ranks are summed.
        local: whether the caller applies f (see the module's docstring). If so, x is [s b h] also
            with sequence parallelism.
    """

    def __init__(
        self, name: str, inputs: int, outputs: Sequence[tuple[str, int]], slicing: Slicing, *, std: float = 0.02,
        bias: bool = True, multiple: int = 1, shared: int = 1, local: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        tp = slicing.tp
        self.axis, self.gather = (LOCAL, False) if local else (tp, slicing.sequence_parallel)
        self.symmetric = slicing.symmetric_memory
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

    def forward(self, x: Tensor, add_bias: bool = True) -> Tensor:
        """Returns this rank's columns of the product, [s b out/t]. Collective.

        Args:
            x: [s b in]; with sequence parallelism [s/t b in].
            add_bias: whether to add the bias; if false, the caller adds it.
        """
        return self.product(x, self.bias if add_bias else None)


class RowLinear(Product):
    """A linear layer sharded by inputs: x [s b in/t] -> [s b out] (or [s/t b out]).

    The output is [s/t b out] with sequence parallelism. The bias is added once, after the
    reduction. With sequence parallelism the bias's gradient is partial, because each rank sums over
    its part of the sequence only.

    Args:
        name: global name, the prefix of the parameters' names.
        inputs: number of input features, in.
        outputs: number of output features, out.
        slicing: parallel layout.
        std: standard deviation of the initial weights.
        bias: whether there is a bias.
        multiple: size of a unit of input features that is never split, such as a head.
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

    def forward(self, x: Tensor, add_bias: bool = True) -> Tensor:
        """Returns the product, summed over tensor ranks: [s b out] (or [s/t b out]). Collective.

        Args:
            x: this rank's input features, [s b in/t].
            add_bias: whether to add the bias; if false, the caller adds it.
        """
        bias = self.bias if add_bias else None
        if self.slicing.tp.size == 1:
            return self.product(x, bias)
        y = self._reduced(x)
        if bias is None:
            return y
        if not launch.ready(y):
            return y + bias
        return _AddBias.apply(y, *for_autograd(y, bias), bias)

    def backward(self, x: Tensor, dy: Tensor) -> Tensor:
        """Returns the gradient of x, without a forward of this layer. Collective.

        The gradients of the parameters are added to their sinks, which all trainable ones must
        have.

        Args:
            x: input of the forward, [s b in/t].
            dy: gradient of the output, [s b out]; with sequence parallelism [s/t b out].
        """
        slicing, bias = self.slicing, self.bias
        if slicing.tp.size > 1 and bias is not None:
            if bias.requires_grad:
                bias_gradient(bias, dy.contiguous().flatten(0, -2))
            bias = None
        if slicing.sequence_parallel:
            dy = collectives.all_gather(dy.contiguous(), slicing.tp)
        tiles = tiled.tiles_of(self)
        dx = gradients(dy, x, tiles, Terms(tiles, bias, by=self.matmul), True)[0]
        assert dx is not None
        return dx

    def _reduced(self, x: Tensor) -> Tensor:
        """Returns the product without bias, summed over tensor ranks."""
        slicing = self.slicing
        # Under torch.compile the tiles must not be touched: they may not be in memory.
        if slicing.sequence_parallel and not torch.compiler.is_compiling():
            tiles, symmetric = tiled.tiles_of(self), slicing.symmetric_memory
            terms = Terms(tiles, None, slicing.tp, by=self.matmul, symmetric=symmetric)
            overlap = terms.overlap(x, x.shape[0] // slicing.tp.size)
            if overlap is not None:
                return _Reduced.apply(x, terms, overlap, *for_autograd(x, *terms.weights))
        return slicing.reduce(self.product(x, None))


class ReplicatedLinear(Product):
    """A linear layer replicated over tensor ranks: x [... in] -> [... out].

    Its forward and backward run no collective. It is used for matrices that are too small to shard
    (a router, a low-rank projection), and for layers between blocks, where x is [s b in] or this
    rank's [s/t b in]. Weight [out in] and bias [out] are the global tensors `name`.weight and
    `name`.bias.

    Args:
        name: global name.
        inputs: number of input features, in.
        outputs: number of output features, out.
        slicing: parallel layout.
        tiles: number of tiles, reduced to `outputs` if larger. Default: `slicing.tile`.
        std: standard deviation of the initial weights.
        bias: whether there is a bias.
        partial: whether the gradients are partial, as in `Slicing.shared`. Use None if x is an
            activation between blocks.
    """

    def __init__(
        self, name: str, inputs: int, outputs: int, slicing: Slicing, *, tiles: int | None = None, std: float = 0.02,
        bias: bool = True, partial: bool | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        # the ranks among which the tokens are divided
        self._parts = slicing.tp.size if partial is None and slicing.sequence_parallel else 1
        piece = matrix(f"{name}.weight", (outputs, inputs), 0, (0, outputs), std)
        spec = slicing.shared(piece, partial=partial, decay=True)
        tiled.add_weight(self, spec, (outputs, inputs), tiles or slicing.tile)
        spec = slicing.shared(vector(f"{name}.bias", outputs), partial=partial)
        self.bias = parameter(spec, (outputs,)) if bias else None

    def flops(self, tokens: int, seq: int) -> int:
        return super().flops(tokens // self._parts, seq)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the product of x [... in] and the full weight, [... out]."""
        return self.product(x, self.bias)


class SinkLinear(nn.Linear):
    """torch's linear layer, with gradients added to sinks directly instead of through autograd.

    It falls back to torch's forward in these cases: under torch.compile or autocast; if the input
    has fewer than two dimensions; if the dtypes of input and weight differ; if autograd must
    compute the gradient of the weight or bias.
    """

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
    """Replaces torch's linear layers inside a layer by `SinkLinear`.

    A split backward computes weight gradients after input gradients. `SinkLinear` can defer its
    weight gradient for this purpose. Subclasses of `nn.Linear` and modules with a replaced forward
    stay unchanged; autograd handles their gradients.
    """
    for module in layer.modules():
        if type(module) is nn.Linear and "forward" not in module.__dict__:
            module.__class__ = SinkLinear
