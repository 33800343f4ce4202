"""Models with one fault each, in `blocks.1`, which `threed verify` must find.

The models are written like a user's file.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from threed import layers
from threed.config import ModelConfig
from threed.distributed import conjugate
from threed.distributed.sharding import Init, Piece, ShardSpec, parameter, vector
from threed.layers import MicroBatch, Slicing


class Block(nn.Module):
    """x + mlp(norm(x)); subclasses add a fault."""

    def __init__(self, name: str, c: ModelConfig, slicing: Slicing) -> None:
        super().__init__()
        self.name, self.slicing = name, slicing
        self.norm: nn.Module = layers.RMSNorm(f"{name}.norm", c.hidden, slicing)
        self.up: nn.Module = layers.ColumnLinear(
            f"{name}.mlp", c.hidden, [("up", 2 * c.hidden)], slicing
        )
        self.down: nn.Module = layers.RowLinear(f"{name}.mlp.down", 2 * c.hidden, c.hidden, slicing)
        self.level: Tensor
        self.register_buffer("level", torch.zeros(()))  # persistent, so that it is compared too
        self.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))
        self.register_buffer("counts", torch.tensor([1, 2]))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("none", None)

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Gain(nn.Module):
    """x * weight, with a custom sharding record."""

    def __init__(self, name: str, width: int, replicated: str | None, partial: str | None) -> None:
        super().__init__()
        pieces = (vector(name, width, value=1.0),)
        self.weight = parameter(ShardSpec(pieces, replicated, partial, decay=False), (width,))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class MissingPartial(Block):
    """A weight whose gradient is partial, because its layer sees only a part of the sequence.

    The fault: its record lacks `partial`.
    """

    def __init__(self, name: str, c: ModelConfig, slicing: Slicing) -> None:
        super().__init__(name, c, slicing)
        self.norm = Gain(f"{name}.gain.weight", c.hidden, slicing.replicated, None)


class PartialTooMany(Block):
    """A weight whose full gradient every tensor rank computes, but whose record has `partial`."""

    def __init__(self, name: str, c: ModelConfig, slicing: Slicing) -> None:
        super().__init__(name, c, slicing)
        self.norm = Gain(f"{name}.gain.weight", c.hidden, slicing.replicated, slicing.replicated)


class MissingSum(Block):
    """A row-parallel product whose partial results are not summed over the tensor ranks."""

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        y = self.up(self.norm(x)).relu()
        return x + F.linear(y, self.down.weight)  # type: ignore[arg-type]


class MissingCopy(Block):
    """A column-parallel product that does not sum its input's gradients over the tensor ranks."""

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        y = F.linear(self.norm(x), self.up.weight, self.up.bias).relu()  # type: ignore[arg-type]
        return x + self.down(y)


class WrongSlice(Block):
    """Learned positions of which every rank uses the first ones, for any part of the sequence."""

    def __init__(self, name: str, c: ModelConfig, slicing: Slicing) -> None:
        super().__init__(name, c, slicing)
        piece = Piece(
            f"{name}.position.weight",
            (c.seq, c.hidden),
            (0, 0),
            (c.seq, c.hidden),
            init=Init(std=0.1),
        )
        self.position = parameter(
            ShardSpec((piece,), slicing.replicated, slicing.partial), (c.seq, c.hidden)
        )

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        return super().forward(x + self.position[: len(x)].unsqueeze(1), micro)


class TorchsDropout(Block):
    """Dropout that uses torch's random number generator."""

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        return F.dropout(super().forward(x, micro), 0.1)


class InPlace(Block):
    """A layer that changes its input in place."""

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        return super().forward(x.mul_(2), micro)


class InPlaceUnseen(Block):
    """A layer that changes its input in place without autograd detecting it.

    Only a second run of the layer, as in recomputation, gives a different result.
    """

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        x.data.mul_(2)
        return super().forward(x, micro)


class ShapeOfTheRank(Block):
    """A parameter whose shape depends on the rank."""

    def __init__(self, name: str, c: ModelConfig, slicing: Slicing) -> None:
        super().__init__(name, c, slicing)
        self.norm = Gain(f"{name}.gain.weight", c.hidden, slicing.replicated, slicing.partial)
        self.extra = Gain(
            f"{name}.extra.weight", 1 + slicing.tp.index, slicing.replicated, slicing.partial
        )

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        return super().forward(x, micro) * self.extra(torch.ones_like(x[:1, :1, :1])).sum()


class OutputOfTheRank(Block):
    """An output whose shape depends on the rank."""

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        y = super().forward(x, micro)
        return y[:-1] if self.slicing.tp.index else y


class DoubledName(Block):
    """Two norms with the same name."""

    def __init__(self, name: str, c: ModelConfig, slicing: Slicing) -> None:
        super().__init__(name, c, slicing)
        self.last = layers.RMSNorm(f"{name}.norm", c.hidden, slicing)

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        return self.last(super().forward(x, micro))


class SlicingWithoutAxis(Block):
    """Layers that are built with a `Slicing` without the axis of the tensor ranks."""

    def __init__(self, name: str, c: ModelConfig, slicing: Slicing) -> None:
        super().__init__(name, c, Slicing())


class SomeRanksOnly(Block):
    """A collective that only some ranks call."""

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        y = super().forward(x, micro)
        return conjugate.reduce_from(y, self.slicing.tp) if self.slicing.tp.index else y


class StateOfItsOwn(Block):
    """A layer that counts its runs and uses the count in its computation."""

    def __init__(self, name: str, c: ModelConfig, slicing: Slicing) -> None:
        super().__init__(name, c, slicing)
        self.runs = 0

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        self.runs += 1
        return super().forward(x, micro) * (1 + self.runs / 100)


class BufferOfTheRank(Block):
    """A buffer that differs between the tensor ranks and is never read."""

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        self.level = self.level + self.slicing.tp.index
        return super().forward(x, micro)


class EndsOnOneRank(Block):
    """A process that exits in the middle of a step."""

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        if self.slicing.tp.index:
            os._exit(3)
        return super().forward(x, micro)


class NoNumber(Block):
    """One tensor rank adds a NaN."""

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        y = super().forward(x, micro)
        return y * torch.nan if self.slicing.tp.index else y


class Model:
    """A model of an embedding, three blocks and a head; the second block has a fault."""

    fault: type[Block] = Block

    def __init__(self, config: ModelConfig, slicing: Slicing) -> None:
        self.config, self.slicing, self.hidden = config, slicing, config.hidden

    def layers(self) -> list[nn.Module]:
        c, slicing, vocab = self.config, self.slicing, self.config.vocab or 0
        kinds = (Block, self.fault, Block)
        blocks = [kind(f"blocks.{i}", c, slicing) for i, kind in enumerate(kinds)]
        norm = layers.RMSNorm("head.norm", c.hidden, slicing)
        head = layers.LanguageModelHead(
            "head", "embedding.word.weight", norm, vocab, c.hidden, slicing
        )
        return [layers.Embedding("embedding", vocab, c.hidden, slicing), *blocks, head]

    def costs(self, micro_batch: int) -> list[float]:
        return [1.0] * 5


def with_fault(fault: type[Block]) -> type[Model]:
    """Returns the model with a fault, as a class that ranks can import."""
    made = type(f"Model{fault.__name__}", (Model,), {"fault": fault, "__module__": __name__})
    globals()[made.__name__] = made
    return made


FAULTS: dict[str, Any] = {kind.__name__: with_fault(kind) for kind in Block.__subclasses__()}
