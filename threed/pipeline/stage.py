"""One pipeline stage: a contiguous range of a model's layers, run forward and backward for one micro-batch at a time.

Layer by layer: each is a unit that is gathered before it runs and released after, and has a graph of its own. A
micro-batch holds an edge into every layer's graph, not the layer's output: so an activation that was sent to the next
stage is free as soon as it has left, and no output need be kept for its shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from threed.layers.slicing import MicroBatch
from threed.schedules.window import first_units, walk


class Gatherer(Protocol):
    """Makes parameters whole before they are used."""

    def start(self, unit: int) -> None:
        """Begins to make the parameters of layer `unit` of this rank whole."""

    def ready(self, unit: int) -> None:
        """Waits until they are."""

    def release(self, unit: int) -> None:
        """They are not needed any more, for now."""


class Whole:
    """The gatherer of parameters that always are, or that look after themselves."""

    def start(self, unit: int) -> None:
        """Nothing to begin."""

    def ready(self, unit: int) -> None:
        """Returns at once."""

    def release(self, unit: int) -> None:
        """Keeps them."""


class Stage:
    """The layers [first, first + len(layers)) among those that this rank holds, as one function of a micro-batch.

    forward(m, x, micro) -> y;  backward(m, dy) -> dx.  x is None on the model's first stage; on its last, y is the
    micro-batch's weighted loss and dy is None. keep: the unit where the pass ends stays whole, for the next one begins
    there. prefetch: units gathered ahead of the one that runs. A layer whose backward does not read its weights says so
    by `backward_reads_weights = False`.
    """

    def __init__(self, layers: Sequence[nn.Module], gatherer: Gatherer, prefetch: int = 1, first: int = 0) -> None:
        self.layers, self.gatherer, self.prefetch, self.first = layers, gatherer, prefetch, first
        self._units = range(first, first + len(layers))
        reading = [unit for unit in self._units if getattr(self._layer(unit), "backward_reads_weights", True)]
        self._backward_units = reading[::-1]
        self._open: dict[int, list[tuple[Tensor | None, GradientEdge | None]]] = {}

    def _layer(self, unit: int) -> nn.Module:
        return self.layers[unit - self.first]

    def reset(self) -> None:
        """Forgets micro-batches whose backward never came: a step was given up."""
        self._open.clear()

    def start(self, backward: bool) -> None:
        """Begins to gather what a pass needs first."""
        for unit in first_units(self._backward_units if backward else self._units, self.prefetch):
            self.gatherer.start(unit)

    def forward(self, microbatch: int, x: Tensor | None, micro: MicroBatch, keep: bool = False) -> Tensor:
        """Runs the layers, and keeps what backward needs when the micro-batch is for training."""
        frames: list[tuple[Tensor | None, GradientEdge | None]] = []
        keep = keep and self._backward_units[:1] == [self._units[-1]]
        y = x if x is None or not micro.training else x.requires_grad_()
        with torch.set_grad_enabled(micro.training):
            for step in walk(self._units, self.prefetch, keep):
                for unit in step.gather:
                    self.gatherer.start(unit)
                self.gatherer.ready(step.run)
                x = y if y is None or not frames else y.detach().requires_grad_(y.requires_grad)
                y = self._layer(step.run)(x, micro)
                frames.append((x, get_gradient_edge(y) if y.requires_grad else None))
                if step.release:
                    self.gatherer.release(step.run)
        if y is None:
            raise ValueError("a pipeline stage without layers")
        if micro.training:
            self._open[microbatch] = frames
        return y.detach()

    def backward(self, microbatch: int, dy: Tensor | None, keep: bool = False) -> Tensor | None:
        """The gradient of the micro-batch's input, None on the first stage; weight gradients go to their sinks."""
        frames, reading = self._open.pop(microbatch), self._backward_units
        keep = keep and bool(reading) and reading[-1] == self.first
        steps = {step.run: step for step in walk(reading, self.prefetch, keep)}
        for unit in reversed(self._units):
            step = steps.get(unit)
            if step is not None:
                for other in step.gather:
                    self.gatherer.start(other)
                self.gatherer.ready(unit)
            x, edge = frames.pop()
            if edge is not None:
                torch.autograd.backward((edge,), None if dy is None else (dy,))
            dy = None if x is None else x.grad
            if step is not None and step.release:
                self.gatherer.release(unit)
        return dy
