"""Matrix products of groups of rows, each with a matrix of its own (a mixture of experts).

    y = product(x, weights, sizes)         the first sizes[0] rows by weights[0], and so on

GPUs compute 16-bit products of all groups in one kernel (`torch._grouped_mm`). Elsewhere there is
one product per group that has rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from threed.ops import launch, matmul


def product(x: Tensor, weights: Tensor, sizes: Sequence[int]) -> Tensor:
    """Returns the product of each group of rows and its matrix, x w^T, without autograd.

    Args:
        x: the rows of all groups, in order of groups, [n in].
        weights: one matrix per group, [e out in], with any strides.
        sizes: number of rows of each group; their sum is n.

    Returns:
        [n out].
    """
    if _in_one_kernel(x):
        return torch._grouped_mm(x, weights.transpose(1, 2), offs=_ends(sizes, x.device))
    out = x.new_empty(len(x), weights.shape[1])
    for group, rows in _groups(sizes):
        torch.mm(x[rows], weights[group].t(), out=out[rows])
    return out


def add_products_(out: Tensor, dy: Tensor, x: Tensor, sizes: Sequence[int], *, fresh: bool) -> None:
    """Computes out[i] += dy_i^T x_i for the rows of each group i, or out[i] = dy_i^T x_i if `fresh`.

    Args:
        out: one matrix per group, [e out in], in the dtype of dy or a wider one.
        dy: the rows of all groups, [n out].
        x: the rows of all groups, [n in].
        sizes: number of rows of each group.
        fresh: whether to overwrite `out`; matrices of groups without rows become zero.
    """
    if _in_one_kernel(x):
        ends = _ends(sizes, x.device)
        found = torch._grouped_mm(dy.t(), x, offs=ends)
        out.copy_(found) if fresh else out.add_(found)
        return
    if fresh and 0 in sizes:
        out.zero_()
    for group, rows in _groups(sizes):
        matmul.add_product_(out[group], dy[rows].t(), x[rows], fresh=fresh)


def _in_one_kernel(x: Tensor) -> bool:
    return launch.on_gpu(x) and x.dtype == torch.bfloat16 and len(x) > 0


def _ends(sizes: Sequence[int], device: torch.device) -> Tensor:
    """Returns the index after the last row of each group, int32 [e]."""
    return torch.tensor(sizes).cumsum(0).to(torch.int32).to(device, non_blocking=True)


def _groups(sizes: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Yields (number of the group, its rows) for each group that has rows."""
    first = 0
    for group, size in enumerate(sizes):
        if size:
            yield group, slice(first, first + size)
        first += size
