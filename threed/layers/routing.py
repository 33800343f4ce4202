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
        scores = scores.detach() if bias is None else scores.detach() + bias.detach()
        if self.groups > 1:
            parts = scores.unflatten(-1, (self.groups, -1))
            best = parts.topk(
                min(2 if self.group_score == "two" else 1, parts.shape[-1]), -1
            ).values
            groups = _best(best.sum(-1), self.groups_per_token)
            mask = torch.ones_like(parts[..., 0], dtype=torch.bool).scatter_(-1, groups, False)
            scores = parts.masked_fill(mask.unsqueeze(-1), -torch.inf).flatten(-2)
        return _best(scores, count)

    def weights(self, logits: Tensor, scores: Tensor, experts: Tensor) -> Tensor:
        """Returns the weights of the chosen experts.

        Args:
            logits: [... e].
            scores: [... e].
            experts: the chosen experts, [... k].

        Returns:
            [... k].
        """
        if self.after_top_k:
            return logits.gather(-1, experts).softmax(-1) * self.scale
        weights = scores.gather(-1, experts)
        if self.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + self.epsilon)
        return weights * self.scale


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


def losses(
    factors: LossFactors, logits: Tensor, scores: Tensor, shares: Tensor | None, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns this rank's part of the losses; the sum over ranks is the loss of the step.

    Args:
        factors: the coefficients.
        logits: of the n positions of each sequence that this rank routes, [n b e].
        scores: the scores of these logits, [n b e].
        shares: an expert's share of the choices of a full sequence, relative to an equal share, [b e];
            only used if `factors.aux` is not 0.
        weight: weight of a token in the loss of the step, a scalar.

    Returns:
        (loss, sums): the loss, a scalar, and the sums over tokens of both losses without coefficients
        and weight, [2]; 0 for a loss whose coefficient is 0.
    """
    aux = z = logits.new_zeros(())
    if shares is not None and factors.aux:
        probabilities = scores / scores.sum(-1, keepdim=True)
        aux = (shares * probabilities.sum(0)).sum()
    if factors.z:
        z = logits.logsumexp(-1).square().sum()
    return (factors.aux * aux + factors.z * z) * weight, torch.stack((aux, z)).detach()


class WithGradients(torch.autograd.Function):
    """Returns y unchanged. The backward also starts the gradients of a loss and of a bias.

    loss: a scalar that is added to the loss of the step, or None.
    bias: a parameter, or None; its gradient is `excess`.
    """

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, loss: Tensor | None, bias: Tensor | None, excess: Tensor | None
    ) -> Tensor:
        ctx.has_loss, ctx.excess = loss is not None, excess
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return dy, dy.new_ones(()) if ctx.has_loss else None, ctx.excess, None
