"""Builds an engine's blueprint: the model's partition into stages, and the parameter layout."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import nn

from threed.config import Config, ConfigError
from threed.distributed import collectives
from threed.distributed.topology import Topology
from threed.models import Model, Wrapped, options_of
from threed.models.check import check
from threed.planner.blueprint import Blueprint, Pipeline, set_up_experts
from threed.planner.layer_times import cut_by_times
from threed.planner.memory_estimate import decide_order, flops


def draw(
    model: Model, topology: Topology, config: Config, trains: bool = True
) -> tuple[Config, Blueprint]:
    """Builds the blueprint of this rank. Collective.

    Args:
        model: the model, or a wrapped module.
        topology: the parallel axes, and this rank's position on them.
        config: the resolved configuration.
        trains: whether the parameters are trained, not only evaluated.

    Returns:
        The configuration with `zero.order` decided, and the blueprint.

    Raises:
        ModelError: if the model would give wrong results in this topology.
        ConfigError: if the model has no trainable parameters, or if the schedule needs several
            chunks per rank and the model is a wrapped module.
    """
    wrapped, chunks = isinstance(model, Wrapped), config.parallel.chunks or 1
    if wrapped and chunks > 1:
        given = f"--parallel.schedule {config.parallel.schedule} with a wrapped module"
        fix = "use a schedule with one chunk per rank, such as 1f1b or gpipe, or build it from threed.layers"
        raise ConfigError(
            [f"{given}: the module is one layer, which cannot be split into {chunks} chunks; {fix}"]
        )
    layers = model.layers()
    if not wrapped:
        check(layers, model.slicing, topology)
    set_up_experts(config, layers, wrapped)
    config = decide_order(config, model, layers, topology)
    costs = partial(_costs, model, layers, topology, config)
    divide = partial(cut_by_times, model, layers, config, topology, costs)
    pipeline = Pipeline.of(layers, topology, config, costs, divide)
    blueprint = Blueprint.build(model, layers, topology, config, pipeline, trains)
    if trains and not any(
        collectives.exchange(bool(blueprint.layout.buckets), topology.axis("world"))
    ):
        raise ConfigError(["the model has no parameter to train: all have requires_grad off"])
    return config, blueprint


def _costs(
    model: Model, layers: list[nn.Module], topology: Topology, config: Config
) -> Sequence[float]:
    """Returns the cost of each layer, by which stages are balanced. Collective.

    If the model defines `costs`, these costs are returned. Otherwise the cost of a layer is 3 × the
    FLOPs of its forward, because a backward counts as two forwards. Costs are summed over the
    tensor ranks, so that all tensor ranks compute the same partition.
    """
    own = options_of(model).costs
    if own is not None:
        return list(own(config.train.micro_batch))
    everyone = collectives.exchange(flops(model, layers, config, topology), topology.axis("tp"))
    return [3.0 * sum(costs) for costs in zip(*everyone, strict=True)]
