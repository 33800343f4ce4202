"""Products in chunks of the sequence, so that collectives of sequence parallelism overlap with them.

    chunks = Chunks(axis, count(...))
    y, gathered = chunks.gather_and_multiply(x, factor, keep=True)    # gather i + 1 overlaps product i
    part = chunks.multiply_and_scatter(x, factor)                     # product i + 1 overlaps reduction i

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

`SymmetricMemory` has the same methods, and overlaps by torch's symmetric memory instead.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from threed.core.gpu_rates import DEVICES, PRODUCT_S, LinkRate
from threed.distributed import collectives, symmetric_memory
from threed.distributed.topology import Axis
from threed.ops.matmul import Matmul

CHUNKS = (1, 2, 4, 8)
DEVICE = DEVICES["h100"]  # whose rates decide, on all devices: see `count`
GAIN = 0.05  # smallest share of the modeled time that chunks must save


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


class Factor(NamedTuple):
    """The weight of a product: x W^T + b, [... i] -> [... o], or x W, [... o] -> [... i].

    Attributes:
        weight: W [o i].
        by: implementation of the matrix products.
        bias: b [o].
        transposed: whether the product is x W^T + b.
    """

    weight: Tensor
    by: Matmul
    bias: Tensor | None = None
    transposed: bool = True

    @property
    def matrix(self) -> Tensor:
        """The matrix by which x is multiplied."""
        return self.weight.t() if self.transposed else self.weight

    def multiply(self, x: Tensor) -> Tensor:
        """Returns the product."""
        if self.transposed:
            return self.by.linear(x, self.weight, self.bias)
        y = self.by.input_gradient(x.flatten(0, -2), self.weight)
        return y.view(*x.shape[:-1], -1)


class Overlap(Protocol):
    """Computes a product together with the collective of sequence parallelism before or after it."""

    def gather_and_multiply(
        self, shard: Tensor, factor: Factor, keep: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Gathers a tensor along the sequence, and multiplies each part when it arrives. Collective.

        Args:
            shard: this rank's part, [s/t b h].
            factor: for products [... h] -> [... f].
            keep: whether to return the gathered tensor.

        Returns:
            The product [s b f] in sequence order, and the gathered tensor [s b h] or None. Its
            order is that of `gathered_order`.
        """

    def multiply_and_scatter(self, x: Tensor, factor: Factor) -> Tensor:
        """Multiplies, and sums the products of all ranks while further ones are computed. Collective.

        Args:
            x: this rank's features, [s b f].
            factor: for products [... f] -> [... h], without a bias.

        Returns:
            This rank's part of the sum, [s/t b h].
        """

    def gathered_order(self, x: Tensor) -> Tensor:
        """Returns x [s ...], which is in sequence order, in the order of gathered tensors."""


@dataclass(frozen=True)
class Chunks:
    """Computes one chunk while another one is sent; see the module's docstring.

    Attributes:
        axis: the t tensor ranks.
        count: number of chunks, a divisor of s/t.
    """

    axis: Axis
    count: int

    def gather_and_multiply(
        self, shard: Tensor, factor: Factor, keep: bool
    ) -> tuple[Tensor, Tensor | None]:
        shape = (self.axis.size * shard.shape[0], *shard.shape[1:])
        gathered = shard.new_empty(shape) if keep else None
        outs: list[Tensor | None] = [None] * self.count
        if gathered is not None:
            outs = [*gathered.chunk(self.count)]
        y = shard.new_empty(*shape[:-1], factor.matrix.shape[1])
        for i, chunk in enumerate(_gathers(shard, self.axis, outs)):
            place = self._positions(y, i)
            place.copy_(factor.multiply(chunk).view(place.shape))
        return y, gathered

    def multiply_and_scatter(self, x: Tensor, factor: Factor) -> Tensor:
        out = x.new_empty(x.shape[0] // self.axis.size, *x.shape[1:-1], factor.matrix.shape[1])
        pending = []
        for i, part in enumerate(out.chunk(self.count)):
            term = factor.multiply(self._positions(x, i).flatten(0, 1))
            pending.append(collectives.start_reduce_scatter(term, self.axis, into=part))
        for reduction in pending:
            reduction.wait()
        return out

    def gathered_order(self, x: Tensor) -> Tensor:
        return self._of_ranks(x).transpose(0, 1).reshape(x.shape)

    def _of_ranks(self, x: Tensor) -> Tensor:
        return x.view(self.axis.size, self.count, -1, *x.shape[1:])

    def _positions(self, x: Tensor, i: int) -> Tensor:
        """Returns a view [t n ...] of the positions of chunk i in x [s ...], in sequence order."""
        return self._of_ranks(x)[:, i]


def _gathers(shard: Tensor, axis: Axis, outs: list[Tensor | None]) -> Iterator[Tensor]:
    """Yields the gathered chunks of `shard`; the next chunk's gather has started. Collective."""
    parts = shard.contiguous().chunk(len(outs))
    following = collectives.start_all_gather(parts[0], axis, outs[0])
    for i in range(len(outs)):
        pending = following
        if i + 1 < len(outs):
            following = collectives.start_all_gather(parts[i + 1], axis, outs[i + 1])
        yield pending.wait()


@dataclass(frozen=True)
class SymmetricMemory:
    """Reads the parts of the other GPUs from their memory; see `distributed.symmetric_memory`.

    Gathered tensors are in sequence order.

    Attributes:
        axis: the t tensor ranks.
    """

    axis: Axis

    def gather_and_multiply(
        self, shard: Tensor, factor: Factor, keep: bool
    ) -> tuple[Tensor, Tensor | None]:
        y, gathered = symmetric_memory.gather_and_multiply(shard, factor.matrix, self.axis, keep)
        return y if factor.bias is None else y.add_(factor.bias), gathered

    def multiply_and_scatter(self, x: Tensor, factor: Factor) -> Tensor:
        return symmetric_memory.multiply_and_scatter(x, factor.matrix, self.axis)

    def gathered_order(self, x: Tensor) -> Tensor:
        return x
