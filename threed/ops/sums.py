"""Sums on a GPU in two stages, parts of blocks and then their sum, in a fixed order: csrc/cuda/sums.cu."""

from __future__ import annotations

import torch
from torch import Tensor

from threed import device
from threed.ops import launch

ROWS_OF_A_BLOCK = 64  # at least: fewer, and the parts would be as large as what is summed
PER_PROCESSOR = 2


def row_blocks(x: Tensor) -> int:
    """Returns into how many parts the sum over the rows of x [n h] is cut."""
    return max(1, min(PER_PROCESSOR * device.processors(x.device), -(-len(x) // ROWS_OF_A_BLOCK)))


def fits(x: Tensor) -> bool:
    """Returns whether `square_sum` takes x."""
    whole = x.dtype == torch.float32 and x.numel() % 4 == 0 and x.is_contiguous() and launch.aligned(x)
    return whole and launch.available(x)


def add_parts(parts: Tensor | None, out: Tensor, *, add: bool) -> None:
    """out [h] = their sum over parts [k h], plus what it held if `add`; fp32. Launches one kernel."""
    if parts is None:
        return
    fits = parts.dtype == out.dtype == torch.float32 and parts.dim() == 2 and parts.shape[1] == out.numel()
    fits = fits and parts.is_contiguous() and out.is_contiguous() and out.numel() % 4 == 0
    fits = fits and launch.aligned(parts) and launch.aligned(out)
    launch.check(fits, "add_parts", "fp32 parts [k h] and out [h], 16-byte aligned, h a multiple of 4", parts, out)
    if out.numel():
        launch.start("add_parts", parts, out, len(parts), out.numel(), add)


def column_sums(x: Tensor, out: Tensor, *, add: bool) -> None:
    """out fp32 [h] = the sum over rows of x bf16 [n h], plus what it held if `add`. 2 bytes an element; two kernels."""
    _COLUMN_SUMS(x, out, add)


def square_sum(x: Tensor) -> Tensor:
    """The sum of the squares of x [n], fp32, as an fp64 scalar. 4 bytes an element; two kernels in one launch."""
    total: Tensor = _SQUARE_SUM(x)
    return total


def _start_column_sums(x: Tensor, out: Tensor, add: bool) -> None:
    fits = x.dim() == 2 and x.shape[1] % 8 == 0 and launch.packed(x)
    launch.check(fits, "column_sums", "bf16 [n h], contiguous and 16-byte aligned, h a multiple of 8", x)
    parts = x.new_empty(row_blocks(x), x.shape[1], dtype=torch.float32)
    if parts.numel():
        launch.start("column_sums", x, parts, len(x), x.shape[1], len(parts))
    add_parts(parts, out, add=add)


def _start_square_sum(x: Tensor) -> Tensor:
    fits = x.dtype == torch.float32 and x.is_contiguous() and x.numel() % 4 == 0 and launch.aligned(x)
    launch.check(fits, "square_sum", "fp32 [n], contiguous and 16-byte aligned, n a multiple of 4", x)
    blocks = max(1, min(8 * device.processors(x.device), -(-x.numel() // 8192)))
    parts, out = x.new_empty(blocks), x.new_empty((), dtype=torch.float64)
    launch.start("square_sum", x, parts, out, x.numel(), blocks)
    return out


_COLUMN_SUMS = launch.define(
    "column_sums_(Tensor x, Tensor(a!) out, bool add) -> ()", _start_column_sums, lambda x, out, add: None, launches=2
)
_SQUARE_SUM = launch.define(
    "square_sum(Tensor x) -> Tensor", _start_square_sum, lambda x: x.new_empty((), dtype=torch.float64), launches=2
)
