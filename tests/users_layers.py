"""Layers written as users write them, with `threed.layers` and manually; see `users_models.py`."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from threed import layers
from threed.distributed import collectives, conjugate
from threed.distributed.collectives import split
from threed.distributed.sharding import Init, Piece, ShardSpec, matrix, parameter
from threed.layers import MicroBatch, Slicing, rotate

WORD = "embedding.word.weight"
STD = 0.2  # large, so that attention is far from uniform, and every gradient has an effect
CLASSES = 11  # classes of images
PATCH = 4
CHANNELS = 3
EXIT, SQUARES = 0.3, 0.05  # weights of the losses of middle layers

Function = Callable[[Tensor], Tensor]


def whole(name: str, shape: tuple[int, ...], slicing: Slicing) -> nn.Parameter:
    """Returns a parameter that every tensor rank holds in full."""
    piece = Piece(name, shape, (0,) * len(shape), shape, init=Init(std=STD))
    return parameter(ShardSpec((piece,), slicing.replicated, slicing.partial), shape)


def cut(name: str, shape: tuple[int, ...], dim: int, slicing: Slicing) -> nn.Parameter:
    """Returns a parameter that is split over the tensor ranks along `dim`."""
    first, last = split(shape[dim], slicing.tp.size, slicing.tp.index)
    start = tuple(first if d == dim else 0 for d in range(len(shape)))
    size = tuple(last - first if d == dim else n for d, n in enumerate(shape))
    return parameter(ShardSpec((Piece(name, shape, start, size, init=Init(std=STD)),)), size)


def enter(x: Tensor, slicing: Slicing) -> Tensor:
    """Enters a part that is split over the tensor ranks: [s b h] or [s/t b h] -> [s b h]."""
    return (conjugate.gather_from if slicing.sequence_parallel else conjugate.copy_to)(
        x, slicing.tp
    )


def leave(x: Tensor, slicing: Slicing) -> Tensor:
    """Leaves such a part by summing over the tensor ranks: [s b h] -> [s b h] or [s/t b h]."""
    return (conjugate.scatter_to if slicing.sequence_parallel else conjugate.reduce_from)(
        x, slicing.tp
    )


class FactorizedEmbedding(nn.Module):
    """Word vectors of a small width e, projected to h: tokens -> [s b h]."""

    name = "embedding"
    context = documents = True  # acts on each position separately

    def __init__(self, word: layers.VocabEmbedding, up: nn.Parameter) -> None:
        super().__init__()
        self.word, self.up = word, up

    def forward(self, x: None, micro: MicroBatch) -> Tensor:
        return F.linear(self.word(micro.tokens), self.up)


class FactorizedHead(nn.Module):
    """Projects from h to e by the transposed projection of the embedding; then applies a head."""

    name = "head"
    context = documents = True  # acts on each position separately
    recomputable = False

    def __init__(self, up: nn.Parameter, head: nn.Module) -> None:
        super().__init__()
        self.up, self.head = up, head

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        return self.head(F.linear(x, self.up.t()), micro)


class WordMemory(nn.Module):
    """x + tanh(norm(x) W^T) W, where W is the token embedding, sharded by rows."""

    context = documents = True  # acts on each position separately

    def __init__(
        self, name: str, norm: nn.Module, vocab: int, hidden: int, slicing: Slicing
    ) -> None:
        super().__init__()
        self.name, self.norm, self.slicing = name, norm, slicing
        self.weight = cut(WORD, (vocab, hidden), 0, slicing)

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        y = torch.tanh(F.linear(enter(self.norm(x), self.slicing), self.weight)) @ self.weight
        return x + leave(y, self.slicing)


class Universal(nn.Module):
    """A block that runs three times in each forward (Universal Transformer, arXiv 1807.03819)."""

    context = documents = True  # mixes positions by `layers.Attention` only

    def __init__(self, block: layers.Block) -> None:
        super().__init__()
        self.name, self.block = block.name, block

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        for _ in range(3):
            x = self.block(x, micro)
        return x


class Gate(nn.Module):
    """x + a sigmoid(b), where one replicated weight [2 h h] computes a and b."""

    context = documents = True  # acts on each position separately

    def __init__(self, name: str, norm: nn.Module, hidden: int, slicing: Slicing) -> None:
        super().__init__()
        self.name, self.norm = name, norm
        self.weight = whole(f"{name}.weight", (2, hidden, hidden), slicing)

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        a, b = torch.einsum("sbh,khg->ksbg", self.norm(x), self.weight)
        return x + a * torch.sigmoid(b)


class Stacked(nn.Module):
    """A gated MLP whose gate and up are one weight [2 f h], split over tp along f."""

    context = documents = True  # acts on each position separately

    def __init__(self, name: str, norm: nn.Module, hidden: int, slicing: Slicing) -> None:
        super().__init__()
        self.name, self.norm, self.slicing = name, norm, slicing
        self.weight = cut(f"{name}.weight", (2, 2 * hidden, hidden), 1, slicing)
        self.down = layers.RowLinear(f"{name}.down", 2 * hidden, hidden, slicing, std=STD)

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        gate, up = torch.einsum("sbh,kfh->ksbf", enter(self.norm(x), self.slicing), self.weight)
        return x + self.down(F.silu(gate) * up)


class Convolution(nn.Module):
    """A causal convolution of each feature over the sequence, like Mamba's (arXiv 2312.00752).

    Its weight [f 1 k] is split by features.
    """

    def __init__(self, name: str, norm: nn.Module, hidden: int, slicing: Slicing) -> None:
        super().__init__()
        self.name, self.norm = name, norm
        self.up = layers.ColumnLinear(name, hidden, [("up", 2 * hidden)], slicing, std=STD)
        self.weight = cut(f"{name}.weight", (2 * hidden, 1, 4), 0, slicing)
        self.down = layers.RowLinear(f"{name}.down", 2 * hidden, hidden, slicing, std=STD)

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        y = rearrange(self.up(self.norm(x)), "s b f -> b f s")
        y = F.conv1d(F.pad(y, (3, 0)), self.weight, groups=len(self.weight))
        return x + self.down(F.silu(rearrange(y, "b f s -> s b f")))


class Running(nn.Module):
    """x + positions + norm(x) scale in training; evaluation subtracts the running mean of training.

    As in BatchNorm, the mean is updated in each micro-batch. With several data ranks, each has a
    different mean, so it is well-defined only with one. The scale is a function of the step. The
    table of positions is not saved.
    """

    recomputable = False  # a second forward would count the micro-batch twice
    context = True  # sums its means over the ranks of a sequence

    def __init__(
        self, name: str, norm: nn.Module, hidden: int, length: int, slicing: Slicing
    ) -> None:
        super().__init__()
        self.name, self.norm, self.slicing = name, norm, slicing
        self.register_buffer("mean", torch.zeros(hidden, dtype=torch.float64))
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))
        table = torch.sin(torch.arange(length * hidden, dtype=torch.float64)).view(
            length, 1, hidden
        )
        self.register_buffer("positions", table, persistent=False)

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        if micro.training:
            self._see(x.detach(), micro)
        positions = self.slicing.positions(len(self.positions)).rows(self.positions)
        y = x if micro.training else x - self.mean
        return x + positions + self.norm(y) * self.scale

    def _see(self, x: Tensor, micro: MicroBatch) -> None:
        mean = x.mean((0, 1)) / self.slicing.sequence_parts
        if self.slicing.sequence_parallel:
            mean = collectives.all_reduce(mean, self.slicing.tp)
        mean = collectives.all_reduce(mean, self.slicing.context.axis)
        self.mean.lerp_(mean, 0.1)
        # A new tensor, not an in-place change: under a pipeline, backwards of earlier micro-batches still need the old values.
        self.scale = torch.full_like(self.scale, 1 / (1 + micro.step))


class WideResidual(nn.Module):
    """A block whose residual stream is fp32, for any dtype of its weights."""

    context = True  # mixes positions by `layers.Attention` only

    def __init__(self, block: layers.Block) -> None:
        super().__init__()
        self.name, self.block = block.name, block

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        x = x.float()
        x = x + self.block.attention(self.block.attention_norm(x.bfloat16())).float()
        return x + self.block.mlp(self.block.mlp_norm(x.bfloat16())).float()


class Before(nn.Module):
    """A layer applied to f(x)."""

    def __init__(self, function: Function, layer: nn.Module, separate: bool = False) -> None:
        super().__init__()
        self.name, self.function, self.layer = layer.name, function, layer
        self.recomputable = getattr(layer, "recomputable", True)
        # `separate`: whether f acts on each position separately
        self.context = separate and layer.context
        self.documents = separate and layer.documents

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        return self.layer(self.function(x), micro)


class After(Before):
    """f applied to the output of a layer."""

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        return self.function(self.layer(x, micro))


def pool(x: Tensor) -> Tensor:
    """Returns the means of neighboring positions: [s b h] -> [s/2 b h]."""
    return x.unflatten(0, (-1, 2)).mean(1)


def stretch(x: Tensor) -> Tensor:
    """Repeats each position: [s b h] -> [2s b h]."""
    return x.repeat_interleave(2, 0)


class Latent(nn.Module):
    """Attention with keys and values from a latent vector of width r (MLA).

    See DeepSeek-V2, arXiv 2405.04434, section 2.1. Rotary positions are in separate parts of
    queries and keys. The latent vector and the single rotary key are full on every tensor rank.
    """

    def __init__(self, name: str, hidden: int, heads: int, slicing: Slicing) -> None:
        super().__init__()
        self.name, self.slicing, self.d, self.turned = name, slicing, hidden // heads, 4
        self.rank = r = 10
        column = functools.partial(layers.ColumnLinear, slicing=slicing, std=STD, bias=False)
        self.norm = layers.RMSNorm(f"{name}.norm", hidden, slicing)
        self.query = column(
            name, hidden, [("query", heads * (self.d + self.turned))], multiple=self.d + self.turned
        )
        self.down = whole(f"{name}.down.weight", (r + self.turned, hidden), slicing)
        self.latent_norm = layers.RMSNorm(f"{name}.latent_norm", r, slicing)
        self.up = column(
            name, r, [("key", heads * self.d), ("value", heads * self.d)], multiple=self.d
        )
        self.out = layers.RowLinear(
            f"{name}.out", heads * self.d, hidden, slicing, std=STD, multiple=self.d
        )

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        y = self.norm(x)
        latent, turned = F.linear(y, self.down).split([self.rank, self.turned], -1)
        k, v = (
            self._heads(part, self.d) for part in self.up(self.latent_norm(latent)).chunk(2, -1)
        )
        q, q_turned = self._heads(self.query(y), self.d + self.turned).split(
            [self.d, self.turned], -1
        )
        k_turned = rotate(enter(turned, self.slicing).unsqueeze(2), 1e4).expand(*k.shape[:-1], -1)
        q, k = torch.cat((q, rotate(q_turned, 1e4)), -1), torch.cat((k, k_turned), -1)
        q, k, v = (rearrange(part, "s b a d -> b a s d") for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(rearrange(y, "b a s d -> s b (a d)"))

    def _heads(self, x: Tensor, d: int) -> Tensor:
        return rearrange(x, "s b (a d) -> s b a d", d=d)


class Sources(nn.Module):
    """tokens -> x [s b h], a memory [s b 2h] for the head, and the token ids [b s]."""

    name = "embedding"
    context = documents = True  # acts on each position separately

    def __init__(self, word: layers.VocabEmbedding) -> None:
        super().__init__()
        self.word = word

    def forward(self, x: None, micro: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
        y = self.word(micro.tokens)
        assert micro.tokens is not None
        return y, torch.cat((y, y.square()), -1), micro.tokens


class Passing(nn.Module):
    """A layer applied to the first of several tensors; the others are passed on."""

    context = documents = True  # mixes positions by `layers.Attention` only

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.name, self.layer = layer.name, layer

    def forward(self, given: tuple[Tensor, ...], micro: MicroBatch) -> tuple[Tensor, ...]:
        x, *others = given
        return self.layer(x, micro), *others


class ValueEmbedding(nn.Module):
    """Adds word vectors of the passed ids to x.

    It passes on two of its three tensors, x and the pooled memory.
    """

    name = "value"

    def __init__(self, word: layers.VocabEmbedding) -> None:
        super().__init__()
        self.word = word

    def forward(
        self, given: tuple[Tensor, Tensor, Tensor], micro: MicroBatch
    ) -> tuple[Tensor, Tensor]:
        x, memory, ids = given
        return x + self.word(ids), pool(memory)


class Join(nn.Module):
    """The head, applied to x and the memory."""

    recomputable = False

    def __init__(self, head: layers.LanguageModelHead, hidden: int, slicing: Slicing) -> None:
        super().__init__()
        self.name, self.head = head.name, head
        self.weight = whole("head.memory.weight", (hidden, 2 * hidden), slicing)

    def forward(self, given: tuple[Tensor, Tensor], micro: MicroBatch) -> Tensor:
        x, memory = given
        return self.head(x + stretch(F.linear(memory, self.weight)), micro)


class Supervised(nn.Module):
    """A layer on (x, loss so far), which adds a loss.

    If it has a head, the loss is that of an early exit at this depth. Otherwise it is the mean
    square of its output over all labeled tokens.
    """

    context = documents = True  # mixes positions by `layers.Attention` only

    def __init__(
        self, layer: nn.Module, slicing: Slicing, head: layers.LanguageModelHead | None = None
    ) -> None:
        super().__init__()
        self.name, self.layer, self.slicing, self.head = layer.name, layer, slicing, head

    def forward(
        self, given: Tensor | tuple[Tensor, Tensor], micro: MicroBatch
    ) -> tuple[Tensor, Tensor]:
        x, loss = given if isinstance(given, tuple) else (given, given.new_zeros(()))
        x = self.layer(x, micro)
        if micro.labels is None:
            return x, loss
        if self.head is not None:
            return x, loss + EXIT * self.head(x, micro)
        squares = x.square().mean(-1).sum()
        if self.slicing.sequence_parallel:
            squares = conjugate.reduce_from(squares, self.slicing.tp)
        return x, loss + SQUARES * squares * micro.weight


class WithLosses(nn.Module):
    """The head; it adds its loss to the losses of earlier layers."""

    context = documents = True  # acts on each position separately

    def __init__(self, head: layers.LanguageModelHead) -> None:
        super().__init__()
        self.name, self.head = head.name, head

    def forward(self, given: tuple[Tensor, Tensor], micro: MicroBatch) -> Tensor:
        x, loss = given
        return self.head(x, micro) + (0 if micro.labels is None else loss)


class Patches(nn.Module):
    """Pixels [b c H W] -> vectors of patches with learned positions.

    The vectors are [n b h], or this rank's [n/t b h] if sequences are split.
    """

    name = "patches"

    def __init__(self, hidden: int, count: int, slicing: Slicing) -> None:
        super().__init__()
        self.slicing = slicing
        self.weight = whole("patches.weight", (hidden, CHANNELS, PATCH, PATCH), slicing)
        self.positions = layers.PositionEmbedding(
            "patches.positions", count, hidden, slicing, std=STD
        )

    def forward(self, x: None, micro: MicroBatch) -> Tensor:
        assert micro.inputs is not None
        pixels = rearrange(
            micro.inputs["pixels"], "b c (i p) (j q) -> (i j) b c p q", p=PATCH, q=PATCH
        )  # a convolution with stride PATCH, only for this rank's patches
        pixels = self.slicing.positions(len(pixels)).rows(pixels)
        return self.positions(torch.einsum("nbcpq,hcpq->nbh", pixels, self.weight))


class Encoder(nn.Module):
    """Bidirectional attention and an MLP."""

    def __init__(self, name: str, hidden: int, heads: int, slicing: Slicing) -> None:
        super().__init__()
        self.name, self.d = name, hidden // heads
        self.norm = layers.LayerNorm(f"{name}.norm", hidden, slicing)
        packed = [(part, hidden) for part in ("query", "key", "value")]
        self.qkv = layers.ColumnLinear(name, hidden, packed, slicing, std=STD, multiple=self.d)
        self.out = layers.RowLinear(
            f"{name}.out", hidden, hidden, slicing, std=STD, multiple=self.d
        )
        self.mlp_norm = layers.LayerNorm(f"{name}.mlp_norm", hidden, slicing)
        self.mlp = layers.MLP(f"{name}.mlp", hidden, 2 * hidden, slicing, std=STD, out_std=STD)

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (rearrange(part, "s b (a d) -> b a s d", d=self.d) for part in parts)
        y = rearrange(F.scaled_dot_product_attention(q, k, v), "b a s d -> s b (a d)")
        x = x + self.out(y)
        return x + self.mlp(self.mlp_norm(x))


class Classifier(nn.Module):
    """The mean over patches, a linear layer and cross-entropy.

    An image has one label; images with a label below 0 are ignored.
    """

    name = "head"

    def __init__(self, hidden: int, slicing: Slicing) -> None:
        super().__init__()
        self.slicing = slicing
        self.norm = layers.LayerNorm("head.norm", hidden, slicing)
        piece = matrix("head.weight", (CLASSES, hidden), 0, (0, CLASSES), STD)
        # Not partial if sequences are split, because its input is already summed over the tensor ranks.
        self.weight = parameter(ShardSpec((piece,), slicing.replicated), (CLASSES, hidden))

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        mean = self.norm(x).mean(0)
        if self.slicing.sequence_parallel:
            mean = conjugate.reduce_from(mean, self.slicing.tp) / self.slicing.tp.size
        logits = F.linear(mean, self.weight)
        if micro.labels is None or micro.weight is None:
            return logits
        counted = micro.labels >= 0
        losses = F.cross_entropy(logits, micro.labels.clamp(min=0), reduction="none")
        return (losses * counted).sum() * micro.weight.to(losses.dtype)
