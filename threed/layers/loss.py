"""The end of a language model: final norm, vocabulary projection and loss in one pipeline layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from threed import collectives
from threed.collectives import split
from threed.layers.contract import PipelineLayer
from threed.layers.embedding import vocab_table
from threed.layers.linear import Terms, linear
from threed.layers.slicing import Flag, MicroBatch, Slicing, for_autograd, sum_of_products
from threed.ops.cross_entropy import weighted_loss
from threed.ops.matmul import NATIVE


@dataclass(frozen=True, eq=False)
class _Projection:
    """What the loss depends on, except x: the table [v/t h] as a linear layer, targets [s b], arguments of the loss."""

    terms: Terms
    targets: Tensor
    scale: Tensor
    first: int
    columns: int
    vocabulary: int
    softcap: float = 0.0

    def loss(self, logits: Tensor, at: slice) -> Tensor:
        """The weighted loss at some positions, of their logits."""
        return weighted_loss(
            capped(logits, self.softcap), self.targets[at], self.scale, self.terms.axis, self.first, columns=self.columns,
            vocabulary=self.vocabulary,
        )  # fmt: skip

    def gradient(self, x: Tensor, weight: Tensor, at: slice, dloss: Tensor) -> Tensor:
        """The gradient of logits at some positions, [n v/t]; they are made again of x, [.. b h]."""
        with torch.enable_grad():
            logits = self.terms.by.linear(x, weight, None).requires_grad_()
            # not a leaf to the loss, which works in its memory
            loss = self.loss(logits.view_as(logits), at)
            return torch.autograd.grad(loss, logits, dloss.to(loss.dtype))[0].flatten(0, -2)


def capped(logits: Tensor, softcap: float) -> Tensor:
    """c tanh(logits / c), the logits where there is no bound c (arXiv 2408.00118)."""
    return (logits / softcap).tanh_() * softcap if softcap else logits


class _ChunkedLoss(torch.autograd.Function):
    """The weighted loss of f(x) w^T, whose logits exist for some positions at a time, in the forward and again in the
    backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shown: Tensor | None, of: _Projection, chunks: int) -> Tensor:
        (weight,), _, axis, gather, by = of.terms
        x = collectives.all_gather(x, axis) if gather else x
        ctx.save_for_backward(x, weight)
        ctx.of, ctx.parts = of, [slice(*split(len(x), chunks, i)) for i in range(chunks)]
        return torch.stack([of.loss(by.linear(x[at], weight, None), at) for at in ctx.parts]).sum()

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        (param,), _, axis, gather, by = ctx.of.terms
        dx = torch.empty_like(x) if ctx.needs_input_grad[0] else None

        def products() -> Iterator[tuple[Tensor, Tensor]]:
            for at in ctx.parts:
                dlogits = ctx.of.gradient(x[at], weight, at, dloss)
                if dx is not None:
                    dx[at] = by.input_gradient(dlogits, weight).view_as(dx[at])
                yield dlogits.t(), x[at].flatten(0, -2)

        dw = sum_of_products(param, products(), by)
        if dx is None:
            return None, dw, None, None
        reduce = collectives.start_reduce_scatter if gather else collectives.start_all_reduce
        return reduce(dx, axis).wait(), dw, None, None


class LanguageModelHead(PipelineLayer):
    """x [s b h] (or [s/t b h]) -> the micro-batch's weighted loss (a scalar), or logits [s b v/t] without labels.

    weight_name: the global name of the [v h] projection; the word table's name when head and embedding are tied.
    softcap: a bound on logits, by tanh; 0: none. If `MicroBatch.loss_chunks` is above 1, the logits
    of a part of the rows exist at a time, which costs a third of the head's time.
    """

    matmul = NATIVE
    recomputable = False  # on the last stage its backward follows at once

    def __init__(
        self,
        name: str,
        weight_name: str,
        norm: nn.Module,
        vocab: int,
        hidden: int,
        slicing: Slicing,
        *,
        std: float = 0.02,
        softcap: float = 0.0,
    ) -> None:
        super().__init__()
        self.name, self.softcap = name, softcap
        self.slicing, self.norm = slicing, norm
        self.first, last = split(vocab, slicing.tp.size, slicing.tp.index)
        self.columns = last - self.first  # of the logits; the rest are the table's padding
        self.weight = vocab_table(weight_name, vocab, hidden, slicing, std)
        self.vocab, self.data_flags = vocab, (Flag(f"labels beyond the {vocab} of {name}"),)

    def flops(self, tokens: int, seq: int) -> int:
        """FLOPs of a forward."""
        return 2 * tokens * self.columns * self.weight.shape[1]

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        slicing = self.slicing
        terms = Terms((self.weight,), None, slicing.tp, slicing.sequence_parallel, self.matmul)
        if micro.labels is None:
            return capped(linear(self.norm(x), terms)[..., : self.columns], self.softcap)
        shape = [x.shape[1], slicing.positions_of(x).length]
        if (given := list(micro.labels.shape)) != shape:
            raise ValueError(
                f"the batch's 'labels' are {given} (in a micro-batch), and {self.name} gets {shape}"
            )
        self.data_flags[0].note(micro.labels >= self.vocab)
        scale = torch.ones((), device=x.device) if micro.weight is None else micro.weight
        of = _Projection(
            terms, micro.labels.t(), scale, self.first, self.columns, self.vocab, self.softcap
        )
        y = self.norm(x)
        if micro.loss_chunks == 1:
            return of.loss(linear(y, terms), slice(None))
        chunks = min(micro.loss_chunks, y.shape[0])
        loss: Tensor = _ChunkedLoss.apply(y, *for_autograd(y, self.weight), of, chunks)
        return loss
