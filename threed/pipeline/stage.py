"""One pipeline stage: a contiguous range of a model's layers, run forward and backward for one micro-batch at a time.

Each layer is a unit that is gathered before it runs and released after. It has an autograd graph of its own where its
weights come and go or it is recomputed; neighbours of which neither is true share one, which costs the host less. For
each micro-batch the stage keeps an edge into every graph, not its output: so an activation is freed as soon as it was
sent to the next stage.

A recomputed layer has no graph until its backward: its forward saves its input only, and runs again while the layer's
weights are gathered for the backward anyway.

Layers pass on a tensor, or a tuple or dict of tensors, of any shape and dtype (`threed.pipeline.boundary`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

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
from threed.schedules.window import Step, first_units, walk


class ParameterGatherer(Protocol):
    """Gathers parameters before they are used (`threed.zero.gather.Gatherer`)."""

    def comes_and_goes(self, unit: int) -> bool:
        """Returns whether the memory of parameters of this rank's layer `unit` is freed between uses."""

    def start(self, unit: int) -> None:
        """Begins to gather the parameters of a unit."""

    def ready(self, unit: int) -> None:
        """Waits until they are whole."""

    def release(self, unit: int) -> None:
        """Frees them until the next `start`."""


class AlwaysWhole:
    """The gatherer of parameters that are always whole, or that hooks gather."""

    def comes_and_goes(self, unit: int) -> bool:
        """Returns False."""
        return False

    def start(self, unit: int) -> None:
        """Does nothing."""

    def ready(self, unit: int) -> None:
        """Does nothing."""

    def release(self, unit: int) -> None:
        """Does nothing."""


@dataclass(eq=False)
class Frame:
    """What backward needs of one graph: its input, whose tensors get the gradient, and for each output tensor the edge
    into the graph, if there is one; or `again`, from which the graph is made in the backward."""

    x: Any = None
    edges: tuple[GradientEdge | None, ...] = ()
    again: Again | None = None


@dataclass(eq=False)
class Again:
    """What a layer's forward needs to run again: its saved inputs (none on the model's first layer), their structure,
    and which of them get a gradient."""

    saved: tuple[SavedInput, ...]
    structure: Any
    grads: tuple[bool, ...]
    draws: RngState
    micro: MicroBatch


class Stage:
    """The layers [first, first + len(layers)) among those that this rank holds, as one function of a micro-batch.

    forward(m, x, micro) -> y;  backward(m, dy) -> dx.  x is None on the model's first stage; on its last, y is the
    micro-batch's weighted loss and dy is None. Gradients have the structure of the values, None where there is none;
    (None,) is that of a sole tensor without one. The tensors of y have no graph; `requires_grad` says which need a
    gradient. keep: the unit where the pass ends stays whole, because the next pass begins there. prefetch: units
    gathered ahead of the running one. recomputed: layers recomputed in the backward. A layer whose backward does not
    read its weights sets `backward_reads_weights = False`, and one that must not be recomputed `recomputable = False`.
    """

    def __init__(
        self, layers: Sequence[nn.Module], gatherer: ParameterGatherer, prefetch: int = 1, first: int = 0,
        recomputed: Recomputed | None = None, scope: ForwardScope | None = None,
    ) -> None:  # fmt: skip
        self.layers, self.gatherer, self.prefetch, self.first = layers, gatherer, prefetch, first
        self.recomputed, self.scope = recomputed or Recomputed(), scope or ForwardScope()
        self._units = range(first, first + len(layers))
        self._again = (
            frozenset()
            if self.recomputed.store is None
            else self.recomputed.units & set(self._units)
        )
        self._trained = {
            unit
            for unit in self._again
            if any(p.requires_grad for p in self._layer(unit).parameters())
        }
        reads = [contract(layer).backward_reads_weights for layer in layers]
        reading = [
            unit
            for unit, own in zip(self._units, reads, strict=True)
            if own or unit in self.recomputed.units
        ]
        self._backward_units = reading[::-1]
        apart = {
            unit
            for unit in self._units
            if gatherer.comes_and_goes(unit) or unit in self.recomputed.units
        }
        # Units whose graph goes on with the next unit's.
        self._joined = {unit for unit in self._units[:-1] if not apart & {unit, unit + 1}}
        self._open: dict[int, list[Frame]] = {}
        self._walks: dict[tuple[bool, bool], tuple[Step, ...]] = {}

    def _walk(self, backward: bool, keep: bool) -> tuple[Step, ...]:
        """The steps of a pass; of gathers and releases only those of parameters that come and go."""
        if (backward, keep) not in self._walks:
            units = self._backward_units if backward else self._units
            moves = self.gatherer.comes_and_goes
            self._walks[backward, keep] = tuple(
                Step(tuple(filter(moves, step.gather)), step.run, step.release and moves(step.run))
                for step in walk(units, self.prefetch, keep)
            )
        return self._walks[backward, keep]

    def _layer(self, unit: int) -> nn.Module:
        return self.layers[unit - self.first]

    def reset(self, ended: int | None = None) -> None:
        """Begins a step.

        Micro-batches without a backward are dropped, as those of an aborted step. With `ended` they stay instead, where
        a step of so many micro-batches left them, and are counted back from -1.
        """
        if ended is not None:
            self._open = {microbatch - ended: frames for microbatch, frames in self._open.items()}
            return
        for frames in self._open.values():
            self._drop(frames)
        self._open.clear()

    def start(self, backward: bool) -> None:
        """Begins to gather the units that a pass needs first."""
        for unit in first_units(self._backward_units if backward else self._units, self.prefetch):
            self.gatherer.start(unit)

    # -------------------------------------------------------------------------------------------------------- forward

    def forward(self, microbatch: int, x: Any, micro: MicroBatch, keep: bool = False) -> Any:
        """Runs the layers, and keeps what backward needs if the micro-batch is for training."""
        frames: list[Frame] = []
        if micro.training:
            self._open[microbatch] = frames
        keep = keep and self._backward_units[:1] == [self._units[-1]]
        y = begin = x
        with torch.set_grad_enabled(micro.training), self.scope.enter():
            for step in self._walk(False, keep):
                for unit in step.gather:
                    self.gatherer.start(unit)
                self.gatherer.ready(step.run)
                y, frame = self._run(step.run, y, micro, begin)
                if frame is not None:
                    frames.append(frame)
                    begin = y
                if step.release:
                    self.gatherer.release(step.run)
        if y is None:
            raise ValueError("a pipeline stage without layers")
        return y

    def _run(self, unit: int, x: Any, micro: MicroBatch, begin: Any) -> tuple[Any, Frame | None]:
        """Runs one layer; returns its output without a graph, and what the backward needs of the graph that began at
        `begin`; or its output with the graph, which goes on, and None."""
        if micro.training and unit in self._again:
            return self._run_to_recompute(unit, x, micro)
        given = (
            [part for part in tensors(x) if part.requires_grad] if unit - 1 in self._joined else []
        )
        versions = [part._version for part in given]
        layer = self._layer(unit)
        with self._watch(unit) if micro.training else nullcontext():
            y = self._call(layer, unit, x, micro)
        # of an input without a neighbour's graph, torch says it
        if [part._version for part in given] != versions:
            raise RuntimeError(f"layer {unit} ({type(layer).__name__}) changed its input in-place")
        parts = self._tensors(unit, y)
        if not micro.training:
            return y, Frame()
        if unit in self._joined:
            return y, None
        edges = tuple(get_gradient_edge(part) if part.requires_grad else None for part in parts)
        outputs = like(y, [part.detach().requires_grad_(part.requires_grad) for part in parts])
        return outputs, Frame(begin, edges)

    def _call(self, layer: nn.Module, unit: int, x: Any, micro: MicroBatch) -> Any:
        """Runs a layer. If it fails on x because that is not a tensor, raises a TypeError with its name and x's
        type."""
        try:
            return layer(x, micro)
        except (AttributeError, TypeError) as error:
            if x is None or isinstance(x, Tensor):
                raise
            raise TypeError(
                f"{self._name(unit)} was given a {type(x).__name__} of {len(x)} tensors, as the layer before it"
                f" returned, and failed: {error}"
            ) from error

    def _name(self, unit: int) -> str:
        return title(self._layer(unit), unit)

    def _watch(self, unit: int) -> AbstractContextManager[None]:
        selective = self.recomputed.selective
        return (
            nullcontext()
            if selective is None or unit not in self.recomputed.units
            else selective.watch()
        )

    def _tensors(self, unit: int, y: Any) -> tuple[Tensor, ...]:
        try:
            return tensors(y)
        except TypeError as error:
            raise TypeError(f"{self._name(unit)} returned {error}") from None

    def _run_to_recompute(self, unit: int, x: Any, micro: MicroBatch) -> tuple[Any, Frame]:
        """Runs one layer without a graph; the tensors of y require a gradient if they might have had one."""
        store = self.recomputed.store
        assert store is not None
        draws, given = RngState(store.device), tensors(x)
        versions = [part._version for part in given]
        with torch.no_grad():
            y = self._call(self._layer(unit), unit, x, micro)
        draws.drawn()
        parts, grads = self._tensors(unit, y), tuple(part.requires_grad for part in given)
        if not (any(grads) or unit in self._trained):
            return like(y, [part.detach() for part in parts]), Frame(edges=(None,) * len(parts))
        if [part._version for part in given] != versions:
            raise RuntimeError(
                f"layer {unit} ({type(self._layer(unit)).__name__}) changed its input in place, from which it is to be"
                " computed again: change a copy (x = x * 2, not x.mul_(2)), or set the layer's `recomputable = False`"
            )
        saved = store.save_all(unit, given)
        outputs = like(
            y, [part.detach().requires_grad_(part.is_floating_point()) for part in parts]
        )
        return outputs, Frame(again=Again(saved, like(x, [None] * len(given)), grads, draws, micro))

    # ------------------------------------------------------------------------------------------------------- backward

    def backward(self, microbatch: int, dy: Any, keep: bool = False, split: bool = False) -> Any:
        """Returns the gradient of the micro-batch's input, None on the first stage; sinks get weight gradients. split:
        those are computed later, from what layers were given: that must stay."""
        frames, reading = self._open[microbatch], self._backward_units
        keep = keep and bool(reading) and reading[-1] == self.first
        steps = {step.run: step for step in self._walk(True, keep)}
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
        """Runs the backward of the graph that ends with a layer. before: frames whose backward comes next. first: of
        the stage's backward, where dy None means that y is a loss; which must have a graph."""
        with self._graph(unit, frame, before, split) as (x, edges):
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
        """Raises RuntimeError for a loss without a graph, unless there is nothing here that it could have trained."""
        inside = [part for layer in self.layers for part in layer.modules()]
        params = [
            param for part in inside for param in part._parameters.values() if param is not None
        ]
        if any(part.requires_grad for part in (*tensors(x), *params)):
            layer = self._layer(unit)
            wrapped = isinstance(layer, Wrapped)
            what = f"module ({type(layer.module).__name__})" if wrapped else title(layer, unit)
            raise RuntimeError(
                f"the loss that {what} returned has no gradient: nothing of it would be trained; was it detached, or"
                " computed under no_grad?"
            )

    @contextmanager
    def _graph(
        self, unit: int, frame: Frame, before: list[Frame], split: bool
    ) -> Iterator[tuple[Any, tuple[GradientEdge | None, ...]]]:
        """Yields a graph's input, and the edges into it; it is made here if the layer is recomputed."""
        again, store = frame.again, self.recomputed.store
        if again is None or store is None:
            yield frame.x, frame.edges
            return
        try:
            given = [
                store.get(one, split).requires_grad_(g)
                for one, g in zip(again.saved, again.grads, strict=True)
            ]
            x = like(again.structure, given)
            self._prefetch_inputs(before)
            with torch.enable_grad(), self.scope.enter(), again.draws.again():
                y = self._layer(unit)(x, again.micro)
            edges = tuple(
                get_gradient_edge(part) if part.requires_grad else None for part in tensors(y)
            )
            del y  # frees its memory for the backward
            yield x, edges
        finally:
            for one in again.saved:
                store.release(one)

    def _prefetch_inputs(self, frames: list[Frame]) -> None:
        """Begins to fetch the saved inputs that are needed next, in the same order on all tensor ranks."""
        store = self.recomputed.store
        if store is None:
            return
        coming = (
            one
            for frame in reversed(frames)
            if frame.again is not None
            for one in frame.again.saved
        )
        saved = list(islice(coming, max(FETCH_AHEAD, GATHER_AHEAD)))
        for one in saved[:FETCH_AHEAD]:
            store.fetch(one)
        for one in saved[:GATHER_AHEAD]:
            store.prefetch(one)

    def _drop(self, frames: list[Frame]) -> None:
        saved = [one for frame in frames if frame.again is not None for one in frame.again.saved]
        if self.recomputed.store is not None:
            for one in saved:
                self.recomputed.store.release(one)
