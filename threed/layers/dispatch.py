"""Rows of tokens on their way to the experts that were chosen for them, and back.

    routes = open_routes(experts, count, axis, one_kernel=False)     # starts to read sizes on the host
    rows = routes.take(x)                                            # a copy of each token per choice
    ...                                                              # sent; then:
    rows = routes.arrival.sorted(rows)                               # waits for the sizes

The rows that a rank sends are sorted by expert. With exact sizes their numbers are read on the host,
once per forward. With a room (`Limits.room`) each rank sends every other rank equally many rows, some
of them empty, and nothing is read; a choice that does not fit is dropped, and the step is skipped.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from threed.core.device import start_copy_out
from threed.distributed import collectives
from threed.distributed.collectives import split
from threed.distributed.topology import Axis
from threed.ops.grouped import Groups
from threed.ops.positions import Positions
from threed.ops.router import Sorted

NO_ROW = -1  # instead of the index of a row


class Limits(NamedTuple):
    """Limits of the rows of experts in training steps.

    Attributes:
        room: number of rows that a rank can send to each expert rank, as a multiple of its mean. 0:
            as many as the router chooses; the host reads their number.
        capacity: number of tokens of a sequence that an expert takes, as a multiple of the mean over
            experts; later tokens are dropped. 0: no limit.
    """

    room: float = 0.0
    capacity: float = 0.0


class Sizes(NamedTuple):
    """Numbers of rows, on the host.

    Attributes:
        sends: for each expert rank.
        receives: from each expert rank.
        groups: for each expert of this rank; empty if no one needs them.
    """

    sends: Sequence[int]
    receives: Sequence[int]
    groups: Sequence[int]


@dataclass(frozen=True, eq=False)
class Arrival:
    """The received rows.

    Attributes:
        sizes: the numbers of rows that travel.
        groups: the rows of each expert of this rank; empty rows follow the last group.
        order: the received rows, sorted by expert, and the inverse of this permutation, both int64
            [m]. None if they arrive in this order.
    """

    sizes: Sizes
    groups: Groups
    order: tuple[Tensor, Tensor] | None = None

    def sorted(self, rows: Tensor) -> Tensor:
        """Returns received rows [m h], sorted by expert."""
        return rows if self.order is None else take(rows, *self.order)

    def unsorted(self, rows: Tensor) -> Tensor:
        """Returns rows sorted by expert [m h] in the order in which they were received."""
        return rows if self.order is None else take(rows, *self.order[::-1])


@dataclass(eq=False)
class Routes:
    """Where the tokens of a rank go, n tokens with k choices each.

    Attributes:
        count: number of choices per token, k.
        sources: the choice, numbered token · k + choice, in each row that may be sent: int64 [r].
        places: the row of each choice, int64 [n k].
        holes: whether rows can be empty and choices dropped; their index is then `NO_ROW`.
        arrive: function that returns `arrival`; it waits until the sizes are on the host.
    """

    count: int
    sources: Tensor
    places: Tensor
    holes: bool
    arrive: Callable[[], Arrival]

    @functools.cached_property
    def arrival(self) -> Arrival:
        """The received rows. The first use waits for their numbers."""
        with torch.no_grad():
            found, self.arrive = self.arrive(), _already_read
        return found

    @functools.cached_property
    def tokens(self) -> Tensor:
        """The token of each row that may be sent, `NO_ROW` for an empty row, int64 [r]."""
        return self.sources.div(self.count, rounding_mode="floor")

    @functools.cached_property
    def firsts(self) -> Tensor:
        """The number of the first choice of each token, int64 [n]."""
        return torch.arange(0, len(self.places), self.count, device=self.places.device)

    def take(self, x: Tensor) -> Tensor:
        """Returns the rows to send: a copy of the token of each choice; x [n h] -> [r h]."""
        return _Copies.apply(x, self)

    def combine(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Returns the weighted sum of the rows of each token, in the order of its choices.

        Args:
            rows: results of the rows that were sent, [m h], without the last empty ones.
            weights: weights of the choices, [n k]; a dropped choice adds nothing.

        Returns:
            [n h].
        """
        return _Combine.apply(rows, weights, self)


def open_routes(
    experts: Tensor, count: int, axis: Axis, *, room: float = 0.0, one_kernel: bool = False,
    kept: Tensor | None = None, ordered: Sorted | None = None, assumed_load: float = 1.0,
) -> tuple[Routes, Tensor, Tensor | None]:  # fmt: skip
    """Returns the routes of tokens, and starts to read their sizes on the host. Collective.

    Args:
        experts: the experts of each token, int64 [... k].
        count: number of experts of the model.
        axis: the ranks that hold different experts.
        room: see `Limits`.
        one_kernel: whether the products of all experts are one kernel, which needs no sizes on the
            host.
        kept: whether each choice is kept, bool [... k]. Default: all.
        ordered: all choices, sorted by expert; None to sort them.
        assumed_load: see `start_reading`.

    Returns:
        (routes, counts, overflow): the number of kept choices per expert, int32 [count]; and a bool
        scalar: whether some of them did not fit into the room, None without a room.
    """
    k, ranks, overflow = experts.shape[-1], axis.size, None
    total, device = experts.numel(), experts.device
    if ordered is None:
        order, bounds, counts = _by_expert(experts, count, kept)
    else:
        order, bounds, counts = ordered.sources, ordered.bounds, ordered.loads
    if room and ranks > 1:
        size = room_rows(room, total, ranks)
        first = bounds[:-1].view(ranks, -1)[:, :1]  # of each rank's rows
        ends = (bounds[1:].view(ranks, -1) - first).clamp(max=size)
        overflow = (bounds[1:].view(ranks, -1)[:, -1:] - first > size).any()
        sent = ends.diff(dim=1, prepend=torch.zeros_like(first))
        sources = _in_segments(order, first, ends[:, -1:], size)
    else:
        sent, sources, size = counts.view(ranks, -1), order, 0
        if kept is not None:
            sources = order.where(torch.arange(total, device=device) < bounds[-1], NO_ROW)
    holes = size > 0 or kept is not None
    inverse = None if holes or ordered is None else ordered.places
    if inverse is None:
        inverse = _places(sources, total) if holes else _inverse(sources)
    arrive = _arrivals(sent, axis, total, size, one_kernel, bounds[1:], assumed_load)
    routes = Routes(k, sources, inverse, holes, arrive)
    if ordered is not None:
        routes.firsts = ordered.firsts
        if not holes:
            routes.tokens = ordered.tokens
    return routes, counts, overflow


def _by_expert(experts: Tensor, count: int, kept: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the choices sorted by expert, the bounds of experts, and the kept choices per expert."""
    flat = experts.flatten()
    if kept is not None:
        flat = flat.where(kept.flatten(), count)  # dropped choices behind all others
    ordered, order = flat.sort(stable=True)
    numbers = torch.arange(count + 1, device=flat.device)
    bounds = torch.searchsorted(ordered, numbers, out_int32=True)
    return order, bounds, bounds[1:] - bounds[:-1]


def room_rows(room: float, total: int, ranks: int) -> int:
    """Returns the number of rows that a rank can send to each expert rank.

    Args:
        room: see `Limits`.
        total: number of choices of the rank.
        ranks: number of expert ranks.
    """
    return min(math.ceil(room * total / ranks), total)


def _already_read() -> Arrival:
    raise AssertionError("the sizes of these routes were read already")


def _arrivals(
    sent: Tensor,
    axis: Axis,
    total: int,
    size: int,
    one_kernel: bool,
    ends: Tensor,
    assumed_load: float,
) -> Callable[[], Arrival]:
    """Sends the numbers of rows, and starts to read what the host needs. Collective.

    Args:
        sent: number of this rank's rows for each rank and expert, [ep e/ep].
        axis: the expert ranks.
        total: number of choices of this rank.
        size: number of rows that travel to each rank, some of them empty; 0: as many as are sent.
        one_kernel: see `open_routes`.
        ends: index after the last row of each expert, if this rank holds all experts.
        assumed_load: see `start_reading`.
    """
    if axis.size == 1:
        if one_kernel:
            arrival = Arrival(Sizes([total], [total], []), Groups(ends, []))
            return lambda: arrival
        read = start_reading(sent, sent, total)
        return lambda: Arrival(Sizes([total], [total], []), Groups(ends, read().groups))
    received = collectives.all_to_all(sent, axis)
    fixed = [size] * axis.size
    if size:  # rows beyond the room are not sent
        assumed_load = min(assumed_load, sum(fixed) / total)
    read = (
        (lambda: Sizes(fixed, fixed, []))
        if size and one_kernel
        else start_reading(sent, received, total, assumed_load)
    )

    def arrive() -> Arrival:
        sizes = read()
        sizes = Sizes(fixed, fixed, sizes.groups) if size else sizes
        return _sorted_by_expert(received, sizes, size)

    return arrive


def start_reading(
    sent: Tensor, received: Tensor, total: int, assumed_load: float = 1.0
) -> Callable[[], Sizes]:
    """Starts to read the numbers of rows that travel; returns a function that waits for them.

    On the meta device, all experts of this rank get equally many rows.

    Args:
        sent: number of this rank's rows for each rank and expert, [ep e/ep].
        received: number of rows from each rank for each expert of this rank, [ep e/ep].
        total: number of choices of this rank.
        assumed_load: on the meta device, the number of rows that this rank receives, divided by
            the mean over expert ranks.
    """
    if sent.is_meta:
        return lambda: even_sizes(len(sent), sent.shape[1], total, assumed_load)
    read = start_copy_out(torch.stack((sent, received)))

    def sizes() -> Sizes:
        sends, receives = read().unbind()
        return Sizes(sends.sum(1).tolist(), receives.sum(1).tolist(), receives.sum(0).tolist())

    return sizes


def even_sizes(ranks: int, own: int, total: int, load: float = 1.0) -> Sizes:
    """Returns the numbers of rows if all ranks send, and all experts of this rank get, equally many.

    Args:
        ranks: number of expert ranks.
        own: number of experts per rank.
        total: number of choices of this rank.
        load: number of rows that this rank receives, divided by the mean over expert ranks.
    """

    def parts(number: int, count: int) -> list[int]:
        ends = [split(number, count, i) for i in range(count)]
        return [stop - start for start, stop in ends]

    receives = parts(round(load * total), ranks)
    return Sizes(parts(total, ranks), receives, parts(sum(receives), own))


def _sorted_by_expert(received: Tensor, sizes: Sizes, size: int) -> Arrival:
    """Returns the arrival of rows that are sorted by rank, and by expert within the rows of a rank.

    Args:
        received: number of rows from each rank for each expert of this rank, [ep e/ep].
        sizes: the numbers of rows that travel.
        size: number of rows from each rank, some of them empty; 0: `received` counts all rows.
    """
    ranks, device = len(received), received.device
    if size:  # empty rows behind the others of their rank, as an expert behind the last
        received = torch.cat((received, size - received.sum(1, keepdim=True)), 1)
    ends = received.flatten().cumsum(0)
    ends_by_expert = received.t().flatten().cumsum(0)
    # rows of one rank and one expert stay together
    shifts = torch.empty_like(ends)
    torch.sub(ends_by_expert.view(-1, ranks).t(), ends.view(ranks, -1), out=shifts.view(ranks, -1))
    rows = torch.arange(sum(sizes.receives), device=device)
    back = rows + shifts[torch.searchsorted(ends, rows, right=True)]
    by_expert = torch.empty_like(rows).scatter_(0, back, rows)
    # stride 1 also for a single expert, as `torch._grouped_mm` demands
    last = ends_by_expert[ranks - 1 :: ranks].to(torch.int32, memory_format=torch.contiguous_format)
    return Arrival(sizes, Groups(last[: len(last) - (size > 0)], sizes.groups), (by_expert, back))


def _in_segments(order: Tensor, first: Tensor, counts: Tensor, size: int) -> Tensor:
    """Returns the choices in the rows of segments of equal size, int64 [ranks · size].

    Args:
        order: the choices, sorted by expert.
        first: index of the first choice of each segment in `order`, [ranks 1].
        counts: number of choices in each segment, [ranks 1]; the rows after them are empty.
        size: number of rows of a segment.
    """
    rows = torch.arange(size, device=order.device)
    found = order[(first + rows).clamp(max=len(order) - 1)]
    return found.where(rows < counts, NO_ROW).flatten()


def _places(sources: Tensor, total: int) -> Tensor:
    """Returns the row of each of `total` choices, `NO_ROW` for a choice without a row."""
    places = sources.new_full((total + 1,), NO_ROW)
    index = sources.where(sources >= 0, total)  # choices of empty rows go behind the end
    return places.scatter_(0, index, torch.arange(len(sources), device=sources.device))[:total]


def _inverse(order: Tensor) -> Tensor:
    """Returns the inverse of a permutation, int64 [n]."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def within_capacity(
    chosen: Tensor, experts: Tensor, limit: int, own: Positions, axes: Sequence[Axis]
) -> Tensor:
    """Returns whether each choice is among the first `limit` choices of its sequence for its expert.

    Choices count in the order of the tokens of the sequence, over all ranks that have parts of it.
    Collective.

    Args:
        chosen: 1 if a token chose an expert, else 0, [n b e].
        experts: the chosen experts, [n b k].
        limit: number of tokens of a sequence that an expert takes.
        own: this rank's parts of a sequence that is divided into equal parts.
        axes: the axes of the ranks that have the other parts.

    Returns:
        bool [n b k].
    """
    # cumulative sums of integers, because those of floats are not deterministic on GPUs
    parts = chosen.to(torch.int32).unflatten(0, (own.total, -1))
    counts = chosen.new_zeros(own.length, *chosen.shape[1:])
    sums, row = parts.sum(1), 0
    for first, last in own.ranges:
        counts[first:last] = sums[row : row + last - first]
        row += last - first
    for axis in axes:
        counts = collectives.all_reduce(counts, axis)
    all_counts = counts.to(torch.int32)
    before = own.rows(all_counts.cumsum(0) - all_counts).unsqueeze(1) + parts.cumsum(1) - parts
    return before.flatten(0, 1).gather(-1, experts) < limit


def take(x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
    """Returns the rows of x in another order: x[index], [n h].

    Args:
        x: rows, [n h].
        index: a permutation, int64 [n].
        inverse: its inverse.
    """
    return _Permuted.apply(x, index, inverse)


class _Permuted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.inverse = inverse
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return dy.index_select(0, ctx.inverse), None, None


class _Copies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, routes: Routes) -> Tensor:
        ctx.routes = routes
        return _rows(x, routes.tokens, routes.holes)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return _sums(dy, ctx.routes), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, routes: Routes) -> Tensor:
        cast = weights.to(rows.dtype)
        ctx.save_for_backward(rows, cast)
        ctx.routes, ctx.dtype = routes, weights.dtype
        return _sums(rows, routes, cast)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        (rows, weights), routes, last = ctx.saved_tensors, ctx.routes, len(ctx.saved_tensors[0])
        dy = _rows(dy, routes.tokens[:last], routes.holes)
        # the weight of each row; that of an empty row may be any
        factors = weights.flatten()[routes.sources[:last]].unsqueeze(1)
        dots = torch.bmm(dy.unsqueeze(1), rows.unsqueeze(2)).view(-1)
        dw = _rows(dots, routes.places, routes.holes).view_as(weights)
        return dy * factors, dw.to(ctx.dtype), None


def _rows(x: Tensor, index: Tensor, holes: bool) -> Tensor:
    """Returns x[index]; with `holes`, zeros for an index `NO_ROW`."""
    if not holes:
        return x.index_select(0, index)
    if not len(x):  # all choices of this rank were dropped
        return x.new_zeros(len(index), *x.shape[1:])
    empty = (index < 0).view(-1, *(1,) * (x.dim() - 1))
    return x.index_select(0, index.clamp(min=0)).masked_fill_(empty, 0)


def _sums(rows: Tensor, routes: Routes, weights: Tensor | None = None) -> Tensor:
    """Returns the sum, weighted if given [n k], of the rows of each token's choices, [n h]."""
    places = routes.places
    if routes.holes:
        places = places.where(places >= 0, len(rows))
        rows = torch.cat((rows, rows.new_zeros(1, rows.shape[1])))
    factors = None if weights is None else weights.flatten()
    return F.embedding_bag(
        places, rows.detach(), routes.firsts, mode="sum", per_sample_weights=factors
    )
