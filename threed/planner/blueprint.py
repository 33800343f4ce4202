"""The blueprint of a rank: its pipeline stages and its parameter layout.

    pipeline  = Pipeline.of(layers, topology, config, costs, divide)     # the same on every rank
    blueprint = Blueprint.build(model, layers, topology, config, pipeline)

An engine builds the blueprint of its rank, with a topology that has process groups, and trains the
blueprint's stages. A forecast builds blueprints of any rank of any grid: `Topology.on_meta` needs
no process groups, and the meta device allocates no memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from torch import nn

from threed import schedules
from threed.config import Config, ConfigError
from threed.config.checks import find_partition_problems, named_stages
from threed.config.resolution import count_microbatches
from threed.config.schema import key_name, written
from threed.core.device import is_accelerator
from threed.core.messages import counted
from threed.distributed.sharding import spec_of
from threed.distributed.topology import SECOND, Topology
from threed.layers.dispatch import Limits
from threed.layers.experts import MixtureOfExperts
from threed.layers.routing import LossFactors
from threed.layers.slicing import Flag, Tally
from threed.models import Model, Wrapped
from threed.models.measured_partition import Division, stage_costs, times_by_flops
from threed.models.pipeline_layout import PipelineLayout, partition
from threed.models.wrapped import find_problems
from threed.pipeline.activation_checkpointing import (
    build,
    configure,
    fully_recomputed,
    recomputed_layers,
    sliced_over,
    with_recompute,
)
from threed.pipeline.graphs import StageGraph
from threed.pipeline.layer_major import LayerMajorStage
from threed.pipeline.replicated_inputs import unlike_inputs
from threed.pipeline.stage import AlwaysGathered, ParameterGatherer, Stage
from threed.schedules import Costs, Plan, all_forward_all_backward, registry, simulation
from threed.zero import agreement, layout, setup
from threed.zero.layout import HasModules, Layout
from threed.zero.reducer import Reducer


@dataclass(frozen=True, eq=False)
class Pipeline:
    """The stages of a model and the order in which ranks run them; the same on every rank.

    Attributes:
        schedule: name of the schedule.
        plan: compute actions of a step, for every pipeline rank.
        layout: the partition of layers into stages, and the ranks of the stages.
        costs: the plan was built for these times of the stages; None for equal times.
        limit: the plan was built for at most this number of micro-batches in memory per rank; None
            for no limit.
        division: the partition by measured times; None for any other partition.
    """

    schedule: str
    plan: Plan
    layout: PipelineLayout
    costs: Costs | None = None
    limit: float | None = None
    division: Division | None = None

    @classmethod
    def of(
        cls, layers: list[nn.Module], topology: Topology, config: Config,
        costs: Callable[[], Sequence[float]], divide: Callable[[Plan], Division],
    ) -> Pipeline:  # fmt: skip
        """Partitions a model into stages and plans a step. Collective, except on the meta device.

        Args:
            layers: all layers of the model.
            topology: the parallel axes, and this rank's position on them.
            config: the resolved configuration.
            costs: function that returns the FLOPs of the layers. It is called only if stages are
                balanced by FLOPs.
            divide: function that partitions the layers by measured times. It is called only with
                `--parallel.partition measured`.

        Raises:
            ConfigError: if the configuration does not fit the number of layers or their parameters.
            ValueError: if the partition or the plan fails, or if plans differ between ranks.
        """
        p, name, plan = config.parallel, schedule_of(config), step_plan(config, topology.dp)
        if problems := list(_find_problems(layers, config, plan, topology)):
            raise ConfigError(problems)
        if p.schedule not in get_args(registry.ScheduleName):
            _check_plan(plan, topology)
        if p.partition == "measured" and p.pp > 1:
            division = divide(plan)
            pipeline = cls(
                name,
                division.plan,
                PipelineLayout.of(division.ranges, plan),
                division.costs,
                division.limit,
                division,
            )
        else:
            pipeline = _divide_by_cost(name, plan, layers, config, costs)
        if pipeline.plan is not plan:
            _check_plan(pipeline.plan, topology)
        return pipeline

    def plan_of(self, microbatches: int) -> Plan:
        """Returns the plan of a step with another number of micro-batches."""
        plan = self.plan
        if microbatches == plan.microbatches:
            return plan
        times = (self.costs, self.limit) if registry.plans_by_times(self.schedule) else ()
        return schedules.build(self.schedule, plan.stages, microbatches, plan.chunks, *times)


def _find_problems(
    layers: list[nn.Module], config: Config, plan: Plan, topology: Topology
) -> Iterator[str]:
    """Yields the reasons why these layers cannot run with the configuration."""
    p, count, stages = config.parallel, len(layers), plan.total_stages
    if count < stages:
        given = f"{counted(count, 'layer')}, embedding and head included, cannot fill the {stages} stages"
        fixes = ["a smaller --parallel.pp"] if p.pp > 1 else []
        if stages != p.pp:
            fixes += ["fewer --parallel.chunks"] if registry.chunks_are_free(p.schedule) else []
            fixes.append("another --parallel.schedule")
        fix = f"use {', '.join(fixes)}, or a model of {stages} layers or more"
        yield f"{given} of {named_stages(p, stages)}: {fix}"
    yield from find_partition_problems(p, count, stages)
    yield from setup.find_group_problems(config.optim, layers, topology.axis("world"))


def _check_plan(plan: Plan, topology: Topology) -> None:
    if not topology.is_meta:
        agreement.check_plan(plan, topology.axis("world"))


def _divide_by_cost(
    name: str,
    plan: Plan,
    layers: list[nn.Module],
    config: Config,
    costs: Callable[[], Sequence[float]],
) -> Pipeline:
    """Partitions the layers without measured times, and returns the pipeline.

    `--parallel.partition` selects how: by costs ("balanced"), into equal numbers of layers
    ("uniform"), or as listed. If the layers are partitioned by costs and the schedule chooses its
    plan by the times of the stages (`registry.plans_by_times`), the costs are used as times.
    """
    p, flops, again = config.parallel, functools.cache(costs), fully_recomputed(config, layers)
    ranges = partition(
        p.partition, len(layers), plan.total_stages, lambda: with_recompute(flops(), again)
    )
    stages = PipelineLayout.of(ranges, plan)
    if p.partition != "balanced" or p.pp == 1 or not registry.plans_by_times(name):
        return Pipeline(name, plan, stages)
    times = stage_costs(times_by_flops(flops(), again), ranges)
    return Pipeline(
        name, schedules.build(name, p.pp, plan.microbatches, plan.chunks, times), stages, times
    )


@dataclass(frozen=True, eq=False)
class Blueprint:
    """The stages, parameters and plan of one rank.

    Attributes:
        model: the model, or a wrapped module.
        topology: the parallel axes, and this rank's position on them.
        config: the resolved configuration.
        layers: all layers of the model.
        recomputed: indices of the layers with activation recomputation, full or selective.
        pipeline: the stages and the plan.
        layout: the memory layout of this rank's parameters (`threed.zero.layout`).
    """

    model: Model
    topology: Topology
    config: Config
    layers: list[nn.Module]
    recomputed: list[int]
    pipeline: Pipeline
    layout: Layout

    @classmethod
    def build(
        cls,
        model: Model,
        layers: list[nn.Module],
        topology: Topology,
        config: Config,
        pipeline: Pipeline,
        trains: bool = True,
    ) -> Blueprint:
        """Builds the blueprint of this rank. Collective, except on the meta device.

        Creates the process groups, and lays out the rank's parameters in memory.

        Args:
            model: the model, or a wrapped module.
            layers: all layers of the model.
            topology: the parallel axes, and this rank's position on them.
            config: the resolved configuration.
            pipeline: the stages and the plan.
            trains: whether the parameters are trained, not only evaluated.

        Raises:
            ConfigError: if the configuration does not fit the model.
            ValueError: if the parameters cannot be laid out.
        """
        wrapped, stages = model if isinstance(model, Wrapped) else None, pipeline.layout
        ties = stages.ties([names(layer) for layer in layers])
        overs = set() if wrapped else dealt_over(layers)
        axes = {
            name for over in (None, *overs) for name in setup.shard_axes(config, topology, over)
        }
        if overlaps(pipeline, topology):
            axes |= {name + SECOND for name in model.slicing.axes}
        axes.discard("")
        topology.prepare(blocks(layers) | axes, [tie.stages for tie in ties.values()], stages.links)
        configure(config, layers)
        parts = stages.chunks(topology.axis("pp").index)
        held: Sequence[HasModules] = [layers[n] for part in parts for n in part]
        units = wrapped.units if wrapped else held
        chunks = None if wrapped else [number for number, part in enumerate(parts) for _ in part]
        if wrapped and pipeline.plan.asynchronous:
            given = f"--parallel.schedule {pipeline.schedule} with a wrapped module"
            fix = "use --parallel.schedule 1f1b or gpipe, or build it from threed.layers"
            raise ConfigError([f"{given}: its steps overlap, which needs layers; {fix}"])
        if wrapped and (problems := find_problems(wrapped.module, topology.dp)):
            raise ConfigError(problems)
        rank_layout = layout.build(
            units,
            ties,
            topology,
            setup.policy(config, topology, stages.ways, overs, trains),
            chunks,
        )
        setup.size_buffers(rank_layout, config, len(setup.state_names(config.optim)))
        return cls(
            model,
            topology,
            config,
            layers,
            recomputed_layers(config, layers),
            pipeline,
            rank_layout,
        )

    def lowered(
        self, microbatches: int, training: bool = True, part: Callable[[Plan], Plan] | None = None
    ) -> Plan:  # fmt: skip
        """Returns the plan of a step, with communication actions.

        Args:
            microbatches: number of micro-batches.
            training: whether the plan has backwards; False for evaluation and sampling, which run
                only forwards.
            part: function that selects a part of the plan, for an asynchronous schedule. For
                example, `double_buffered.first` removes the actions of the previous step, because
                the first step of a run has no previous step. None: the full plan.
        """
        gathers, placement = self.config.zero.stage == 3, self.pipeline.layout.one_way
        if not training:
            plan = all_forward_all_backward.forward_only(len(placement), microbatches, placement)
            return schedules.lower(plan, gathers)
        plan = self.pipeline.plan_of(microbatches)
        return schedules.lower(plan if part is None else part(plan), gathers, self.optimistic)

    def stages(
        self, gatherer: ParameterGatherer, reducer: Reducer, graphs: bool = False
    ) -> list[Stage]:
        """Returns the executable stages (chunks) of this rank.

        A wrapped module gathers its parameters and recomputes its activations itself, so its stage
        does not. In layer-major order, the stage calls `reducer.unit_ended` after all backwards of
        a layer.

        Args:
            gatherer: gathers the parameters of a layer before the layer runs, under ZeRO-3.
            reducer: reduces the gradients of a layer after its backward.
            graphs: whether passes are replayed as CUDA graphs (`pipeline.graphs.wanted`).
        """
        first, stages, rank_layers = 0, list[Stage](), [self.layers[number] for number in self.held]
        between = None if reducer.early is None else reducer.early.progress
        layer_major = functools.partial(
            LayerMajorStage, unit_ended=reducer.unit_ended, between=between
        )
        required, device = self.config.run.graphs is True, self.topology.device
        graphed = functools.partial(StageGraph, gradients=reducer, device=device, required=required)
        plain = functools.partial(Stage, by_layer=overlaps(self.pipeline, self.topology))
        make: Callable[..., Stage] = (
            layer_major if self.layer_major else graphed if graphs else plain
        )
        wrapped = isinstance(self.model, Wrapped)
        units = {} if wrapped else {unit: rank_layers[unit] for unit in self.recomputed_units}
        recomputed = build(
            self.config, units, self.live, self.model.slicing, self.topology, self._input_flag
        )
        for chunk in self.chunks:
            layers = rank_layers[first : first + len(chunk)]
            own_gatherer = AlwaysGathered() if wrapped else gatherer
            stages.append(
                make(
                    layers,
                    own_gatherer,
                    self.config.zero.prefetch,
                    first,
                    recomputed,
                    reducer.scope,
                )
            )
            first += len(chunk)
        return stages

    @property
    def chunks(self) -> tuple[range, ...]:
        """For each chunk of this rank, the indices of its layers in the list of all layers."""
        return self.pipeline.layout.chunks(self.topology.axis("pp").index)

    @property
    def held(self) -> list[int]:
        """For each layer of this rank, its index in the list of all layers of the model.

        The position of a layer in the returned list is the number of its ZeRO unit (except for a
        wrapped module, see `units_of`).
        """
        return [number for chunk in self.chunks for number in chunk]

    def units_of(self, layer: int) -> range:
        """Returns the indices of the ZeRO units of a layer.

        A layer of `threed.layers` is one unit. A wrapped module is one layer with several units.

        Args:
            layer: index of the layer among this rank's layers.
        """
        if isinstance(self.model, Wrapped):
            return range(len(self.model.units))
        return range(layer, layer + 1)

    @property
    def fully_recomputed(self) -> list[int]:
        """The indices of the layers that are recomputed in full, in the list of all layers."""
        return self.recomputed if self.config.recompute.mode == "full" else []

    @property
    def recomputed_units(self) -> list[int]:
        """The indices of this rank's ZeRO units that are recomputed, in full or selectively."""
        return [unit for unit, number in enumerate(self.held) if number in self.recomputed]

    @functools.cached_property
    def _input_flag(self) -> Flag:
        return unlike_inputs()

    @property
    def flags(self) -> list[Flag]:
        """The flags that layers and stages set on the device if they receive invalid data.

        The list has the same order on every rank.
        """
        found = _attributes(self.layers, "data_flags")
        if isinstance(self.model, Wrapped) or self.config.recompute.mode != "full":
            return found
        return [*found, self._input_flag] if sliced_over(self.config, self.model.slicing) else found

    @functools.cached_property
    def tallies(self) -> list[Tally]:
        """The tallies of this rank's layers."""
        return _attributes([self.layers[n] for n in dict.fromkeys(self.held)], "tallies")

    @functools.cached_property  # cached, because `is_optimistic` hashes the plan, which is slow
    def optimistic(self) -> bool:
        """Whether weights are updated before the gradient norm is known.

        If so, the next step validates the update, and undoes it if it was wrong.
        """
        return setup.is_optimistic(self.config, self.pipeline.plan)

    @property
    def layer_major(self) -> bool:
        """Whether a layer runs all micro-batches of a step before the next layer runs."""
        return self.config.zero.order == "layer"

    @property
    def live(self) -> int:
        """The largest number of micro-batches with activations on this rank at the same time."""
        return math.ceil(
            simulation.peak_activations(self.pipeline.plan, self.topology.axis("pp").index)
        )


def set_up_experts(config: Config, layers: Sequence[nn.Module], wrapped: bool = False) -> None:
    """Sets the losses of all routers, and the limits of all experts' rows.

    Call it before layers are traced, because both need memory.

    Args:
        config: the configuration, with the keys `experts` and `parallel.ep`.
        layers: all layers of the model.
        wrapped: whether they are a wrapped module, which cannot have expert ranks.

    Raises:
        ConfigError: if keys ask for experts or selection biases that the model does not have.
    """
    keys, ep = config.experts, config.parallel.ep
    factors, limits = LossFactors(keys.aux_loss, keys.z_loss), Limits(keys.room, keys.capacity)
    found = [p for layer in layers for p in layer.modules() if isinstance(p, MixtureOfExperts)]
    if ep > 1 and wrapped:
        fix = "use --parallel.ep 1, or build the model from threed.layers"
        raise ConfigError([f"--parallel.ep {ep}: a wrapped module has no expert ranks; {fix}"])
    if others := {mixture.axis.size for mixture in found} - {ep}:
        given = (
            f"the model's Slicing has {counted(others.pop(), 'expert rank')}, parallel.ep is {ep}"
        )
        raise ConfigError([f"{given}: build the model with Slicing.of(topology, config)"])
    if ep > 1 and not dealt_over(layers):
        raise ConfigError([f"--parallel.ep {ep}: this model has no experts; use --parallel.ep 1"])
    unused = {"bias_rate"} if found else set(type(keys).model_fields)
    unused = set() if any(mixture.bias is not None for mixture in found) else unused
    without = "selection biases" if found else "layers.MixtureOfExperts"
    if problems := [
        f"--experts.{key_name(key)} {written(value)}: this model has no {without}; leave it out"
        for key, value in keys
        if key in unused and value != type(keys).model_fields[key].default
    ]:
        raise ConfigError(problems)
    for mixture in found:
        mixture.set_limits(limits)
        if any(factors):
            mixture.set_losses(factors)


def _attributes(layers: Sequence[nn.Module], name: str) -> list[Any]:
    """Returns the items of an attribute of all modules of layers that have it."""
    modules = (module for layer in layers for module in layer.modules())
    return [item for module in modules for item in getattr(module, name, ())]


def overlaps(pipeline: Pipeline, topology: Topology) -> bool:
    """Returns whether forwards and backwards run concurrently: in pairs, on a device with streams."""
    return pipeline.plan.pairs and is_accelerator(topology.device)


def step_plan(config: Config, data_ranks: int) -> Plan:
    """Returns the compute actions of a step.

    If the schedule chooses its plan by the times of the stages (`registry.plans_by_times`), all
    stages are assumed to take the same time.
    """
    p = config.parallel
    return schedules.build(
        schedule_of(config), p.pp, count_microbatches(config, data_ranks), p.chunks
    )


def schedule_of(config: Config) -> str:
    """Returns the name of the schedule; layer-major order uses gpipe."""
    return "gpipe" if config.zero.order == "layer" else config.parallel.schedule


def names(layer: nn.Module) -> list[str]:
    """Returns the global names of a layer's parameters."""
    return [spec_of(param).name for param in layer.parameters()]


def dealt_over(layers: Sequence[nn.Module]) -> set[str]:
    """Returns the axes `ShardSpec.over` of all parameters, such as "dp" or "dp/2".

    Each data rank of such an axis holds different pieces of a parameter, for example different
    experts. ZeRO, in contrast, shards a parameter over data ranks with the same pieces.
    """
    specs = (spec_of(param) for layer in layers for param in layer.parameters())
    return {spec.over for spec in specs if spec.over is not None}


def blocks(layers: Sequence[nn.Module]) -> set[str]:
    """Returns the names of the axes that the parameters' sharding records refer to.

    These are the axes over which a parameter is replicated (`ShardSpec.replicated`), and the axes
    over which the gradient of a parameter is a partial sum (`ShardSpec.partial`).
    """
    specs = [spec_of(param) for layer in layers for param in layer.parameters()]
    return {axis for spec in specs for axis in (spec.replicated, spec.partial) if axis is not None}
