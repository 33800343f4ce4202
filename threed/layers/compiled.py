"""A layer under torch.compile, without a graph break.

    compile_layer(layer, "inductor")       layer(x, micro) compiles when it is first called

A weight's gradient goes to its sink, which counts it and may send a bucket; a sum over ranks waits for other ranks;
a mask of dropout follows from the sample. None of that can be traced. So these are operators of torch, whose last
argument is the layer's `Opaque`: an input of the graph that stands for the layer, so that blocks that are alike share
one graph. They run the layers' own code. torch keeps them in order and leaves none out (`EffectType.ORDERED`); what
lies between them is the compiler's to fuse, and our kernels leave it to it.

Gradients of weights and biases of linear layers do not pass through the graph; those of norms do, as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._library.effects import EffectType
from torch._library.opaque_object import get_opaque_type_name, register_opaque_type
from torch._opaque_base import OpaqueBase

from threed import collectives
from threed.layers import linear, tiled
from threed.layers.dropout import Dropout
from threed.layers.slicing import Slicing, has_gradient_hooks, sink_of
from threed.sharding import spec_of

RECOMPILES = 64  # graphs of one function: kinds of blocks, with and without gradients, sizes


class Opaque(OpaqueBase):
    """Stands for an object that torch.compile does not look into."""

    def __init__(self, value: Any) -> None:
        self.value = value


register_opaque_type(Opaque, typ="reference")
_LIBRARY = torch.library.Library("threed", "FRAGMENT")  # registrations last as long as it


def _define(schema: str, work: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Registers torch.ops.threed.<name>; `Opaque` in the schema is that type."""
    name = schema.split("(")[0]
    _LIBRARY.define(schema.replace("Opaque", get_opaque_type_name(Opaque)))
    _LIBRARY.impl(name, work, "CompositeExplicitAutograd")
    torch.library.register_fake(f"threed::{name}", fake, lib=_LIBRARY)
    _LIBRARY._register_effectful_op(f"threed::{name}", EffectType.ORDERED)


# ---------------------------------------------------------------------------------------------------------- products


def _product(
    x: Tensor, whole: Tensor, weight: Tensor, bias: Tensor | None, out: int, parts: int, of: Opaque
) -> Tensor:
    """x: before f. whole: after it. weight: a single tile; else something of which y's gradient is asked."""
    return linear.product(whole, _values(weight, of.value), bias, of.value.matmul)


def _values(weight: Tensor, layer: linear.Product) -> tuple[Tensor, ...]:
    tiles = tiled.tiles_of(layer)
    return (weight,) if len(tiles) == 1 else tiles


def _product_backward(
    dy: Tensor, whole: Tensor, weight: Tensor, parts: int, need: list[bool], of: Opaque
) -> Tensor:
    """need: the gradients of x, weight and bias; the latter two go to their sinks, which may not keep dy and whole."""
    layer, tiles = of.value, tiled.tiles_of(of.value)
    bias = layer.bias if need[2] else None  # the parameter itself, which has the sink
    sinks = map(sink_of, tiles)
    if any(sink is not None and sink.defers() for sink in sinks):
        # They are read later, and the compiler may reuse their memory as soon as this returns.
        dy, whole = dy.clone(), whole.clone()
    terms = linear.Terms(tiles, bias, layer.axis, layer.gather, layer.matmul)
    dx, *rest = linear.gradients(dy, whole, _values(weight, layer), terms, need[0])
    if any(gradient is not None for gradient in rest):
        hooked = [
            spec_of(param).name
            for param in (*tiles, bias)
            if param is not None and has_gradient_hooks(param)
        ]
        raise RuntimeError(
            f"{', '.join(hooked)}: gradient hooks do not run on weights of compiled layers; use --run.compile false"
            if hooked
            else "a compiled layer needs an engine, which takes its gradients"
        )
    return whole.new_empty(0) if dx is None else dx


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, whole, weight, _, _, ctx.parts, ctx.of = inputs
    ctx.save_for_backward(whole, weight)


def _backward_of_product(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    whole, weight = ctx.saved_tensors
    need = [ctx.needs_input_grad[i] for i in (0, 2, 3)]
    dx = torch.ops.threed.product_backward(dy, whole, weight, ctx.parts, need, ctx.of)
    return dx if need[0] else None, None, None, None, None, None, None


_define(
    "product(Tensor x, Tensor whole, Tensor weight, Tensor? bias, int out, int parts, Opaque of) -> Tensor",
    _product,
    lambda x, whole, weight, bias, out, parts, of: whole.new_empty(*whole.shape[:-1], out),
)
_define(
    "product_backward(Tensor dy, Tensor whole, Tensor weight, int parts, bool[] need, Opaque of) -> Tensor",
    _product_backward,
    lambda dy, whole, weight, parts, need, of: whole.new_empty(
        (whole.shape[0] // parts, *whole.shape[1:]) if need[0] else (0,)
    ),
)
torch.library.register_autograd(
    "threed::product", _backward_of_product, setup_context=_keep, lib=_LIBRARY
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


# Of each: its work (which must give memory of its own), its shape, and the one that its gradient goes through.
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
        return (
            dy if back is None else getattr(torch.ops.threed, back)(dy, ctx.size, ctx.axis),
            None,
            None,
        )

    _define(
        f"{name}(Tensor x, int size, Opaque axis) -> Tensor",
        lambda x, size, axis: work(x, axis.value),
        shape,
    )
    torch.library.register_autograd(
        f"threed::{name}", backward, setup_context=_ctx_of_axis, lib=_LIBRARY
    )


for _name in _CONJUGATES:
    _define_conjugate(_name)


# ------------------------------------------------------------------------------------------------------------ dropout


def _ctx_of_dropout(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, samples, ctx.step, ctx.of = inputs
    ctx.save_for_backward(samples)


def _backward_of_dropout(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
    (samples,) = ctx.saved_tensors
    return torch.ops.threed.drop(dy.contiguous(), samples, ctx.step, ctx.of), None, None, None


_define(
    "drop(Tensor x, Tensor samples, SymInt step, Opaque of) -> Tensor",
    lambda x, samples, step, of: of.value.drop(x, samples, step),
    _same,
)
torch.library.register_autograd(
    "threed::drop", _backward_of_dropout, setup_context=_ctx_of_dropout, lib=_LIBRARY
)


# ------------------------------------------------------------------------------------------------------------- layers


def compile_layer(layer: nn.Module, backend: str) -> None:
    """Makes calls of a layer run compiled, by a backend of torch.compile."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILES)
    for module in layer.modules():
        if isinstance(module, linear.Product):
            module.traced = _traced(module)
        elif isinstance(module, Dropout):
            module.opaque = Opaque(module)
        slicing = getattr(module, "slicing", None)
        if isinstance(slicing, Slicing) and slicing.opaque is None:
            object.__setattr__(slicing, "opaque", Opaque(slicing.tp))  # of a frozen dataclass
    layer.compile(fullgraph=True, backend=backend)


def _traced(module: linear.Product) -> linear.Traced:
    tiles = tiled.tiles_of(module)
    trained = any(tile.requires_grad for tile in tiles)
    asks = torch.zeros(0, dtype=tiles[0].dtype, requires_grad=trained) if len(tiles) > 1 else None
    return linear.Traced(Opaque(module), Opaque(module.axis), sum(map(len, tiles)), asks)
