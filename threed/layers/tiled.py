"""Tiled linear layers: large weights are gathered one tile at a time.

This is memory-centric tiling (ZeRO-Infinity, arXiv 2104.07857, section 5.1.3).

    weight [out in] -> tiles [out_i in], split by rows
    y[..., out_i] = x tile_i^T
    dx = sum over i of dy[..., out_i] tile_i

`zero.tile` sets the number of tiles for the linear layers of a model's blocks. A `ReplicatedLinear`
can override it. Each tile is a separate parameter, which is gathered, reduced, updated and
offloaded on its own. The `ShardSpec`s of all tiles name the same global tensor, so initial values,
checkpoints and exports do not depend on the number of tiles. While one tile is used, the next is
gathered by its `TileGatherer`, so at most two tiles are in memory. Tiles without a gatherer stay in
memory.

The output and the input's gradient differ from the untiled layer only by rounding: a matrix product
of a different shape may sum in a different order, and the input's gradient is a sum over tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from threed.distributed.collectives import split
from threed.distributed.sharding import Piece, ShardSpec, parameter
from threed.layers.slicing import tile_gatherer_of
from threed.ops.matmul import Matmul

# Number of rows. If tiles have at least this many rows on average, each tile starts at a multiple
# of GRANULE, because matrix kernels are faster on such tiles.
GRANULE = 64

Span = tuple[int, int]


def spans(rows: int, tiles: int) -> list[Span]:
    """Returns the rows [first, last) of each tile. There are at most as many tiles as rows."""
    tiles = max(1, min(tiles, rows))
    unit = GRANULE if rows >= GRANULE * tiles else 1
    cuts = [min(rows, unit * split(-(-rows // unit), tiles, i)[0]) for i in range(tiles)]
    return list(zip(cuts, [*cuts[1:], rows], strict=True))


def slice_rows(pieces: Sequence[Piece], first: int, last: int) -> tuple[Piece, ...]:
    """Returns the `Piece`s that describe rows [first, last) of a weight.

    `pieces` describes the full weight: global matrices (or their shards), one below the other.
    """
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
    """Registers a module's `weight` [rows in], or its tiles `weight_0`, `weight_1` ...

    Args:
        module: linear layer.
        spec: `ShardSpec` of the full weight.
        shape: (rows, in).
        tiles: requested number of tiles.
    """
    cuts = spans(shape[0], tiles)
    if len(cuts) == 1:
        module.register_parameter("weight", parameter(spec, shape))
        return
    for i, (first, last) in enumerate(cuts):
        part = replace(spec, pieces=slice_rows(spec.pieces, first, last), tile=(i, len(cuts)))
        module.register_parameter(f"weight_{i}", parameter(part, (last - first, shape[1])))


def tiles_of(module: nn.Module) -> tuple[Tensor, ...]:
    """Returns the tiles of a module's weight, in order. An undivided weight counts as one tile."""
    return tuple(
        weight
        for name, weight in module._parameters.items()
        if name.startswith("weight") and weight is not None
    )


@contextmanager
def gathered(weight: Tensor, following: Tensor | None = None) -> Iterator[None]:
    """Context in which the tile `weight` is gathered.

    On entry it also starts to gather `following`, the tile that is used next.
    """
    gatherer = tile_gatherer_of(weight)
    following_gatherer = None if following is None else tile_gatherer_of(following)
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
    """Yields each tile number in `order`, and the context manager that gathers this tile."""
    for i, following in zip(order, [*(weights[n] for n in order[1:]), None], strict=True):
        yield i, gathered(weights[i], following)


def product(x: Tensor, weights: Sequence[Tensor], bias: Tensor | None, by: Matmul) -> Tensor:
    """Returns x W^T + b, [... in] -> [... out], computed tile by tile."""
    cuts = _columns_of(weights)
    y = x.new_empty(*x.shape[:-1], cuts[-1][1])
    flat_x, flat_y = x.flatten(0, -2), y.view(-1, y.shape[-1])
    for i, opened in _walk(weights, range(len(weights))):
        out = flat_y[:, slice(*cuts[i])]
        if bias is not None:
            out.copy_(bias[slice(*cuts[i])])
        with opened:
            by.add_product_(out, flat_x, weights[i].t(), fresh=bias is None)
    return y


def input_gradient(
    rows: Tensor, weights: Sequence[Tensor], params: Sequence[Tensor], by: Matmul,
    after: Callable[[int, Tensor], None] | None,
) -> Tensor:  # fmt: skip
    """Returns the gradient of x [m in] for y = x W^T, a sum over tiles.

    Args:
        rows: gradient of y, [m out].
        weights: values of the tiles.
        params: the tiles' parameters, which have the gatherers.
        by: implementation of the matrix products.
        after: `after(i, part)` is called when tile i has been used, while the next tile is being
            gathered; `part` has the columns of `rows` for tile i.
    """
    last = len(weights) - 1
    total = rows.new_empty(len(rows), weights[0].shape[1], dtype=_sum_dtype(rows, len(weights)))
    opens = _walk(params, range(len(weights))[::-1])
    for (i, opened), (_, part) in zip(opens, parts(rows, weights), strict=True):
        with opened:
            by.add_product_(total, part, weights[i], fresh=i == last)
        if after is not None:
            after(i, part)
    return total.to(rows.dtype)


def parts(rows: Tensor, weights: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """Yields (i, the columns of `rows` [m out] for tile i), from the last tile to the first.

    The order is from last to first, because gradient buckets are filled in this order.
    """
    for i, span in reversed(list(enumerate(_columns_of(weights)))):
        # contiguous, because oneDNN is up to a thousand times slower on a transposed slice
        yield i, rows[:, slice(*span)].contiguous()


def _columns_of(weights: Sequence[Tensor]) -> list[Span]:
    """Returns the columns of the output that each tile computes."""
    return list(pairwise(accumulate(map(len, weights), initial=0)))


def _sum_dtype(x: Tensor, tiles: int) -> torch.dtype:
    """Returns the dtype in which a sum over tiles is computed.

    For more than two 16-bit terms this is fp32, so that only the final sum is rounded.
    """
    return torch.float32 if x.dtype in (torch.bfloat16, torch.float16) and tiles > 2 else x.dtype
