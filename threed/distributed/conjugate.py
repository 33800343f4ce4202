"""Collectives with a backward, in pairs: copy_to and reduce_from, gather_from and scatter_to.

`to_heads` and `to_positions` are inverses, and each is the backward of the other (DeepSpeed-Ulysses,
arXiv 2309.14509).

In each pair, the backward of one function is the forward of the other (Megatron-LM, arXiv
1909.08053 section 3; for sequence parallelism, arXiv 2205.05198 section 4.2.2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from threed.distributed import collectives
from threed.distributed.collectives import Pending
from threed.distributed.topology import Axis

AxisFunction = Callable[[Tensor, Axis], Tensor]


class _Conjugate(torch.autograd.Function):
    """Applies one function of (tensor, axis) in the forward and another one in the backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, axis: Axis, forward: AxisFunction, backward: AxisFunction
    ) -> Tensor:
        ctx.axis, ctx.conjugate = axis, backward
        return forward(x, axis)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.conjugate(dy, ctx.axis), None, None, None


def _view(x: Tensor, axis: Axis) -> Tensor:
    return x.view_as(x)


def _pass_on(dy: Tensor, axis: Axis) -> Tensor:
    return dy


def _all_reduce_copy(dy: Tensor, axis: Axis) -> Tensor:
    # A copy: NCCL sums in place, and another branch may use dy.
    return collectives.all_reduce(dy.clone(), axis)


def copy_to(x: Tensor, axis: Axis) -> Tensor:
    """Returns x; the backward all-reduces the gradient (Megatron's f). Collective.

    Args:
        x: tensor of any shape, equal on all ranks of the axis.
        axis: ranks over which the gradient is summed.
    """
    return x if axis.size == 1 else _Conjugate.apply(x, axis, _view, _all_reduce_copy)


def reduce_from(x: Tensor, axis: Axis) -> Tensor:
    """Returns the sum of x over ranks (Megatron's g). Collective.

    The backward returns the gradient unchanged.

    Args:
        x: this rank's term, a tensor of any shape.
        axis: ranks over which x is summed.
    """
    return x if axis.size == 1 else _Conjugate.apply(x, axis, collectives.all_reduce, _pass_on)


def gather_from(x: Tensor, axis: Axis) -> Tensor:
    """Returns the concatenation of x over ranks; the backward reduce-scatters. Collective.

    Args:
        x: this rank's part, [s/t ...].
        axis: the t ranks.

    Returns:
        The parts of all ranks, [s ...].
    """
    if axis.size == 1:
        return x
    return _Conjugate.apply(x, axis, collectives.all_gather, collectives.reduce_scatter)


def scatter_to(x: Tensor, axis: Axis) -> Tensor:
    """Returns this rank's part of the sum of x over ranks; the backward all-gathers. Collective.

    Args:
        x: this rank's term, [s ...].
        axis: the t ranks.

    Returns:
        This rank's part of the sum, [s/t ...].
    """
    if axis.size == 1:
        return x
    return _Conjugate.apply(x, axis, collectives.reduce_scatter, collectives.all_gather)


def part_of(x: Tensor, axis: Axis) -> Tensor:
    """Returns this rank's part of x; the backward all-gathers the gradient. Collective.

    Args:
        x: tensor that is equal on all ranks, [s ...]; s is a multiple of t.
        axis: the t ranks.

    Returns:
        This rank's part, [s/t ...].
    """
    return x if axis.size == 1 else _Conjugate.apply(x, axis, _part, collectives.all_gather)


def join_parts(x: Tensor, axis: Axis) -> Tensor:
    """Returns the concatenation of x over ranks; the inverse of `part_of`. Collective.

    Unlike the backward of `gather_from`, the backward sums nothing: the gradient of the result must
    be equal on all ranks.

    Args:
        x: this rank's part, [s/t ...].
        axis: the t ranks.

    Returns:
        The parts of all ranks, [s ...].
    """
    return x if axis.size == 1 else _Conjugate.apply(x, axis, collectives.all_gather, _part)


def _part(x: Tensor, axis: Axis) -> Tensor:
    return x.chunk(axis.size)[axis.index].contiguous()


class Exchange:
    """An exchange of rows between the ranks of an axis; the backward sends gradients back.

        rows = exchange.start(rows)
        ...                             # work that needs no rows runs at the same time
        rows = exchange.wait(rows)

    In the backward, `wait` starts to send the gradients of the received rows back, and `start` waits
    for them. So what runs between the two calls runs at the same time in the backward, too.

    Args:
        axis: the ranks.
        sends: number of rows for each rank.
        receives: number of rows that each rank sends to this one.
    """

    def __init__(self, axis: Axis, sends: Sequence[int], receives: Sequence[int]) -> None:
        self.axis, self.sends, self.receives = axis, sends, receives
        self.rows = 0  # number of rows that were passed to `start`
        self.gradient: Tensor | None = None  # of these rows; complete after `finish`
        self._pending: Pending | None = None

    def start(self, x: Tensor) -> Tensor:
        """Starts to send rows. Collective.

        Args:
            x: the rows for each rank, in rank order, [n h]. Rows behind them stay, and get no
                defined gradient.

        Returns:
            Memory of the received rows, [m h], whose only use is `wait`.
        """
        return x if self.axis.size == 1 else _StartRows.apply(x, self)

    def wait(self, rows: Tensor) -> Tensor:
        """Waits for the rows.

        Args:
            rows: the result of `start`.

        Returns:
            The received rows, in rank order, [m h].
        """
        return rows if self.axis.size == 1 else _WaitForRows.apply(rows, self)

    def launch(self, x: Tensor, rows: int, *, back: bool = False) -> Tensor:
        """Starts to send rows of x, or gradients back; returns memory of `rows` rows. Collective."""
        to, of = (self.receives, self.sends) if back else (self.sends, self.receives)
        out = x.new_empty(rows, *x.shape[1:])
        self._pending = collectives.start_exchange(x[: sum(to)], self.axis, to, of, out[: sum(of)])
        return out

    def finish(self) -> None:
        """Waits until the rows of `launch` are complete."""
        assert self._pending is not None
        self._pending.wait()
        self._pending = None


class _StartRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange, exchange.rows = exchange, len(x)
        return exchange.launch(x, sum(exchange.receives))

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, None]:
        exchange: Exchange = ctx.exchange
        exchange.finish()
        dx, exchange.gradient = exchange.gradient, None
        return dx, None


class _WaitForRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange) -> Tensor:
        exchange.finish()
        ctx.exchange = exchange
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        exchange: Exchange = ctx.exchange
        exchange.gradient = exchange.launch(dy, exchange.rows, back=True)
        # `start` returns the gradient; autograd would not accept its number of rows here
        return dy, None


def to_heads(axis: Axis, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Exchanges positions for heads: all tensors in one all-to-all. Collective.

    Args:
        axis: the u ranks, which hold consecutive parts of the positions.
        tensors: all heads at this rank's positions, [s/u b n d]; n, a multiple of u, and d may
            differ between tensors.

    Returns:
        For each tensor, this rank's heads at the positions of all ranks, [s b n/u d].
    """
    return _ToHeads.apply(axis, *tensors) if axis.size > 1 else tensors


def to_positions(axis: Axis, x: Tensor) -> Tensor:
    """Exchanges heads for positions; the inverse of `to_heads`. Collective.

    Args:
        axis: the u ranks, each with its own heads.
        x: this rank's heads at the positions of all ranks, [s b n d].

    Returns:
        The heads of all ranks at this rank's positions, [s/u b u·n d].
    """
    return x if axis.size == 1 else _Conjugate.apply(x, axis, _to_positions, _to_heads)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: Axis, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.axis = axis
        return _swap_for_heads(axis, tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_swap_for_positions(ctx.axis, grads)


def _swap_for_heads(axis: Axis, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    s, b = tensors[0].shape[:2]
    # the numbers for each rank, [s b u (n/u d)]
    parts = [x.reshape(s, b, axis.size, -1) for x in tensors]
    sent = torch.cat(parts, 3).movedim(2, 0)
    got = collectives.all_to_all(sent, axis).flatten(0, 1)
    columns = got.split([part.shape[3] for part in parts], 2)
    return tuple(
        part.unflatten(2, (-1, x.shape[3])) for part, x in zip(columns, tensors, strict=True)
    )


def _swap_for_positions(axis: Axis, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    sent = torch.cat([x.flatten(2) for x in tensors], 2).unflatten(0, (axis.size, -1))
    got = collectives.all_to_all(sent, axis).movedim(0, 2)  # [s/u b u (n d)]
    columns = got.split([x.shape[2] * x.shape[3] for x in tensors], 3)
    return tuple(
        part.unflatten(3, x.shape[2:]).flatten(2, 3)
        for part, x in zip(columns, tensors, strict=True)
    )


def _to_heads(x: Tensor, axis: Axis) -> Tensor:
    return _swap_for_heads(axis, (x,))[0]


def _to_positions(x: Tensor, axis: Axis) -> Tensor:
    return _swap_for_positions(axis, (x,))[0]
