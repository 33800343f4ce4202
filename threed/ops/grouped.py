"""Matrix products of groups of rows, each multiplied by another matrix (a mixture of experts).

    y = product(x, weights, groups)        the rows of each group times its matrix

GPUs since Hopper compute bf16 products of all groups in one kernel (`torch._grouped_mm`; see
`in_one_kernel`). Elsewhere there is one product per group that has rows. The kernel's products for the
gradients of weights are bf16, and are then added to the buffer of the gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from threed.core import device
from threed.ops import launch, matmul


class Groups(NamedTuple):
    """The groups of consecutive rows.

    Attributes:
        ends: index after the last row of each group, on the device of the rows, int32 [e]. Rows
            after the last group belong to no group; their products are undefined.
        sizes: number of rows of each group; only used if `in_one_kernel` is False.
    """

    ends: Tensor
    sizes: Sequence[int]


def product(x: Tensor, weights: Tensor, groups: Groups) -> Tensor:
    """Returns the product of each group of rows and its matrix, x w^T, without autograd.

    Args:
        x: the rows of all groups, in order of groups, [n in].
        weights: one matrix per group, [e out in], with any strides.
        groups: the groups, with at most n rows in all.

    Returns:
        [n out].
    """
    if in_one_kernel(x, weights):
        return torch._grouped_mm(x, weights.transpose(1, 2), offs=groups.ends)
    out = x.new_empty(len(x), weights.shape[1])
    for group, rows in _slices(groups, len(x)):
        torch.mm(x[rows], weights[group].t(), out=out[rows])
    return out


def add_products_(out: Tensor, dy: Tensor, x: Tensor, groups: Groups, *, fresh: bool) -> None:
    """Computes out[i] += dy_i^T x_i for the rows of each group i, or out[i] = dy_i^T x_i if `fresh`.

    Args:
        out: one matrix per group, [e out in], in the dtype of dy or a wider one.
        dy: the rows of all groups, [n out].
        x: the rows of all groups, [n in].
        groups: the groups, with at most n rows in all.
        fresh: whether to overwrite `out`; matrices of groups without rows become zero.
    """
    if in_one_kernel(x, out):
        found = torch._grouped_mm(dy.t(), x, offs=groups.ends)
        out.copy_(found) if fresh else out.add_(found)
        return
    if fresh and 0 in groups.sizes:
        out.zero_()
    for group, rows in _slices(groups, len(x)):
        matmul.add_product_(out[group], dy[rows].t(), x[rows], fresh=fresh)


def group_of_rows(groups: Groups, rows: int) -> Tensor:
    """Returns the number of each row's group, int64 [n], without a read by the host.

    Args:
        groups: the groups.
        rows: number of rows n. Rows behind the last group get the number of the last group.
    """
    ends = groups.ends
    index = torch.arange(rows, dtype=ends.dtype, device=ends.device)
    return torch.searchsorted(ends, index, right=True).clamp_(max=len(ends) - 1)


def sums(x: Tensor, groups: Groups) -> Tensor:
    """Returns the sum of the rows of each group, in a fixed order: x [n out] -> [e out].

    The sums are in fp32 at least, but if one kernel computes those of all groups, in 16 bits.
    """
    count, wide = len(groups.ends), torch.promote_types(x.dtype, torch.float32)
    if in_one_kernel(x, x.new_empty(0, x.shape[1], 8)):
        ones = x.new_ones(len(x), 8)  # the kernel needs rows of 16 bytes
        return torch._grouped_mm(x.t(), ones, offs=groups.ends)[..., 0]
    out = x.new_zeros(count, x.shape[1], dtype=wide)
    for group, rows in _slices(groups, len(x)):
        torch.sum(x[rows], 0, dtype=wide, out=out[group])
    return out


def kernel_flops(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    """Returns the FLOPs of `torch._grouped_mm`: a [n in], b [e in out], or a [out n], b [n in]."""
    return 2 * a.shape[0] * a.shape[1] * b.shape[-1]


def in_one_kernel(x: Tensor, weights: Tensor) -> bool:
    """Returns whether one kernel computes the products of all groups: x [n in], weights [e out in].

    The kernel needs bf16 and rows of a multiple of 16 bytes. On GPUs before Hopper torch has no such
    kernel: it reads the sizes on the host for each product.
    """
    aligned = weights.shape[1] % 8 == weights.shape[2] % 8 == 0
    fits = launch.on_gpu(x) and x.dtype == torch.bfloat16 and aligned
    return fits and device.multiplies_groups(launch.gpu_of(x))


def _slices(groups: Groups, rows: int) -> Iterator[tuple[int, slice]]:
    """Yields (number of the group, its rows) for each group that has rows."""
    if len(groups.sizes) != len(groups.ends):
        raise ValueError(f"sizes of {len(groups.sizes)} groups on the host, of {len(groups.ends)}")
    first = 0
    for group, size in enumerate(groups.sizes):
        if size:
            yield group, slice(first, first + size)
        first += size
    if first > rows:
        raise ValueError(f"groups of {first} rows for {rows} rows")
