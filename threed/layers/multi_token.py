"""Prediction of further tokens, for training (multi-token prediction, arXiv 2412.19437 section 2.2).

    layers = [embedding, *blocks, MultiTokenPrediction("blocks.61", ...), head]

The layer of depth k gets, for each position i, the hidden state of depth k-1 (of depth 0: of the main
model), and the embedding of token i+k. It predicts token i+k+1, the label of position i+k. The layer
is before the head in the list of layers, and passes the output of the last block on to the head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from threed.distributed.collectives import split
from threed.layers.block import Block, Embedding
from threed.layers.contract import PipelineLayer
from threed.layers.linear import RowLinear
from threed.layers.loss import LanguageModelHead, with_loss
from threed.layers.slicing import MicroBatch, Slicing, Tally

State = Tensor | tuple[Tensor, Tensor]


class MultiTokenPrediction(PipelineLayer):
    """A block that predicts one more token per position: x [s b h] -> x, unchanged.

    With sequence parallelism x is [s/t b h]. The layer computes head(block(join(embedding, state))),
    where `join` projects the norms of the next token's embedding and of the hidden state, 2h -> h.
    The loss is added to the gradients, not to the loss that the model returns. It is a sum that is
    multiplied by `MicroBatch.weight`, so the mean over the labels of the main model. In evaluations
    the layer only returns its input.

    A model with several depths has one layer for each. They pass on a pair (x, hidden state of this
    depth), of which the last one returns x.

    Embedding, head and final norm are tied to those of the model by the names of their parameters.

    Args:
        name: global name, the prefix of the parameters' names.
        hidden: hidden width h.
        embedding: the embedding of the model.
        norms: norms of the hidden state, in this order: the norm of the head of the previous depth
            (of depth 1: of the model), and the norm before `join`.
        embedding_norm: norm of the embedding before `join`.
        block: the block of this depth.
        head: the head of this depth, with a norm of its own, and the projection of the model's head.
        slicing: parallel layout.
        depth: number of this depth, k.
        depths: number of all depths.
        factor: coefficient of the mean of the losses of all depths.
        std: standard deviation of the initial weights of `join`.

    Attributes:
        sums: a `slicing.Tally` of the loss without coefficient and weight, and of the number of
            labels of the main model, fp64 [2]. Sums over data and context ranks describe the steps.
    """

    documents = True

    def __init__(
        self, name: str, hidden: int, embedding: Embedding, norms: tuple[nn.Module, nn.Module],
        embedding_norm: nn.Module, block: Block, head: LanguageModelHead, slicing: Slicing, *, depth: int = 1,
        depths: int = 1, factor: float = 0.3, std: float = 0.02,
    ) -> None:  # fmt: skip
        super().__init__()
        self.name, self.slicing, self.depth, self.depths = name, slicing, depth, depths
        self.factor = factor / depths
        self.embedding, self.block, self.head = embedding, block, head
        self.previous_norm, self.hidden_norm = norms
        self.embedding_norm = embedding_norm
        self.join = RowLinear(f"{name}.join", 2 * hidden, hidden, slicing, std=std, bias=False)
        self.features = split(2 * hidden, slicing.tp.size, slicing.tp.index)
        word = embedding.word.weight
        if word.spec.name == head.weight.spec.name:  # type: ignore[attr-defined]
            head.use(word)  # one weight has one parameter per layer
        self.sums = Tally()
        self.tallies = (self.sums,)

    @property
    def context(self) -> bool:  # type: ignore[override]
        """Whether the block supports context parallelism."""
        return self.block.context

    def forward(self, x: State, micro: MicroBatch) -> State:
        """Returns the output of the last block, for the head. Collective.

        Args:
            x: the output of the last block, [s b h] (with sequence parallelism [s/t b h]). If this
                is not the first depth: a pair of it and the hidden state of the depth before.
            micro: the micro-batch; its tokens, labels, documents and weight are read.

        Returns:
            x. If this is not the last depth: a pair of x and the hidden state of this depth.
        """
        if not micro.training or micro.labels is None:
            return x
        y, state = x if isinstance(x, tuple) else (x, x)
        last, trains = self.depth == self.depths, torch.is_grad_enabled()
        if last and not trains:  # the first of two forwards, which only has to return y
            return y
        later = micro.ahead(self.depth, self.slicing)
        embedded = self.embedding_norm(self.embedding(None, later))
        state = self.hidden_norm(self.previous_norm(state))
        both = self.slicing.gather(torch.cat((embedded, state), -1))
        state = self.block(self.join(both[..., slice(*self.features)].contiguous()), micro)
        if trains:
            loss = self.head(state, later)
            self._add(loss, micro)
            y = with_loss(y, loss * self.factor)
        return y if last else (y, state)

    def _add(self, loss: Tensor, micro: MicroBatch) -> None:
        assert micro.labels is not None
        loss = loss.detach().double() / (1.0 if micro.weight is None else micro.weight)
        self.sums.add(torch.stack((loss, (micro.labels >= 0).sum().double())))
