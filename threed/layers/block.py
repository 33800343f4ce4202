"""The pipeline layers of a decoder: embedding, block, head. Each has a global `name` and maps x to x."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from threed.layers.dropout import Dropout
from threed.layers.embedding import PositionEmbedding, VocabEmbedding
from threed.layers.norm import sum_and_norm
from threed.layers.recompute import Recompute
from threed.layers.slicing import MicroBatch, Slicing
from threed.layers.tape import Tape, apply, may_run, wanted, watched


class Embedding(nn.Module):
    """Token ids -> x [s b h] (or [s/t b h]): word vectors, learned positions if any, dropout."""

    backward_reads_weights = False
    recomputable = False  # its output is a look-up, and a mask of a byte

    def __init__(
        self, name: str, vocab: int, hidden: int, slicing: Slicing, *, positions: int | None = None,
        dropout: float = 0.0, std: float = 0.02,
    ) -> None:  # fmt: skip
        super().__init__()
        self.name = name
        self.word = VocabEmbedding(f"{name}.word", vocab, hidden, slicing, std=std)
        self.position = (
            PositionEmbedding(f"{name}.position", positions, hidden, slicing, std=std) if positions else None
        )
        self.dropout = Dropout(f"{name}.dropout", dropout, slicing)

    def forward(self, x: Tensor | None, micro: MicroBatch) -> Tensor:
        if micro.tokens is None:
            raise ValueError("the first pipeline stage needs the batch's 'tokens' [b s]")
        y = self.word(micro.tokens)
        return self.dropout(y if self.position is None else self.position(y), micro)


class _UpToHeads(torch.autograd.Function):
    """x -> x, and heads of its norm, projected."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        ctx.tape = tape = Tape()
        x, y = block.attention_norm.run(x, tape)
        y = block.attention.qkv.run(y, tape)
        ctx.save_for_backward(*tape.tensors)
        return x.view_as(x), y

    @staticmethod
    def backward(ctx: Any, dx: Tensor, dy: Tensor) -> tuple[Tensor, None]:
        back = ctx.tape.rewind(ctx.saved_tensors)
        return back.step(back.to(1, dy), dx), None


class _AfterHeads(torch.autograd.Function):
    """What heads found, and x -> the block's output."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, block: Block, micro: MicroBatch) -> Tensor:
        ctx.tape = tape = Tape()
        y = block.attention_dropout.run(block.attention.out.run(y, tape), tape, micro)
        x, y = block.mlp_norm.run(y, tape, x)
        ctx.from_norm = len(tape)
        y = block.mlp_dropout.run(block.mlp.run(y, tape), tape, micro)
        ctx.save_for_backward(*tape.tensors)
        return x + y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None, None]:
        back = ctx.tape.rewind(ctx.saved_tensors)
        dx = back.step(back.to(ctx.from_norm, dy), dy)
        return back.to(0, dx), dx, None, None


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), dropout on both branches: [s b h] -> [s b h] (or [s/t b h])."""

    recompute = Recompute()
    compilable = True
    _on_tapes = False

    def __init__(
        self, name: str, norms: tuple[nn.Module, nn.Module], attention: nn.Module, mlp: nn.Module, slicing: Slicing, *,
        dropout: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.name = name
        self.attention_norm, self.mlp_norm = norms
        self.attention, self.mlp = attention, mlp
        self.attention_dropout = Dropout(f"{name}.attention.dropout", dropout, slicing)
        self.mlp_dropout = Dropout(f"{name}.mlp.dropout", dropout, slicing)

    def look(self) -> None:
        """Sees whether the parts of a step that begins can run on tapes."""
        parts = (self.attention_norm, self.mlp_norm, self.attention, self.mlp, self.attention_dropout, self.mlp_dropout)
        self._on_tapes = type(self.recompute) is Recompute and all(map(may_run, parts)) and not watched()

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        if self._on_tapes and wanted(x) and self.attention_norm.takes(x) and self.mlp_norm.takes(x):
            x, y = apply(_UpToHeads, x, self)
            out: Tensor = apply(_AfterHeads, self.attention.heads_attend(y), x, self, micro)
            return out
        x, y = self._normed(self.attention_norm, x)
        x, y = self._normed(self.mlp_norm, self.attention_dropout(self.attention(y), micro), x)
        return x + self.mlp_dropout(self.mlp(y), micro)

    def _normed(self, norm: nn.Module, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x + residual, and its norm; where the norm may be computed again, the sum is no part of it."""
        if type(self.recompute) is Recompute:
            return sum_and_norm(norm, x, residual)
        total = x if residual is None else x + residual
        return total, self.recompute.run("norm", norm, total)
