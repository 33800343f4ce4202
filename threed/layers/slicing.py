"""The objects that layers use: parallel layout, micro-batch, gradient sinks and tile gatherers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from threed.distributed import conjugate
from threed.distributed.sharding import Piece, ShardSpec
from threed.distributed.topology import Axis, alone
from threed.ops import launch, sums
from threed.ops.matmul import NATIVE, Matmul
from threed.ops.positions import Positions


@dataclass(frozen=True, eq=False)
class Slicing:
    """Parallel layout of the layers, and the seed of dropout.

    Attributes:
        tp: tensor-parallel axis.
        sequence: whether activations are sharded along the sequence where they are not sharded by
            heads or features: in norms, dropout and residual additions (sequence parallelism, arXiv
            2205.05198, section 4.2.2).
        seed: seed of dropout.
        tile: number of tiles of every linear layer (see `layers.tiled`).
    """

    tp: Axis = field(default_factory=alone)
    sequence: bool = False
    seed: int = 1234
    tile: int = 1
    # represents `tp` in a graph of torch.compile (`layers.compiled`)
    opaque: Any = field(default=None, init=False)

    def __deepcopy__(self, memo: object) -> Slicing:
        return self

    @property
    def sequence_parallel(self) -> bool:
        """Whether activations between blocks are [s/t b h] instead of [s b h]."""
        return self.sequence and self.tp.size > 1

    @property
    def sequence_parts(self) -> int:
        """Number of ranks over which a sequence is sharded between blocks."""
        return self.tp.size if self.sequence_parallel else 1

    def positions(self, length: int) -> Positions:
        """Returns this rank's positions of a sequence, for activations between blocks.

        Args:
            length: full length of the sequence.

        Raises:
            ValueError: if the length is not a multiple of `sequence_parts`.
        """
        if length % self.sequence_parts:
            raise ValueError(
                f"sequence length {length} is not a multiple of tp {self.tp.size}: pad the batch to one"
            )
        part = length // self.sequence_parts
        first = self.tp.index * part if self.sequence_parallel else 0
        return Positions(((first, first + part),), length)

    def positions_of(self, x: Tensor) -> Positions:
        """Returns the positions of the rows of `x`, an activation between blocks.

        x: [s b h]; with sequence parallelism [s/t b h].
        """
        return self.positions(x.shape[0] * self.sequence_parts)

    def gathered_positions(self, x: Tensor) -> Positions:
        """Returns the positions of the rows of `x` [s b ...], an output of `gather`."""
        return Positions.all(x.shape[0])

    @property
    def replicated(self) -> str | None:
        """The axis over which parameters that are not sharded are replicated; None if tp is 1."""
        return "tp" if self.tp.size > 1 else None

    @property
    def partial(self) -> str | None:
        """The axis over which the gradient of a replicated parameter between blocks is partial.

        With sequence parallelism the result is "tp", because each rank has only its part of the
        sequence. Otherwise the property returns None.
        """
        return "tp" if self.sequence_parallel else None

    def heads(self, count: int) -> tuple[int, int]:
        """Returns the heads of this rank out of `count`, as the range [first, last).

        If `count` is below tp, ranks share heads.
        """
        first = count * self.tp.index // self.tp.size
        return first, max(first + 1, count * (self.tp.index + 1) // self.tp.size)

    def shared(self, *pieces: Piece, partial: bool | None = None, decay: bool = False) -> ShardSpec:
        """Returns the `ShardSpec` of a parameter that is replicated over tensor ranks.

        A gradient is partial if each rank computes only a part of it, to be summed over tensor
        ranks:
          None   for layers between blocks: partial with sequence parallelism, because each rank
                 has only its own positions; otherwise complete
          True   always partial: the parameter is applied to this rank's own heads or features, or
                 its output enters a sharded layer without a `gather` (f) in between
          False  always complete: every rank applies the parameter to full sequences, and has the
                 complete gradient of the result

        Args:
            pieces: global tensors stored in the parameter.
            partial: whether the gradient is partial, see above.
            decay: whether weight decay applies.
        """
        axis = self.partial if partial is None else self.replicated if partial else None
        return ShardSpec(pieces, self.replicated, axis, decay)

    def gather(self, x: Tensor) -> Tensor:
        """Returns the input of tensor-sharded layers (Megatron's f). Collective.

        Without sequence parallelism, returns x, and the backward sums the gradient over tensor
        ranks. With it, gathers x along the sequence, and the backward reduce-scatters the gradient.

        Args:
            x: activation [s b h]; with sequence parallelism [s/t b h].

        Returns:
            [s b h].
        """
        return self._conjugate(
            conjugate.gather_from if self.sequence_parallel else conjugate.copy_to, x
        )

    def reduce(self, x: Tensor) -> Tensor:
        """Sums the output of tensor-sharded layers over tensor ranks (Megatron's g). Collective.

        Args:
            x: this rank's term, [s b h].

        Returns:
            The sum [s b h]; with sequence parallelism this rank's part of it, [s/t b h].
        """
        return self._conjugate(
            conjugate.scatter_to if self.sequence_parallel else conjugate.reduce_from, x
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
    """One micro-batch as seen by the layers.

    Attributes:
        tokens: token ids, int64 [b s].
        labels: label of each token, int64 [b s]; labels below 0 are ignored. None: the last layer
            returns logits.
        samples: global sample indices, int64 [b].
        weight: factor of the sum of token losses, a scalar tensor: 1 / number of valid labels in
            the step's global batch. If labels are not integers: 1 / number of rows of that batch.
        step: number of the step, for dropout masks; an int64 scalar tensor in a CUDA graph
            (`--run.graphs`).
        training: whether dropout is on.
        inputs: the batch's other tensors [b ...], by name. They keep their dtypes unless
            `precision.cast_inputs` is on. For a wrapped module: all of its keyword arguments.
        loss_chunks: number of chunks into which the head divides the sequence. Only the logits of
            one chunk exist at a time.
        documents: number of each token's document, int64 [b s], not decreasing along s. It always
            covers the full sequences, also with sequence parallelism. None: each sequence is one
            document.
    """

    tokens: Tensor | None = None
    labels: Tensor | None = None
    samples: Tensor | None = None
    weight: Tensor | None = None
    step: int | Tensor = 0
    training: bool = True
    inputs: Mapping[str, Any] | None = None
    loss_chunks: int = 1
    documents: Tensor | None = None


class Flag:
    """An error in the data, detected on the device without a synchronization.

    If an error is recorded, the step is skipped, and reading the step's metrics raises DataError. A
    layer keeps its flags in a tuple `data_flags`, where the engine finds them.

    Args:
        what: description of the error, for the message.
        error: whether to raise DataError; if false, only a warning is issued.
    """

    def __init__(self, what: str, error: bool = True) -> None:
        self.what, self.error = what, error
        self._found: Tensor | None = None

    def note(self, wrong: Tensor) -> None:
        """Records whether any element of `wrong` (bool) is true."""
        found = wrong.any()
        if self._found is None:
            self._found = found
        else:
            # in place: if the old tensor were freed, another stream could reuse its memory
            self._found |= found

    def take(self, device: torch.device) -> Tensor:
        """Returns 1.0 if an error was recorded since the last call, else 0.0 (fp64 scalar)."""
        found = self.swap(None)
        return (
            torch.zeros((), dtype=torch.float64, device=device) if found is None else found.double()
        )

    def swap(self, found: Tensor | None) -> Tensor | None:
        """Replaces the recorded state, a bool scalar or None; returns the previous state."""
        found, self._found = self._found, found
        return found


class ForwardScope:
    """Records whether a pipeline stage is running a forward.

    A gradient that is computed during a forward comes from `torch.autograd.grad` in a layer and is
    not part of the loss's gradient. The stages of a rank and its gradient sinks share one scope.
    """

    def __init__(self) -> None:
        self.active = False

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Context manager: marks its block as part of a forward."""
        before, self.active = self.active, True
        try:
            yield
        finally:
            self.active = before


class GradSink(Protocol):
    """Accumulates a parameter's gradient, contribution by contribution.

    A layer that computes the gradient of its weight itself adds the gradient to `weight.sink`. If
    the weight has no sink, the layer returns the gradient to autograd.
    """

    def add(self, grad: Tensor) -> None:
        """Adds `grad`, which has the parameter's shape, to the accumulated gradient."""

    def add_product(self, a: Tensor, b: Tensor, by: Matmul = NATIVE) -> None:
        """Adds the matrix product a @ b to the accumulated gradient. `by` computes the product."""

    def add_products(self, pairs: Iterable[tuple[Tensor, Tensor]], by: Matmul = NATIVE) -> None:
        """Adds the products a @ b of all pairs to the accumulated gradient.

        The products are computed one at a time, and together count as one contribution.
        """

    def add_rows(self, index: Tensor, rows: Tensor) -> None:
        """Adds rows[i] to row index[i] of the accumulated gradient: rows [n h], index [n]."""

    def memory(self) -> tuple[Tensor, bool] | None:
        """Returns (buffer, add): the gradient's buffer, in the parameter's shape, and a flag.

        If the flag is true, the caller must add the gradient to the buffer's content. Otherwise the
        caller must overwrite the content. Returns None instead of the pair if the caller must pass
        the gradient to the method `GradSink.add`.
        """

    def mark_added(self) -> None:
        """Counts a contribution that the caller has written to the buffer returned by `memory`."""

    def in_forward(self) -> bool:
        """Returns whether a stage is running a forward, in which the sink accepts no gradients."""

    def defers(self) -> bool:
        """Returns whether the sink stores contributions and adds them later (split backward)."""


def sink_of(weight: Tensor) -> GradSink | None:
    """Returns the sink of a parameter, or None if the gradient must be returned to autograd.

    The gradient must be returned if the parameter has no sink. It must also be returned if the user
    registered gradient hooks on the parameter, because only autograd runs these hooks. Afterwards
    autograd runs the sink's own hook, which moves the gradient to the sink.
    """
    return None if has_gradient_hooks(weight) else getattr(weight, "sink", None)


def has_gradient_hooks(param: Tensor) -> bool:
    """Returns whether a parameter has gradient hooks other than the sink's post-accumulate hook."""
    return bool(param._backward_hooks) or len(param._post_accumulate_grad_hooks or ()) > 1


def goes_to_sink(param: Tensor | None) -> bool:
    """Returns whether autograd needs no gradient for `param`.

    This is the case if `param` is None or frozen, or if its gradient goes to a sink.
    """
    return param is None or not param.requires_grad or sink_of(param) is not None


def for_autograd(x: Tensor, *params: Tensor | None) -> tuple[Tensor | None, ...]:
    """Returns the parameters to pass to an autograd function of x and these parameters.

    If x requires a gradient, and autograd needs no gradient for any parameter (`goes_to_sink`),
    each parameter is replaced by None. This saves host time, because autograd's work for the passed
    parameters would take as long as the launch of a small kernel. If x requires no gradient, the
    parameters must be passed: without them autograd would not run the backward.
    """
    no_params = x.requires_grad and all(map(goes_to_sink, params))
    return (None,) * len(params) if no_params else params


def bias_gradient(bias: Tensor, rows: Tensor) -> Tensor | None:
    """Adds the sum of rows [m n] to the bias's sink; without a sink, returns it for autograd."""
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
    """fp32 memory into which a kernel writes the gradient of a bias or of a norm's weight.

    The memory is the sink's buffer if possible, otherwise a temporary tensor.

    Attributes:
        out: the memory, fp32 [n].
        add: whether the kernel must add to `out` instead of overwriting it.
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
        """Finishes the contribution; without a sink, returns the gradient for autograd."""
        if self._sink is None:
            return self.out.to(self._dtype)
        self._sink.mark_added() if self._direct else self._sink.add(self.out)
        return None


class TileGatherer(Protocol):
    """Gathers a tile's weight for use. While the tile is not in use, its memory may be freed.

    A layer uses `weight.tile_gatherer`. A weight without a gatherer is always in memory.
    """

    def open(self) -> None:
        """Waits until the weight is gathered. Starts the gather if `ahead` did not start it."""

    def ahead(self) -> None:
        """Starts to gather the weight, for the next `open`."""

    def close(self) -> None:
        """Frees the weight until the next `open`."""


def tile_gatherer_of(weight: Tensor) -> TileGatherer | None:
    """Returns the tile gatherer of a parameter, or None."""
    return getattr(weight, "tile_gatherer", None)


def sum_of_products(
    weight: Tensor, pairs: Iterable[tuple[Tensor, Tensor]], by: Matmul = NATIVE
) -> Tensor | None:
    """Adds the sum of products a @ b to the weight's sink, or returns the sum for autograd.

    All pairs are consumed even if the weight is frozen, because producing a pair may have side
    effects, such as computing the input's gradient.
    """
    sink, total = sink_of(weight), None
    if sink is not None:
        sink.add_products(pairs, by)
        return None
    for a, b in pairs:
        if weight.requires_grad:
            total = add_to(total, a, b, by)
    return total


def add_to(total: Tensor | None, a: Tensor, b: Tensor, by: Matmul) -> Tensor:
    """Returns total + a b, computed in total's memory; without a total, returns a b."""
    if total is None:
        return by.product(a, b)
    by.add_product_(total, a, b, fresh=False)
    return total
