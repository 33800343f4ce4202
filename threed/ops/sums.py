"""Sums on a GPU in two stages, parts of blocks and then their sum, in a fixed order: csrc/cuda/sums.cu."""

from __future__ import annotations

from dataclasses import dataclass

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
    whole = (
        x.dtype == torch.float32 and x.numel() % 4 == 0 and x.is_contiguous() and launch.aligned(x)
    )
    return whole and launch.available(x)


def column_fits(x: Tensor) -> bool:
    """Returns whether `column_sums` takes rows x [n h]."""
    return x.shape[1] % 8 == 0 and launch.ready(x) and launch.packed(x)


@dataclass(frozen=True, eq=False)
class Parts:
    """A sum in parts [k h]. out: fp32 [h], gets it; add: plus what it held."""

    parts: Tensor
    out: Tensor
    add: bool


def add_parts(first: Parts, second: Parts | None = None) -> None:
    """Adds up the parts of one sum, or of two of one shape. Launches one kernel."""
    for one in (first, second) if second is not None else (first,):
        fits = (
            one.parts.dtype == one.out.dtype == torch.float32
            and one.parts.shape == first.parts.shape
        )
        fits = (
            fits
            and one.parts.dim() == 2
            and one.parts.shape[1] == one.out.numel()
            and one.out.numel() % 4 == 0
        )
        fits = fits and all(t.is_contiguous() and launch.aligned(t) for t in (one.parts, one.out))
        wanted = "fp32 parts [k h] and out [h], 16-byte aligned, h a multiple of 4"
        launch.check(fits, "add_parts", wanted, one.parts, one.out)
    if first.out.numel():
        of_second = (
            (None, None, False) if second is None else (second.parts, second.out, second.add)
        )
        launch.start("add_parts", first.parts, first.out, first.add, *of_second, *first.parts.shape)


def column_sums(x: Tensor, out: Tensor, *, add: bool) -> None:
    """out fp32 [h] = the sum over rows of x bf16 [n h], plus what it held if `add`. 2 bytes an element; two kernels."""
    _COLUMN_SUMS(x, out, add)


def square_sum(x: Tensor) -> Tensor:
    """The sum of the squares of x [n], fp32, as an fp64 scalar. 4 bytes an element; two kernels in one launch."""
    total: Tensor = _SQUARE_SUM(x)
    return total


def _start_column_sums(x: Tensor, out: Tensor, add: bool) -> None:
    fits = x.dim() == 2 and x.shape[1] % 8 == 0 and launch.packed(x)
    launch.check(
        fits, "column_sums", "bf16 [n h], contiguous and 16-byte aligned, h a multiple of 8", x
    )
    parts = x.new_empty(row_blocks(x), x.shape[1], dtype=torch.float32)
    if parts.numel():
        launch.start("column_sums", x, parts, len(x), x.shape[1], len(parts))
    add_parts(Parts(parts, out, add))


def _start_square_sum(x: Tensor) -> Tensor:
    fits = (
        x.dtype == torch.float32 and x.is_contiguous() and x.numel() % 4 == 0 and launch.aligned(x)
    )
    launch.check(
        fits, "square_sum", "fp32 [n], contiguous and 16-byte aligned, n a multiple of 4", x
    )
    blocks = max(1, min(8 * device.processors(x.device), -(-x.numel() // 8192)))
    parts, out = x.new_empty(blocks), x.new_empty((), dtype=torch.float64)
    launch.start("square_sum", x, parts, out, x.numel(), blocks)
    return out


_COLUMN_SUMS = launch.define(
    "column_sums_(Tensor x, Tensor(a!) out, bool add) -> ()",
    _start_column_sums,
    lambda x, out, add: None,
    launches=2,
)
_SQUARE_SUM = launch.define(
    "square_sum(Tensor x) -> Tensor",
    _start_square_sum,
    lambda x: x.new_empty((), dtype=torch.float64),
    launches=2,
)
