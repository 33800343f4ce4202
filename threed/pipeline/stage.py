"""One pipeline stage: a contiguous range of a model's layers, run forward and backward for one micro-batch at a time.

The graph of a micro-batch is held by an edge into it, not by its output: so an activation that was sent to the next
stage is free as soon as it has left, and no output need be kept for its shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from threed.layers.slicing import MicroBatch


class Gatherer(Protocol):
    """Makes parameters whole before they are used."""

    def ready(self, unit: int) -> None:
        """Waits until the parameters of layer `unit` of this rank are whole."""


class Whole:
    """The gatherer of parameters that always are."""

    def ready(self, unit: int) -> None:
        """Returns at once."""


class Stage:
    """The layers [first, first + len(layers)) among those that this rank holds, as one function of a micro-batch.

    forward(m, x, micro) -> y;  backward(m, dy) -> dx.  x is None on the model's first stage; on its last, y is the
    micro-batch's weighted loss and dy is None.
    """

    def __init__(self, layers: Sequence[nn.Module], gatherer: Gatherer, first: int = 0) -> None:
        self.layers, self.gatherer, self.first = layers, gatherer, first
        self._open: dict[int, tuple[Tensor | None, GradientEdge]] = {}

    def forward(self, microbatch: int, x: Tensor | None, micro: MicroBatch) -> Tensor:
        """Runs the layers, and keeps what backward needs when the micro-batch is for training."""
        with torch.set_grad_enabled(micro.training):
            y = x if x is None or not micro.training else x.requires_grad_()
            for unit, layer in enumerate(self.layers, self.first):
                self.gatherer.ready(unit)
                y = layer(y, micro)
        if y is None:
            raise ValueError("a pipeline stage without layers")
        if micro.training:
            self._open[microbatch] = (x, get_gradient_edge(y))
        return y.detach()

    def backward(self, microbatch: int, dy: Tensor | None) -> Tensor | None:
        """The gradient of the micro-batch's input, None on the first stage; weight gradients go to their sinks."""
        x, edge = self._open.pop(microbatch)
        torch.autograd.backward((edge,), None if dy is None else (dy,))
        return None if x is None else x.grad
