"""The router of a mixture of experts on GPUs: choices, weights, losses and rows of choices.

One kernel (csrc/cuda/router.cu) scores, chooses and weighs, and counts the choices. Another one
(csrc/cuda/choices.cu) sorts the choices by expert, from these counts. The backward computes the
scores again from the logits, and adds the gradients of the router's losses.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from threed.ops import launch

EXPERTS, CHOICES, GROUPS = 512, 32, 32  # the most that the kernels support
FP32 = torch.float32
AUX = 1 << 5  # of `Rule.flags`: there is an auxiliary loss
BLOCKS, POSITIONS = 256, 8  # most blocks of the forward, and least positions of a block


class Rule(NamedTuple):
    """How experts are chosen and weighed; see `layers.routing.Routing`.

    Attributes:
        per_token: number of experts per token, k.
        groups: number of groups of experts.
        groups_per_token: number of groups in which a token's experts lie.
        flags: bits of csrc/cuda/router.cu (`flags`).
        scale: factor of the weights.
        epsilon: added to the sum by which weights are divided.
    """

    per_token: int
    groups: int
    groups_per_token: int
    flags: int
    scale: float
    epsilon: float


class Sorted(NamedTuple):
    """The choices of tokens, sorted by expert; n tokens with k choices each.

    Attributes:
        sources: the choices, numbered token · k + choice, int64 [n k].
        places: the inverse of this permutation.
        tokens: the token of each of `sources`, int64 [n k].
        firsts: the number of the first choice of each token, int64 [n].
        bounds: the index of the first choice of each expert, and n k: int32 [e + 1].
        loads: the number of choices of each expert, int32 [e].
        excess: the loads minus their mean, times e: fp32 [e].
        chosen: the number of choices per sequence and expert, fp32 [b e].
    """

    sources: Tensor
    places: Tensor
    tokens: Tensor
    firsts: Tensor
    bounds: Tensor
    loads: Tensor
    excess: Tensor
    chosen: Tensor


def flags(
    *, sigmoid: bool, of_chosen: bool, by_scores: bool, normalize: bool, two: bool, aux: bool = False, z: bool = False
) -> int:  # fmt: skip
    """Returns the bits of `Rule.flags`.

    Args:
        sigmoid: whether scores are sigmoids, otherwise softmax.
        of_chosen: whether the weights are the softmax of the chosen logits.
        by_scores: whether experts are chosen by scores, otherwise by logits.
        normalize: whether the weights of a token are divided by their sum.
        two: whether a group's score is the sum of its two best scores, otherwise its best score.
        aux: whether there is an auxiliary loss.
        z: whether there is a z-loss.
    """
    bits = (sigmoid, of_chosen, by_scores, normalize, two, aux, z)
    return sum(bit << i for i, bit in enumerate(bits))


def fits(x: Tensor, logits: Tensor, bias: Tensor | None, rule: Rule) -> bool:
    """Returns whether the kernels support tokens x with logits [n b e] and biases [e]."""
    sizes = logits.shape[-1] <= EXPERTS and rule.per_token <= CHOICES and rule.groups <= GROUPS
    sizes = sizes and 0 < logits.numel() < 2**31 and logits.shape[1] < 2**16
    given = [logits] if bias is None else [logits, bias]
    return sizes and launch.ready(x) and all(_is(tensor, FP32, *tensor.shape) for tensor in given)


def _is(x: Tensor, dtype: torch.dtype, *shape: int) -> bool:
    return x.dtype == dtype and x.shape == shape and x.is_contiguous()


def chunks(positions: int, sequences: int) -> int:
    """Returns into how many blocks of positions the kernels divide each sequence."""
    size = max(POSITIONS, -(-positions * sequences // BLOCKS))
    return -(-positions // size)


def _routed(
    logits: Tensor, bias: Tensor | None, given: Tensor | None, sums: bool, per_token: int,
    *rest: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    n, b, e = logits.shape
    blocks, new = chunks(n, b), given is None
    return (
        logits.new_empty((n, b, per_token) if new else 0, dtype=torch.int64),
        logits.new_empty(n, b, per_token, dtype=torch.bfloat16),
        logits.new_empty((blocks, b, e) if new else 0, dtype=torch.int32),
        logits.new_empty((blocks, b, e + 1) if sums else 0),
    )


@launch.operator(
    "router(Tensor logits, Tensor? bias, Tensor? given, bool sums, int per_token, int groups, int groups_per_token,"
    " int flags, float scale, float epsilon) -> (Tensor, Tensor, Tensor, Tensor)",
    _routed, launches=1,
)  # fmt: skip
def route(
    logits: Tensor, bias: Tensor | None, given: Tensor | None, sums: bool, per_token: int, groups: int,
    groups_per_token: int, flags: int, scale: float, epsilon: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns choices, weights, and partial sums of blocks of tokens. Launches one kernel.

    Args:
        logits: fp32 [n b e].
        bias: added to the scores for the choice, fp32 [e], or None.
        given: the choices, int64 [n b k]; None to choose.
        sums: whether to compute the sums for `losses`.
        per_token: as all further arguments, see `Rule`.

    Returns:
        (experts, weights, counts, sums): choices int64 [n b k], best first; their weights, bf16
        [n b k]; number of choices, int32 [chunks b e]; and sums fp32 [chunks b e+1] over the tokens of
        a block: of each expert's share of the scores, and of the squared log-sum-exp. Without a use,
        experts, counts and sums are empty.
    """
    out = experts, weights, counts, parts = _routed(logits, bias, given, sums, per_token)
    n, b, e = logits.shape
    fits = e <= EXPERTS and per_token <= min(e, CHOICES) and groups <= GROUPS and e % groups == 0
    fits = fits and _is(logits, FP32, n, b, e) and (bias is None or _is(bias, FP32, e))
    fits = fits and (given is None or _is(given, torch.int64, n, b, per_token))
    launch.check(fits, "router", f"logits fp32 [n b e], e up to {EXPERTS}", logits, bias, given)
    launch.start(
        "router", logits, bias, experts if given is None else given, weights, counts if given is None else None,
        parts if sums else None, n, b, chunks(n, b), e, per_token, groups, groups_per_token, flags, scale, epsilon,
    )  # fmt: skip
    return out


def _sorted(experts: Tensor, counts: Tensor) -> tuple[Tensor, ...]:
    e, (n, b, k), new = counts.shape[2], experts.shape, experts.new_empty
    rows = tuple(new(n * b * k) for _ in range(3))
    ends, loads = new(e + 1, dtype=torch.int32), new(e, dtype=torch.int32)
    excess, chosen = (new(shape, dtype=torch.float32) for shape in ((e,), (b, e)))
    return *rows, new(n * b), ends, loads, excess, chosen


@launch.operator(
    f"sort_choices(Tensor experts, Tensor counts) -> ({', '.join(8 * ['Tensor'])})",
    _sorted,
    launches=1,
)
def _sort(experts: Tensor, counts: Tensor) -> tuple[Tensor, ...]:
    out, (n, b, k), e = _sorted(experts, counts), experts.shape, counts.shape[2]
    fits = _is(experts, torch.int64, n, b, k) and _is(counts, torch.int32, chunks(n, b), b, e)
    launch.check(fits, "sort_choices", "results of `route`", experts, counts)
    launch.start("sort_choices", experts, counts, *out, n, b, chunks(n, b), e, k)
    return out


def sort(experts: Tensor, counts: Tensor) -> Sorted:
    """Returns the choices sorted by expert. Launches one kernel.

    Args:
        experts: the choices of `route`, int64 [n b k].
        counts: the counts of `route`, int32 [chunks b e].
    """
    return Sorted(*_sort(experts, counts))


@launch.operator(
    "router_losses(Tensor sums, Tensor? chosen, float factor) -> Tensor",
    lambda sums, *_: sums.new_empty(2), launches=1,
)  # fmt: skip
def losses(sums: Tensor, chosen: Tensor | None, factor: float) -> Tensor:
    """Returns the sums over tokens of both losses without coefficients, fp32 [2]. Launches one kernel.

    Args:
        sums: the sums of `route`, [chunks b e+1].
        chosen: the number of choices per sequence and expert, fp32 [b e]; None without auxiliary loss.
        factor: of `chosen`.
    """
    out, (blocks, b, width) = sums.new_empty(2), sums.shape
    fits = chosen is None or _is(chosen, FP32, b, width - 1)
    fits = fits and _is(sums, FP32, blocks, b, width)
    launch.check(fits, "router_losses", "fp32 [chunks b e+1] and [b e]", sums, chosen)
    launch.start("router_losses", sums, chosen, out, blocks, b, width - 1, factor)
    return out


@launch.operator(
    "router_backward(Tensor dy, Tensor logits, Tensor experts, Tensor? chosen, Tensor? weight, int flags,"
    " float scale, float epsilon, float aux, float z) -> Tensor",
    lambda dy, logits, *_: torch.empty_like(logits), launches=1,
)  # fmt: skip
def backward(
    dy: Tensor, logits: Tensor, experts: Tensor, chosen: Tensor | None, weight: Tensor | None, flags: int,
    scale: float, epsilon: float, aux: float, z: float,
) -> Tensor:  # fmt: skip
    """Returns the gradient of the logits, fp32 [n b e]. Launches one kernel.

    Args:
        dy: gradient of the weights, bf16 [n b k].
        logits: as in `route`.
        experts: the choices, int64 [n b k].
        chosen: as in `losses`.
        weight: weight of a token in the loss of the step, an fp64 scalar; None without losses.
        flags: as `scale` and `epsilon`, see `Rule`.
        aux: gradient of the loss of the step with respect to a share of the scores, divided by
            `chosen` and `weight`.
        z: the same with respect to half the squared log-sum-exp, divided by `weight`.
    """
    dx, (n, b, e), k = torch.empty_like(logits), logits.shape, experts.shape[-1]
    fits = _is(logits, FP32, n, b, e) and _is(dy, torch.bfloat16, n, b, k)
    fits = fits and _is(experts, torch.int64, n, b, k)
    fits = fits and (_is(chosen, FP32, b, e) if chosen is not None else not flags & AUX)
    fits = fits and (weight is None or (weight.dtype == torch.float64 and weight.numel() == 1))
    what = "bf16 and int64 [n b k], fp32 [n b e]"
    launch.check(fits, "router_backward", what, dy, experts, logits, chosen, weight)
    launch.start(
        "router_backward", dy, logits, experts, chosen, weight, dx, n * b, b, e, k, flags, scale, epsilon, aux,
        z,
    )  # fmt: skip
    return dx
