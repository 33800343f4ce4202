"""Routing of a mixture of experts: which experts each token goes to, with which weights, and losses.

Ties of scores go to the expert with the lower index, so that all topologies make the same choice. The
losses are sums over sequences and tokens, multiplied by the weight of a token in the loss of the step
(`MicroBatch.weight`). So they do not depend on how the batch is divided into micro-batches and ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from threed.ops import router
from threed.ops.router import Rule


@dataclass(frozen=True)
class Routing:
    """How a router chooses experts and weighs their outputs.

    Attributes:
        score: function from logits to scores: "softmax" over all experts, or "sigmoid".
        after_top_k: whether the weights are the softmax of the chosen logits alone.
        normalize: whether the weights of a token are divided by their sum.
        scale: factor of the weights.
        groups: number of groups of neighboring experts, a divisor of the number of experts.
        groups_per_token: number of groups in which a token's experts lie.
        group_score: score of a group: the sum of its two best scores, or its best score.
        bias: whether scores get a bias per expert for the choice of experts, but not for the weights
            (arXiv 2408.15664). It is trained by the load of the experts (`ops.balance`).
        epsilon: added to the sum by which weights are divided.
    """

    score: Literal["softmax", "sigmoid"] = "softmax"
    after_top_k: bool = False
    normalize: bool = True
    scale: float = 1.0
    groups: int = 1
    groups_per_token: int = 1
    group_score: Literal["two", "best"] = "two"
    bias: bool = False
    epsilon: float = 0.0

    @property
    def needs_scores(self) -> bool:
        """Whether choices or weights need scores; otherwise the logits serve as scores."""
        ordered = self.groups == 1 or self.group_score == "best"
        return not (self.of_chosen and ordered and not self.bias)

    @property
    def of_chosen(self) -> bool:
        """Whether the weights are the softmax of the chosen logits, normalized scores included."""
        return self.score == "softmax" and (
            self.after_top_k or (self.normalize and not self.epsilon)
        )

    def scores(self, logits: Tensor) -> Tensor:
        """Returns the score of each expert.

        Args:
            logits: [... e].

        Returns:
            [... e].
        """
        return logits.softmax(-1) if self.score == "softmax" else logits.sigmoid()

    def choose(self, scores: Tensor, bias: Tensor | None, count: int) -> Tensor:
        """Returns the experts of each token, best first.

        Args:
            scores: [... e].
            bias: added to the scores, [e]; None for no bias.
            count: number of experts per token, k.

        Returns:
            Indices of experts, int64 [... k].
        """
        scores = scores if bias is None else scores + bias
        if self.groups > 1:
            parts = scores.unflatten(-1, (self.groups, -1))
            best = parts.topk(
                min(2 if self.group_score == "two" else 1, parts.shape[-1]), -1
            ).values
            groups = _best(best.sum(-1), self.groups_per_token)
            mask = torch.ones_like(parts[..., 0], dtype=torch.bool).scatter_(-1, groups, False)
            scores = parts.masked_fill(mask.unsqueeze(-1), -torch.inf).flatten(-2)
        return _best(scores, count)


def _best(scores: Tensor, count: int) -> Tensor:
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]


class LossFactors(NamedTuple):
    """The coefficients of a router's losses.

    Attributes:
        aux: of the loss that balances experts within each sequence: the sum over experts of the
            expert's share of choices, relative to an equal share, times its mean probability
            (arXiv 2412.19437, section 2.1.2).
        z: of the mean squared log-sum-exp of the logits (arXiv 2202.08906, section 3).
    """

    aux: float = 0.0
    z: float = 0.0


class Losses(NamedTuple):
    """The losses of a router, as what their gradients need. Each is None for a loss that is off.

    Attributes:
        probabilities: each expert's share of the scores of a token, [n b e].
        aux: gradient of the loss of the step with respect to a probability of any token, [b e].
        lse: log-sum-exp of the logits of each token, [n b 1].
        z: gradient of the loss of the step with respect to half the square of `lse`, a scalar.
    """

    probabilities: Tensor | None = None
    aux: Tensor | None = None
    lse: Tensor | None = None
    z: Tensor | None = None


def losses(
    factors: LossFactors, routing: Routing, logits: Tensor, shares: Tensor | None, weight: Tensor
) -> tuple[Losses, Tensor]:
    """Returns this rank's part of the losses; the sum over ranks is the loss of the step.

    Args:
        factors: the coefficients.
        routing: defines the scores.
        logits: of the n positions of each sequence that this rank routes, [n b e].
        shares: an expert's share of the choices of a full sequence, relative to an equal share, [b e];
            only used if `factors.aux` is not 0.
        weight: weight of a token in the loss of the step, a scalar.

    Returns:
        (losses, sums): the losses; and the sums over tokens of both losses without coefficients and
        weight, [2], 0 for a loss whose coefficient is 0.
    """
    found, sums = Losses(), logits.new_zeros(2)
    if shares is not None and factors.aux:
        scores = routing.scores(logits)
        scores = scores if routing.score == "softmax" else scores / scores.sum(-1, keepdim=True)
        torch.sum(shares * scores.sum(0), (0, 1), out=sums[0])
        found = Losses(scores, shares * (factors.aux * weight))
    if factors.z:
        lse = logits.logsumexp(-1, keepdim=True)
        torch.sum(lse.square(), (0, 1, 2), out=sums[1])
        found = found._replace(lse=lse, z=2 * factors.z * weight)
    return found, sums


def rule_of(routing: Routing, per_token: int, factors: LossFactors) -> Rule | None:
    """Returns the arguments of the kernels (`ops.router`); None for a subclass of `Routing`.

    Args:
        routing: how experts are chosen and weighed.
        per_token: number of experts per token.
        factors: the coefficients of the losses.
    """
    if type(routing) is not Routing:
        return None
    flags = router.flags(
        sigmoid=routing.score == "sigmoid", of_chosen=routing.of_chosen,
        by_scores=routing.needs_scores, normalize=routing.normalize,
        two=routing.group_score == "two", aux=bool(factors.aux), z=bool(factors.z),
    )  # fmt: skip
    return Rule(
        per_token, routing.groups, routing.groups_per_token, flags, routing.scale, routing.epsilon
    )


def gates(
    routing: Routing, logits: Tensor, scores: Tensor, experts: Tensor, losses: Losses,
    bias: Tensor | None = None, excess: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Returns the weights of the chosen experts. The backward adds the gradients of the losses.

    Args:
        routing: how experts are weighed.
        logits: [n b e].
        scores: the scores of these logits, [n b e]; not used if `routing.of_chosen`.
        experts: the chosen experts, [n b k].
        losses: the losses of the router, whose gradients the backward adds to those of `logits`.
        bias: a parameter whose gradient is `excess`, or None.
        excess: see `bias`.

    Returns:
        [n b k].
    """
    return _Gates.apply(logits, bias, excess, routing, scores, experts, losses)


@dataclass(frozen=True, eq=False)
class Kernels:
    """Arguments of `gates_by_kernel`.

    Attributes:
        rule: how experts are chosen and weighed.
        factors: the coefficients of the losses that are on.
        chosen: the number of tokens of each sequence that chose an expert, fp32 [b e]; None without
            an auxiliary loss.
        share: factor that turns `chosen` into shares (`losses`).
        weight: weight of a token in the loss of the step, a scalar; None without losses.
    """

    rule: Rule
    factors: LossFactors
    chosen: Tensor | None
    share: float
    weight: Tensor | None


def gates_by_kernel(
    logits: Tensor, weights: Tensor, experts: Tensor, by: Kernels, bias: Tensor | None = None,
    excess: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Returns the weights of the chosen experts, as `gates`, with a backward by one kernel.

    Args:
        logits: fp32 [n b e].
        weights: the weights that `ops.router.route` found, bf16 [n b k].
        experts: the chosen experts, [n b k].
        by: the other arguments of the kernel.
        bias: see `gates`.
        excess: see `gates`.
    """
    return _Fused.apply(logits, bias, excess, weights, experts, by)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, bias: Tensor | None, excess: Tensor | None, weights: Tensor,
        experts: Tensor, by: Kernels,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(logits, experts, by.chosen, by.weight)
        ctx.by, ctx.excess = by, excess
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("torch.autograd.grad with create_graph=True, through experts")
        by, (logits, experts, chosen, weight) = ctx.by, ctx.saved_tensors
        dx = router.backward(
            dy.contiguous(), logits, experts, chosen, None if weight is None else weight.double(),
            by.rule.flags, by.rule.scale, by.rule.epsilon, by.factors.aux * by.share, 2 * by.factors.z,
        )  # fmt: skip
        return dx, ctx.excess, *(None,) * 4


class _Gates(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, bias: Tensor | None, excess: Tensor | None, routing: Routing,
        scores: Tensor, experts: Tensor, losses: Losses,
    ) -> Tensor:  # fmt: skip
        total: Tensor | None = None
        weights = (logits if routing.of_chosen else scores).gather(-1, experts)
        weights = weights.softmax(-1) if routing.of_chosen else weights
        if routing.normalize and not routing.of_chosen:
            total = weights.sum(-1, keepdim=True)
            total = total + routing.epsilon if routing.epsilon else total
            weights = weights / total
        ctx.save_for_backward(logits, scores, experts, weights, total, *losses)
        ctx.routing, ctx.excess = routing, excess
        return weights * routing.scale if routing.scale != 1 else weights

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("torch.autograd.grad with create_graph=True, through experts")
        logits, scores, experts, weights, total, *rest = ctx.saved_tensors
        routing, losses = ctx.routing, Losses(*rest)
        dy = dy * routing.scale if routing.scale != 1 else dy
        if routing.of_chosen:
            dy = _softmax_backward(dy, weights)
        elif total is not None:
            dy = (dy - (dy * weights).sum(-1, keepdim=True)) / total
        dx = _Gates._through_scores(routing, logits, scores, experts, dy, losses)
        if losses.lse is not None and losses.z is not None:
            dx.addcmul_((logits - losses.lse).exp_(), losses.lse * losses.z)
        return dx, ctx.excess, *(None,) * 5

    @staticmethod
    def _through_scores(
        routing: Routing,
        logits: Tensor,
        scores: Tensor,
        experts: Tensor,
        dy: Tensor,
        losses: Losses,
    ) -> Tensor:
        """Returns the gradient of the logits, given that of the chosen scores or logits [n b k]."""
        shares, aux = losses.probabilities, losses.aux
        if shares is None or aux is None:
            dx = torch.zeros_like(logits).scatter_(-1, experts, dy)
        elif routing.score == "softmax":
            dx = aux.expand_as(logits).clone()
            if routing.of_chosen:
                return _softmax_backward(dx, shares).scatter_add_(-1, experts, dy)
            dx.scatter_add_(-1, experts, dy)
        else:
            dx = (aux - (aux * shares).sum(-1, keepdim=True)) / scores.sum(-1, keepdim=True)
            dx.scatter_add_(-1, experts, dy)
        if routing.of_chosen:
            return dx
        if routing.score == "softmax":
            return _softmax_backward(dx, scores)
        return torch.ops.aten.sigmoid_backward(dx, scores)


def _softmax_backward(dy: Tensor, y: Tensor) -> Tensor:
    """Returns the gradient of the input of a softmax over the last dimension with output y."""
    return torch._softmax_backward_data(dy, y, -1, y.dtype)
