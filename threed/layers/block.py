"""The pipeline layers of a decoder: embedding, block, head. Each has a global `name` and maps x to x."""

from __future__ import annotations

import functools
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from threed.layers.attention import Attention
from threed.layers.dropout import Dropout
from threed.layers.embedding import PositionEmbedding, VocabEmbedding
from threed.layers.mlp import MLP, GatedMLP
from threed.layers.norm import Norm, sum_and_norm
from threed.layers.recompute import Recompute
from threed.layers.running import OnTape, may_run, shares, wanted, watched
from threed.layers.slicing import MicroBatch, Slicing
from threed.ops.tape import Rewind, Tape, apply, as_one


class Embedding(OnTape):
    """Token ids -> x [s b h] (or [s/t b h]): word vectors, learned positions if any, dropout.

    scale: of word vectors, rounded to fp32 and then to their dtype.
    """

    backward_reads_weights = False
    recomputable = False  # its output is a look-up, and a mask of a byte
    _on_tape = False

    def __init__(
        self, name: str, vocab: int, hidden: int, slicing: Slicing, *, positions: int | None = None,
        dropout: float = 0.0, std: float = 0.02, scale: float = 1.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.name, self.scale = name, scale
        self.word = VocabEmbedding(f"{name}.word", vocab, hidden, slicing, std=std)
        self.position = (
            PositionEmbedding(f"{name}.position", positions, hidden, slicing, std=std)
            if positions
            else None
        )
        self.dropout = Dropout(f"{name}.dropout", dropout, slicing)

    def forward(self, x: Tensor | None, micro: MicroBatch) -> Tensor:
        if micro.tokens is None:
            raise ValueError("the first pipeline stage needs the batch's 'tokens' [b s]")
        if self._on_tape and wanted(self.word.weight):
            return as_one(
                self.word.weight, functools.partial(self._run, tokens=micro.tokens, micro=micro)
            )
        y = self.word(micro.tokens)
        if self.scale != 1.0:
            y = y * rounded(self.scale, y.dtype)
        return self.dropout(y if self.position is None else self.position(y), micro)

    def look(self, shared: Set[Tensor]) -> None:
        """Sees whether its parts run on a tape in the step that begins."""
        may = self.scale == 1.0 and not watched()
        may = may and may_run(self.word, VocabEmbedding) and may_run(self.dropout, Dropout)
        if self.position is not None:
            may = (
                may
                and may_run(self.position, PositionEmbedding)
                and not shares(shared, self.position)
            )
        self._on_tape = may

    def _run(self, table: Tensor, tape: Tape, tokens: Tensor, micro: MicroBatch) -> Tensor:
        y = self.word.run(table, tape, tokens)
        return self.dropout.run(
            y if self.position is None else self.position.run(y, tape), tape, micro
        )


@functools.lru_cache(maxsize=64)
def rounded(number: float, dtype: torch.dtype) -> float:
    """A number as fp32 and then `dtype` have it."""
    return float(torch.tensor(number, dtype=torch.float32, device="cpu").to(dtype))


@dataclass(frozen=True, eq=False)
class _Parts:
    """A block's, which all run on a tape."""

    attention_norm: Norm
    mlp_norm: Norm
    attention: Attention
    mlp: MLP | GatedMLP
    attention_dropout: Dropout
    mlp_dropout: Dropout

    def share(self, shared: Set[Tensor]) -> bool:
        """Whether these parameters are some whose gradient would come by another way."""
        return shares(shared, self.attention_norm, self.mlp_norm, self.attention.out, self.mlp.down)

    def take(self, x: Tensor) -> bool:
        """Whether they run for x."""
        return wanted(x) and self.attention_norm.takes(x) and self.mlp_norm.takes(x)

    def run(self, x: Tensor, micro: MicroBatch) -> Tensor:
        """The block's output: one function to autograd where attention runs on the tape too, else one before it and one
        after."""
        heads = None
        if not self.attention.runs_on(x):
            x, projected = apply(_BeforeHeads, x, self)
            heads = self.attention.heads_attend(projected)
        y: Tensor = apply(_AfterHeads, heads, x, self, micro)
        return y

    def before_heads(self, x: Tensor, tape: Tape) -> tuple[Tensor, Tensor]:
        """x, and what heads begin with; the norm is the tape's first step."""
        assert self.attention.qkv is not None
        x, y = self.attention_norm.run_sum(x, tape)
        return x, self.attention.qkv.run(y, tape)

    def after_heads(
        self, y: Tensor, x: Tensor, tape: Tape, micro: MicroBatch
    ) -> tuple[Tensor, int]:
        """The block's output, of what heads found and x; and the tape's length after the norm."""
        y = self.attention_dropout.run(self.attention.out.run(y, tape), tape, micro)
        x, y = self.mlp_norm.run_sum(y, tape, x)
        length = len(tape)
        return x + self.mlp_dropout.run(self.mlp.run(y, tape), tape, micro), length


class _BeforeHeads(torch.autograd.Function):
    """x -> x, and what heads begin with."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: _Parts) -> tuple[Tensor, Tensor]:
        x, y = parts.before_heads(x, tape := Tape())
        tape.keep(ctx)
        return x.view_as(x), y

    @staticmethod
    def backward(ctx: Any, dx: Tensor, dy: Tensor) -> tuple[Tensor, None]:
        back = Rewind(ctx)
        return back.step(back.to(1, dy), dx), None


class _AfterHeads(torch.autograd.Function):
    """What heads found, and x -> the block's output; of x alone where heads run on this tape."""

    @staticmethod
    def forward(ctx: Any, y: Tensor | None, x: Tensor, parts: _Parts, micro: MicroBatch) -> Tensor:
        tape = Tape()
        if y is None:
            x, projected = parts.before_heads(x, tape)
            y = parts.attention.run_heads(projected, tape)
        ctx.heads = len(tape)
        z, ctx.norm = parts.after_heads(y, x, tape, micro)
        tape.keep(ctx)
        return z

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, Tensor, None, None]:
        back = Rewind(ctx)
        dx = back.step(back.to(ctx.norm, dz), dz)
        dy = back.to(ctx.heads, dx)
        if ctx.heads:
            return None, back.step(back.to(1, dy), dx), None, None
        return dy, dx, None, None


class Block(OnTape):
    """x + attention(norm(x)), then x + mlp(norm(x)), dropout on both branches: [s b h] -> [s b h] (or [s/t b h]).

    post_norms: norms of what the branches give, before it is added.
    """

    recompute = Recompute()
    compilable = True
    _parts: _Parts | None = None

    def __init__(
        self, name: str, norms: tuple[nn.Module, nn.Module], attention: nn.Module, mlp: nn.Module, slicing: Slicing, *,
        dropout: float = 0.0, post_norms: tuple[nn.Module, nn.Module] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.name = name
        self.attention_norm, self.mlp_norm = norms
        self.attention, self.mlp = attention, mlp
        self.attention_dropout = Dropout(f"{name}.attention.dropout", dropout, slicing)
        self.mlp_dropout = Dropout(f"{name}.mlp.dropout", dropout, slicing)
        self.attention_post_norm = post_norms[0] if post_norms else None
        self.mlp_post_norm = post_norms[1] if post_norms else None

    def look(self, shared: Set[Tensor]) -> None:
        """Sees whether its parts run on a tape in the step that begins."""
        norms, dropouts = (
            (self.attention_norm, self.mlp_norm),
            (self.attention_dropout, self.mlp_dropout),
        )
        may = self.attention_post_norm is None and self.mlp_post_norm is None
        may = (
            may
            and all(may_run(part, Norm) for part in norms)
            and all(may_run(part, Dropout) for part in dropouts)
        )
        may = may and may_run(self.attention, Attention) and may_run(self.mlp, MLP, GatedMLP)
        alone = (
            type(self.recompute) is Recompute and self._compiled_call_impl is None and not watched()
        )
        given: Any = (*norms, self.attention, self.mlp, *dropouts)
        parts = _Parts(*given) if may and alone else None
        self._parts = None if parts is None or parts.share(shared) else parts

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        if self._parts is not None and self._parts.take(x):
            return self._parts.run(x, micro)
        x, y = self._normed(self.attention_norm, x)
        y = self._branch(self.attention(y), self.attention_post_norm)
        x, y = self._normed(self.mlp_norm, self.attention_dropout(y, micro), x)
        return x + self.mlp_dropout(self._branch(self.mlp(y), self.mlp_post_norm), micro)

    def _branch(self, y: Tensor, norm: nn.Module | None) -> Tensor:
        """What a branch gives, and its norm if there is one."""
        return y if norm is None else self.recompute.run("norm", norm, y)

    def _normed(
        self, norm: nn.Module, x: Tensor, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """x + residual, and its norm; where the norm may be computed again, the sum is no part of it."""
        if type(self.recompute) is Recompute:
            return sum_and_norm(norm, x, residual)
        total = x if residual is None else x + residual
        return total, self.recompute.run("norm", norm, total)
