"""A model cut and laid out for one rank: the same objects for a run, and for its forecast on paper.

    pipeline  = Pipeline.of(layers, topology, config, costs, divide)     the same on every rank
    blueprint = Blueprint.draw(model, layers, topology, config, pipeline)

On a topology with process groups this is what an engine trains. On `Topology.drawn`, whose device is meta, it is what
any rank of any grid would hold, and no byte of it is in memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

from torch import nn

from threed import schedules
from threed.checks import find_partition_problems, named_stages
from threed.config import Config, ConfigError
from threed.device import is_accelerator
from threed.layers.slicing import Flag
from threed.models import Model, Wrapped
from threed.models.wrapped import find_problems
from threed.pipeline.activation_checkpointing import (
    build,
    recomputed_layers,
    sliced_over,
    whole_again,
    with_recompute,
)
from threed.pipeline.layer_major import LayerMajorStage
from threed.pipeline.replicated_inputs import unlike_inputs
from threed.pipeline.stage import AlwaysWhole, ParameterGatherer, Stage
from threed.planner.cut import Cut, partition
from threed.planner.measured import Division, stage_costs, times_by_flops
from threed.resolution import count_microbatches
from threed.schedules import Costs, Plan
from threed.sharding import spec_of
from threed.topology import SECOND, Topology
from threed.zero import agreement, layout, setup
from threed.zero.layout import HasModules, Layout
from threed.zero.reducer import Reducer


@dataclass(frozen=True, eq=False)
class Pipeline:
    """A model's stages, and the order in which ranks run them: the same for every rank.

    plan: a step's compute actions, of every pipeline rank. costs, limit: times of the stages, and the most
    micro-batches on a rank, where the schedule plans by them. division: where the cut is by measured times.
    """

    schedule: str
    plan: Plan
    cut: Cut
    costs: Costs | None = None
    limit: float | None = None
    division: Division | None = None

    @classmethod
    def of(
        cls, layers: list[nn.Module], topology: Topology, config: Config,
        costs: Callable[[], Sequence[float]], divide: Callable[[Plan], Division],
    ) -> Pipeline:  # fmt: skip
        """Cuts the model and plans a step. Collective where the topology has groups.

        layers: the model's. costs: returns theirs, where stages are balanced by them. divide: cuts by measured times.
        Raises ConfigError, or ValueError, for what cannot be cut or planned, or where ranks have different plans.
        """
        p, name, plan = config.parallel, schedule_of(config), step_plan(config, topology.dp)
        if problems := list(_find_problems(layers, config, plan)):
            raise ConfigError(problems)
        if p.schedule not in get_args(schedules.ScheduleName):
            _agree(plan, topology)
        if p.partition == "measured" and p.pp > 1:
            found = divide(plan)
            made = cls(
                name, found.plan, Cut.of(found.ranges, plan), found.costs, found.limit, found
            )
        else:
            made = _cut_by_cost(name, plan, layers, config, costs)
        if made.plan is not plan:
            _agree(made.plan, topology)
        return made

    def plan_of(self, microbatches: int) -> Plan:
        """The plan of a step of so many micro-batches."""
        plan = self.plan
        if microbatches == plan.microbatches:
            return plan
        times = (self.costs, self.limit) if schedules.plans_by_times(self.schedule) else ()
        return schedules.build(self.schedule, plan.stages, microbatches, plan.chunks, *times)


def _find_problems(layers: list[nn.Module], config: Config, plan: Plan) -> Iterator[str]:
    """Yields the problems of a configuration with a model."""
    p, count, stages = config.parallel, len(layers), plan.total_stages
    if count < stages:
        given = f"{count} layers, embedding and head included, cannot fill the {stages} stages"
        fixes = ["a smaller --parallel.pp"] if p.pp > 1 else []
        if stages != p.pp:
            fixes += ["fewer --parallel.chunks"] if schedules.chunks_are_free(p.schedule) else []
            fixes.append("another --parallel.schedule")
        fix = f"use {', '.join(fixes)}, or a model of {stages} layers or more"
        yield f"{given} of {named_stages(p, stages)}: {fix}"
    yield from find_partition_problems(p, count, stages)
    yield from setup.find_group_problems(config.optim, layers)


def _agree(plan: Plan, topology: Topology) -> None:
    if not topology.on_paper:
        agreement.check_plan(plan, topology.axis("world"))


def _cut_by_cost(
    name: str,
    plan: Plan,
    layers: list[nn.Module],
    config: Config,
    costs: Callable[[], Sequence[float]],
) -> Pipeline:
    """Cut by layers' costs, which are then the times that a schedule plans by; or by counts, with equal times."""
    p, flops, again = config.parallel, functools.cache(costs), whole_again(config, layers)
    ranges = partition(
        p.partition, len(layers), plan.total_stages, lambda: with_recompute(flops(), again)
    )
    cut = Cut.of(ranges, plan)
    if p.partition != "balanced" or p.pp == 1 or not schedules.plans_by_times(name):
        return Pipeline(name, plan, cut)
    times = stage_costs(times_by_flops(flops(), again), ranges)
    return Pipeline(
        name, schedules.build(name, p.pp, plan.microbatches, plan.chunks, times), cut, times
    )


@dataclass(frozen=True, eq=False)
class Blueprint:
    """layers: all of the model's, of which `held` are this rank's by number, chunk by chunk. recomputed: the numbers of
    layers of which something is computed again."""

    model: Model
    topology: Topology
    config: Config
    layers: list[nn.Module]
    recomputed: list[int]
    pipeline: Pipeline
    layout: Layout

    @classmethod
    def draw(
        cls,
        model: Model,
        layers: list[nn.Module],
        topology: Topology,
        config: Config,
        pipeline: Pipeline,
    ) -> Blueprint:
        """Lays out this rank's parameters. Collective where the topology has groups.

        layers: the model's, cut as `pipeline` says. Raises ConfigError, or ValueError, for what cannot be laid out.
        """
        wrapped, cut = model if isinstance(model, Wrapped) else None, pipeline.cut
        ties = cut.ties([names(layer) for layer in layers])
        overs = set() if wrapped else dealt_over(layers)
        wanted = [setup.shard_axes(config, topology, over) for over in (None, *overs)]
        axes = {name for names in wanted for name in names if name}
        if pipeline.plan.pairs and is_accelerator(topology.device):
            axes.add("tp" + SECOND)
        topology.prepare(blocks(layers) | axes, [tie.stages for tie in ties.values()], cut.links)
        parts = cut.chunks(topology.axis("pp").index)
        held: Sequence[HasModules] = [layers[n] for part in parts for n in part]
        units = wrapped.units if wrapped else held
        chunks = None if wrapped else [number for number, part in enumerate(parts) for _ in part]
        if wrapped and pipeline.plan.asynchronous:
            given = f"--parallel.schedule {pipeline.schedule} with a wrapped module"
            fix = "use --parallel.schedule 1f1b or gpipe, or build it from threed.layers"
            raise ConfigError([f"{given}: its steps overlap, which needs layers; {fix}"])
        if wrapped and (problems := find_problems(wrapped.module, topology.dp)):
            raise ConfigError(problems)
        laid_out = layout.build(
            units, ties, topology, setup.policy(config, topology, cut.ways, overs), chunks
        )
        setup.size_buffers(laid_out, config, len(setup.state_names(config.optim)))
        return cls(
            model, topology, config, layers, recomputed_layers(config, layers), pipeline, laid_out
        )

    def lowered(
        self, microbatches: int, training: bool = True, part: Callable[[Plan], Plan] | None = None
    ) -> Plan:  # fmt: skip
        """Returns a step's plan with its communication; of forwards alone for evaluation and sampling; of an
        asynchronous one the `part`, if not all."""
        gathers, placement = self.config.zero.stage == 3, self.pipeline.cut.one_way
        if not training:
            plan = schedules.forward_only(len(placement), microbatches, placement)
            return schedules.lower(plan, gathers)
        plan = self.pipeline.plan_of(microbatches)
        return schedules.lower(plan if part is None else part(plan), gathers, self.optimistic)

    def stages(self, gatherer: ParameterGatherer, reducer: Reducer) -> list[Stage]:
        """Returns this rank's chunks of the model; a wrapped module gathers its parameters, and recomputes, by itself.

        Layer by layer the reducer is told when the backwards of a layer are over.
        """
        first, stages, mine = 0, list[Stage](), [self.layers[number] for number in self.held]
        between = None if reducer.early is None else reducer.early.progress
        layer_major = functools.partial(
            LayerMajorStage, unit_ended=reducer.unit_ended, between=between
        )
        make: Callable[..., Stage] = layer_major if self.layer_major else Stage
        wrapped = isinstance(self.model, Wrapped)
        units = {} if wrapped else {unit: mine[unit] for unit in self.recomputed_units}
        recomputed = build(
            self.config, units, self.live, self.model.slicing, self.topology, self._unlike
        )
        for chunk in self.chunks:
            layers, own = mine[first : first + len(chunk)], AlwaysWhole() if wrapped else gatherer
            stages.append(
                make(layers, own, self.config.zero.prefetch, first, recomputed, reducer.scope)
            )
            first += len(chunk)
        return stages

    @property
    def chunks(self) -> tuple[range, ...]:
        """The layers of this rank, by their numbers in the model, chunk by chunk."""
        return self.pipeline.cut.chunks(self.topology.axis("pp").index)

    @property
    def held(self) -> list[int]:
        """The numbers of all layers of this rank; a layer's place in this list is its unit's number."""
        return [number for chunk in self.chunks for number in chunk]

    @property
    def again(self) -> list[int]:
        """The numbers of the layers that are computed again as a whole."""
        return self.recomputed if self.config.recompute.mode == "full" else []

    @property
    def recomputed_units(self) -> list[int]:
        """This rank's units of which something is computed again."""
        return [unit for unit, number in enumerate(self.held) if number in self.recomputed]

    @functools.cached_property
    def _unlike(self) -> Flag:
        return unlike_inputs()

    @property
    def flags(self) -> list[Flag]:
        """The flags of all layers of the model, and of the stages; the same list on every rank."""
        found = [
            f
            for layer in self.layers
            for m in layer.modules()
            for f in getattr(m, "data_flags", ())
        ]
        sliced = not isinstance(self.model, Wrapped) and sliced_over(
            self.config, self.model.slicing
        )
        return [*found, self._unlike] if sliced and self.config.recompute.mode == "full" else found

    @functools.cached_property  # a plan is long to hash
    def optimistic(self) -> bool:
        """Whether updates begin before the gradient norm is known, and are validated in the next step."""
        return setup.is_optimistic(self.config, self.pipeline.plan)

    @property
    def layer_major(self) -> bool:
        """Whether a layer runs all micro-batches of a step before the next layer runs any."""
        return self.config.zero.order == "layer"

    @property
    def live(self) -> int:
        """Micro-batches whose activations this rank holds at the worst moment."""
        return math.ceil(
            schedules.peak_activations(self.pipeline.plan, self.topology.axis("pp").index)
        )


def step_plan(config: Config, data_ranks: int) -> Plan:
    """The compute actions of a step; with equal times, where a schedule plans by times."""
    p = config.parallel
    return schedules.build(
        schedule_of(config), p.pp, count_microbatches(config, data_ranks), p.chunks
    )


def schedule_of(config: Config) -> str:
    """The schedule of a step; layer by layer it is all forwards, then all backwards."""
    return "gpipe" if config.zero.order == "layer" else config.parallel.schedule


def names(layer: nn.Module) -> list[str]:
    """The global names of a layer's parameters."""
    return [spec_of(param).name for param in layer.parameters()]


def dealt_over(layers: Sequence[nn.Module]) -> set[str]:
    """Returns each `ShardSpec.over` of the model."""
    specs = (spec_of(param) for layer in layers for param in layer.parameters())
    return {spec.over for spec in specs if spec.over is not None}


def blocks(layers: Sequence[nn.Module]) -> set[str]:
    """The axes that some parameter of the model is replicated or partial over."""
    specs = [spec_of(param) for layer in layers for param in layer.parameters()]
    return {axis for spec in specs for axis in (spec.replicated, spec.partial) if axis is not None}
