"""Word and position embeddings.

The token embedding is sharded by vocabulary (Megatron-LM, arXiv 1909.08053, section 3).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from threed.distributed.collectives import split
from threed.distributed.sharding import ShardSpec, matrix, parameter
from threed.layers.slicing import Flag, Slicing, sink_of
from threed.ops.positions import in_documents

# PAD_FROM and PAD_TO are numbers of rows. A table of PAD_FROM or more rows is padded to a multiple
# of PAD_TO rows. A smaller table is not padded, because the padding could exceed a tenth of its
# size.
PAD_FROM, PAD_TO = 1024, 128


def vocab_table(
    name: str, vocab: int, hidden: int, slicing: Slicing, std: float = 0.02
) -> nn.Parameter:
    """Returns this rank's table of word vectors [v/t h]; shards are unequal if t does not divide v.

    A table of 1024 or more rows per rank is padded with zeros to a multiple of 128 rows, because
    GPUs compute matrix products of such sizes faster. A padded table has the same number of rows on
    all tensor ranks. The padding belongs to no global tensor, so checkpoints do not contain it
    (`ShardSpec.padding`).
    """
    first, last = split(vocab, slicing.tp.size, slicing.tp.index)
    rows_per_rank = -(-vocab // slicing.tp.size)
    rows = -(-rows_per_rank // PAD_TO) * PAD_TO if rows_per_rank >= PAD_FROM else last - first
    piece = matrix(name, (vocab, hidden), 0, (first, last), std)
    return parameter(ShardSpec((piece,), padding=(rows - (last - first)) * hidden), (rows, hidden))


class _LookUp(torch.autograd.Function):
    """Looks up rows of a table [v/t h] by ids; returns zeros for ids of other shards.

    owned: whether each id belongs to this shard, bool in the shape of ids. None if all ids belong
    to this shard.
    """

    @staticmethod
    def forward(ctx: Any, table: Tensor, ids: Tensor, owned: Tensor | None) -> Tensor:
        ctx.save_for_backward(ids, owned)
        ctx.table = table
        if table.shape[0] == 0:
            return table.new_zeros(*ids.shape, table.shape[1])
        rows = F.embedding(ids, table)
        return rows if owned is None else rows.mul_(owned.unsqueeze(-1))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, None]:
        (ids, owned), table = ctx.saved_tensors, ctx.table
        # An id of another shard was replaced by 0 in `ids`, and its row in `rows` is zero. Adding
        # this row to row 0 of the gradient therefore has no effect. This is cheaper than selecting
        # the ids of this shard, and no tensor's size depends on the data.
        rows = (dy if owned is None else dy * owned.unsqueeze(-1)).flatten(0, -2)
        sink = sink_of(table)
        if sink is not None:
            sink.add_rows(ids.flatten(), rows)
            return None, None, None
        grad = torch.zeros_like(table)
        return (grad.index_add_(0, ids.flatten(), rows) if len(table) else grad), None, None


class VocabEmbedding(nn.Module):
    """Maps token ids [b s] to word vectors [s b h] (with sequence parallelism [s/t b h]).

    The table is sharded over tensor ranks by rows. Ids outside the vocabulary are clamped and
    reported by a `Flag`.

    Args:
        name: global name, the prefix of the parameter's name.
        vocab: number of rows of the table.
        hidden: width h of a word vector.
        slicing: parallel layout.
        std: standard deviation of the initial values.
    """

    def __init__(
        self, name: str, vocab: int, hidden: int, slicing: Slicing, *, std: float = 0.02
    ) -> None:
        super().__init__()
        self.slicing, self.vocab = slicing, vocab
        self.first, self.last = split(vocab, slicing.tp.size, slicing.tp.index)
        self.weight = vocab_table(f"{name}.weight", vocab, hidden, slicing, std)
        self.data_flags = (Flag(f"token ids beyond the {vocab} of {name}"),)

    def flops(self, tokens: int, seq: int) -> int:
        """Returns 0 FLOPs, because a lookup has no matrix product.

        Args:
            tokens: number of tokens of the micro-batch.
            seq: sequence length.
        """
        return 0

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the word vectors [s b h] (with sequence parallelism [s/t b h]). Collective.

        Args:
            tokens: int64 [b s].
        """
        ids, owned = self._local_rows(tokens)
        return self.slicing.reduce(_LookUp.apply(self.weight, ids, owned))

    def _local_rows(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns row numbers [s b] in this rank's shard, and whether the shard contains each id.

        The second result is bool [s b], or None if the shard contains the full vocabulary.
        """
        ids = tokens.clamp(0, self.vocab - 1)
        self.data_flags[0].note(ids != tokens)
        ids = ids.t()
        if (self.first, self.last) == (0, self.vocab):
            return ids, None
        owned = (ids >= self.first) & (ids < self.last)
        return (ids - self.first).masked_fill(~owned, 0), owned


class PositionEmbedding(nn.Module):
    """Adds learned positions to x [s b h] (with sequence parallelism [s/t b h]).

    Args:
        name: global name, the prefix of the parameter's name.
        length: largest sequence length.
        hidden: width h of a position's vector.
        slicing: parallel layout.
        std: standard deviation of the initial values.
    """

    def __init__(
        self, name: str, length: int, hidden: int, slicing: Slicing, *, std: float = 0.02
    ) -> None:
        super().__init__()
        self.slicing = slicing
        piece = matrix(f"{name}.weight", (length, hidden), 0, (0, length), std)
        self.weight = parameter(slicing.shared(piece, decay=True), (length, hidden))

    def flops(self, tokens: int, seq: int) -> int:
        """Returns 0 FLOPs, because a lookup has no matrix product.

        Args:
            tokens: number of tokens of the micro-batch.
            seq: sequence length.
        """
        return 0

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        """Adds to each row of x the vector of the row's position, and returns the sum.

        Args:
            x: [s b h]; with sequence parallelism [s/t b h].
            documents: number of the document of every position of the full sequences, int64 [b s],
                not decreasing along s. Positions begin at 0 in each document. Default: each
                sequence is one document.

        Raises:
            ValueError: if the sequence is longer than the table.
        """
        positions = self.slicing.positions_of(x)
        if positions.length > len(self.weight):
            raise ValueError(
                f"position {positions.length - 1} is beyond the {len(self.weight)} learned positions"
            )
        if documents is None:
            return x + positions.rows(self.weight).unsqueeze(1)
        places, _ = in_documents(documents)
        vectors: Tensor = _LookUp.apply(self.weight, positions.rows(places), None)
        return x + vectors
