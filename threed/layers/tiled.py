"""Tiled linear layers: large weights that are gathered one tile at a time (memory-centric tiling, ZeRO-Infinity, arXiv
2104.07857, section 5.1.3).

    weight [out in]  ->  tiles [out_i in], rows cut;   y[..., out_i] = x tile_i^T;   dx = sum of dy[..., out_i] tile_i

`zero.tile` sets the number of tiles for the linear layers of a model's blocks; a single `ReplicatedLinear` can have its
own. A tile is a parameter of its own: gathered, reduced, updated and offloaded by itself. Its record names the same
global tensor, so initial values, checkpoints and exports do not depend on tiles. While one tile is used the next is
being gathered (`TileGatherer`); never more than two are in memory. Without gatherers all tiles stay in memory.

Outputs equal those of the whole layer, up to the order of summation in matrix products of another shape; the input's
gradient is a sum over tiles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from threed import collectives
from threed.collectives import split
from threed.layers.slicing import bias_gradient, tile_gatherer_of, weight_gradient
from threed.ops import matmul
from threed.sharding import Piece, ShardSpec, parameter
from threed.topology import Axis, alone

GRANULE = 64  # rows: larger tiles are cut at multiples of it, which matrix kernels prefer
LOCAL = alone()

Span = tuple[int, int]


def spans(rows: int, tiles: int) -> list[Span]:
    """Returns the first and last row of each tile of a matrix; fewer tiles than requested if it has fewer rows."""
    tiles = max(1, min(tiles, rows))
    unit = GRANULE if rows >= GRANULE * tiles else 1
    cuts = [min(rows, unit * split(-(-rows // unit), tiles, i)[0]) for i in range(tiles)]
    return list(zip(cuts, [*cuts[1:], rows], strict=True))


def cut_rows(pieces: Sequence[Piece], first: int, last: int) -> tuple[Piece, ...]:
    """Returns the pieces of rows [first, last) of matrices that are stacked."""
    found, at = [], 0
    for piece in pieces:
        rows, columns = piece.size
        lo, hi = max(first, at), min(last, at + rows)
        if lo < hi:
            start = (piece.start[0] + lo - at, piece.start[1])
            found.append(
                replace(piece, start=start, size=(hi - lo, columns), offset=(lo - first) * columns)
            )
        at += rows
    return tuple(found)


def add_weight(module: nn.Module, spec: ShardSpec, shape: Span, tiles: int) -> None:
    """Registers a module's `weight` [rows in], or its tiles: `weight_0`, `weight_1` ..."""
    cuts = spans(shape[0], tiles)
    if len(cuts) == 1:
        module.register_parameter("weight", parameter(spec, shape))
        return
    for i, (first, last) in enumerate(cuts):
        part = replace(spec, pieces=cut_rows(spec.pieces, first, last), tile=(i, len(cuts)))
        module.register_parameter(f"weight_{i}", parameter(part, (last - first, shape[1])))


def tiles_of(module: nn.Module) -> tuple[Tensor, ...]:
    """Returns the tiles of a module's weight in order, or the one weight."""
    return tuple(
        weight
        for name, weight in module._parameters.items()
        if name.startswith("weight") and weight is not None
    )


@contextmanager
def whole(weight: Tensor, following: Tensor | None = None) -> Iterator[None]:
    """Keeps a tile whole in the block, and begins to gather `following`."""
    gatherer, following_gatherer = (
        tile_gatherer_of(weight),
        None if following is None else tile_gatherer_of(following),
    )
    if gatherer is not None:
        gatherer.open()
    if following_gatherer is not None:
        following_gatherer.ahead()
    try:
        yield
    finally:
        if gatherer is not None:
            gatherer.close()


def _walk(
    weights: Sequence[Tensor], order: Sequence[int]
) -> Iterator[tuple[int, AbstractContextManager[None]]]:
    """Yields the numbers of tiles in `order`, each with the context in which it is whole."""
    for i, following in zip(order, [*(weights[n] for n in order[1:]), None], strict=True):
        yield i, whole(weights[i], following)


class _Tiled(torch.autograd.Function):
    """y = f(x) w^T + b tile by tile; f gathers x over `axis` if `gather`, and its gradient is summed over the axis."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, axis: Axis, gather: bool, *weights: Tensor
    ) -> Tensor:
        if gather:
            x = collectives.all_gather(x, axis)
        # Autograd does not save gathered tiles: hooks that offload saved tensors would read freed memory.
        gathered = any(tile_gatherer_of(weight) is not None for weight in weights)
        ctx.save_for_backward(x, *(() if gathered else weights))
        ctx.weights, ctx.bias, ctx.axis, ctx.gather = weights, bias, axis, gather
        return product(x, weights, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, *saved = ctx.saved_tensors
        # The parameters themselves get gradients: hooks may return other tensors for saved ones.
        of_f, need = (ctx.axis, ctx.gather), ctx.needs_input_grad[:2]
        dx, db, *grads = gradients(dy, x, saved or ctx.weights, (ctx.weights, ctx.bias), of_f, need)
        return dx, db, None, None, *grads


def product(x: Tensor, weights: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    """x [... in] -> [... out], tile by tile."""
    cuts = _cuts(weights)
    y = x.new_empty(*x.shape[:-1], cuts[-1][1])
    flat_x, flat_y = x.flatten(0, -2), y.view(-1, y.shape[-1])
    for i, opened in _walk(weights, range(len(weights))):
        out = flat_y[:, slice(*cuts[i])]
        if bias is not None:
            out.copy_(bias[slice(*cuts[i])])
        with opened:
            matmul.add_product_(out, flat_x, weights[i].t(), fresh=bias is None)
    return y


def gradients(
    dy: Tensor, x: Tensor, weights: Sequence[Tensor], params: tuple[Sequence[Tensor], Tensor | None],
    of_f: tuple[Axis, bool], need: Sequence[bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The gradients of x before f, bias and each tile; those of params go to their sinks, and None is returned, where
    they have one. of_f: the axis, and whether it gathered. need: those of x and bias."""
    (axis, gather), (need_dx, need_db) = of_f, need
    cuts, flat_dy = _cuts(weights), dy.flatten(0, -2)
    grads: list[Tensor | None] = [None] * len(weights)
    # Last tile first: the order of buckets. A tile's gradient is computed while the next tile is being gathered;
    # but if the input's gradient is summed over ranks, that sum begins first and overlaps with the others.
    order, pending = range(len(weights))[::-1], None
    early = need_dx and axis.size == 1
    if need_dx:
        total = torch.empty(x.shape, dtype=_sum_dtype(x, len(weights)), device=x.device)
        for i, opened in _walk(params[0], order):
            part = _columns(flat_dy, cuts[i])
            with opened:
                _add(total.flatten(0, -2), part, weights[i], fresh=i == order[0])
            if early:
                grads[i] = weight_gradient(params[0][i], part, x)
        reduce = collectives.start_reduce_scatter if gather else collectives.start_all_reduce
        pending = reduce(total.to(x.dtype), axis)
    for i in () if early else order:
        grads[i] = weight_gradient(params[0][i], _columns(flat_dy, cuts[i]), x)
    db = (
        bias_gradient(params[1], flat_dy.contiguous())
        if need_db and params[1] is not None
        else None
    )
    return pending.wait() if pending else None, db, *grads


def _columns(matrix: Tensor, span: Span) -> Tensor:
    """Returns columns of a matrix, contiguous: oneDNN is up to a thousand times slower on a transposed window."""
    return matrix[:, slice(*span)].contiguous()


def _cuts(weights: Sequence[Tensor]) -> list[Span]:
    """Returns the columns of the output that each tile computes."""
    cuts, at = [], 0
    for weight in weights:
        cuts.append((at, at + len(weight)))
        at += len(weight)
    return cuts


def _sum_dtype(x: Tensor, tiles: int) -> torch.dtype:
    """Returns fp32 for sums of more than two 16-bit terms, to round once; a sum of two is rounded once anyway."""
    return torch.float32 if x.dtype in (torch.bfloat16, torch.float16) and tiles > 2 else x.dtype


def _add(total: Tensor, a: Tensor, b: Tensor, fresh: bool) -> None:
    """Computes total += a b, or total = a b if `fresh`."""
    if total.dtype == a.dtype:
        matmul.add_product_(total, a, b, fresh=fresh)
    else:
        product = torch.mm(a, b)
        total.copy_(product) if fresh else total.add_(product)


def tiled_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None = None,
    axis: Axis = LOCAL,
    gather: bool = False,
) -> Tensor:
    """Returns x W^T + b: x [... in] -> [... out]; weights: tiles [out_i in] of W; `axis`, `gather`: see `_Tiled`."""
    out: Tensor = _Tiled.apply(x, bias, axis, gather, *weights)
    return out
