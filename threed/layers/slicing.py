"""What every layer is told: how tensors are sliced, and which micro-batch is running."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from threed import collectives
from threed.sharding import Piece, ShardSpec
from threed.topology import Axis, alone


@dataclass(frozen=True, eq=False)
class Slicing:
    """How layers are sliced: over which axis, whether sequences are too, and the seed of dropout.

    tp: the tensor-parallel axis. sequence: activations between column- and row-parallel layers are cut along the
    sequence (arXiv 2205.05198, section 4.2.2). tile: tiles that every linear layer is cut into (see `layers.tiled`).
    """

    tp: Axis = field(default_factory=alone)
    sequence: bool = False
    seed: int = 1234
    tile: int = 1

    def __deepcopy__(self, memo: object) -> Slicing:
        return self

    @property
    def sequence_parallel(self) -> bool:
        """Whether activations between blocks are [s/t b h] rather than [s b h]."""
        return self.sequence and self.tp.size > 1

    def sequence_range(self, length: int) -> tuple[int, int]:
        """The positions of a sequence of `length` that this rank's activations between blocks hold."""
        if not self.sequence_parallel:
            return 0, length
        if length % self.tp.size:
            raise ValueError(f"sequence length {length} is not a multiple of tp {self.tp.size}: pad the batch to one")
        part = length // self.tp.size
        return self.tp.index * part, (self.tp.index + 1) * part

    @property
    def scattered(self) -> bool:
        """The former name of `sequence_parallel`."""
        warnings.warn("Slicing.scattered is called sequence_parallel now", DeprecationWarning, stacklevel=2)
        return self.sequence_parallel

    def rows(self, length: int) -> tuple[int, int]:
        """The former name of `sequence_range`."""
        warnings.warn("Slicing.rows is called sequence_range now", DeprecationWarning, stacklevel=2)
        return self.sequence_range(length)

    @property
    def replicated(self) -> str | None:
        """The axis that a parameter held whole by every tensor rank is replicated over."""
        return "tp" if self.tp.size > 1 else None

    @property
    def partial(self) -> str | None:
        """The axis that such a parameter's gradient is partial over: each rank saw its part of the sequence only."""
        return "tp" if self.sequence_parallel else None

    def heads(self, count: int) -> tuple[int, int]:
        """Which of `count` heads this rank holds: [first, last). Of fewer heads than ranks neighbours share one."""
        first = count * self.tp.index // self.tp.size
        return first, max(first + 1, count * (self.tp.index + 1) // self.tp.size)

    def shared(self, *pieces: Piece, partial: bool | None = None, decay: bool = False) -> ShardSpec:
        """The record of a parameter that every tensor rank holds whole.

        partial: whether the gradient that a rank computes is a part, to be summed over tensor ranks, or already all of
        it, the same on every rank.
          None   what is between blocks: a part when sequences are cut, for each rank saw its positions only; else all
          True   a part always: each rank saw its own heads or features, or what follows is cut by them without an f
                 (`gather`) in between
          False  all of it always: every rank saw whole sequences, and the gradient of what it gave is whole too
        """
        axis = self.partial if partial is None else self.replicated if partial else None
        return ShardSpec(pieces, self.replicated, axis, decay)

    def gather(self, x: Tensor) -> Tensor:
        """f, before what is cut over tensor ranks: [s b h] (or [s/t b h] when sequences are cut) -> [s b h].

        Every rank gets all of x; the gradient is the sum of what the ranks give back.
        """
        return (collectives.gather_from if self.sequence_parallel else collectives.copy_to)(x, self.tp)

    def reduce(self, x: Tensor) -> Tensor:
        """g, after what is cut over tensor ranks: the sum of every rank's [s b h] (this rank's [s/t b h] of it)."""
        return (collectives.scatter_to if self.sequence_parallel else collectives.reduce_from)(x, self.tp)


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """One micro-batch as the layers see it.

    tokens, labels: int64 [b s]; a label below 0 is not counted. samples: int64 [b], global sample indices.
    weight: what the sum of token losses is multiplied by, 1 / the step's global number of valid labels (a scalar
    tensor; of rows where there are no integer labels). step and training rule dropout. inputs: the batch's other
    tensors [b ...], floats in the compute dtype; for a wrapped module all of its keyword arguments.
    """

    tokens: Tensor | None = None
    labels: Tensor | None = None
    samples: Tensor | None = None
    weight: Tensor | None = None
    step: int = 0
    training: bool = True
    inputs: Mapping[str, Any] | None = None


class Flag:
    """Something that can be wrong with the data: found where the data are, told when the step's metrics are read.

    A layer keeps its flags in a tuple `data_flags`.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self._found: Tensor | None = None

    def note(self, wrong: Tensor) -> None:
        """Remembers whether any of `wrong` (bool) is true."""
        found = wrong.any()
        self._found = found if self._found is None else self._found | found

    def take(self, device: torch.device) -> Tensor:
        """1.0 if something was wrong since the last time, else 0.0 (fp64 scalar)."""
        found, self._found = self._found, None
        return torch.zeros((), dtype=torch.float64, device=device) if found is None else found.double()


class GradSink(Protocol):
    """Where a parameter's gradient goes, contribution by contribution, as it is made.

    A layer that can write its gradient in place asks `weight.sink`; without one it returns the gradient to autograd.
    """

    def add(self, grad: Tensor) -> None:
        """Adds a whole gradient."""

    def add_product(self, a: Tensor, b: Tensor) -> None:
        """Adds the matrix product a @ b."""

    def add_rows(self, index: Tensor, rows: Tensor) -> None:
        """Adds rows [n h] at the given row numbers [n]."""


def sink_of(weight: Tensor) -> GradSink | None:
    """The sink of a parameter, if it has one."""
    return getattr(weight, "sink", None)


class TileGatherer(Protocol):
    """Makes a tile's weight whole while it is used; in between its storage may be empty, and must not be read.

    A layer asks `weight.tile_gatherer`; a weight without one is always whole.
    """

    def open(self) -> None:
        """Waits until the weight is whole; begins to make it so if `ahead` has not."""

    def ahead(self) -> None:
        """Begins to make the weight whole, for the next `open`."""

    def close(self) -> None:
        """The weight is not needed any more, for now."""


def tile_gatherer_of(weight: Tensor) -> TileGatherer | None:
    """The gate of a parameter, if it has one."""
    return getattr(weight, "tile_gatherer", None)


def weight_gradient(weight: Tensor, dy: Tensor, x: Tensor) -> Tensor | None:
    """dy^T x [out in] for y = x weight^T: into the parameter's sink (and None), else as a tensor for autograd."""
    if not weight.requires_grad:
        return None
    a, b = dy.flatten(0, -2).t(), x.flatten(0, -2)
    sink = sink_of(weight)
    if sink is None:
        return torch.mm(a, b)
    sink.add_product(a, b)
    return None
