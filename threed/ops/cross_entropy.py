"""Cross entropy over a vocabulary that is cut over ranks; the logits are never gathered.

Each rank finds its shard's maximum, its sum of exponentials and the target's logit if it holds it; one all-gather of
these three numbers per token replaces the logits (Megatron-LM, arXiv 1909.08053, section 3, sends two and the maximum
first). The logits' memory becomes the exponentials and then the gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from threed import collectives, device
from threed.ops import fused_cpu, launch
from threed.topology import Axis


def reference(logits: Tensor, targets: Tensor) -> Tensor:
    """The loss of every token, fp32 or fp64 [...], from whole logits [... v]; targets below 0 cost nothing."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    flat = F.cross_entropy(
        logits.flatten(0, -2), targets.clamp(min=-1).flatten(), reduction="none", ignore_index=-1
    )
    return flat.view_as(targets)


class _CrossEntropy(torch.autograd.Function):
    """The loss of every token.

    csrc/cpu/fused.cpp, where it takes the logits, leaves them as they are until the backward. Otherwise their memory
    holds the exponentials meanwhile, in fp32 at least.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, axis: Axis, first: int, columns: int
    ) -> Tensor:
        fused = columns > 0 and fused_cpu.fits(logits)
        whole = axis.size == 1 and columns > 0
        narrow = not fused and logits.dtype not in (torch.float32, torch.float64)
        wide = logits.float() if narrow else logits
        counted = held = targets >= 0
        if whole:
            local = targets.clamp(0, columns - 1)
        else:
            local = targets - first
            held = counted & (local >= 0) & (local < columns)
            local = local.masked_fill(~held, 0)
        local = local.unsqueeze(-1)
        hit = wide.gather(-1, local).squeeze(-1) if columns else wide.new_zeros(targets.shape)
        if fused:
            top, total = fused_cpu.row_numbers(logits, columns)
        else:
            top, total = _shard_numbers(wide if columns == wide.shape[-1] else wide[..., :columns])
        logarithm, scale, hit = _over_shards(top, total, hit if whole else hit * held, axis)
        ctx.save_for_backward(wide, local, held, counted, logarithm if fused else scale)
        ctx.fused, ctx.whole, ctx.columns, ctx.dtype = fused, whole, columns, logits.dtype
        return (logarithm - hit).where(counted, 0.0)

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, None, None, None, None]:
        wide, local, held, counted, number = ctx.saved_tensors
        dloss, columns = dloss.where(counted, 0.0), ctx.columns
        if ctx.fused:
            own = local.squeeze(-1).masked_fill(~held, -1)
            fused_cpu.softmax_gradient_(wide, columns, number, dloss, own)
            return wide, None, None, None, None
        grad = wide if columns == wide.shape[-1] else wide[..., :columns]
        grad.mul_((number * dloss).unsqueeze(-1))  # exponentials -> softmax, times dloss
        if columns:
            grad.scatter_add_(-1, local, -(dloss if ctx.whole else dloss * held).unsqueeze(-1))
        if columns < wide.shape[-1]:
            wide[..., columns:].zero_()
        return wide.to(ctx.dtype), None, None, None, None


def _shard_numbers(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Maximum and sum of exponentials of a shard; `scores` become exponentials."""
    if scores.shape[-1] == 0:
        zero = scores.new_zeros(scores.shape[:-1])
        return zero - torch.inf, zero
    top = scores.amax(-1)
    return top, scores.sub_(top.unsqueeze(-1)).exp_().sum(-1)


def _over_shards(
    top: Tensor, total: Tensor, hit: Tensor, axis: Axis
) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row: the logarithm of the sum of exponentials over all shards, what this shard's e^(x - top) are to be
    multiplied by to be probabilities, and the target's logit."""
    if axis.size == 1:
        return top + total.log(), total.reciprocal(), hit
    # [t 3 ...]
    rows = collectives.all_gather(torch.stack((top, total, hit.to(top.dtype))).unsqueeze(0), axis)
    peak = rows[:, 0].amax(0)
    whole = (rows[:, 1] * torch.exp(rows[:, 0] - peak)).sum(0)
    return peak + whole.log(), torch.exp(top - peak) / whole, rows[:, 2].sum(0)


def vocab_parallel_cross_entropy(
    logits: Tensor, targets: Tensor, axis: Axis, first: int, columns: int | None = None
) -> Tensor:
    """The loss of every token [...], fp32 (fp64 for fp64 logits), the same on every rank of the axis.

    logits: [... v/t], whose memory is used up (fp32 and fp64; a narrower type is copied). targets: int64 [...], global
    ids; those below 0 cost nothing. first: the global id of the shard's first column. columns: the shard's, where
    there is padding behind them, whose gradient is zero.
    """
    width = logits.shape[-1] if columns is None else columns
    losses: Tensor = _CrossEntropy.apply(logits, targets, axis, first, width)
    return losses


# ------------------------------------------------------------------------------------------ csrc/cuda/cross_entropy.cu
#
# The gradient is made in the forward, in the logits' place, times a scalar `weight` that is known by then. logits:
# bf16 [n width], of which `columns` are the shard's and the rest is padding; targets: int64 [n], global ids; first: the
# id of the shard's first column. Targets outside of the vocabulary cost nothing.

ROW_IN_SHARED_MEMORY = 112 << 10  # bytes: two such blocks fit a multiprocessor (227 KiB on sm_90)
OF_WARPS = 128  # bytes of shared memory that the kernel of `whole` uses in addition to the row


def fits(logits: Tensor) -> bool:
    """Returns whether the kernels take logits [... width]."""
    width = logits.shape[-1]
    return width > 0 and width % 8 == 0 and launch.ready(logits) and launch.packed(logits)


def row_fits(columns: int, logits: Tensor) -> bool:
    """Returns whether a row of `columns` columns fits into the GPU's shared memory, as `whole` requires."""
    row = -(-columns // 8) * 16
    return row <= ROW_IN_SHARED_MEMORY and row + OF_WARPS <= device.shared_memory(
        launch.gpu_of(logits)
    )


def _losses(logits: Tensor, *rest: object) -> Tensor:
    return logits.new_empty(len(logits), dtype=torch.float32)


def _three(logits: Tensor, *rest: object) -> Tensor:
    return logits.new_empty(len(logits), 3, dtype=torch.float32)


@launch.operator(
    "cross_entropy_(Tensor(a!) logits, Tensor targets, Tensor weight, int columns) -> Tensor",
    _losses, launches=1,
)  # fmt: skip
def whole(logits: Tensor, targets: Tensor, weight: Tensor, columns: int) -> Tensor:
    """Returns the loss of each row, fp32 [n]; logits become d(their sum * weight)/d(logits). 4 bytes a logit."""
    _check(logits, targets, weight, columns)
    loss, (rows, width) = _losses(logits), logits.shape
    if rows:
        launch.start("cross_entropy", logits, targets, weight, loss, rows, columns, width)
    return loss


@launch.operator(
    "cross_entropy_numbers(Tensor logits, Tensor targets, int columns, int first) -> Tensor",
    _three, launches=1,
)  # fmt: skip
def shard_numbers(logits: Tensor, targets: Tensor, columns: int, first: int) -> Tensor:
    """Returns of each row, in powers of two: its largest exponent, the sum of powers below that, and the target's
    logit or 0, fp32 [n 3]. 2 bytes a logit."""
    _check(logits, targets, None, columns)
    out, (rows, width) = _three(logits), logits.shape
    if rows:
        launch.start("cross_entropy_stats", logits, targets, out, rows, columns, width, first)
    return out


@launch.operator(
    "cross_entropy_from_numbers_(Tensor(a!) logits, Tensor targets, Tensor weight, Tensor numbers, int columns,"
    " int first, int vocabulary) -> Tensor",
    _losses, launches=1,
)  # fmt: skip
def from_numbers(
    logits: Tensor, targets: Tensor, weight: Tensor, numbers: Tensor, columns: int, first: int, vocabulary: int
) -> Tensor:  # fmt: skip
    """As `whole`, of a shard, from all shards' numbers [t n 3] in the order of ranks. 4 bytes a logit."""
    _check(logits, targets, weight, columns)
    loss, (rows, width) = _losses(logits), logits.shape
    fits = numbers.dtype == torch.float32 and numbers.shape == (len(numbers), rows, 3)
    launch.check(
        fits and numbers.is_contiguous(), "from_numbers", "numbers fp32 [t n 3]", logits, numbers
    )
    if rows:
        launch.start(
            "cross_entropy_gradient", logits, targets, weight, numbers, loss, rows, columns, width, first,
            vocabulary, len(numbers),
        )  # fmt: skip
    return loss


@launch.operator("scale_(Tensor(a!) x, Tensor factor) -> ()", lambda x, factor: None, launches=1)
def scale_(x: Tensor, factor: Tensor) -> None:
    """Multiplies x, bf16, by an fp32 scalar in place; reads nothing else if that is 1."""
    fits = factor.dtype == torch.float32 and factor.numel() == 1 and x.numel() % 8 == 0
    wanted = "x bf16, 16-byte aligned, a multiple of 8 numbers; factor an fp32 scalar"
    launch.check(fits and launch.packed(x), "scale_", wanted, x, factor)
    if x.numel():
        blocks = min(8 * device.processors(x.device), -(-x.numel() // 2048))
        launch.start("scale", x, factor, x.numel(), blocks)


def _check(logits: Tensor, targets: Tensor, weight: Tensor | None, columns: int) -> None:
    """Raises ValueError for what the kernels would misread."""
    fits = logits.dim() == 2 and launch.packed(logits) and logits.shape[1] % 8 == 0
    fits = fits and 0 <= columns <= logits.shape[1] and targets.shape == logits.shape[:1]
    fits = fits and targets.dtype == torch.int64 and targets.is_contiguous()
    if weight is not None:
        fits = fits and weight.dtype == torch.float32 and weight.numel() == 1
    wanted = "logits bf16 [n width], 16-byte aligned, width a multiple of 8; targets int64 [n]; weight an fp32 scalar"
    launch.check(fits, "cross_entropy", wanted, logits, targets, weight)


class _Weighted(torch.autograd.Function):
    """The sum of the losses times `weight` by our kernels, which make the gradient in the forward, in the logits'
    memory."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, weight: Tensor, axis: Axis, first: int, columns: int,
        vocabulary: int,
    ) -> Tensor:  # fmt: skip
        rows, ids, weight = logits.view(-1, logits.shape[-1]), targets.flatten(), weight.float()
        if axis.size == 1 and row_fits(columns, logits):
            losses = whole(rows, ids, weight, columns)
        else:
            numbers = shard_numbers(rows, ids, columns, first).unsqueeze(0)
            numbers = collectives.all_gather(numbers, axis)
            losses = from_numbers(rows, ids, weight, numbers, columns, first, vocabulary)
        ctx.save_for_backward(rows.detach())
        ctx.shape = logits.shape
        return losses.sum() * weight

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        scale_(gradient, dloss.float())  # at the root of a backward 1, and then it only looks
        return gradient.view(ctx.shape), *(None,) * 6


def weighted_loss(
    logits: Tensor,
    targets: Tensor,
    weight: Tensor,
    axis: Axis,
    first: int,
    *,
    columns: int,
    vocabulary: int,
) -> Tensor:
    """The sum of all tokens' losses times `weight`, a scalar, fp32 (fp64 for fp64 logits), the same on every rank.

    Arguments as in `vocab_parallel_cross_entropy`, and: weight, a scalar tensor; vocabulary: the columns of all ranks.
    By our kernels it makes the gradient in the forward, and can be differentiated once.
    """
    trained = logits.requires_grad and not weight.requires_grad and torch.is_grad_enabled()
    if trained and fits(logits):
        loss: Tensor = _Weighted.apply(logits, targets, weight, axis, first, columns, vocabulary)
        return loss
    losses = vocab_parallel_cross_entropy(logits, targets, axis, first, columns)
    return losses.sum() * weight.to(losses.dtype)
