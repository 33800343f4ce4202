"""RMSNorm (arXiv 1910.07467) and LayerNorm (arXiv 1607.06450) of bf16 rows on GPUs.

The kernels (csrc/cuda/norm.cu) also compute the residual addition before the norm.

Forward: s = x + residual + before, rounded to bf16, and y = norm(s); `before` is a bias.
Backward: ds = dresidual + the gradient of s through norm(s), and the gradients of weight and bias.
Forward and backward each read and write 8 bytes of memory per element. Sums over rows are computed
in a fixed order, so results are reproducible.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from threed.core import device
from threed.ops import launch, sums

LARGEST = 16384  # maximum number of elements per row that the kernels support
# (largest row size, blocks per multiprocessor) of the backward, limited by registers
_BLOCKS_OF_BACKWARD = ((256, 3), (1024, 2), (2048, 4), (4096, 2), (LARGEST, 1))


@dataclass(frozen=True, eq=False)
class Normalized:
    """Results of `forward`.

    Attributes:
        sum: the input of the norm, x + residual + before, bf16 [n h]. Without residual and before
            it is x itself.
        y: output, bf16 [n h].
        means: LayerNorm's mean per row, fp32 [n], for the backward.
        scales: 1 / sqrt(variance + eps) per row, fp32 [n], for the backward; RMSNorm's variance is
            the mean square.
    """

    sum: Tensor
    y: Tensor
    means: Tensor | None
    scales: Tensor


def reference(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, layer: bool) -> Tensor:
    """Returns LayerNorm (if `layer`) or RMSNorm of x [... h] over h, by plain operations."""
    if layer:
        x = x - x.mean(-1, keepdim=True)
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
    return y if bias is None else y + bias


def fits(x: Tensor, *vectors: Tensor | None) -> bool:
    """Returns whether the kernel supports x [... h] and weights [h].

    A weight that is a view of a buffer may be unaligned. The kernel does not support such a weight.
    """
    h = x.shape[-1]
    if h % 8 or not 0 < h <= LARGEST or x.numel() >= h << 31 or not launch.ready(x):
        return False
    return launch.packed(x) and all(vector is None or launch.packed(vector) for vector in vectors)


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, layer: bool, residual: Tensor | None = None,
    before: Tensor | None = None,
) -> Normalized:  # fmt: skip
    """Computes norm(x + residual + before). Launches one kernel.

    Args:
        x: rows, bf16 [n h].
        weight: bf16 [h].
        bias: bf16 [h], for LayerNorm.
        eps: constant added to the variance (to the mean square in RMSNorm).
        layer: whether the norm is LayerNorm; otherwise it is RMSNorm.
        residual: rows to add to x, bf16 [n h].
        before: bf16 [h], a bias added before the norm.
    """
    total, y, means, scales = _start(x, residual, before, weight, bias, eps, layer)
    return Normalized(
        x if residual is None and before is None else total, y, means if layer else None, scales
    )


def backward(
    dy: Tensor, result: Normalized, weight: Tensor, dweight: Tensor, dbias: Tensor | None, *, add: bool,
    add_bias: bool = False, residual: Tensor | None = None, dbefore: Tensor | None = None, add_before: bool = False,
) -> Tensor:  # fmt: skip
    """Returns the gradient of `sum` [n h], plus `residual`.

    Launches two kernels. With `dbefore` a third kernel reads the returned gradient once more.

    Args:
        dy: gradient of y, bf16 [n h].
        result: result of `forward`.
        weight: bf16 [h].
        dweight: fp32 [h], receives the weight's gradient, a sum over rows.
        dbias: fp32 [h], receives the bias's gradient.
        add: whether to add to dweight instead of overwriting it.
        add_bias: whether to add to dbias instead of overwriting it.
        residual: gradient of the residual branch, bf16 [n h].
        dbefore: fp32 [h], receives the gradient of `before`; None if it is not needed.
        add_before: whether to add to dbefore instead of overwriting it.
    """
    return _start_backward(
        dy, result.sum, weight, result.means, result.scales, residual, dweight, dbias, dbefore, add, add_bias, add_before
    )  # fmt: skip


def _outputs(
    x: Tensor, residual: Tensor | None, before: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float,
    layer: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    total = torch.empty_like(x) if residual is not None or before is not None else x.new_empty(0)
    means, scales = (x.new_empty(n, dtype=torch.float32) for n in (len(x) * layer, len(x)))
    return total, torch.empty_like(x), means, scales


@launch.operator(
    "norm(Tensor x, Tensor? residual, Tensor? before, Tensor weight, Tensor? bias, float eps, bool layer)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _outputs, launches=1,
)  # fmt: skip
def _start(
    x: Tensor, residual: Tensor | None, before: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float,
    layer: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    rows, h = _check("norm", x, weight, (residual,), (bias, before))
    total, y, means, scales = _outputs(x, residual, before, weight, bias, eps, layer)
    if x.numel():
        launch.start(
            "norm", x, residual, before, weight, bias, total if total.numel() else None, y, means if layer else None,
            scales, rows, h, eps,
        )  # fmt: skip
    return total, y, means, scales


@launch.operator(
    "norm_backward(Tensor dy, Tensor total, Tensor weight, Tensor? means, Tensor scales, Tensor? residual,"
    " Tensor(a!) dweight, Tensor(b!)? dbias, Tensor(c!)? dbefore, bool add, bool add_bias, bool add_before) -> Tensor",
    lambda dy, *rest: torch.empty_like(dy), launches=lambda *args: 2 if args[8] is None else 3,
)  # fmt: skip
def _start_backward(
    dy: Tensor, total: Tensor, weight: Tensor, means: Tensor | None, scales: Tensor, residual: Tensor | None,
    dweight: Tensor, dbias: Tensor | None, dbefore: Tensor | None, add: bool, add_bias: bool, add_before: bool,
) -> Tensor:  # fmt: skip
    rows, h = _check("norm_backward", dy, weight, (total, residual), ())
    pairs = [(dweight, add), (dbias, add_bias), (dbefore, add_before)]
    gradients = [g for g, _ in pairs if g is not None]
    fits = all(g.dtype == torch.float32 and g.numel() == h and g.is_contiguous() for g in gradients)
    launch.check(fits, "norm_backward", "dweight, dbias and dbefore fp32 [h]", *gradients)
    dx = torch.empty_like(dy)
    blocks = max(1, min(blocks_of_backward(h) * device.processors(dy.device), rows))
    dw_parts, db_parts = (
        None if g is None else torch.empty(blocks, h, dtype=torch.float32, device=dy.device)
        for g in (dweight, dbias)
    )  # fmt: skip
    launch.start(
        "norm_backward", dy, total, weight, means, scales, residual, dx, dw_parts, db_parts, rows, h, blocks
    )  # fmt: skip
    parts = (dw_parts, db_parts, None if dbefore is None else sums.column_parts(dx))
    sums.add_parts(*(
        sums.Parts(part, g, added)
        for part, (g, added) in zip(parts, pairs, strict=True)
        if part is not None and g is not None
    ))  # fmt: skip
    return dx


def blocks_of_backward(h: int) -> int:
    """Returns the number of thread blocks per multiprocessor in the backward, for rows of size h.

    All of them run at the same time. Each block writes partial gradients of the weights, so more
    blocks would only write more.
    """
    return next(blocks for largest, blocks in _BLOCKS_OF_BACKWARD if h <= largest)


def _check(
    name: str,
    x: Tensor,
    weight: Tensor,
    rows: tuple[Tensor | None, ...],
    vectors: tuple[Tensor | None, ...],
) -> tuple[int, int]:
    """Returns (rows, columns) of x.

    Raises:
        ValueError: if the kernel does not support these tensors.
    """
    h = weight.numel()
    tensors = [t for t in (x, weight, *rows, *vectors) if t is not None]
    fits = x.dim() == 2 and x.shape[1] == h and h % 8 == 0 and 0 < h <= LARGEST and len(x) < 2**31
    fits = fits and all(t is None or t.shape == x.shape for t in rows)
    fits = (
        fits
        and all(t is None or t.numel() == h for t in vectors)
        and all(map(launch.packed, tensors))
    )
    wanted = (
        f"bf16 [n h] and [h], contiguous and 16-byte aligned, h a multiple of 8 up to {LARGEST}"
    )
    launch.check(fits, name, wanted, *tensors)
    return len(x), h
