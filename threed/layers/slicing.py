"""The objects that layers use: parallel layout, micro-batch, gradient sinks and tile gatherers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeGuard, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from threed.config import Config, ConfigError
from threed.config.resolution import context_heads
from threed.distributed import conjugate, symmetric_memory
from threed.distributed.sharding import Piece, ShardSpec
from threed.distributed.topology import EXPERTS, Axis, Topology, alone
from threed.layers.context import Context
from threed.ops import grouped, launch, sums
from threed.ops.grouped import Groups
from threed.ops.matmul import NATIVE, Matmul
from threed.ops.positions import IGNORED, Positions

Module = TypeVar("Module", bound=nn.Module)


@dataclass(frozen=True, eq=False)
class ExpertRanks:
    """The ranks that hold different experts.

    Attributes:
        axis: the ranks, with a separate communicator.
        over: `ShardSpec.over` of the experts' parameters. Blocks of one rank, such as "dp*tp/1", if
            every rank holds all experts; None if they are also not divided over tensor ranks.
    """

    axis: Axis = field(default_factory=lambda: alone(EXPERTS))
    over: str | None = None

    @classmethod
    def of(cls, topology: Topology, ep: int) -> ExpertRanks:
        """Returns the expert ranks of this rank. Collective over the world if ep > 1.

        Args:
            topology: the process topology.
            ep: number of ranks that hold different experts.

        Raises:
            ValueError: if ep does not divide the ranks of a pipeline stage.
        """
        over = topology.grid.expert_axis(ep)
        if ep == 1:  # over blocks of one rank, so that ZeRO shards also over tensor ranks
            return cls(over=over if topology.tp > 1 else None)
        name = f"{over}@{EXPERTS}"
        topology.prepare([name])
        return cls(topology.axis(name), over)

    @property
    def name(self) -> str:
        """The name of `axis`; "" if every rank holds all experts."""
        return f"{self.over}@{EXPERTS}" if self.axis.size > 1 else ""


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
        context: ranks over which every sequence is split (context parallelism).
        experts: ranks that hold different experts (expert parallelism).
        symmetric_memory: whether linear layers with sequence parallelism use symmetric memory.
    """

    tp: Axis = field(default_factory=alone)
    sequence: bool = False
    seed: int = 1234
    tile: int = 1
    context: Context = field(default_factory=Context)
    experts: ExpertRanks = field(default_factory=ExpertRanks)
    symmetric_memory: bool = False
    # represents `tp` in a graph of torch.compile (`layers.compiled`)
    opaque: Any = field(default=None, init=False)

    @classmethod
    def of(cls, topology: Topology, config: Config) -> Slicing:
        """Returns the layout that a configuration asks for.

        Collective over the world if cp > 1 or ep > 1, or with `parallel.symmetric_memory`.

        Args:
            topology: the process topology.
            config: the configuration; its sizes are those of the topology.

        Raises:
            ConfigError: if the tensor ranks cannot use symmetric memory, as `config` demands.
        """
        sequence, seed = bool(config.parallel.sequence), config.train.seed
        context = Context.of(topology, context_heads(config))
        experts = ExpertRanks.of(topology, config.parallel.ep)
        tp, symmetric = topology.axis("tp"), config.parallel.symmetric_memory
        used = symmetric and tp.group is not None
        if problem := used and symmetric_memory.find_problem(tp, topology.device):
            given = f"--parallel.symmetric-memory true: {problem}"
            raise ConfigError([f"{given}; use --parallel.symmetric-memory false"])
        return cls(tp, sequence, seed, config.zero.tile, context, experts, symmetric)

    def __deepcopy__(self, memo: object) -> Slicing:
        return self

    @property
    def axes(self) -> list[str]:
        """The names of the axes over which layers communicate."""
        context = Context.names(self.context.size, self.context.heads.size)
        return [name for name in ("tp", *context, self.experts.name) if name]

    @property
    def sequence_parallel(self) -> bool:
        """Whether activations between blocks are [s/t b h] instead of [s b h]."""
        return self.sequence and self.tp.size > 1

    @property
    def sequence_parts(self) -> int:
        """Number of ranks over which a sequence is sharded between blocks."""
        return self.context.size * (self.tp.size if self.sequence_parallel else 1)

    def positions(self, length: int) -> Positions:
        """Returns this rank's positions of a sequence, for activations between blocks.

        Args:
            length: full length of the sequence.

        Raises:
            ValueError: if the sequence cannot be split over the ranks evenly.
        """
        context, tp = self.context, self.tp.size if self.sequence_parallel else 1
        if length % (context.multiple * tp):
            sizes = f"cp {context.size}" if context.size > 1 else ""
            sizes += " and " * (context.size > 1 < tp) + (f"tp {tp}" if tp > 1 else "")
            of = context.multiple * tp
            times = f"{of}, for {sizes}" if context.size > 1 else sizes
            raise ValueError(
                f"sequence length {length} is not a multiple of {times}: pad the batch to one"
            )
        mine = context.positions(length)
        return mine.part(tp, self.tp.index) if tp > 1 else mine

    def positions_of(self, x: Tensor) -> Positions:
        """Returns the positions of the rows of `x`, an activation between blocks.

        x: [s/c b h]; with sequence parallelism [s/(c t) b h].
        """
        return self.positions(x.shape[0] * self.sequence_parts)

    def gathered_positions(self, x: Tensor) -> Positions:
        """Returns the positions of the rows of `x` [s/c b ...], an output of `gather`."""
        return self.context.positions(x.shape[0] * self.context.size)

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

    def core_heads(self, count: int) -> tuple[int, int]:
        """Returns the heads that an attention core of this rank gets, as the range [first, last).

        It is the range `heads(count)`, or a part of it if context ranks exchange positions for
        heads.

        Args:
            count: number of heads of the layer.
        """
        (first, last), axis = self.heads(count), self.context.heads
        part = max((last - first) // axis.size, 1)
        start = first + (last - first) * axis.index // axis.size
        return start, start + part

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

    def gather_sequence(self, x: Tensor) -> Tensor:
        """Returns full sequences, for layers that mix positions in other ways than by attention.

        Collective over context ranks, and over tensor ranks with sequence parallelism. The
        gradients of all ranks are summed. `split_sequence` is the inverse.

        Args:
            x: activation between blocks, [s/c b ...]; with sequence parallelism [s/(c t) b ...].

        Returns:
            All positions, in order, [s b ...].
        """
        x = conjugate.gather_from(x, self.tp) if self.sequence_parallel else x
        return self.context.gather(x)

    def split_sequence(self, x: Tensor) -> Tensor:
        """Returns this rank's positions of full sequences; the inverse of `gather_sequence`.

        Args:
            x: all positions, [s b ...].

        Returns:
            [s/c b ...]; with sequence parallelism [s/(c t) b ...].
        """
        return self.positions(x.shape[0]).rows(x)

    def _conjugate(self, function: Callable[[Tensor, Axis], Tensor], x: Tensor) -> Tensor:
        if self.tp.size == 1:
            return x
        if self.opaque is not None and torch.compiler.is_compiling():
            return getattr(torch.ops.threed, function.__name__)(x, self.tp.size, self.opaque)
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
        full: (tokens, labels) of the full sequences, int64 [b s], if `tokens` and `labels` have only
            the positions of this context rank; else None.
        memo: results that a layer's second forward reuses, by name, if the layer runs again in the
            backward (`--recompute.mode full`); else None. A layer stores choices here that a second
            forward must not make differently, such as the experts of each token.
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
    full: tuple[Tensor, Tensor] | None = None
    memo: dict[str, Any] | None = None

    def ahead(self, count: int, slicing: Slicing) -> MicroBatch:
        """Returns the micro-batch with tokens and labels that are `count` positions further.

        Beyond the end of a sequence, the token is 0 and the label is ignored. A label is also
        ignored if its token belongs to another document than the position that gets the label.

        Args:
            count: number of positions, 1 or more.
            slicing: parallel layout.

        Raises:
            ValueError: if the micro-batch has no tokens or no labels.
        """
        if self.tokens is None or self.labels is None:
            raise ValueError("the batch needs 'tokens' and 'labels', int64 [b s]")
        tokens, labels = (self.tokens, self.labels) if self.full is None else self.full
        length = tokens.shape[1]
        pad = (0, min(count, length))
        tokens = F.pad(tokens[:, count:], pad)
        labels = F.pad(labels[:, count:], pad, value=IGNORED)
        if self.documents is not None:
            other = F.pad(self.documents[:, count:], pad) != self.documents
            labels = labels.masked_fill(other, IGNORED)
        own = slicing.context.positions(length)
        return replace(self, tokens=own.columns(tokens), labels=own.columns(labels), full=None)


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


class Tally:
    """Sums over the tokens of this rank, for metrics of a layer.

    A layer keeps its tallies in a tuple `tallies`, where the engine finds them: it takes back what
    a layer has added in a step that is repeated.
    """

    def __init__(self) -> None:
        self._sums: Tensor | None = None

    def add(self, values: Tensor) -> None:
        """Adds values [k] to the sums, in fp64.

        The memory of the sums does not change, because a CUDA graph adds to a fixed address.
        """
        if self._sums is None:
            self._sums = torch.zeros_like(values, dtype=torch.float64)
        self._sums += values

    def take(self) -> Tensor | None:
        """Returns the sums since the last call, [k]; None if nothing was ever added."""
        if self._sums is None:
            return None
        sums = self._sums.clone()
        self._sums.zero_()
        return sums

    def rewinding(self) -> Callable[[], None]:
        """Returns a function that restores the sums to their current values."""
        before = None if self._sums is None else self._sums.clone()

        def rewind() -> None:
            if self._sums is not None:
                self._sums.zero_() if before is None else self._sums.copy_(before)

        return rewind


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

    def add_rows(self, index: Tensor, rows: Tensor) -> None:
        """Adds rows[i] to row index[i] of the accumulated gradient: rows [n h], index [n]."""

    def add_groups(self, dy: Tensor, x: Tensor, groups: Groups) -> None:
        """Adds the product of each group of rows, dy^T x, to one matrix of the accumulated gradient.

        Args:
            dy: gradient of the output, [n out]; the groups follow each other.
            x: input, [n in].
            groups: the groups of rows.
        """

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
    autograd runs the sink's own hook, which moves the gradient to the sink. A `SummedSink` is
    returned also for such a parameter, because it returns its sum to autograd.
    """
    sink: GradSink | None = getattr(weight, "sink", None)
    return None if has_gradient_hooks(weight) and type(sink) is not SummedSink else sink


def has_gradient_hooks(param: Tensor) -> bool:
    """Returns whether a parameter has gradient hooks other than the sink's post-accumulate hook."""
    return bool(param._backward_hooks) or len(param._post_accumulate_grad_hooks or ()) > 1


def has_hooks(module: nn.Module) -> bool:
    """Returns whether hooks of a module may read or change its input, its output or gradients."""
    forward = module._forward_hooks or module._forward_pre_hooks
    return bool(forward or module._backward_hooks or module._backward_pre_hooks)


def is_plain(module: nn.Module, *kinds: type[Module]) -> TypeGuard[Module]:
    """Returns whether a module is of one of these classes itself, and has no hooks."""
    return type(module) in kinds and not has_hooks(module)


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


class SummedSink:
    """A gradient sink that sums contributions, and passes the sum on as a single contribution.

    The sum is computed in the buffer of the parameter's own sink if possible. Otherwise, as in a
    split backward, it is computed in a temporary tensor: in fp32 if the parameter has 16 bits.

    Args:
        param: the parameter.
    """

    def __init__(self, param: Tensor) -> None:
        self._param, self._sink = param, sink_of(param)
        self._out: Tensor | None = None
        self._direct = self._is_set = self._is_counted = False

    def memory(self) -> tuple[Tensor, bool]:
        if self._out is None:
            found = None if self._sink is None else self._sink.memory()
            self._direct = found is not None
            if found is None:
                wide = torch.promote_types(self._param.dtype, torch.float32)
                found = torch.empty_like(self._param, dtype=wide, requires_grad=False), False
            self._out, self._is_set = found
        return self._out, self._is_set

    def mark_added(self) -> None:
        self._is_set = self._is_counted = True

    def add(self, grad: Tensor) -> None:
        out, add = self.memory()
        out.add_(grad) if add else out.copy_(grad)
        self.mark_added()

    def add_product(self, a: Tensor, b: Tensor, by: Matmul = NATIVE) -> None:
        out, add = self.memory()
        by.add_product_(out, a, b, fresh=not add)
        self.mark_added()

    def add_rows(self, index: Tensor, rows: Tensor) -> None:
        out, add = self.memory()
        if not add:
            out.zero_()
        out.index_add_(0, index, rows.to(out.dtype))
        self.mark_added()

    def add_groups(self, dy: Tensor, x: Tensor, groups: Groups) -> None:
        out, add = self.memory()
        grouped.add_products_(out, dy, x, groups, fresh=not add)
        self.mark_added()

    def in_forward(self) -> bool:
        return self._sink is not None and self._sink.in_forward()

    def defers(self) -> bool:
        return False

    def done(self) -> Tensor | None:
        """Passes the sum on. If the parameter has no sink, returns the sum for autograd instead."""
        if not self._is_counted or self._out is None:
            return None
        if self._sink is None:
            return self._out.to(self._param.dtype)
        self._sink.mark_added() if self._direct else self._sink.add(self._out)
        return None


@contextmanager
def one_contribution(params: Sequence[Tensor]) -> Iterator[list[Tensor | None]]:
    """Context in which all contributions to the gradient of a parameter count as one.

    A layer that computes a gradient in several parts, such as chunks of the sequence, uses it in
    its backward.

    Args:
        params: the parameters. Inside the context each trainable one has a `SummedSink`, also if it
            had no sink, or if only autograd could use its gradient (`sink_of`).

    Yields:
        A list that gets, when the context ends, the gradient of each parameter for autograd: None
        if the gradient went to the parameter's sink, or if there was no contribution.
    """
    before = [getattr(param, "sink", None) for param in params]
    sums = [SummedSink(param) if param.requires_grad else None for param in params]
    returned: list[Tensor | None] = []
    _set_sinks(params, [new or old for new, old in zip(sums, before, strict=True)])
    try:
        yield returned
    finally:
        _set_sinks(params, before)
    returned += [None if total is None else total.done() for total in sums]


def _set_sinks(params: Iterable[Tensor], sinks: Iterable[GradSink | None]) -> None:
    for param, sink in zip(params, sinks, strict=True):
        if sink is not None:
            param.sink = sink  # type: ignore[attr-defined]
        elif hasattr(param, "sink"):
            del param.sink
