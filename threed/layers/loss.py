"""The end of a language model: final norm, vocabulary projection and loss in one pipeline layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from threed.collectives import split
from threed.layers.embedding import vocab_table
from threed.layers.linear import linear
from threed.layers.slicing import Flag, MicroBatch, Slicing
from threed.ops.cross_entropy import weighted_loss


class LanguageModelHead(nn.Module):
    """x [s b h] (or [s/t b h]) -> the micro-batch's weighted loss (a scalar), or logits [s b v/t] without labels.

    weight_name: the global name of the [v h] projection; the word table's name when head and embedding are tied.
    """

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
    ) -> None:
        super().__init__()
        self.name = name
        self.slicing, self.norm = slicing, norm
        self.first, last = split(vocab, slicing.tp.size, slicing.tp.index)
        self.columns = last - self.first  # of the logits; the rest are the table's padding
        self.weight = vocab_table(weight_name, vocab, hidden, slicing, std)
        self.vocab, self.data_flags = vocab, (Flag(f"labels beyond the {vocab} of {name}"),)

    def flops(self, tokens: int, seq: int) -> int:
        """FLOPs of a forward."""
        return 2 * tokens * self.columns * self.weight.shape[1]

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        logits = linear(self.norm(x), self.weight, None, self.slicing.tp, self.slicing.sequence_parallel)
        if micro.labels is None:
            return logits[..., : self.columns]
        self.data_flags[0].note(micro.labels >= self.vocab)
        weight = torch.ones((), device=x.device) if micro.weight is None else micro.weight
        return weighted_loss(
            logits, micro.labels.t(), weight, self.slicing.tp, self.first, columns=self.columns, vocabulary=self.vocab
        )
