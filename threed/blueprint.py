"""A model cut and laid out for one rank: the same objects for a run, and for its forecast on paper.

    blueprint = Blueprint.draw(model, topology, config, costs)

On a topology with process groups this is what an engine trains. On `Topology.drawn`, whose device is meta, it is what
any rank of any grid would hold, and no byte of it is in memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from threed import schedules
from threed.config import Config, ConfigError, count_microbatches
from threed.models import Model, Wrapped
from threed.models.wrapped import find_problems
from threed.pipeline.activation_checkpointing import build, recomputed_layers, with_recompute
from threed.pipeline.layer_major import LayerMajorStage
from threed.pipeline.stage import AlwaysWhole, ParameterGatherer, Stage
from threed.planner.cut import Cut, partition
from threed.planner.measured import Division
from threed.schedules import Plan
from threed.sharding import spec_of
from threed.topology import Topology
from threed.zero import agreement, layout, setup
from threed.zero.layout import HasModules, Layout


@dataclass(frozen=True, eq=False)
class Blueprint:
    """plan: a step's compute actions, of every pipeline rank. layers: all of the model's, of which `held` are this
    rank's by number, chunk by chunk. recomputed: the numbers of layers of which something is computed again."""

    model: Model
    topology: Topology
    config: Config
    layers: list[nn.Module]
    recomputed: list[int]
    plan: Plan
    cut: Cut
    layout: Layout
    division: Division | None = None  # where the cut is by measured times

    @classmethod
    def draw(
        cls, model: Model, layers: list[nn.Module], topology: Topology, config: Config,
        costs: Callable[[list[nn.Module]], Sequence[float]], divide: Callable[[Plan, list[nn.Module]], Division],
    ) -> Blueprint:  # fmt: skip
        """Cuts the model and lays out this rank's parameters. Collective where the topology has groups.

        layers: the model's. costs: gives theirs, where stages are balanced by them. divide: cuts by measured times.
        Raises ConfigError, or ValueError, for what cannot be cut or laid out.
        """
        wrapped = model if isinstance(model, Wrapped) else None
        setup.check_groups(config.optim, layers)
        p, r = config.parallel, config.recompute
        set_loss_chunks(layers, config)
        recomputed = recomputed_layers(config, layers)
        plan = step_plan(config, topology.dp)
        if schedules.names_file(p.schedule) and not topology.on_paper:
            agreement.check_plan(plan, topology.axis("world"))
        again = recomputed if r.mode == "full" else ()
        division = divide(plan, layers) if p.partition == "measured" and p.pp > 1 else None
        ranges = division.ranges if division else partition(
            p.partition, len(layers), plan.total_stages, lambda: with_recompute(costs(layers), again)
        )  # fmt: skip
        cut = Cut.of(ranges, plan)
        ties = cut.ties([names(layer) for layer in layers])
        axes = {name for name in setup.shard_axes(config, topology) if name}
        topology.prepare(blocks(layers) | axes, [tie.stages for tie in ties.values()], cut.links)
        held = [(n, chunk) for chunk, part in enumerate(cut.chunks(topology.axis("pp").index)) for n in part]
        units: Sequence[HasModules] = wrapped.units if wrapped else [layers[n] for n, _ in held]
        chunks = None if wrapped else [chunk for _, chunk in held]
        if wrapped and plan.asynchronous:
            raise ConfigError([f"--parallel.schedule {p.schedule} with a wrapped module: build it from threed.layers"])
        if wrapped and (problems := find_problems(wrapped.module, topology.dp, config.zero.stage)):
            raise ConfigError(problems)
        laid_out = layout.build(units, ties, topology, setup.policy(config, topology), chunks)
        setup.size_buffers(laid_out, config, len(setup.rule(config.optim).state_names))
        return cls(model, topology, config, layers, recomputed, plan, cut, laid_out, division)

    def lowered(
        self, microbatches: int, training: bool = True, part: Callable[[Plan], Plan] | None = None
    ) -> Plan:  # fmt: skip
        """Returns a step's plan with its communication; of forwards alone for evaluation and sampling; of an
        asynchronous one the `part`, if not all."""
        schedule = schedule_of(self.config) if training else None
        placement, gathers = self.cut.placement if training else self.cut.one_way, self.config.zero.stage == 3
        return _lowered(schedule, microbatches, placement, gathers, training and self.optimistic, part)

    def stages(self, gatherer: ParameterGatherer, unit_ended: Callable[[int], None]) -> list[Stage]:
        """Returns this rank's chunks of the model; a wrapped module gathers its parameters, and recomputes, by itself.

        unit_ended(unit) is called, layer by layer, when the backwards of a layer are over.
        """
        first, stages, mine = 0, list[Stage](), [self.layers[number] for number in self.held]
        layer_major = functools.partial(LayerMajorStage, unit_ended=unit_ended)
        make: Callable[..., Stage] = layer_major if self.layer_major else Stage
        wrapped = isinstance(self.model, Wrapped)
        units = {} if wrapped else {unit: mine[unit] for unit in self.recomputed_units}
        recomputed = build(self.config, units, self.live, self.model.slicing, self.topology)
        for chunk in self.chunks:
            layers, own = mine[first : first + len(chunk)], AlwaysWhole() if wrapped else gatherer
            stages.append(make(layers, own, self.config.zero.prefetch, first, recomputed))
            first += len(chunk)
        return stages

    @property
    def chunks(self) -> tuple[range, ...]:
        """The layers of this rank, by their numbers in the model, chunk by chunk."""
        return self.cut.chunks(self.topology.axis("pp").index)

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

    @functools.cached_property  # every step asks, and a plan is long to hash
    def optimistic(self) -> bool:
        """Whether updates begin before the gradient norm is known, and are validated in the next step."""
        return setup.is_optimistic(self.config, self.plan)

    @property
    def layer_major(self) -> bool:
        """Whether a layer runs all micro-batches of a step before the next layer runs any."""
        return self.config.zero.order == "layer"

    @property
    def live(self) -> int:
        """Micro-batches whose activations this rank holds at the worst moment."""
        return math.ceil(schedules.peak_activations(self.plan, self.topology.axis("pp").index))


def set_loss_chunks(layers: Sequence[nn.Module], config: Config) -> None:
    """Tells the layers that make logits in how many parts; before they are traced or timed."""
    for layer in layers:
        if hasattr(layer, "loss_chunks"):
            layer.loss_chunks = config.recompute.loss_chunks  # type: ignore[assignment]


@functools.lru_cache(maxsize=32)
def _lowered(
    schedule: str | None, microbatches: int, placement: tuple[tuple[int, ...], ...], gathers: bool, validates: bool,
    part: Callable[[Plan], Plan] | None,
) -> Plan:  # fmt: skip
    stages, chunks = len(placement), len(placement[0])
    if schedule is None:
        return schedules.lower(schedules.forward_only(stages, microbatches, placement), gathers)
    plan = schedules.build(schedule, stages, microbatches, chunks)
    return schedules.lower(plan if part is None else part(plan), gathers, validates)


def step_plan(config: Config, data_ranks: int) -> Plan:
    """The compute actions of a step."""
    p = config.parallel
    return schedules.build(schedule_of(config), p.pp, count_microbatches(config, data_ranks), p.chunks)


def schedule_of(config: Config) -> str:
    """The schedule of a step; layer by layer it is all forwards, then all backwards."""
    return "gpipe" if config.zero.order == "layer" else config.parallel.schedule


def names(layer: nn.Module) -> list[str]:
    """The global names of a layer's parameters."""
    return [spec_of(param).name for param in layer.parameters()]


def blocks(layers: Sequence[nn.Module]) -> set[str]:
    """The axes that some parameter of the model is replicated or partial over."""
    specs = [spec_of(param) for layer in layers for param in layer.parameters()]
    return {axis for spec in specs for axis in (spec.replicated, spec.partial) if axis is not None}
