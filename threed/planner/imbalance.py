"""Layers of a rank whose experts get more tokens than the mean, for a trace on the meta device.

    busy = with_load(layer, 1.5)        # a copy; its experts get 1.5 times the mean number of tokens

The rank sends as many tokens as other ranks, but receives more. Its products, activations and
messages of received tokens grow.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from threed.layers import MicroBatch, MixtureOfExperts
from threed.layers.experts import Routes, even_sizes
from threed.ops.grouped import Groups

LOADS = (1.25, 1.5, 2.0)


@dataclass(frozen=True)
class Imbalance:
    """Memory and time of a run whose busiest expert rank gets more tokens than the mean.

    Attributes:
        load: tokens of the busiest expert rank in every layer, divided by the mean.
        peak: peak of this rank, in bytes.
        seconds: predicted time of a step, in which all ranks wait for the busiest one; None if it
            is not known.
    """

    load: float
    peak: int
    seconds: float | None


def with_load(layer: nn.Module, load: float) -> nn.Module:
    """Returns a copy of a layer whose experts get `load` times the mean number of tokens.

    Args:
        layer: a layer on the meta device.
        load: a factor, at least 1.
    """
    layer = copy.deepcopy(layer)
    if isinstance(layer, MixtureOfExperts):
        return _Busy.of(layer, load)
    for parent in list(layer.modules()):
        for name, part in parent.named_children():
            if isinstance(part, MixtureOfExperts):
                setattr(parent, name, _Busy.of(part, load))
    return layer


class _Busy(MixtureOfExperts):
    """Experts that get `load` times the mean number of tokens."""

    load: float

    @classmethod
    def of(cls, mixture: MixtureOfExperts, load: float) -> _Busy:
        """Returns the same experts, with other numbers of tokens."""
        busy = cls.__new__(cls)
        vars(busy).update(vars(mixture), load=load)
        return busy

    def _new_routes(self, x: Tensor, scores: Tensor, micro: MicroBatch, divided: bool) -> Routes:
        routes = super()._new_routes(x, scores, micro, divided)
        if self.axis.size == 1:
            return routes
        rows = round(self.load * sum(routes.sizes.receives))
        even = even_sizes(self.axis.size, len(self.gate_up), rows)
        sizes = routes.sizes._replace(receives=even.receives, groups=even.groups)
        index, back = (torch.empty(rows, dtype=torch.int64, device=scores.device) for _ in range(2))
        groups = Groups(routes.groups.ends, even.groups)
        return replace(routes, sizes=sizes, groups=groups, by_expert=index, back=back)
