"""Collectives with a backward, in pairs: copy_to and reduce_from, gather_from and scatter_to.

In each pair, the backward of one function is the forward of the other (Megatron-LM, arXiv
1909.08053 section 3; for sequence parallelism, arXiv 2205.05198 section 4.2.2).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from threed.distributed import collectives
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
    return collectives.all_reduce(
        dy.clone(), axis
    )  # a copy: NCCL sums in place, and another branch may use dy


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
    return (
        x
        if axis.size == 1
        else _Conjugate.apply(x, axis, collectives.all_gather, collectives.reduce_scatter)
    )


def scatter_to(x: Tensor, axis: Axis) -> Tensor:
    """Returns this rank's part of the sum of x over ranks; the backward all-gathers. Collective.

    Args:
        x: this rank's term, [s ...].
        axis: the t ranks.

    Returns:
        This rank's part of the sum, [s/t ...].
    """
    return (
        x
        if axis.size == 1
        else _Conjugate.apply(x, axis, collectives.reduce_scatter, collectives.all_gather)
    )
