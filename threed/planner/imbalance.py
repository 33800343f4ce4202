"""Layers of a rank whose experts get more tokens than the mean, for a trace on the meta device.

    busy = with_load(layer, 1.5)        # a copy; its experts get 1.5 times the mean number of tokens

The rank sends as many tokens as other ranks, but receives more. Its products, activations and
messages of received tokens grow.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

from torch import nn

from threed.layers import MixtureOfExperts

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
    for part in layer.modules():
        if isinstance(part, MixtureOfExperts):
            part.assume_load(load)
    return layer
