"""The stages of a run on the meta device, with their memory and traffic."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

from threed import models, schedules
from threed.config import Config, ConfigError
from threed.distributed.grid import AXES, Grid
from threed.distributed.sharding import spec_of
from threed.distributed.topology import Topology, default_device
from threed.layers import MixtureOfExperts, Slicing
from threed.models import Model, options_of
from threed.models.check import find_missing_records
from threed.models.measured_partition import Division, LayerBytes, stage_costs, times_by_flops
from threed.pipeline.activation_checkpointing import enable, fully_recomputed, recomputed_layers
from threed.pipeline.batches import check_packing, documents_problem
from threed.pipeline.trace import LayerCost, TraceError
from threed.planner.blueprint import Blueprint, Pipeline, set_up_experts, step_plan
from threed.planner.imbalance import with_load
from threed.planner.layer_times import division as divided
from threed.planner.layer_times import layer_times, max_over_ranks, trace_layer_bytes
from threed.planner.memory_estimate import (
    Fixed,
    Footprint,
    decide_order,
    footprint,
    order_facts,
    trace,
)
from threed.planner.order import with_order
from threed.zero.setup import check_tile


class Column:
    """The ranks with the same tensor-parallel index.

    All of these ranks share one model on the meta device, and the costs of its layers.
    """

    def __init__(
        self, config: Config, grid: Grid, build: Callable[[Slicing], Model], number: int
    ) -> None:
        self.config, self.grid, self.number = config, grid, number
        self.topology = Topology.on_meta(grid, number)
        self.model = build(Slicing.of(self.topology, config))
        self.note = ""
        self.layers = self.model.layers()
        if isinstance(self.model, models.Wrapped):
            self._prepare_module(self.model)
        elif problems := list(find_missing_records(self.layers)):
            raise ConfigError(problems)
        given = self.model, self.layers, config, default_device()
        check_packing(config, documents_problem(*given))
        set_up_experts(config, self.layers, isinstance(self.model, models.Wrapped))
        self.shapes = tuple(
            tuple(tuple(p.shape) for p in layer.parameters()) for layer in self.layers
        )

    def _prepare_module(self, model: models.Wrapped) -> None:
        """Moves a wrapped module to the meta device, and enables activation recomputation in it.

        Raises:
            ConfigError: if the configuration needs a feature that modules do not have.
        """
        if problems := models.find_split_problems(model, self.grid.pp, self.grid.tp, self.grid.cp):
            raise ConfigError(problems)
        check_tile(self.config.zero.tile, 1, wrapped=True)
        self.config = decide_order(self.config, model, self.layers, self.topology)
        enable(model.module, self.config)
        model.to_meta()

    @functools.cached_property
    def costs(self) -> list[LayerCost]:
        """The traced costs of all layers of the model, on a rank of this column."""
        recomputed = recomputed_layers(self.config, self.layers)
        try:
            return trace(self.model, self.layers, self.config, self.topology, recomputed)
        except TraceError as error:
            if not isinstance(self.model, models.Wrapped):
                raise
            # A wrapped module is a single layer, so no partition by costs is needed. Its FLOPs are
            # estimated from the number of parameters (arXiv 2001.08361, section 2.1).
            self.note = f"of activations is not known: {error.__cause__} (on the meta device)"
            tokens = self.config.train.micro_batch * self.config.model.seq
            return [LayerCost(2 * self.parameters * tokens)]

    @property
    def flops(self) -> list[float]:
        """The model's custom cost of each layer or, without custom costs, the FLOPs of each layer.

        The FLOPs are the sum of forward and backward, where a backward counts as two forwards.
        """
        custom_costs = options_of(self.model).costs
        if custom_costs is None:
            return [3.0 * cost.flops for cost in self.costs]
        return list(custom_costs(self.config.train.micro_batch))

    @property
    def parameters(self) -> int:
        """The number of elements of all parameters of the model on this column, without padding."""
        found = {
            spec_of(p).name: spec_of(p).numel for layer in self.layers for p in layer.parameters()
        }
        return sum(found.values())

    @property
    def active(self) -> int:
        """The number of `parameters` that compute a token, without experts that it is not sent to."""
        parts = (part for layer in self.layers for part in layer.modules())
        idle = (
            param.numel() * (one.experts - one.per_token) // one.experts
            for one in parts
            if isinstance(one, MixtureOfExperts)
            for param in (one.gate_up, one.gate_up_bias, one.down, one.down_bias)
            if param is not None
        )
        return self.parameters - sum(idle)

    def busy(self, load: float) -> Column:
        """Returns a column whose rank gets `load` times the mean number of tokens for its experts."""
        other = self.at(self.config)
        other.layers = [with_load(layer, load) for layer in self.layers]
        return other

    def at(self, config: Config) -> Column:
        """Returns a column of the same model with another configuration."""
        other = copy.copy(self)
        other.config = config
        vars(other).pop("costs", None)
        return other

    def pipeline(
        self, flops: Sequence[float], divide: Callable[[Sequence[float]], Division]
    ) -> Pipeline:
        """Returns the stages and the plan, which are the same for all columns.

        Args:
            flops: FLOPs of the layers, summed over columns.
            divide: function of these FLOPs that partitions the layers by measured times.
        """
        return Pipeline.of(
            self.layers, self.topology, self.config, lambda: flops, lambda _: divide(flops)
        )

    def stage_costs(self, flops: Sequence[float], pipeline: Pipeline) -> schedules.Costs:
        """Returns costs of stages for a simulation, in FLOPs or in the unit of custom costs."""
        again = fully_recomputed(self.config, self.layers)
        return stage_costs(times_by_flops(flops, again), pipeline.layout.ranges)

    def blueprint(self, stage: int, pipeline: Pipeline) -> Blueprint:
        """Returns a stage's blueprint on the first rank with this tensor-parallel index."""
        position = {**dict.fromkeys(AXES, 0), "pp": stage, "tp": self.number}
        topology = Topology.on_meta(self.grid, self.grid.rank_of(position))
        return Blueprint.build(self.model, self.layers, topology, self.config, pipeline)


class Stages:
    """The stages of all ranks, and their memory.

    Args:
        columns: the column of each tensor rank.
        config: the resolved configuration.
        divide: function of the FLOPs of the layers that partitions them by measured times.
        base: stages of the same model with sequences of another length. If the partition is the
            same, the parts of the memory that do not depend on activations are taken from there.

    Attributes:
        config: the configuration with `zero.order` decided.
        flops: FLOPs of the layers, summed over columns.
        pipeline: the stages and the plan, which are the same for all columns.
        blueprints: per column, the blueprint of each stage.
        footprints: per column, the memory and traffic of each stage.
    """

    def __init__(
        self, columns: Sequence[Column], config: Config, divide: Callable[[Sequence[float]], Division],
        base: Stages | None = None,
    ) -> None:  # fmt: skip
        self.columns, self._given, self._divide = columns, config, divide
        self.blueprints: dict[Column, list[Blueprint]]
        self._fixed: list[list[Fixed]]
        self.config = with_order(
            config, lambda: [order_facts(config, c.layers, c.costs) for c in set(columns)]
        )
        for column in columns:
            column.config = self.config
        self.flops = [sum(costs) for costs in zip(*(c.flops for c in columns), strict=True)]
        self.pipeline = columns[0].pipeline(self.flops, divide)
        unique = dict.fromkeys(columns)
        if base is not None and self._is_like(base):
            old = [base.blueprints[column] for column in dict.fromkeys(base.columns)]
            self.blueprints = {
                column: [replace(one, config=self.config, pipeline=self.pipeline) for one in stages]
                for column, stages in zip(unique, old, strict=True)
            }
            self._fixed = base._fixed
        else:
            self.blueprints = {
                column: [column.blueprint(n, self.pipeline) for n in range(column.grid.pp)]
                for column in unique
            }
            self._fixed = [[Fixed(one) for one in stages] for stages in self.blueprints.values()]
        self.footprints = {
            column: [
                footprint(one, column.costs, known)
                for one, known in zip(stages, fixed, strict=True)
            ]
            for (column, stages), fixed in zip(self.blueprints.items(), self._fixed, strict=True)
        }

    def _is_like(self, base: Stages) -> bool:
        one, other = self.pipeline, base.pipeline
        same = one.layout == other.layout and one.plan == other.plan
        return same and self.config.zero.order == base.config.zero.order

    def busy(self, load: float) -> dict[Column, tuple[list[LayerCost], list[Footprint]]]:
        """Returns costs and footprints of each column if experts get `load` times the mean."""
        found = {}
        for (column, stages), fixed in zip(self.blueprints.items(), self._fixed, strict=True):
            costs = column.busy(load).costs
            sizes = [footprint(one, costs, own) for one, own in zip(stages, fixed, strict=True)]
            found[column] = costs, sizes
        return found

    @property
    def peak(self) -> int:
        """The peak of the rank that needs the most memory, in bytes."""
        return max(one.bytes["peak"] for stages in self.footprints.values() for one in stages)

    def at(self, seq: int) -> Stages:
        """Returns the stages of the same model with sequences of another length.

        Raises:
            ValueError: if the model cannot run on such sequences.
        """
        model = self._given.model.model_copy(update={"seq": seq})
        config = self._given.model_copy(update={"model": model})
        copies = {column: column.at(config) for column in dict.fromkeys(self.columns)}
        return Stages([copies[column] for column in self.columns], config, self._divide, self)


def divide(
    columns: Sequence[Column], flops: Sequence[float], build: Callable[[Slicing], Model]
) -> Division:
    """Measures the times of a model's layers in this process, and partitions the model by them.

    The measured layers are not sharded, even if the configuration has several tensor ranks: a
    sharded layer would have to communicate with tensor ranks that do not exist. In this case a
    notice in the result states that the times are of unsharded layers.

    Args:
        columns: the columns with different parameter shapes.
        flops: FLOPs of the layers, summed over all columns.
        build: function that builds the model for a `Slicing`.
    """
    first, device = columns[0], default_device()
    config, plan = first.config, step_plan(first.config, first.topology.dp)
    alone = Topology.on_meta(Grid(), 0)
    model = build(Slicing(alone.axis("tp"), False, config.train.seed, config.zero.tile))
    layers = model.layers()
    times = layer_times(model, layers, config, alone, device)

    def layer_sizes() -> list[LayerBytes]:
        return max_over_ranks(
            [
                trace_layer_bytes(c.model, c.layers, config, c.topology, device, plan.ways)
                for c in columns
            ]
        )

    division = divided(plan, first.layers, times, flops, layer_sizes, config, device)
    if (shares := first.grid.tp * first.grid.cp) == 1:
        return division
    notice = f"times of unsharded layers, not of 1/{shares} of each"
    return replace(division, notices=(notice, *division.notices))
