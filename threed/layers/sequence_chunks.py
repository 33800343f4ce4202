"""Products in chunks of the sequence, so that collectives of sequence parallelism overlap with them.

    y, gathered = gather_and_multiply(x, multiply, axis, chunks)      # gather i + 1 overlaps product i
    part = multiply_and_scatter(x, multiply, axis, chunks)            # product i + 1 overlaps reduction i

With t ranks and c chunks of n positions per rank, s = t c n. A tensor [s ...] in sequence order has
the axes [t c n ...], because each rank owns consecutive positions. Chunk i consists of the positions
[:, i] of all ranks, so a collective of one chunk is an ordinary all-gather or reduce-scatter of
contiguous tensors, [n ...] <-> [t n ...]. The parts of one rank, [c n ...], need no copy: chunk i is a
slice of them. Gathered chunks form a tensor in *chunk order*, [c t n ...].

Only the tensor with this rank's features, [s b f/t], is copied between the two orders, in one pass.
It has about a t-th of the bytes of the gathered tensor, which is never copied.

Every row of a product is computed from the same numbers as without chunks. The results are equal up
to rounding, because a matrix kernel may sum in a different order for a different number of rows. A
backend that adds the terms of a reduce-scatter in rank order, as with gloo, adds the same terms in
the same order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

from torch import Tensor

from threed.core.gpu_rates import DEVICES, PRODUCT_S, LinkRate
from threed.distributed import collectives
from threed.distributed.topology import Axis

CHUNKS = (1, 2, 4, 8)
DEVICE = DEVICES["h100"]  # whose rates decide, on all devices: see `count`
GAIN = 0.05  # smallest share of the modeled time that chunks must save

Multiply = Callable[[Tensor], Tensor]


def seconds(
    chunks: int, shape: tuple[int, int, int], sent: float, copied: float, link: LinkRate
) -> float:
    """Returns the modeled time of a product and of the collective before or after it.

    Chunks share the time of the whole product evenly. That the waves of their tiles may be filled
    worse, and that a collective slows the product that it overlaps with, is left to `GAIN`.

    Args:
        chunks: number of chunks.
        shape: rows, columns and inner size of the whole product.
        sent: bytes that this rank sends.
        copied: bytes that a copy to or from chunk order reads and writes.
        link: bandwidth between the ranks.
    """
    whole = DEVICE.product_seconds(shape) - PRODUCT_S
    product = whole / chunks + PRODUCT_S + DEVICE.gap_seconds(1)
    if chunks > 1:
        product += DEVICE.gap_seconds(1) + copied / DEVICE.bandwidth / chunks
    collective = link.seconds(sent / chunks)
    return product + collective + (chunks - 1) * max(product, collective)


def count(rows: int, inputs: int, features: int, part: int, itemsize: int, axis: Axis) -> int:
    """Returns the number of chunks for one linear layer, 1 if chunks do not pay.

    The number is the one with the shortest modeled time (`seconds`), if chunks save at least a
    share `GAIN` of the time without chunks; otherwise it is 1. The model has the rates of an H100
    on every GPU, and those of its links: NVLink, or the network if the ranks are on several
    machines with 8 GPUs each. So the number depends only on sizes and ranks, and all ranks return
    the same one even if their GPUs differ. A GPU with other rates may get a number that is not its
    best; results do not depend on it, up to rounding. With gloo it is 1, because gloo's collectives
    compete with the products for the processor.

    Args:
        rows: number of positions per rank, s/t.
        inputs: number of sequences b.
        features: number of features of the gathered or reduced tensor.
        part: number of features of this rank's tensor [s b part].
        itemsize: bytes of a number.
        axis: the t tensor ranks.
    """
    if not collectives.overlaps_kernels(axis):
        return 1
    return _count(rows, inputs, features, part, itemsize, axis.ranks)


@functools.lru_cache
def _count(
    rows: int, inputs: int, features: int, part: int, itemsize: int, ranks: tuple[int, ...]
) -> int:
    size, link = len(ranks), DEVICE.link(ranks)
    tokens = rows * size * inputs
    copied = 2.0 * tokens * part * itemsize
    sent = tokens * features * itemsize * (size - 1) / size
    shape = (tokens, part, features)
    times = {n: seconds(n, shape, sent, copied, link) for n in CHUNKS if rows % n == 0}
    best = min(times, key=lambda n: times[n])
    return best if times[best] < (1 - GAIN) * times[1] else 1


def in_chunk_order(x: Tensor, axis: Axis, chunks: int) -> Tensor:
    """Returns a copy in chunk order of x [s ...], which is in sequence order."""
    return x.view(axis.size, chunks, -1, *x.shape[1:]).transpose(0, 1).reshape(x.shape)


def _positions(x: Tensor, axis: Axis, chunks: int, i: int) -> Tensor:
    """Returns a view [t n ...] of the positions of chunk i in x [s ...], in sequence order."""
    return x.view(axis.size, chunks, -1, *x.shape[1:])[:, i]


def _gathers(shard: Tensor, axis: Axis, outs: list[Tensor | None]) -> Iterator[Tensor]:
    """Yields the gathered chunks of `shard`; the next chunk's gather has started. Collective."""
    parts = shard.contiguous().chunk(len(outs))
    following = collectives.start_all_gather(parts[0], axis, outs[0])
    for i in range(len(outs)):
        pending = following
        if i + 1 < len(outs):
            following = collectives.start_all_gather(parts[i + 1], axis, outs[i + 1])
        yield pending.wait()


def gather_and_multiply(
    shard: Tensor, multiply: Multiply, features: int, axis: Axis, chunks: int, keep: bool
) -> tuple[Tensor, Tensor | None]:
    """Gathers a tensor along the sequence, and multiplies each chunk when it arrives. Collective.

    Args:
        shard: this rank's part, [s/t b h].
        multiply: product of rows [... h] -> [... f].
        features: f.
        axis: the t tensor ranks.
        chunks: number of chunks, a divisor of s/t.
        keep: whether to return the gathered tensor.

    Returns:
        The product [s b f] in sequence order, and the gathered tensor [s b h] in chunk order, or
        None.
    """
    shape = (axis.size * shard.shape[0], *shard.shape[1:])
    gathered = shard.new_empty(shape) if keep else None
    outs: list[Tensor | None] = [None] * chunks if gathered is None else [*gathered.chunk(chunks)]
    y = shard.new_empty(*shape[:-1], features)
    for i, chunk in enumerate(_gathers(shard, axis, outs)):
        place = _positions(y, axis, chunks, i)
        place.copy_(multiply(chunk).view(place.shape))
    return y, gathered


def multiply_and_scatter(
    x: Tensor, multiply: Multiply, features: int, axis: Axis, chunks: int
) -> Tensor:
    """Multiplies chunk by chunk, and reduce-scatters each product while the next one runs. Collective.

    Args:
        x: this rank's features, [s b f].
        multiply: product of rows [... f] -> [... h].
        features: h.
        axis: the t tensor ranks.
        chunks: number of chunks, a divisor of s/t.

    Returns:
        This rank's part of the sum, [s/t b h].
    """
    out = x.new_empty(x.shape[0] // axis.size, *x.shape[1:-1], features)
    pending = []
    for i, part in enumerate(out.chunk(chunks)):
        term = multiply(_positions(x, axis, chunks, i).flatten(0, 1))
        pending.append(collectives.start_reduce_scatter(term, axis, into=part))
    for reduction in pending:
        reduction.wait()
    return out
