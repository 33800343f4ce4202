"""RMSNorm of every query and key head, followed by rotary positions, on GPUs.

One kernel (csrc/cuda/head_norm.cu) computes both. The backward computes the norm's scales again
from the input. Forward and backward read and write 4 and 6 bytes per element of queries and keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from threed.core import device
from threed.ops import launch, rotary, sums
from threed.ops.frequencies import Theta, rotated_size
from threed.ops.positions import Positions

SIZES = (64, 128, 256)  # sizes of a head that the kernels support
BLOCKS = 2  # thread blocks of the backward per multiprocessor, for each of queries, keys and values


@dataclass(frozen=True, eq=False)
class HeadNorm:
    """Arguments of `forward` and `backward`.

    Attributes:
        heads: number of query heads a and of key heads k.
        size: head's size d.
        theta: base of the frequencies, or a result of `ops.frequencies.frequencies`.
        positions: the s positions.
        offset: constant added to the weights.
        eps: constant added to the mean squares.
    """

    heads: tuple[int, int]
    size: int
    theta: Theta
    positions: Positions
    offset: float
    eps: float


def fits(x: Tensor, size: int, theta: Theta, *weights: Tensor) -> bool:
    """Returns whether the kernels support rows of heads x [s b width] and weights [d]."""
    supported = size in SIZES and rotated_size(theta, size) == size
    return (
        supported
        and launch.ready(x)
        and all(map(launch.packed, (x, *weights)))
        and x.shape[0] * x.shape[1] < 2**31
    )


def forward(x: Tensor, weights: tuple[Tensor, Tensor], by: HeadNorm) -> Tensor:
    """Returns the normalized and rotated heads of queries and keys, [s b (a+k)d].

    Launches one kernel.

    Args:
        x: rows of a query, k key and k value heads, bf16 [s b (a+2k)d].
        weights: of query and key norm, bf16 [d].
        by: the other arguments.
    """
    _check("head_norm", x, weights, by)
    table = rotary.table(by.positions, by.size, by.theta, x.device)
    return _start(x, *weights, table, *by.heads, by.offset, by.eps)


def backward(
    gradients: tuple[Tensor, Tensor, Tensor], x: Tensor, weights: tuple[Tensor, Tensor], by: HeadNorm,
    dweights: tuple[Tensor, Tensor], add: tuple[bool, bool],
) -> Tensor:  # fmt: skip
    """Returns the gradient of x, [s b (a+2k)d]. Launches two kernels.

    Args:
        gradients: of queries [s b a d], keys and values [s b k d], bf16. Gradients that a kernel
            cannot read in packs are copied first.
        x: as in `forward`.
        weights: as in `forward`.
        by: as in `forward`.
        dweights: fp32 [d], receive the gradients of the weights, sums over heads and rows.
        add: for each of `dweights`, whether to add to it instead of overwriting it.
    """
    _check("head_norm_backward", x, weights, by)
    dq, dk, dv = map(rotary.in_packs, gradients)
    (queries, keys), rows = by.heads, x.shape[:2]
    fits = dq.shape == (*rows, queries, by.size) and dk.shape == dv.shape == (*rows, keys, by.size)
    launch.check(fits, "head_norm_backward", "bf16 [s b a d] and [s b k d]", dq, dk, dv)
    table = rotary.table(by.positions, by.size, by.theta, x.device)
    return _start_backward(dq, dk, dv, x, *weights, table, by.offset, by.eps, *dweights, *add)


def _check(name: str, x: Tensor, weights: tuple[Tensor, Tensor], by: HeadNorm) -> None:
    queries, keys = by.heads
    fits = x.dim() == 3 and len(x) == by.positions.total and by.size in SIZES
    fits = fits and x.shape[2] == (queries + 2 * keys) * by.size and len(x) * x.shape[1] < 2**31
    fits = fits and all(w.shape == (by.size,) and launch.packed(w) for w in weights)
    fits = fits and launch.packed(x) and rotated_size(by.theta, by.size) == by.size
    wanted = f"bf16 [s b (a+2k)d] and [d], contiguous and 16-byte aligned, d one of {SIZES}"
    launch.check(fits, name, wanted, x, *weights)


def _normed(
    x: Tensor, q_weight: Tensor, k_weight: Tensor, table: Tensor, queries: int, keys: int,
    offset: float, eps: float,
) -> Tensor:  # fmt: skip
    return x.new_empty(*x.shape[:2], (queries + keys) * q_weight.numel())


@launch.operator(
    "head_norm(Tensor x, Tensor q_weight, Tensor k_weight, Tensor table, int queries, int keys,"
    " float offset, float eps) -> Tensor",
    _normed, launches=1,
)  # fmt: skip
def _start(
    x: Tensor, q_weight: Tensor, k_weight: Tensor, table: Tensor, queries: int, keys: int,
    offset: float, eps: float,
) -> Tensor:  # fmt: skip
    y = _normed(x, q_weight, k_weight, table, queries, keys, offset, eps)
    s, b, width = x.shape
    if y.numel():
        sizes = s * b, width, b, queries, keys, q_weight.numel()
        launch.start("head_norm", x, q_weight, k_weight, table, y, *sizes, offset, eps)
    return y


@launch.operator(
    "head_norm_backward(Tensor dq, Tensor dk, Tensor dv, Tensor x, Tensor q_weight, Tensor k_weight, Tensor table,"
    " float offset, float eps, Tensor(a!) dq_weight, Tensor(b!) dk_weight, bool add_q, bool add_k) -> Tensor",
    lambda dq, dk, dv, x, *rest: torch.empty_like(x), launches=2,
)  # fmt: skip
def _start_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, x: Tensor, q_weight: Tensor, k_weight: Tensor, table: Tensor,
    offset: float, eps: float, dq_weight: Tensor, dk_weight: Tensor, add_q: bool, add_k: bool,
) -> Tensor:  # fmt: skip
    dx, (s, b, queries, size) = torch.empty_like(x), dq.shape
    blocks = max(1, min(BLOCKS * device.processors(x.device), -(-s * b // 8)))
    parts = torch.empty(2, blocks, size, dtype=torch.float32, device=x.device)
    strides = (stride for g in (dq, dk, dv) for stride in g.stride()[:3])
    launch.start(
        "head_norm_backward", dq, dk, dv, x, q_weight, k_weight, table, dx, parts, *strides, s * b, b, queries,
        dk.shape[2], size, blocks, offset, eps,
    )  # fmt: skip
    sums.add_parts(sums.Parts(parts[0], dq_weight, add_q), sums.Parts(parts[1], dk_weight, add_k))
    return dx
