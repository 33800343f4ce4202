"""From a model's layers to this rank's share: which layers, and which weights live on several stages."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from threed.planner.partition import balanced, explicit, uniform
from threed.sharding import spec_of

Ranges = Sequence[range]


def partition(how: str | tuple[int, ...], costs: Sequence[float], stages: int) -> Ranges:
    """The layers of every stage: balanced by cost, uniform by count, or the counts given."""
    if isinstance(how, tuple):
        return explicit(how, len(costs), stages)
    if how == "uniform":
        return uniform(len(costs), stages)
    if how == "balanced":
        return balanced(costs, stages)
    raise ValueError(f"partition {how!r} is not in this version; use balanced, uniform, or the counts of each stage")


def names(layer: nn.Module) -> list[str]:
    """The global names of a layer's parameters."""
    return [spec_of(param).name for param in layer.parameters()]


def tied_weights(layers: Sequence[nn.Module], ranges: Ranges) -> dict[str, tuple[int, ...]]:
    """Parameter name -> the stages that hold it, for those that more than one does."""
    homes: dict[str, set[int]] = {}
    for stage, held in enumerate(ranges):
        for index in held:
            for name in names(layers[index]):
                homes.setdefault(name, set()).add(stage)
    return {name: tuple(sorted(stages)) for name, stages in homes.items() if len(stages) > 1}


def blocks(layers: Sequence[nn.Module]) -> set[str]:
    """The axes that some parameter of the model is replicated or partial over."""
    specs = [spec_of(param) for layer in layers for param in layer.parameters()]
    return {axis for spec in specs for axis in (spec.replicated, spec.partial) if axis is not None}
