"""The arguments of every layer: how tensors are sliced, and which micro-batch is running."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from threed import collectives
from threed.ops import launch, sums
from threed.ops.matmul import NATIVE, Matmul
from threed.ops.positions import Positions
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
    # stands for `tp` in a graph of torch.compile (`layers.compiled`)
    opaque: Any = field(default=None, init=False)

    def __deepcopy__(self, memo: object) -> Slicing:
        return self

    @property
    def sequence_parallel(self) -> bool:
        """Whether activations between blocks are [s/t b h] rather than [s b h]."""
        return self.sequence and self.tp.size > 1

    @property
    def sequence_parts(self) -> int:
        """The number of ranks that a sequence is cut over between blocks."""
        return self.tp.size if self.sequence_parallel else 1

    def positions(self, length: int) -> Positions:
        """Returns this rank's positions of a sequence of `length`, in activations between blocks."""
        if length % self.sequence_parts:
            raise ValueError(
                f"sequence length {length} is not a multiple of tp {self.tp.size}: pad the batch to one"
            )
        part = length // self.sequence_parts
        first = self.tp.index * part if self.sequence_parallel else 0
        return Positions(((first, first + part),), length)

    def positions_of(self, x: Tensor) -> Positions:
        """Returns the positions of an activation between blocks, [s b h] (or [s/t b h])."""
        return self.positions(x.shape[0] * self.sequence_parts)

    def gathered_positions(self, x: Tensor) -> Positions:
        """Returns the positions of an activation after `gather`, [s b ...]."""
        return Positions.all(x.shape[0])

    @property
    def replicated(self) -> str | None:
        """The axis that a parameter held whole by every tensor rank is replicated over."""
        return "tp" if self.tp.size > 1 else None

    @property
    def partial(self) -> str | None:
        """The axis over which such a parameter's gradient is partial: each rank has a part of the sequence only."""
        return "tp" if self.sequence_parallel else None

    def heads(self, count: int) -> tuple[int, int]:
        """Returns the heads of `count` that this rank holds: [first, last). With too few heads, ranks share one."""
        first = count * self.tp.index // self.tp.size
        return first, max(first + 1, count * (self.tp.index + 1) // self.tp.size)

    def shared(self, *pieces: Piece, partial: bool | None = None, decay: bool = False) -> ShardSpec:
        """Returns the record of a parameter that every tensor rank holds whole.

        partial: whether the gradient that a rank computes is partial, to be summed over tensor ranks, or already
        complete, the same on every rank.
          None   between blocks: partial if sequences are cut, since each rank has its positions only; else complete
          True   always partial: each rank has its own heads or features, or the next layer is cut by them without an
                 f (`gather`) in between
          False  always complete: every rank has whole sequences, and the gradient of its output is complete too
        """
        axis = self.partial if partial is None else self.replicated if partial else None
        return ShardSpec(pieces, self.replicated, axis, decay)

    def gather(self, x: Tensor) -> Tensor:
        """Applies f, before layers cut over tensor ranks: [s b h] (or [s/t b h] when sequences are cut) -> [s b h].

        Every rank gets all of x; the gradient is the sum of the ranks' gradients.
        """
        return self._conjugate(
            collectives.gather_from if self.sequence_parallel else collectives.copy_to, x
        )

    def reduce(self, x: Tensor) -> Tensor:
        """Applies g, after layers cut over tensor ranks: sums the ranks' [s b h] (returns its [s/t b h] of the sum)."""
        return self._conjugate(
            collectives.scatter_to if self.sequence_parallel else collectives.reduce_from, x
        )

    def _conjugate(self, function: Callable[[Tensor, Axis], Tensor], x: Tensor) -> Tensor:
        if self.tp.size == 1:
            return x
        if self.opaque is not None and torch.compiler.is_compiling():
            traced: Tensor = getattr(torch.ops.threed, function.__name__)(
                x, self.tp.size, self.opaque
            )
            return traced
        return function(x, self.tp)


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """One micro-batch as the layers see it.

    tokens, labels: int64 [b s]; a label below 0 is not counted. samples: int64 [b], global sample indices.
    weight: what the sum of token losses is multiplied by, 1 / the step's global number of valid labels (a scalar
    tensor; of rows where there are no integer labels). step and training rule dropout. inputs: the batch's other
    tensors [b ...], in their own dtypes unless precision.cast_inputs is on; for a wrapped module all of its keyword
    arguments. loss_chunks: the number of parts in which a head computes logits.
    """

    tokens: Tensor | None = None
    labels: Tensor | None = None
    samples: Tensor | None = None
    weight: Tensor | None = None
    step: int = 0
    training: bool = True
    inputs: Mapping[str, Any] | None = None
    loss_chunks: int = 1


class Flag:
    """An error in the data, detected on the device. The step is skipped, and reading its metrics raises DataError.

    A layer keeps its flags in a tuple `data_flags`. what: a description for the message. error: if false, a warning is
    given instead of the exception.
    """

    def __init__(self, what: str, error: bool = True) -> None:
        self.what, self.error = what, error
        self._found: Tensor | None = None

    def note(self, wrong: Tensor) -> None:
        """Records whether any of `wrong` (bool) is true."""
        found = wrong.any()
        if self._found is None:
            self._found = found
        else:
            self._found |= found  # in place: a forward may run beside another stream, which would reuse what it frees

    def take(self, device: torch.device) -> Tensor:
        """Returns 1.0 if there was an error since the last call, else 0.0 (fp64 scalar)."""
        found = self.swap(None)
        return (
            torch.zeros((), dtype=torch.float64, device=device) if found is None else found.double()
        )

    def swap(self, found: Tensor | None) -> Tensor | None:
        """Replaces the record since the last `take` (a bool scalar, or None), and returns the old one."""
        found, self._found = self._found, found
        return found


class ForwardScope:
    """Records whether a pipeline stage is running a forward.

    A gradient that is computed during a forward comes from `torch.autograd.grad` in a layer, and is not part of the
    loss's gradient. The stages of a rank and its gradient sinks share one scope.
    """

    def __init__(self) -> None:
        self.active = False

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Marks the block as a forward."""
        before, self.active = self.active, True
        try:
            yield
        finally:
            self.active = before


class GradSink(Protocol):
    """Collects a parameter's gradient, contribution by contribution.

    A layer that can write its gradient in place uses `weight.sink`; without one it returns the gradient to autograd.
    """

    def add(self, grad: Tensor) -> None:
        """Adds a whole gradient."""

    def add_product(self, a: Tensor, b: Tensor, by: Matmul = NATIVE) -> None:
        """Adds the matrix product a @ b."""

    def add_products(self, pairs: Iterable[tuple[Tensor, Tensor]], by: Matmul = NATIVE) -> None:
        """Adds matrix products a @ b, made one after the other, as one contribution."""

    def add_rows(self, index: Tensor, rows: Tensor) -> None:
        """Adds rows [n h] at the given row numbers [n]."""

    def memory(self) -> tuple[Tensor, bool] | None:
        """Returns where the gradient is, in the parameter's shape, and whether to add to what is there; None where it
        must be given to `add`."""

    def mark_added(self) -> None:
        """Counts a contribution that was written to `memory`."""

    def in_forward(self) -> bool:
        """Returns whether a stage is running a forward, during which the sink takes no gradients."""

    def defers(self) -> bool:
        """Returns whether contributions are kept and added later, as in a split backward."""


def sink_of(weight: Tensor) -> GradSink | None:
    """Returns the sink that takes a parameter's gradient.

    Returns None without a sink, and for a parameter with gradient hooks of the user: its gradient goes through
    autograd, and the sink's hook, which runs last, moves it to the sink.
    """
    return None if has_gradient_hooks(weight) else getattr(weight, "sink", None)


def has_gradient_hooks(param: Tensor) -> bool:
    """Returns whether a parameter has gradient hooks in addition to its sink's post-accumulate hook."""
    return bool(param._backward_hooks) or len(param._post_accumulate_grad_hooks or ()) > 1


def goes_to_sink(param: Tensor | None) -> bool:
    """Returns whether no gradient of a parameter (or None) passes through autograd: it is frozen, or has a sink."""
    return param is None or not param.requires_grad or sink_of(param) is not None


def for_autograd(x: Tensor, *params: Tensor | None) -> tuple[Tensor | None, ...]:
    """Returns the parameters to pass to an autograd function of x.

    None for each of them if x requires a gradient and theirs go to sinks: autograd would visit them for nothing, which
    costs the host as much as a small kernel.
    """
    known = x.requires_grad and all(map(goes_to_sink, params))
    return (None,) * len(params) if known else params


def bias_gradient(bias: Tensor, rows: Tensor) -> Tensor | None:
    """Computes the sum of rows [m n]: adds it to the bias's sink, else returns it for autograd."""
    if sums.column_fits(rows):
        gradient = VectorGradient(bias)
        sums.column_sums(rows, gradient.out, add=gradient.add)
        return gradient.done()
    db, sink = rows.sum(0), sink_of(bias)
    if sink is None:
        return db
    sink.add(db)
    return None


class VectorGradient:
    """Memory for a kernel that sums a vector's gradient in fp32: that of the parameter's sink, where it fits.

    out: fp32 [n]. add: whether to add to what it holds.
    """

    def __init__(self, param: Tensor) -> None:
        self._sink, self._dtype = sink_of(param), param.dtype
        found = None if self._sink is None else self._sink.memory()
        self._direct = (
            found is not None and found[0].dtype == torch.float32 and launch.aligned(found[0])
        )
        if found is not None and self._direct:
            self.out, self.add = found[0].view(-1), found[1]
        else:
            self.out = torch.empty(param.shape, dtype=torch.float32, device=param.device)
            self.add = False

    def done(self) -> Tensor | None:
        """Ends the contribution; returns what autograd is to get, if it does not go to a sink."""
        if self._sink is None:
            return self.out.to(self._dtype)
        self._sink.mark_added() if self._direct else self._sink.add(self.out)
        return None


class TileGatherer(Protocol):
    """Gathers a tile's weight while it is used; at other times its memory may be freed, and must not be read.

    A layer uses `weight.tile_gatherer`; a weight without one is always whole.
    """

    def open(self) -> None:
        """Waits until the weight is whole; begins to gather it if `ahead` has not."""

    def ahead(self) -> None:
        """Begins to gather the weight, for the next `open`."""

    def close(self) -> None:
        """Frees the weight until the next `open`."""


def tile_gatherer_of(weight: Tensor) -> TileGatherer | None:
    """Returns the tile gatherer of a parameter, if it has one."""
    return getattr(weight, "tile_gatherer", None)


def sum_of_products(
    weight: Tensor, pairs: Iterable[tuple[Tensor, Tensor]], by: Matmul = NATIVE
) -> Tensor | None:
    """Adds the sum of products a @ b to the weight's sink, or else returns it. Every pair is made in any case."""
    sink, total = sink_of(weight), None
    if sink is not None:
        sink.add_products(pairs, by)
        return None
    for a, b in pairs:
        if weight.requires_grad:
            total = add_to(total, a, b, by)
    return total


def add_to(total: Tensor | None, a: Tensor, b: Tensor, by: Matmul) -> Tensor:
    """Returns total + a b, in total's memory; a b if there is no total yet."""
    if total is None:
        return by.product(a, b)
    by.add_product_(total, a, b, fresh=False)
    return total
