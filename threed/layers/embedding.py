"""Word and position embeddings; the word table is cut by vocabulary (Megatron-LM, arXiv 1909.08053, section 3)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from threed import collectives
from threed.collectives import split
from threed.layers.slicing import Flag, Slicing, sink_of
from threed.sharding import Init, Piece, ShardSpec, matrix, parameter

PAD_FROM, PAD_TO = 1024, 128  # rows: below, padding would be a tenth of the table and more


def vocab_table(name: str, vocab: int, hidden: int, slicing: Slicing, std: float = 0.02) -> nn.Parameter:
    """A [v/t h] table of word vectors, whose rows may be uneven when tp does not divide the vocabulary.

    A large one is padded with rows of zeros to a multiple of 128, the same on all tensor ranks, for matrix products of
    odd sizes are slow on GPUs. The padding is no part of the model: see `ShardSpec.padding`.
    """
    first, last = split(vocab, slicing.tp.size, slicing.tp.index)
    most = -(-vocab // slicing.tp.size)
    rows = -(-most // PAD_TO) * PAD_TO if most >= PAD_FROM else last - first
    piece = matrix(name, (vocab, hidden), 0, (first, last), std)
    return parameter(ShardSpec((piece,), padding=(rows - (last - first)) * hidden), (rows, hidden))


class _Lookup(torch.autograd.Function):
    """Rows of a table for the ids [first, last) that it holds, zero for the others."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, table: Tensor, first: int, last: int) -> Tensor:
        local = ids - first
        held = (ids >= first) & (ids < last)
        local = local.masked_fill(~held, 0)
        ctx.save_for_backward(local, held)
        ctx.table = table  # the parameter itself has the sink; its values are not read
        if table.shape[0] == 0:
            return table.new_zeros(*ids.shape, table.shape[1])
        return F.embedding(local, table).mul_(held.unsqueeze(-1))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor | None, None, None]:
        local, held = ctx.saved_tensors
        table = ctx.table
        if not ctx.needs_input_grad[1]:
            return None, None, None, None
        sink = sink_of(table)
        # Off-shard ids add zero to row 0: cheaper than selecting, and free of a size that depends on the data.
        rows = (dy * held.unsqueeze(-1)).flatten(0, -2)
        if sink is not None:
            sink.add_rows(local.flatten(), rows)
            return None, None, None, None
        grad = torch.zeros_like(table)
        return None, grad.index_add_(0, local.flatten(), rows) if table.shape[0] else grad, None, None


class VocabEmbedding(nn.Module):
    """Token ids [b s] -> word vectors [s b h] (or [s/t b h] when sequences are cut)."""

    def __init__(self, name: str, vocab: int, hidden: int, slicing: Slicing, *, std: float = 0.02) -> None:
        super().__init__()
        self.slicing, self.vocab = slicing, vocab
        self.first, self.last = split(vocab, slicing.tp.size, slicing.tp.index)
        self.weight = vocab_table(f"{name}.weight", vocab, hidden, slicing, std)
        self.data_flags = (Flag(f"token ids beyond the {vocab} of {name}"),)

    def flops(self, tokens: int, seq: int) -> int:
        """None that count."""
        return 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.data_flags[0].note((tokens < 0) | (tokens >= self.vocab))
        x: Tensor = _Lookup.apply(tokens.t(), self.weight, self.first, self.last)
        total = collectives.scatter_to if self.slicing.sequence_parallel else collectives.reduce_from
        return total(x, self.slicing.tp)


class PositionEmbedding(nn.Module):
    """Learned positions, added to x [s b h] (or to this rank's part [s/t b h])."""

    def __init__(self, name: str, length: int, hidden: int, slicing: Slicing, *, std: float = 0.02) -> None:
        super().__init__()
        self.slicing = slicing
        piece = Piece(f"{name}.weight", (length, hidden), (0, 0), (length, hidden), init=Init(std=std))
        self.weight = parameter(slicing.shared(piece, decay=True), (length, hidden))

    def flops(self, tokens: int, seq: int) -> int:
        """None that count."""
        return 0

    def forward(self, x: Tensor) -> Tensor:
        first, last = self.slicing.sequence_range(
            x.shape[0] * (self.slicing.tp.size if self.slicing.sequence_parallel else 1)
        )
        if last > self.weight.shape[0]:
            raise ValueError(f"position {last - 1} is beyond the {self.weight.shape[0]} learned positions")
        return x + self.weight[first:last].unsqueeze(1)
