"""Sums on a GPU in two stages: a partial sum per thread block, then the sum of all partial sums.

Both stages add in a fixed order, so results are reproducible. The kernels are in csrc/cuda/sums.cu.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from threed.core import device
from threed.ops import launch

# minimum number of rows per thread block; with far fewer rows, the partial sums would take as much
# memory as the input
ROWS_OF_A_BLOCK = 64
PER_PROCESSOR = 2  # thread blocks per multiprocessor
SETS = 3  # maximum number of sets that a call of `add_parts` adds up


def row_blocks(x: Tensor) -> int:
    """Returns the number of groups of rows of x [n h]. Each group gets its own partial sum."""
    return max(1, min(PER_PROCESSOR * device.processors(x.device), -(-len(x) // ROWS_OF_A_BLOCK)))


def fits(x: Tensor) -> bool:
    """Returns whether `square_sum` supports x."""
    return _is_plain(x) and launch.available(x)


def _is_plain(x: Tensor) -> bool:
    """Returns whether x is fp32, contiguous and aligned, with a multiple of 4 elements."""
    plain = x.dtype == torch.float32 and x.is_contiguous() and launch.aligned(x)
    return plain and x.numel() % 4 == 0


def column_fits(x: Tensor) -> bool:
    """Returns whether `column_sums` supports x [n h]."""
    return x.shape[1] % 8 == 0 and launch.ready(x) and launch.packed(x)


@dataclass(frozen=True, eq=False)
class Parts:
    """Partial sums, and the tensor that receives their sum.

    Attributes:
        parts: k partial sums, fp32 [k h].
        out: fp32 [h], receives the sum over k.
        add: whether to add to `out` instead of overwriting it.
    """

    parts: Tensor
    out: Tensor
    add: bool


def add_parts(*several: Parts) -> None:
    """Adds up one to three sets of partial sums, each into its own `out`. Launches one kernel.

    Args:
        several: the sets. Their numbers of partial sums may differ, but not their h.
    """
    wanted = "fp32 parts [k h] and out [h], 16-byte aligned, h a multiple of 4"
    columns = several[0].out.numel()
    for one in several:
        fits = _is_plain(one.out) and one.parts.shape[1:] == (columns,) == (one.out.numel(),)
        fits = fits and one.parts.dtype == torch.float32 and one.parts.is_contiguous()
        launch.check(fits and launch.aligned(one.parts), "add_parts", wanted, one.parts, one.out)
    if columns:
        given = [x for one in several for x in (one.parts, one.out, one.add, len(one.parts))]
        absent = [None, None, False, 0] * (SETS - len(several))
        launch.start("add_parts", *given, *absent, len(several), columns)


@launch.operator(
    "column_sums_(Tensor x, Tensor(a!) out, *, bool add) -> ()",
    lambda x, out, add: None, launches=2,
)  # fmt: skip
def column_sums(x: Tensor, out: Tensor, *, add: bool) -> None:
    """Writes the sum over the rows of x to `out`, or adds it if `add`. Launches two kernels.

    Args:
        x: bf16 [n h], read once (2 bytes per element).
        out: fp32 [h].
        add: whether to add to `out` instead of overwriting it.
    """
    add_parts(Parts(column_parts(x), out, add))


def column_parts(x: Tensor) -> Tensor:
    """Returns sums over groups of rows of x [n h], fp32 [k h], for `add_parts`. Launches one kernel.

    Args:
        x: bf16 [n h], read once (2 bytes per element).
    """
    fits = x.dim() == 2 and x.shape[1] % 8 == 0 and launch.packed(x)
    wanted = "bf16 [n h], contiguous and 16-byte aligned, h a multiple of 8"
    launch.check(fits, "column_sums", wanted, x)
    parts = x.new_empty(row_blocks(x), x.shape[1], dtype=torch.float32)
    if parts.numel():
        launch.start("column_sums", x, parts, len(x), x.shape[1], len(parts))
    return parts


@launch.operator(
    "square_sum(Tensor x) -> Tensor", lambda x: x.new_empty((), dtype=torch.float64), launches=2
)
def square_sum(x: Tensor) -> Tensor:
    """Returns the sum of squares of x, fp32 [n], as an fp64 scalar. Launches two kernels.

    Reads 4 bytes per element.
    """
    wanted = "fp32 [n], contiguous and 16-byte aligned, n a multiple of 4"
    launch.check(_is_plain(x), "square_sum", wanted, x)
    blocks = max(1, min(8 * device.processors(x.device), -(-x.numel() // 8192)))
    parts, out = x.new_empty(blocks), x.new_empty((), dtype=torch.float64)
    launch.start("square_sum", x, parts, out, x.numel(), blocks)
    return out
