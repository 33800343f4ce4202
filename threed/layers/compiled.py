"""Compiles a layer with torch.compile, without graph breaks.

    compile_layer(layer, "inductor")       # the first call of layer(x, micro) compiles the layer

Some operations cannot be traced: adding a weight's gradient to its `GradSink`, which counts
contributions and may start the reduction of a bucket; collectives, which wait for other ranks; and
dropout, whose mask depends on the samples. These operations are registered as custom operators that
run the layers' own code. The last argument of such an operator is an `Opaque`, a graph input that
represents the layer or its axis, so that blocks of the same structure share one graph. torch keeps
these operators in order and never removes them (`EffectType.ORDERED`). The compiler fuses the
operations between these operators, so this package's own fused kernels are not used in compiled
layers.

The gradients of weights and biases of linear layers do not leave the graph as outputs: an operator
adds them to the sinks. The gradients of the weights of norms are outputs of the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._library.effects import EffectType
from torch._library.opaque_object import get_opaque_type_name, register_opaque_type
from torch._opaque_base import OpaqueBase

from threed.distributed import collectives
from threed.distributed.sharding import spec_of
from threed.layers import linear, tiled
from threed.layers.dropout import Dropout
from threed.layers.slicing import Slicing, has_gradient_hooks, sink_of
from threed.ops import attention, block_sparse
from threed.ops.block_sparse import SparseAttention

# Maximum number of graphs per function. torch compiles one graph for each combination of the kind
# of block, the input shapes, and whether gradients are enabled.
RECOMPILES = 64


class Opaque(OpaqueBase):
    """Wraps an object so that torch.compile does not trace into it."""

    def __init__(self, value: Any) -> None:
        self.value = value


register_opaque_type(Opaque, typ="reference")
# kept in a global variable, because freeing the library would unregister its operators
_LIBRARY = torch.library.Library("threed", "FRAGMENT")


def _define(
    schema: str, work: Callable[..., Any], fake: Callable[..., Any],
    backward: Callable[..., Any] | None = None, keep: Callable[..., None] | None = None,
) -> None:  # fmt: skip
    """Registers the operator torch.ops.threed.<name>.

    Args:
        schema: schema of the operator, which begins with its name. The type `Opaque` is written as
            "Opaque" and replaced by the name that torch gave the type at its registration.
        work: implementation of the operator.
        fake: implementation for tracing; returns empty tensors of the results' shapes.
        backward: function that autograd calls for the gradients. None: there are none.
        keep: function that keeps the tensors that `backward` needs.
    """
    name = schema.split("(")[0]
    _LIBRARY.define(schema.replace("Opaque", get_opaque_type_name(Opaque)))
    _LIBRARY.impl(name, work, "CompositeExplicitAutograd")
    torch.library.register_fake(f"threed::{name}", fake, lib=_LIBRARY)
    _LIBRARY._register_effectful_op(f"threed::{name}", EffectType.ORDERED)
    if backward is not None:
        register = torch.library.register_autograd
        register(f"threed::{name}", backward, setup_context=keep, lib=_LIBRARY)


# ---------------------------------------------------------------------------------------------------------- products


def _product(
    x: Tensor,
    gathered: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: int,
    parts: int,
    opaque: Opaque,
) -> Tensor:
    """Returns gathered W^T + b.

    Args:
        x: input of the layer, before f (see `layers.linear`).
        gathered: f(x).
        weight: the weight [out in]; for a tiled layer, the empty tensor `Traced.anchor`.
        bias: the bias [out], or None.
        out: number of columns of the result, for the fake implementation.
        parts: number of ranks over which f gathers x, for the backward. 1: f does not gather.
        opaque: `Opaque` of the layer.
    """
    return linear.product(gathered, _values(weight, opaque.value), bias, opaque.value.matmul)


def _values(weight: Tensor, layer: linear.Product) -> tuple[Tensor, ...]:
    tiles = tiled.tiles_of(layer)
    return (weight,) if len(tiles) == 1 else tiles


def _product_backward(
    dy: Tensor, gathered: Tensor, weight: Tensor, parts: int, need: list[bool], opaque: Opaque
) -> Tensor:
    """Adds the gradients of weight and bias to their sinks, and returns the gradient of x.

    If the gradient of x is not needed, an empty tensor is returned.

    Args:
        dy: gradient of the output.
        gathered: as in `_product`.
        weight: as in `_product`.
        parts: as in `_product`.
        need: whether the gradients of x, weight and bias are needed, in this order.
        opaque: as in `_product`.
    """
    layer, tiles = opaque.value, tiled.tiles_of(opaque.value)
    # The bias is taken from the layer, because only the parameter itself has the attribute `sink`.
    bias = layer.bias if need[2] else None
    sinks = map(sink_of, tiles)
    if any(sink is not None and sink.defers() for sink in sinks):
        # These sinks read `dy` and `gathered` later. The compiler may reuse the memory of the two
        # tensors after this function returns, so the sinks get copies.
        dy, gathered = dy.clone(), gathered.clone()
    terms = linear.Terms(tiles, bias, layer.axis, layer.gather, layer.matmul)
    dx, *rest = linear.gradients(dy, gathered, _values(weight, layer), terms, need[0])
    if any(gradient is not None for gradient in rest):
        hooked = [
            spec_of(param).name
            for param in (*tiles, bias)
            if param is not None and has_gradient_hooks(param)
        ]
        raise RuntimeError(
            f"{', '.join(hooked)}: gradient hooks do not run on weights of compiled layers; use --run.compile false"
            if hooked
            else "a compiled layer works only in an engine, which collects its gradients"
        )
    return gathered.new_empty(0) if dx is None else dx


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, gathered, weight, _, _, ctx.parts, ctx.opaque = inputs
    ctx.save_for_backward(gathered, weight)


def _backward_of_product(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    gathered, weight = ctx.saved_tensors
    need = [ctx.needs_input_grad[i] for i in (0, 2, 3)]
    dx = torch.ops.threed.product_backward(dy, gathered, weight, ctx.parts, need, ctx.opaque)
    return dx if need[0] else None, None, None, None, None, None, None


_define(
    "product(Tensor x, Tensor gathered, Tensor weight, Tensor? bias, int out, int parts, Opaque opaque) -> Tensor",
    _product,
    lambda x, gathered, weight, bias, out, parts, opaque: gathered.new_empty(
        *gathered.shape[:-1], out
    ),
    _backward_of_product,
    _keep,
)
_define(
    "product_backward(Tensor dy, Tensor gathered, Tensor weight, int parts, bool[] need, Opaque opaque) -> Tensor",
    _product_backward,
    lambda dy, gathered, weight, parts, need, opaque: gathered.new_empty(
        (gathered.shape[0] // parts, *gathered.shape[1:]) if need[0] else (0,)
    ),
)


# --------------------------------------------------------------------------------------------------------- conjugates


def _ctx_of_axis(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.size, ctx.axis = inputs


def _longer(x: Tensor, size: int, axis: Opaque) -> Tensor:
    return x.new_empty(x.shape[0] * size, *x.shape[1:])


def _shorter(x: Tensor, size: int, axis: Opaque) -> Tensor:
    return x.new_empty(x.shape[0] // size, *x.shape[1:])


def _same(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


# Per operator: its implementation (the output must not alias x), its fake implementation for
# tracing, and the operator that computes the gradient of x from dy (None: the identity).
_CONJUGATES: dict[
    str, tuple[Callable[[Tensor, Any], Tensor], Callable[..., Tensor], str | None]
] = {
    "copy_to": (lambda x, axis: x.clone(), _same, "reduce_from"),
    "reduce_from": (lambda x, axis: collectives.all_reduce(x.clone(), axis), _same, None),
    "gather_from": (collectives.all_gather, _longer, "scatter_to"),
    "scatter_to": (collectives.reduce_scatter, _shorter, "gather_from"),
}


def _define_conjugate(name: str) -> None:
    work, shape, back = _CONJUGATES[name]

    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        if back is not None:
            dy = getattr(torch.ops.threed, back)(dy, ctx.size, ctx.axis)
        return dy, None, None

    _define(
        f"{name}(Tensor x, int size, Opaque axis) -> Tensor",
        lambda x, size, axis: work(x, axis.value),
        shape,
        backward,
        _ctx_of_axis,
    )


for _name in _CONJUGATES:
    _define_conjugate(_name)


# ------------------------------------------------------------------------------------------------------------ dropout


def _ctx_of_dropout(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, samples, ctx.step, ctx.opaque = inputs
    ctx.save_for_backward(samples)


def _backward_of_dropout(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
    (samples,) = ctx.saved_tensors
    return torch.ops.threed.drop(dy.contiguous(), samples, ctx.step, ctx.opaque), None, None, None


_define(
    "drop(Tensor x, Tensor samples, SymInt step, Opaque opaque) -> Tensor",
    lambda x, samples, step, opaque: opaque.value.drop(x, samples, step),
    _same,
    _backward_of_dropout,
    _ctx_of_dropout,
)


# ------------------------------------------------------------------------------------------- block-sparse attention


def _keep_heads(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *heads, ctx.core = inputs
    ctx.save_for_backward(*heads, *output)


def _backward_of_heads(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *torch.ops.threed.block_sparse_backward(dy, *ctx.saved_tensors, ctx.core), None


def _flex_lists(q: Tensor, sizes: list[int], core: Opaque) -> list[Tensor]:
    """Returns copies of the lists, because the compiler may reuse the memory of a result."""
    heads = core.value.heads or (0, q.shape[2])
    lists = block_sparse.flex_lists(core.value.pattern, q.shape[0], heads, q.device)
    return [tensor.clone() for tensor in lists]


def _fake_flex_lists(q: Tensor, sizes: list[int], core: Opaque) -> list[Tensor]:
    count, n, m = sizes
    blocks = [q.new_empty(shape, dtype=torch.int32) for shape in ((1, count, m), (1, count, m, m))]
    return [q.new_empty(count, n, n, dtype=torch.bool), *blocks, *map(torch.empty_like, blocks)]


_define(
    "block_sparse(Tensor q, Tensor k, Tensor v, Opaque core) -> (Tensor, Tensor)",
    lambda q, k, v, core: attention.output(core.value, q, k, v),
    lambda q, k, v, core: (
        q.new_empty(*q.shape[:2], q.shape[2] * v.shape[3]),
        q.new_empty(
            q.shape[1], q.shape[2], q.shape[0], dtype=torch.promote_types(q.dtype, torch.float32)
        ),
    ),
    _backward_of_heads,
    _keep_heads,
)
_define(
    "block_sparse_backward(Tensor dy, Tensor q, Tensor k, Tensor v, Tensor y, Tensor lse, Opaque core)"
    " -> (Tensor, Tensor, Tensor)",
    lambda dy, q, k, v, y, lse, core: tuple(
        x.contiguous()
        for x in attention.gradients(core.value, dy, q, k, v, None, y, lse)[:3]
        if x is not None
    ),
    lambda dy, q, k, v, *_: tuple(map(_same, (q, k, v))),
)
_define("flex_lists(Tensor q, int[] sizes, Opaque core) -> Tensor[]", _flex_lists, _fake_flex_lists)


# ------------------------------------------------------------------------------------------------------------- layers


def compile_layer(layer: nn.Module, backend: str) -> None:
    """Makes torch.compile compile a layer's forward at the first call.

    Args:
        layer: pipeline layer. An `Opaque` is attached to each of its linear layers and dropouts,
            to its block-sparse attention, and to its `Slicing`.
        backend: a backend of torch.compile, such as "inductor".
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILES)
    for module in layer.modules():
        if isinstance(module, linear.Product):
            module.traced = _traced(module)
        elif isinstance(module, Dropout):
            module.opaque = Opaque(module)
        for core in vars(module).values():
            if isinstance(core, SparseAttention) and core.opaque is None:
                object.__setattr__(core, "opaque", Opaque(core))
        slicing = getattr(module, "slicing", None)
        if isinstance(slicing, Slicing) and slicing.opaque is None:
            # object.__setattr__ is called because the dataclasses are frozen.
            object.__setattr__(slicing, "opaque", Opaque(slicing.tp))
    layer.compile(fullgraph=True, backend=backend)


def _traced(module: linear.Product) -> linear.Traced:
    tiles = tiled.tiles_of(module)
    trained = any(tile.requires_grad for tile in tiles)
    anchor = torch.zeros(0, dtype=tiles[0].dtype, requires_grad=trained) if len(tiles) > 1 else None
    return linear.Traced(Opaque(module), Opaque(module.axis), sum(map(len, tiles)), anchor)
