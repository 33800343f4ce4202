"""The last pipeline layer of a language model: final norm, vocabulary projection and loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from threed.distributed import collectives
from threed.distributed.collectives import split
from threed.layers.contract import PipelineLayer
from threed.layers.embedding import vocab_table
from threed.layers.linear import Terms, linear, weight_gradient
from threed.layers.slicing import Flag, MicroBatch, Slicing, for_autograd, one_contribution
from threed.ops.cross_entropy import weighted_loss
from threed.ops.matmul import NATIVE


@dataclass(frozen=True, eq=False)
class _Projection:
    """The arguments of the loss other than x.

    Attributes:
        terms: the table [v/t h] as the weight of a linear layer.
        targets: label of each position, int64 [s b]. Labels below 0 have loss 0.
        scale: factor of the summed loss, a scalar tensor.
        first: token id of the first column of this rank's logits.
        columns: number of columns of this rank's logits, without padding.
        vocabulary: size of the vocabulary: the columns of all ranks, without padding.
        softcap: bound on logits, as in `capped`.
    """

    terms: Terms
    targets: Tensor
    scale: Tensor
    first: int
    columns: int
    vocabulary: int
    softcap: float = 0.0

    def loss(self, logits: Tensor, at: slice) -> Tensor:
        """Returns the weighted loss at the positions `at`; `logits` has only these positions."""
        return weighted_loss(
            capped(logits, self.softcap), self.targets[at], self.scale, self.terms.axis, self.first, columns=self.columns,
            vocabulary=self.vocabulary,
        )  # fmt: skip

    def gradient(self, x: Tensor, weight: Tensor, at: slice, dloss: Tensor) -> Tensor:
        """Recomputes the logits at the n positions `at` and returns their gradient, [(n b) v/t].

        Args:
            x: input at these positions, [n b h].
            weight: the table [v/t h].
            at: range of positions in the sequence.
            dloss: gradient of the loss, a scalar.
        """
        with torch.enable_grad():
            logits = self.terms.by.linear(x, weight, None).requires_grad_()
            # a view, because the loss overwrites the logits, and autograd forbids in-place changes
            # of a leaf that requires a gradient
            loss = self.loss(logits.view_as(logits), at)
            return torch.autograd.grad(loss, logits, dloss.to(loss.dtype))[0].flatten(0, -2)


def capped(logits: Tensor, softcap: float) -> Tensor:
    """Returns softcap * tanh(logits / softcap) (arXiv 2408.00118); if softcap is 0, the logits."""
    return (logits / softcap).tanh_() * softcap if softcap else logits


class _ChunkedLoss(torch.autograd.Function):
    """Computes the weighted loss from the logits f(x) w^T, chunk by chunk along the sequence.

    Only the logits of one chunk exist at a time. The backward recomputes the logits of each chunk.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, tracked: Tensor | None, head: _Projection, chunks: int
    ) -> Tensor:
        (weight,), _, axis, gather, by, *_ = head.terms
        x = collectives.all_gather(x, axis) if gather else x
        ctx.save_for_backward(x, weight)
        ctx.head, ctx.parts = head, [slice(*split(len(x), chunks, i)) for i in range(chunks)]
        return torch.stack(
            [head.loss(by.linear(x[at], weight, None), at) for at in ctx.parts]
        ).sum()

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        (param,), _, axis, gather, by, *_ = ctx.head.terms
        dx = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        with one_contribution([param]) as for_weight:
            for at in ctx.parts:
                dlogits = ctx.head.gradient(x[at], weight, at, dloss)
                if dx is not None:
                    dx[at] = by.input_gradient(dlogits, weight).view_as(dx[at])
                weight_gradient(param, dlogits, x[at], by)
        (dw,) = for_weight
        if dx is None:
            return None, dw, None, None
        reduce = collectives.start_reduce_scatter if gather else collectives.start_all_reduce
        return reduce(dx, axis).wait(), dw, None, None


class LanguageModelHead(PipelineLayer):
    """The last layer: x [s b h] (or [s/t b h]) -> the micro-batch's weighted loss, a scalar.

    Without labels it returns logits [s b v/t]. If `MicroBatch.loss_chunks` is above 1, only the
    logits of one chunk of the sequence exist at a time; the backward recomputes them, which adds a
    third to the head's time.

    Args:
        name: global name of the layer.
        weight_name: global name of the projection [v h]. To tie head and embedding, pass the name
            of the token embedding.
        norm: final norm.
        vocab: size of the vocabulary, v.
        hidden: hidden width h.
        slicing: parallel layout.
        std: standard deviation of the initial weights.
        softcap: bound on logits, applied by tanh. 0: no bound.
    """

    context = True
    matmul = NATIVE
    documents = True
    # The head's backward follows its forward immediately, so recomputation would free no memory.
    recomputable = False

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
        self.columns = last - self.first  # number of logits per token on this rank, without padding
        self.weight = vocab_table(weight_name, vocab, hidden, slicing, std)
        self.vocab, self.data_flags = vocab, (Flag(f"labels beyond the {vocab} of {name}"),)

    def use(self, weight: nn.Parameter) -> None:
        """Makes `weight`, an equal parameter of another module in the same layer, the projection."""
        self.weight = weight

    def flops(self, tokens: int, seq: int) -> int:
        """Returns the FLOPs of a forward.

        Args:
            tokens: number of tokens of the micro-batch.
            seq: sequence length.
        """
        return 2 * tokens * self.columns * self.weight.shape[1]

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        """Returns the weighted loss of a micro-batch; its logits if it has no labels. Collective.

        Args:
            x: output of the last block, [s b h]; with sequence parallelism [s/t b h].
            micro: the micro-batch; its labels at this rank's positions, int64 [b s/c], and its
                weight are read.

        Returns:
            The loss, a scalar: the sum of the token losses, multiplied by `micro.weight`. Without
            labels, this rank's logits [s b v/t].

        Raises:
            ValueError: if labels and activations differ in shape.
        """
        slicing = self.slicing
        terms = Terms((self.weight,), None, slicing.tp, slicing.sequence_parallel, self.matmul)
        if micro.labels is None:
            return capped(linear(self.norm(x), terms)[..., : self.columns], self.softcap)
        shape = [x.shape[1], slicing.positions_of(x).length // slicing.context.size]
        if (given := list(micro.labels.shape)) != shape:
            raise ValueError(
                f"the batch's 'labels' are {given} (in a micro-batch), and {self.name} gets {shape}"
            )
        self.data_flags[0].note(micro.labels >= self.vocab)
        scale = torch.ones((), device=x.device) if micro.weight is None else micro.weight
        head = _Projection(
            terms, micro.labels.t(), scale, self.first, self.columns, self.vocab, self.softcap
        )
        y = self.norm(x)
        if micro.loss_chunks == 1:
            return head.loss(linear(y, terms), slice(None))
        chunks = min(micro.loss_chunks, y.shape[0])
        return _ChunkedLoss.apply(y, *for_autograd(y, self.weight), head, chunks)


def with_loss(y: Tensor, loss: Tensor) -> Tensor:
    """Returns y unchanged; its backward adds the gradient of a loss to that of the step's loss.

    Args:
        y: an output of the layer that computes the loss.
        loss: a scalar, multiplied by `MicroBatch.weight`.
    """
    return _WithLoss.apply(y, loss)


class _WithLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        return dy, dy.new_ones(())
