"""From a model's layers to this rank's share: which layers, and which weights live on several stages."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from threed.planner.partition import balanced, explicit, uniform
from threed.sharding import spec_of
from threed.zero.layout import Tie

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


def tied_weights(layers: Sequence[nn.Module], ranges: Ranges) -> dict[str, Tie]:
    """Parameter name -> where it is used, for those that more than one stage holds, in the order of first use.

    Every rank has all layers, so all of them get the same ties in the same order.
    """
    users: dict[str, list[int]] = {}
    for number, layer in enumerate(layers):
        for name in dict.fromkeys(names(layer)):
            users.setdefault(name, []).append(number)
    stage_of = {number: stage for stage, held in enumerate(ranges) for number in held}
    ties: dict[str, Tie] = {}
    for name, used in users.items():
        stages = tuple(sorted({stage_of[number] for number in used}))
        if len(stages) > 1:
            ties[name] = Tie(len(ties), stages, tuple(used))
    return ties


def blocks(layers: Sequence[nn.Module]) -> set[str]:
    """The axes that some parameter of the model is replicated or partial over."""
    specs = [spec_of(param) for layer in layers for param in layer.parameters()]
    return {axis for spec in specs for axis in (spec.replicated, spec.partial) if axis is not None}
