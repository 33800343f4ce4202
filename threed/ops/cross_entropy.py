"""Cross entropy over a vocabulary that is sharded over ranks; the logits are never gathered.

For each token, a rank computes the maximum of its shard, the sum of exponentials, and the target's
logit if the target is in its shard. One all-gather of these three numbers per token replaces a
gather of the logits. (Megatron-LM, arXiv 1909.08053, section 3, first reduces the maximum, then the
other two numbers.) The logits' memory is overwritten with the exponentials, then with the gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from threed.core import device
from threed.distributed import collectives
from threed.distributed.topology import Axis
from threed.ops import fused_cpu, launch


def reference(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the loss of every token, fp32 or fp64 [...], from unsharded logits [... v].

    Targets below 0 have loss 0.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    flat = F.cross_entropy(
        logits.flatten(0, -2), targets.clamp(min=-1).flatten(), reduction="none", ignore_index=-1
    )
    return flat.view_as(targets)


class _CrossEntropy(torch.autograd.Function):
    """Computes the loss of every token.

    If csrc/cpu/fused.cpp supports the logits, they stay unchanged until the backward overwrites
    them with their gradient. Otherwise the forward overwrites them with exponentials; logits
    narrower than fp32 are first copied to fp32.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, axis: Axis, first: int, columns: int
    ) -> Tensor:
        fused = columns > 0 and fused_cpu.fits(logits)
        unsharded = axis.size == 1 and columns > 0
        narrow = not fused and logits.dtype not in (torch.float32, torch.float64)
        wide = logits.float() if narrow else logits
        counted = owned = targets >= 0
        if unsharded:
            local = targets.clamp(0, columns - 1)
        else:
            local = targets - first
            owned = counted & (local >= 0) & (local < columns)
            local = local.masked_fill(~owned, 0)
        local = local.unsqueeze(-1)
        hit = wide.gather(-1, local).squeeze(-1) if columns else wide.new_zeros(targets.shape)
        if fused:
            top, total = fused_cpu.row_numbers(logits, columns)
        else:
            top, total = _shard_numbers(wide if columns == wide.shape[-1] else wide[..., :columns])
        logarithm, scale, hit = _combine_shards(top, total, hit if unsharded else hit * owned, axis)
        ctx.save_for_backward(wide, local, owned, counted, logarithm if fused else scale)
        ctx.fused, ctx.unsharded, ctx.columns, ctx.dtype = fused, unsharded, columns, logits.dtype
        return (logarithm - hit).where(counted, 0.0)

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, None, None, None, None]:
        wide, local, owned, counted, number = ctx.saved_tensors
        dloss, columns = dloss.where(counted, 0.0), ctx.columns
        if ctx.fused:
            local_target = local.squeeze(-1).masked_fill(~owned, -1)
            fused_cpu.softmax_gradient_(wide, columns, number, dloss, local_target)
            return wide, None, None, None, None
        grad = wide if columns == wide.shape[-1] else wide[..., :columns]
        grad.mul_((number * dloss).unsqueeze(-1))  # turns exponentials into softmax * dloss
        if columns:
            grad.scatter_add_(-1, local, -(dloss if ctx.unsharded else dloss * owned).unsqueeze(-1))
        if columns < wide.shape[-1]:
            wide[..., columns:].zero_()
        return wide.to(ctx.dtype), None, None, None, None


def _shard_numbers(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Returns each row's maximum and sum of exponentials e^(x - maximum) in a shard.

    The exponentials overwrite `scores`.
    """
    if scores.shape[-1] == 0:
        zero = scores.new_zeros(scores.shape[:-1])
        return zero - torch.inf, zero
    top = scores.amax(-1)
    return top, scores.sub_(top.unsqueeze(-1)).exp_().sum(-1)


def _combine_shards(
    top: Tensor, total: Tensor, hit: Tensor, axis: Axis
) -> tuple[Tensor, Tensor, Tensor]:
    """Combines the results of all shards for each token [...]. Collective over the axis.

    Args:
        top: maximum of this shard.
        total: sum of e^(x - top) in this shard.
        hit: the target's logit, or 0 if the target is not in this shard.
        axis: axis over which the vocabulary is sharded.

    Returns:
        The log-sum-exp over all shards, the factor that turns this shard's e^(x - top) into
        probabilities, and the target's logit.
    """
    if axis.size == 1:
        return top + total.log(), total.reciprocal(), hit
    # rows [t 3 ...]: the three numbers of every token from each of the t ranks
    rows = collectives.all_gather(torch.stack((top, total, hit.to(top.dtype))).unsqueeze(0), axis)
    peak = rows[:, 0].amax(0)
    denominator = (rows[:, 1] * torch.exp(rows[:, 0] - peak)).sum(0)
    return peak + denominator.log(), torch.exp(top - peak) / denominator, rows[:, 2].sum(0)


def vocab_parallel_cross_entropy(
    logits: Tensor, targets: Tensor, axis: Axis, first: int, columns: int | None = None
) -> Tensor:
    """Returns the loss of every token [...], equal on every rank of the axis. Collective.

    Args:
        logits: [... v/t]. They may be overwritten by the forward or the backward.
        targets: int64 [...], global ids. Targets below 0 have loss 0.
        axis: axis over which the vocabulary is sharded.
        first: global id of the shard's first column.
        columns: number of columns in the shard. The remaining columns are padding, and their
            gradient is zero. Default: all columns.

    Returns:
        fp32 [...]; fp64 for fp64 logits.
    """
    width = logits.shape[-1] if columns is None else columns
    return _CrossEntropy.apply(logits, targets, axis, first, width)


# ------------------------------------------------------------------------------------------ csrc/cuda/cross_entropy.cu
#
# In the functions below the forward computes the logits' gradient, multiplied by a scalar `weight`,
# and overwrites the logits with it. Arguments of these functions:
# logits: bf16 [n width]; the first `columns` columns are the shard, the others are padding.
# targets: int64 [n], global ids. Targets outside the vocabulary have loss 0.
# first: global id of the shard's first column.

OF_WARPS = 128  # bytes of shared memory that `whole` needs in addition to the row


def fits(logits: Tensor) -> bool:
    """Returns whether the GPU kernels support logits [... width]."""
    width = logits.shape[-1]
    return width > 0 and width % 8 == 0 and launch.ready(logits) and launch.packed(logits)


def packs_in_shared_memory(columns: int, logits: Tensor) -> int:
    """Returns how many packs of 8 columns of a row `whole` keeps in the GPU's shared memory."""
    limit = device.shared_memory(launch.gpu_of(logits)) - OF_WARPS
    return min(-(-columns // 8), limit // 16)


def _empty_losses(logits: Tensor, *rest: object) -> Tensor:
    return logits.new_empty(len(logits), dtype=torch.float32)


def _empty_numbers(logits: Tensor, *rest: object) -> Tensor:
    return logits.new_empty(len(logits), 3, dtype=torch.float32)


@launch.operator(
    "cross_entropy_(Tensor(a!) logits, Tensor targets, Tensor weight, int columns) -> Tensor",
    _empty_losses, launches=1,
)  # fmt: skip
def whole(logits: Tensor, targets: Tensor, weight: Tensor, columns: int) -> Tensor:
    """Returns the loss of each row, fp32 [n], of an unsharded vocabulary. Launches one kernel.

    Overwrites the logits with the gradient d(sum(loss) * weight)/d(logits). Reads and writes each
    logit (bf16) once, 4 bytes in total. The end of a row that does not fit into shared memory is
    read a second time, usually from the L2 cache.
    """
    _check(logits, targets, weight, columns)
    loss, (rows, width) = _empty_losses(logits), logits.shape
    if rows:
        packs = packs_in_shared_memory(columns, logits)
        launch.start("cross_entropy", logits, targets, weight, loss, rows, columns, width, packs)
    return loss


@launch.operator(
    "cross_entropy_numbers(Tensor logits, Tensor targets, int columns, int first) -> Tensor",
    _empty_numbers, launches=1,
)  # fmt: skip
def shard_numbers(logits: Tensor, targets: Tensor, columns: int, first: int) -> Tensor:
    """Returns three numbers per row of a shard's logits, fp32 [n 3]. Launches one kernel.

    The numbers are base = max(x log2 e), the sum of 2^(x log2 e - base), and the target's logit (0
    if the target is in another shard). Reads 2 bytes per logit.
    """
    _check(logits, targets, None, columns)
    out, (rows, width) = _empty_numbers(logits), logits.shape
    if rows:
        launch.start("cross_entropy_stats", logits, targets, out, rows, columns, width, first)
    return out


@launch.operator(
    "cross_entropy_from_numbers_(Tensor(a!) logits, Tensor targets, Tensor weight, Tensor numbers, int columns,"
    " int first, int vocabulary) -> Tensor",
    _empty_losses, launches=1,
)  # fmt: skip
def from_numbers(
    logits: Tensor, targets: Tensor, weight: Tensor, numbers: Tensor, columns: int, first: int, vocabulary: int
) -> Tensor:  # fmt: skip
    """Returns the losses, and overwrites a shard's logits with their gradient, as `whole` does.

    numbers: results of `shard_numbers` on all ranks, fp32 [t n 3], in the order of ranks.
    """
    _check(logits, targets, weight, columns)
    loss, (rows, width) = _empty_losses(logits), logits.shape
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
    """Multiplies x, bf16, by an fp32 scalar in place. If the scalar is 1, x is not read."""
    fits = factor.dtype == torch.float32 and factor.numel() == 1 and x.numel() % 8 == 0
    wanted = "x bf16, 16-byte aligned, a multiple of 8 numbers; factor an fp32 scalar"
    launch.check(fits and launch.packed(x), "scale_", wanted, x, factor)
    if x.numel():
        blocks = min(8 * device.processors(x.device), -(-x.numel() // 2048))
        launch.start("scale", x, factor, x.numel(), blocks)


def _check(logits: Tensor, targets: Tensor, weight: Tensor | None, columns: int) -> None:
    """Raises ValueError for tensors that the kernels do not support."""
    fits = logits.dim() == 2 and launch.packed(logits) and logits.shape[1] % 8 == 0
    fits = fits and 0 <= columns <= logits.shape[1] and targets.shape == logits.shape[:1]
    fits = fits and targets.dtype == torch.int64 and targets.is_contiguous()
    if weight is not None:
        fits = fits and weight.dtype == torch.float32 and weight.numel() == 1
    wanted = "logits bf16 [n width], 16-byte aligned, width a multiple of 8; targets int64 [n]; weight an fp32 scalar"
    launch.check(fits, "cross_entropy", wanted, logits, targets, weight)


class _Weighted(torch.autograd.Function):
    """Computes the sum of the losses, multiplied by `weight`, by the GPU kernels.

    The forward also computes the logits' gradient, in the memory of the logits.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, weight: Tensor, axis: Axis, first: int, columns: int,
        vocabulary: int,
    ) -> Tensor:  # fmt: skip
        rows, ids, weight = logits.view(-1, logits.shape[-1]), targets.flatten(), weight.float()
        if axis.size == 1:
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
        # If the loss is the root of the backward, dloss is 1. Then `scale_` returns without reading
        # the gradient.
        scale_(gradient, dloss.float())
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
    """Returns the sum of all tokens' losses, multiplied by `weight`. Collective.

    The result is equal on every rank of the axis. The GPU kernels compute the gradient in the
    forward, so the result can be differentiated only once.

    Args:
        logits: [... v/t], as in `vocab_parallel_cross_entropy`.
        targets: as in `vocab_parallel_cross_entropy`.
        weight: factor of the sum, a scalar tensor.
        axis: axis over which the vocabulary is sharded.
        first: global id of the shard's first column.
        columns: number of columns in the shard, without padding.
        vocabulary: total number of columns of all ranks, without padding.

    Returns:
        fp32 scalar; fp64 for fp64 logits.
    """
    trained = logits.requires_grad and not weight.requires_grad and torch.is_grad_enabled()
    if trained and fits(logits):
        return _Weighted.apply(logits, targets, weight, axis, first, columns, vocabulary)
    losses = vocab_parallel_cross_entropy(logits, targets, axis, first, columns)
    return losses.sum() * weight.to(losses.dtype)
