"""Word and position embeddings; the word table is cut by vocabulary (Megatron-LM, arXiv 1909.08053, section 3)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from threed.collectives import split
from threed.layers.slicing import Flag, Slicing, sink_of
from threed.sharding import Init, Piece, ShardSpec, matrix, parameter

PAD_FROM, PAD_TO = 1024, 128  # rows: below, padding would be a tenth of the table and more


def vocab_table(
    name: str, vocab: int, hidden: int, slicing: Slicing, std: float = 0.02
) -> nn.Parameter:
    """A [v/t h] table of word vectors, whose rows may be uneven when tp does not divide the vocabulary.

    A large one is padded with rows of zeros to a multiple of 128, the same on all tensor ranks, for matrix products of
    odd sizes are slow on GPUs. The padding is no part of the model: see `ShardSpec.padding`.
    """
    first, last = split(vocab, slicing.tp.size, slicing.tp.index)
    most = -(-vocab // slicing.tp.size)
    rows = -(-most // PAD_TO) * PAD_TO if most >= PAD_FROM else last - first
    piece = matrix(name, (vocab, hidden), 0, (first, last), std)
    return parameter(ShardSpec((piece,), padding=(rows - (last - first)) * hidden), (rows, hidden))


class _LookUp(torch.autograd.Function):
    """Returns rows of a table, zero for ids that it does not hold. held: bool, like ids; None if it holds all."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, ids: Tensor, held: Tensor | None) -> Tensor:
        ctx.save_for_backward(ids, held)
        ctx.table = table
        if table.shape[0] == 0:
            return table.new_zeros(*ids.shape, table.shape[1])
        rows = F.embedding(ids, table)
        return rows if held is None else rows.mul_(held.unsqueeze(-1))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, None]:
        (ids, held), table = ctx.saved_tensors, ctx.table
        # Off-shard ids add zero to row 0: cheaper than selecting, and free of a size that depends on the data.
        rows = (dy if held is None else dy * held.unsqueeze(-1)).flatten(0, -2)
        sink = sink_of(table)
        if sink is not None:
            sink.add_rows(ids.flatten(), rows)
            return None, None, None
        grad = torch.zeros_like(table)
        return (grad.index_add_(0, ids.flatten(), rows) if len(table) else grad), None, None


class VocabEmbedding(nn.Module):
    """Token ids [b s] -> word vectors [s b h] (or [s/t b h] when sequences are cut)."""

    def __init__(
        self, name: str, vocab: int, hidden: int, slicing: Slicing, *, std: float = 0.02
    ) -> None:
        super().__init__()
        self.slicing, self.vocab = slicing, vocab
        self.first, self.last = split(vocab, slicing.tp.size, slicing.tp.index)
        self.weight = vocab_table(f"{name}.weight", vocab, hidden, slicing, std)
        self.data_flags = (Flag(f"token ids beyond the {vocab} of {name}"),)

    def flops(self, tokens: int, seq: int) -> int:
        """None that count."""
        return 0

    def forward(self, tokens: Tensor) -> Tensor:
        ids, held = self._find(tokens)
        return self.slicing.reduce(_LookUp.apply(self.weight, ids, held))

    def _find(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """Rows [s b] of this rank's part of the table, and which of them it holds; None where it holds all."""
        ids = tokens.clamp(0, self.vocab - 1)
        self.data_flags[0].note(ids != tokens)
        ids = ids.t()
        if (self.first, self.last) == (0, self.vocab):
            return ids, None
        held = (ids >= self.first) & (ids < self.last)
        return (ids - self.first).masked_fill(~held, 0), held


class PositionEmbedding(nn.Module):
    """Learned positions, added to x [s b h] (or to this rank's part [s/t b h])."""

    def __init__(
        self, name: str, length: int, hidden: int, slicing: Slicing, *, std: float = 0.02
    ) -> None:
        super().__init__()
        self.slicing = slicing
        piece = Piece(
            f"{name}.weight", (length, hidden), (0, 0), (length, hidden), init=Init(std=std)
        )
        self.weight = parameter(slicing.shared(piece, decay=True), (length, hidden))

    def flops(self, tokens: int, seq: int) -> int:
        """None that count."""
        return 0

    def forward(self, x: Tensor) -> Tensor:
        positions = self.slicing.positions_of(x)
        if positions.length > len(self.weight):
            raise ValueError(
                f"position {positions.length - 1} is beyond the {len(self.weight)} learned positions"
            )
        return x + positions.rows(self.weight).unsqueeze(1)
