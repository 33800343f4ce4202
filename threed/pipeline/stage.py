"""One pipeline stage: a contiguous range of a model's layers, run forward and backward for one
micro-batch at a time.

With ZeRO-3 each layer is a unit: its parameters are gathered before it runs and released
afterwards. A layer has a separate autograd graph if its parameters are gathered and released, if it
is recomputed, or if `by_layer` is True. Other neighboring layers share one graph, which saves host
time. For each micro-batch the stage keeps an edge into every graph
(`torch.autograd.graph.GradientEdge`) instead of the graph's output, so an activation is freed as
soon as it has been sent to the next stage.

A recomputed layer has no graph until its backward, because its forward only saves the input. The
backward first runs the forward again; it needs no additional gather, because the layer's parameters
are gathered for the backward anyway.

Layers return a tensor, or a tuple or dict of tensors, of any shape and dtype
(`threed.pipeline.boundary`).
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from threed.layers.contract import contract, title
from threed.layers.recompute import RngState
from threed.layers.slicing import ForwardScope, MicroBatch
from threed.models.wrapped import Wrapped
from threed.pipeline.activation_checkpointing import (
    FETCH_AHEAD,
    GATHER_AHEAD,
    Recomputed,
    SavedInput,
)
from threed.pipeline.boundary import gradients_of, like, tensors
from threed.schedules.prefetch_order import Step, first_units, walk

T = TypeVar("T")
Pass = Generator[None, None, T]  # a forward or backward that yields after each layer


def finish(steps: Pass[T]) -> T:
    """Runs a pass to its end; returns its result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


class ParameterGatherer(Protocol):
    """Gathers parameters before they are used (`threed.zero.gather.Gatherer`).

    A unit is the number of a layer among the layers of this rank.
    """

    def is_freed(self, unit: int) -> bool:
        """Returns whether the parameters of a unit are freed between uses."""

    def start(self, unit: int) -> None:
        """Starts to gather the parameters of a unit."""

    def ready(self, unit: int) -> None:
        """Waits until the full parameters of a unit are available."""

    def release(self, unit: int) -> None:
        """Frees the full parameters of a unit until the next `start`."""


class AlwaysGathered:
    """A gatherer without effect, for parameters that are never sharded or are gathered by hooks."""

    def is_freed(self, unit: int) -> bool:
        return False

    def start(self, unit: int) -> None:
        """Has no effect."""

    def ready(self, unit: int) -> None:
        """Has no effect."""

    def release(self, unit: int) -> None:
        """Has no effect."""


@dataclass(eq=False)
class Frame:
    """The state of one autograd graph, kept from its forward to its backward.

    Attributes:
        x: the input of the graph. The backward writes the gradients of the input tensors to their
            `.grad`.
        edges: per output tensor: the edge at which autograd begins the tensor's backward, or None
            if the tensor requires no gradient.
        recomputation: the saved state from which the backward builds the graph of a recomputed
            layer; None if the layer is not recomputed.
    """

    x: Any = None
    edges: tuple[GradientEdge | None, ...] = ()
    recomputation: Recomputation | None = None


@dataclass(eq=False)
class Recomputation:
    """The state that is needed to run a layer's forward again.

    Attributes:
        saved: the saved input tensors; empty for the model's first layer.
        structure: the structure of the input: the input with None in place of its tensors.
        grads: for each input tensor, whether it requires a gradient.
        rng: state of the random generators before the first forward.
        micro: the micro-batch of the first forward.
    """

    saved: tuple[SavedInput, ...]
    structure: Any
    grads: tuple[bool, ...]
    rng: RngState
    micro: MicroBatch


def saved_inputs(frames: Iterable[Frame]) -> Iterator[SavedInput]:
    """Yields the saved inputs of the recomputed layers among some frames, in order."""
    for frame in frames:
        if frame.recomputation is not None:
            yield from frame.recomputation.saved


class Stage:
    """Layers `first` to `first + len(layers) - 1` of this rank, as one function of a micro-batch.

    forward(m, x, micro) -> y;  backward(m, dy) -> dx

    x is the stage's input and y its output; dx and dy are their gradients. x is `None` on the
    model's first stage. On the last stage, y is the weighted loss of the micro-batch and dy is
    `None`. A gradient has the structure of its value (x or y), with None for a tensor without a
    gradient. If the value is a single tensor without a gradient, the gradient is (None,). The
    tensors of y have no graph; `requires_grad` is True for the tensors that need a gradient.

    A layer whose backward does not read its parameters sets `backward_reads_weights = False`. A
    layer that must not be recomputed sets `recomputable = False`.

    Args:
        layers: the layers of the stage.
        gatherer: gathers and releases the parameters of a layer.
        prefetch: number of units that are gathered ahead of the running unit.
        first: number of the first layer among the layers of this rank.
        recomputed: the layers that are recomputed in the backward.
        scope: active while a forward runs, so that the rank's gradient sinks can reject gradients
            that are computed during a forward.
        by_layer: whether each layer has a separate graph, so that its backward can be run alone.
    """

    def __init__(
        self, layers: Sequence[nn.Module], gatherer: ParameterGatherer, prefetch: int = 1, first: int = 0,
        recomputed: Recomputed | None = None, scope: ForwardScope | None = None, by_layer: bool = False,
    ) -> None:  # fmt: skip
        self.layers, self.gatherer, self.prefetch, self.first = layers, gatherer, prefetch, first
        self.recomputed, self.scope = recomputed or Recomputed(), scope or ForwardScope()
        self._units = range(first, first + len(layers))
        full = frozenset() if self.recomputed.store is None else self.recomputed.units
        self._recomputed = full & set(self._units)
        self._trained = {
            unit
            for unit in self._recomputed
            if any(p.requires_grad for p in self._layer(unit).parameters())
        }
        self._backward_units = [
            unit
            for unit in reversed(self._units)
            if unit in self.recomputed.units or contract(self._layer(unit)).backward_reads_weights
        ]
        separate = {
            unit
            for unit in self._units
            if by_layer or gatherer.is_freed(unit) or unit in self.recomputed.units
        }
        # Numbers of the units that share a graph with the next unit.
        self._joined = {unit for unit in self._units[:-1] if not separate & {unit, unit + 1}}
        self._open: dict[int, list[Frame]] = {}
        # by (backward, keep); see `_walk`
        self._walks = {key: self._walk(*key) for key in product((False, True), repeat=2)}

    @property
    def reuses_storages(self) -> bool:
        """Whether a backward frees storages of saved inputs, which the next forward reuses.

        The reuse is ordered by one stream. So if the two passes use two streams, the forward must
        not take a storage that the backward has freed meanwhile.
        """
        return self.recomputed.store is not None and self.recomputed.store.storages is not None

    def _walk(self, backward: bool, keep: bool) -> tuple[Step, ...]:
        """Returns the steps of a pass: which units to gather, run and release, in order.

        The steps gather and release only units whose parameters are freed between uses.

        Args:
            backward: whether the pass is a backward.
            keep: whether the last unit of the pass stays gathered.
        """
        units = self._backward_units if backward else self._units
        moves = self.gatherer.is_freed
        return tuple(
            Step(tuple(filter(moves, step.gather)), step.run, step.release and moves(step.run))
            for step in walk(units, self.prefetch, keep)
        )

    def _layer(self, unit: int) -> nn.Module:
        return self.layers[unit - self.first]

    def reset(self, ended: int | None = None) -> None:
        """Begins a step.

        Args:
            ended: number of micro-batches of the previous step, if this step runs the backwards
                that the previous step has left open. The open micro-batches are then renumbered so
                that the last micro-batch of the previous step is -1. None: all open micro-batches
                are dropped, for example after an aborted step.
        """
        if ended is not None:
            self._open = {microbatch - ended: frames for microbatch, frames in self._open.items()}
            return
        for frames in self._open.values():
            self._drop(frames)
        self._open.clear()

    def start(self, backward: bool) -> None:
        """Starts to gather the first units of a forward or backward pass."""
        for unit in first_units(self._backward_units if backward else self._units, self.prefetch):
            self.gatherer.start(unit)

    # -------------------------------------------------------------------------------------------------------- forward

    def forward(self, microbatch: int, x: Any, micro: MicroBatch, keep: bool = False) -> Any:
        """Runs the layers on a micro-batch; see `forward_by_layer`."""
        return finish(self.forward_by_layer(microbatch, x, micro, keep))

    def forward_by_layer(
        self, microbatch: int, x: Any, micro: MicroBatch, keep: bool = False
    ) -> Pass[Any]:
        """Runs the layers on a micro-batch; yields after each layer.

        If the micro-batch is for training, also saves the state that its backward needs.

        Args:
            microbatch: number of the micro-batch.
            x: output of the previous stage; None on the first stage.
            micro: the micro-batch, which every layer gets as its second argument.
            keep: whether the last unit stays gathered, because the next pass starts with it.

        Returns:
            The output of the stage, detached from its graph; on the last stage, the weighted loss.
        """
        frames: list[Frame] = []
        if micro.training:
            self._open[microbatch] = frames
        keep = keep and self._backward_units[:1] == [self._units[-1]]
        y = begin = x
        for step in self._walks[False, keep]:
            with torch.set_grad_enabled(micro.training), self.scope.enter():
                for unit in step.gather:
                    self.gatherer.start(unit)
                self.gatherer.ready(step.run)
                y, frame = self._run(step.run, y, micro, begin)
                if frame is not None:
                    frames.append(frame)
                    begin = y
                if step.release:
                    self.gatherer.release(step.run)
            yield
        if y is None:
            raise ValueError("a pipeline stage must have at least one layer")
        return y

    def _run(self, unit: int, x: Any, micro: MicroBatch, begin: Any) -> tuple[Any, Frame | None]:
        """Runs one layer of a forward.

        Args:
            unit: index of the layer among the layers of this rank.
            x: input of the layer.
            micro: the micro-batch, which the layer gets as its second argument.
            begin: input of the graph to which the layer belongs.

        Returns:
            (output, frame): the output, detached from the graph, and the `Frame` of the graph. If
            the next layer shares the graph: the output with its graph, and None.
        """
        if micro.training and unit in self._recomputed:
            return self._run_to_recompute(unit, x, micro)
        given = (
            [part for part in tensors(x) if part.requires_grad] if unit - 1 in self._joined else []
        )
        versions = [part._version for part in given]
        selective = self.recomputed.selective
        watches = micro.training and unit in self.recomputed.units
        with selective.watch() if selective is not None and watches else nullcontext():
            y, parts = self._call(unit, x, micro)
        # `given` is empty if the input is a leaf. If the layer changes a leaf in place, torch
        # itself raises an error.
        if [part._version for part in given] != versions:
            kind = type(self._layer(unit)).__name__
            raise RuntimeError(f"layer {unit} ({kind}) changed its input in-place")
        if not micro.training:
            return y, Frame()
        if unit in self._joined:
            return y, None
        edges = tuple(get_gradient_edge(part) if part.requires_grad else None for part in parts)
        outputs = like(y, [part.detach().requires_grad_(part.requires_grad) for part in parts])
        return outputs, Frame(begin, edges)

    def _call(self, unit: int, x: Any, micro: MicroBatch) -> tuple[Any, tuple[Tensor, ...]]:
        """Runs a layer; returns its output, and the tensors of the output.

        If the layer raises an error and x is not a tensor, adds the layer's name and the type of x
        to the error.

        Raises:
            TypeError: the output is not a tensor, or a tuple or dict of tensors.
        """
        layer = self._layer(unit)
        try:
            y = layer(x, micro)
        except (AttributeError, TypeError) as error:
            if x is None or isinstance(x, Tensor):
                raise
            raise TypeError(
                f"{title(layer, unit)} was given a {type(x).__name__} of {len(x)} tensors, as the layer before it"
                f" returned, and failed: {error}"
            ) from error
        try:
            return y, tensors(y)
        except TypeError as error:
            raise TypeError(f"{title(layer, unit)} returned {error}") from None

    def _run_to_recompute(self, unit: int, x: Any, micro: MicroBatch) -> tuple[Any, Frame]:
        """Runs one layer without a graph, and saves its input.

        Floating-point output tensors are marked as requiring a gradient, because the recomputed
        tensors may require one.
        """
        store = self.recomputed.store
        assert store is not None
        rng, given, micro = RngState(store.device), tensors(x), replace(micro, memo={})
        versions = [part._version for part in given]
        with torch.no_grad():
            y, parts = self._call(unit, x, micro)
        rng.drawn()
        grads = tuple(part.requires_grad for part in given)
        if not (any(grads) or unit in self._trained):
            return like(y, [part.detach() for part in parts]), Frame(edges=(None,) * len(parts))
        if [part._version for part in given] != versions:
            raise RuntimeError(
                f"layer {unit} ({type(self._layer(unit)).__name__}) changed its input in place, from which it is"
                " recomputed: change a copy (x = x * 2, not x.mul_(2)), or set the layer's `recomputable = False`"
            )
        saved = store.save_all(unit, given)
        outputs = like(
            y, [part.detach().requires_grad_(part.is_floating_point()) for part in parts]
        )
        return outputs, Frame(
            recomputation=Recomputation(saved, like(x, [None] * len(given)), grads, rng, micro)
        )

    # ------------------------------------------------------------------------------------------------------- backward

    def backward(self, microbatch: int, dy: Any, keep: bool = False, split: bool = False) -> Any:
        """Runs the backward of a micro-batch; see `backward_by_layer`."""
        return finish(self.backward_by_layer(microbatch, dy, keep, split))

    def backward_by_layer(
        self, microbatch: int, dy: Any, keep: bool = False, split: bool = False
    ) -> Pass[Any]:
        """Runs the backward of a micro-batch; yields after each graph.

        Gradients of parameters are added to the parameters' gradient sinks (`param.sink`).

        Args:
            microbatch: number of the micro-batch.
            dy: gradient of the stage's output; None on the last stage.
            keep: whether the first unit stays gathered, because the next pass starts with it.
            split: whether weight gradients are computed later, from the layers' saved inputs. If
                True, the memory of these inputs stays valid after the backward.

        Returns:
            The gradient of the stage's input; None on the first stage.
        """
        frames, reading = self._open[microbatch], self._backward_units
        keep = keep and bool(reading) and reading[-1] == self.first
        steps = {step.run: step for step in self._walks[True, keep]}
        if self._recomputed:
            self._prefetch_inputs(frames)
        for unit in reversed(self._units):
            step = steps.get(unit)
            if step is not None:
                for other in step.gather:
                    self.gatherer.start(other)
                self.gatherer.ready(unit)
            if unit not in self._joined:
                dy = self._back(unit, frames.pop(), frames, dy, unit == self._units[-1], split)
            if step is not None and step.release:
                self.gatherer.release(unit)
            if unit not in self._joined:
                yield
        del self._open[microbatch]
        return dy

    def _back(
        self,
        unit: int,
        frame: Frame,
        before: list[Frame],
        dy: Any,
        first: bool,
        split: bool = False,
    ) -> Any:
        """Runs the backward of one graph; returns the gradient of the graph's input.

        Args:
            unit: number of the last layer of the graph.
            frame: the state of the graph.
            before: the frames whose backwards have not run yet; the backward of the last one is
                next.
            dy: gradient of the graph's output; None if no gradient arrives, or for a loss.
            first: whether this is the first graph of the stage's backward. If it is, and dy is
                None, the graph's output is a loss.
            split: see `backward`.

        Raises:
            RuntimeError: if the output is a loss without a graph, although a parameter or the input
                requires a gradient.
        """
        graph: AbstractContextManager[Any] = nullcontext((frame.x, frame.edges))
        if frame.recomputation is not None:
            graph = self._recompute(unit, frame.recomputation, before, split)
        with graph as (x, edges):
            grads = gradients_of(dy, len(edges))
            loss = first and dy is None
            roots = [
                (e, g)
                for e, g in zip(edges, grads, strict=True)
                if e is not None and (loss or g is not None)
            ]
            if loss and not roots:
                self._refuse_untrained(unit, x)
            if roots:
                torch.autograd.backward(
                    tuple(e for e, _ in roots), None if loss else tuple(g for _, g in roots)
                )
            return like(x, [part.grad for part in tensors(x)])

    def _refuse_untrained(self, unit: int, x: Any) -> None:
        """Raises RuntimeError for a loss without a graph, if a gradient is required.

        A gradient is required if any parameter of this stage, or any tensor of the input `x`, has
        `requires_grad`.
        """
        inside = [part for layer in self.layers for part in layer.modules()]
        params = [
            param for part in inside for param in part._parameters.values() if param is not None
        ]
        if any(part.requires_grad for part in (*tensors(x), *params)):
            layer = self._layer(unit)
            wrapped = isinstance(layer, Wrapped)
            what = f"module ({type(layer.module).__name__})" if wrapped else title(layer, unit)
            raise RuntimeError(
                f"the loss that {what} returned has no gradient, so no parameter would be trained: was it detached, or"
                " computed under no_grad?"
            )

    @contextmanager
    def _recompute(
        self, unit: int, recomputation: Recomputation, before: list[Frame], split: bool
    ) -> Iterator[tuple[Any, tuple[GradientEdge | None, ...]]]:
        """Context manager that runs the forward of a recomputed layer again.

        Yields (x, edges): the input of the layer's graph, and the edges into the graph.
        """
        store = self.recomputed.store
        assert store is not None
        try:
            given = [
                store.get(one, split).requires_grad_(g)
                for one, g in zip(recomputation.saved, recomputation.grads, strict=True)
            ]
            x = like(recomputation.structure, given)
            self._prefetch_inputs(before)
            with torch.enable_grad(), self.scope.enter(), recomputation.rng.again():
                y = self._layer(unit)(x, recomputation.micro)
            edges = tuple(
                get_gradient_edge(part) if part.requires_grad else None for part in tensors(y)
            )
            del y  # frees the output's memory before the backward
            yield x, edges
        finally:
            for one in recomputation.saved:
                store.release(one)

    def _prefetch_inputs(self, frames: list[Frame]) -> None:
        """Starts to fetch the saved inputs that the next backwards need.

        The order is the same on all tensor ranks, as gathers require.

        Args:
            frames: the frames whose backwards have not run yet; the last one is next.
        """
        store = self.recomputed.store
        assert store is not None
        coming = saved_inputs(reversed(frames))
        saved = list(islice(coming, max(FETCH_AHEAD, GATHER_AHEAD)))
        for one in saved[:FETCH_AHEAD]:
            store.fetch(one)
        for one in saved[:GATHER_AHEAD]:
            store.prefetch(one)

    def _drop(self, frames: list[Frame]) -> None:
        if self.recomputed.store is not None:
            for one in saved_inputs(frames):
                self.recomputed.store.release(one)
