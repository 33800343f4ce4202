"""From a batch to micro-batches: what each is made of, and how much its loss weighs.

    micros = Batches(model, topology, config).micro_batches(batch, step, consumed, scale, training=True)

The loss of a step is the mean over all valid items (tokens) of the global batch, however it is cut: a micro-batch's
loss is multiplied by the loss scale / the global number of items.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from threed import collectives
from threed.config import Config
from threed.layers import MicroBatch
from threed.models import Model, Wrapped
from threed.models.counting import with_some_label
from threed.precision import dtype
from threed.topology import Topology

Batch = Mapping[str, Tensor]


class Batches:
    """Cuts this data rank's share of global batches for a model."""

    def __init__(self, model: Model, topology: Topology, config: Config) -> None:
        self.wrapped = model if isinstance(model, Wrapped) else None
        self.topology = topology
        self.size = config.train.micro_batch
        self.dtype = dtype(config.precision.dtype)
        self.last_stage = topology.axis("pp").index == topology.pp - 1

    def rows(self, batch: Batch) -> int:
        """Sequences (or rows) in a batch. Raises ValueError when they make no whole micro-batches."""
        for name, value in batch.items():
            if not isinstance(value, Tensor) or value.dim() == 0:
                raise ValueError(f"the batch's {name!r} is no tensor with rows: pass tensors that are cut along rows")
        sizes = {len(value) for value in batch.values()}
        rows = sizes.pop() if len(sizes) == 1 else 0
        if sizes:
            raise ValueError(
                f"the batch's tensors have different numbers of rows: { ({k: len(v) for k, v in batch.items()}) }"
            )
        if rows == 0 or rows % self.size:
            raise ValueError(f"this rank's batch of {rows} sequences is not a multiple of micro-batch {self.size}")
        return rows

    def micro_batches(
        self, batch: Batch, step: int, consumed: int, scale: Tensor | float, training: bool
    ) -> list[MicroBatch]:
        """The micro-batches of a batch.

        batch: 'tokens' and 'labels' [b s] and maybe 'samples' [b]; for a wrapped module its keyword arguments [b ...].
        consumed: samples of the global batches before. scale: the loss scale. Collective.
        """
        rows = self.rows(batch)
        if self.wrapped is not None:
            return self._of_a_module(self.wrapped, batch, rows // self.size, step, scale, training)
        device = self.topology.device
        tokens, labels = batch["tokens"].to(device), batch["labels"].to(device)
        first = consumed + self.topology.axis("dp").index * rows
        samples = batch["samples"] if "samples" in batch else torch.arange(first, first + rows)
        weight = self._weight((labels >= 0).sum().double(), scale)
        cut = (tokens.split(self.size), labels.split(self.size), samples.to(device).split(self.size))
        return [MicroBatch(t, y, n, weight, step, training) for t, y, n in zip(*cut, strict=True)]

    def _of_a_module(
        self, wrapped: Wrapped, batch: Batch, count: int, step: int, scale: Tensor | float, training: bool
    ) -> list[MicroBatch]:
        """Each one's mean loss weighs as much as the items it is a mean over."""
        whole = {key: self._placed(value) for key, value in batch.items()}
        parts = [{key: value.chunk(count)[i] for key, value in whole.items()} for i in range(count)]
        items = [wrapped.count(part) for part in parts]
        total = collectives.sum_of_scalars(torch.stack(items).sum(0).view(-1), self.topology.axis("dp")).clamp(min=1)
        weights = [(n * (scale / total)).view(n.shape) for n in items]
        parts = [with_some_label(part, n) for part, n in zip(parts, items, strict=True)]
        return [
            MicroBatch(weight=weight, step=step, training=training, inputs=part)
            for weight, part in zip(weights, parts, strict=True)
        ]

    def _placed(self, value: Tensor) -> Tensor:
        """On the device, and in the compute dtype if it is a number with a point."""
        return value.to(self.topology.device, self.dtype if value.is_floating_point() else value.dtype)

    def _weight(self, valid: Tensor, scale: Tensor | float) -> Tensor | None:
        """The loss scale / the global number of valid items; needed, and so agreed upon, on the last stage only."""
        if not self.last_stage:
            return None
        return scale / collectives.sum_of_scalars(valid.view(1), self.topology.axis("dp"))[0].clamp(min=1)
