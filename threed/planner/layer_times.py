"""Measured times and memory of a model's layers, for `--parallel.partition measured`.

    times = layer_times(model, layers, config, topology)        # collective; the same on every rank
    division(plan, layers, times, ...).ranges                   # layers of each stage

All ranks measure all layers at the same time, so that the machine is as busy as in a training step.
The time of a layer is the median over ranks.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from threed import schedules
from threed.config import Config
from threed.core.device import is_accelerator, memory_bytes
from threed.distributed import collectives
from threed.distributed.topology import Topology
from threed.memory.sizes import optimizer_bytes
from threed.models import Model
from threed.models.measured_partition import (
    Division,
    LayerBytes,
    LayerTimes,
    divide,
    stage_costs,
    times_by_flops,
)
from threed.models.partition import balanced, uniform
from threed.ops.precision import dtype
from threed.pipeline import activation_checkpointing, compiling
from threed.pipeline.timing import Timer
from threed.pipeline.trace import LayerCost, TraceError
from threed.planner.memory_estimate import example, trace
from threed.schedules import Costs, Plan, registry
from threed.schedules.registry import is_asynchronous
from threed.zero.setup import state_names

GIB = 2**30


def layer_times(
    model: Model,
    layers: list[nn.Module],
    config: Config,
    topology: Topology,
    device: torch.device | None = None,
) -> list[LayerTimes]:
    """Measures the times of every layer; returns the same times on every rank. Collective.

    Args:
        model: the model that defines the layers.
        layers: all layers of the model.
        config: the resolved configuration.
        topology: the parallel axes, and this rank's position on them.
        device: device to measure on; by default the topology's.

    Raises:
        RuntimeError: if a layer cannot run on its own.
    """
    world = topology.axis("world")
    collectives.barrier(world)
    own = _measure(model, layers, config, topology, device or topology.device)
    everyone = collectives.exchange(own, world)
    return [
        LayerTimes(*(statistics.median(values) for values in zip(*layer, strict=True)))
        for layer in zip(*everyone, strict=True)
    ]


def _measure(
    model: Model, layers: list[nn.Module], config: Config, topology: Topology, device: torch.device
) -> list[LayerTimes]:
    """Measures the times of every layer on this rank.

    Bytes that the layers send during the measurement are not counted as traffic.
    """
    before, precision = Counter(topology.traffic), config.precision
    numbers = activation_checkpointing.recomputed_layers(config, layers)
    activation_checkpointing.configure(config, layers)
    timer = Timer(
        example(model, config, device), dtype(precision.dtype), dtype(precision.grad_dtype or "fp32"), device,
        config.train.seed, lambda layer: compiling.compile_layers([layer], layers, config.run),
    )  # fmt: skip
    try:
        return timer.measure(
            layers, activation_checkpointing.for_tracing(config, numbers, model.slicing, device)
        )
    finally:
        topology.traffic.clear()
        topology.traffic.update(before)


def cut_by_times(
    model: Model,
    layers: list[nn.Module],
    config: Config,
    topology: Topology,
    costs: Callable[[], Sequence[float]],
    plan: Plan,
) -> Division:
    """Measures the times of a model's layers and partitions the model by them. Collective.

    Args:
        model: the model that defines the layers.
        layers: all layers of the model.
        config: the resolved configuration.
        topology: the parallel axes, and this rank's position on them.
        costs: function that returns the FLOPs of the layers. The result is compared with the
            partition that is balanced by these FLOPs. If the function raises TraceError, this
            comparison is omitted.
        plan: the plan of a step, built as if all stages took equal times.

    Raises:
        RuntimeError: if a layer cannot run on its own.
        ValueError: if no partition fits the memory limit.
    """

    def layer_sizes() -> list[LayerBytes]:
        own = trace_layer_bytes(model, layers, config, topology, topology.device, plan.ways)
        return max_over_ranks(collectives.exchange(own, topology.axis("tp")))

    times, flops = layer_times(model, layers, config, topology), None
    with contextlib.suppress(TraceError):
        flops = costs()
    return division(plan, layers, times, flops, layer_sizes, config, topology.device)


def division(
    plan: Plan, layers: Sequence[nn.Module], times: Sequence[LayerTimes], flops: Sequence[float] | None,
    layer_sizes: Callable[[], Sequence[LayerBytes]], config: Config, device: torch.device,
) -> Division:  # fmt: skip
    """Partitions a model by the times of its layers.

    If the schedule chooses its plan by the times of the stages (`registry.plans_by_times`), the
    plan of the result is built for the stage times of its partition. Otherwise it is `plan`.

    The memory limit of a rank is the configured limit; if none is configured, it is the memory of
    the GPU. If no partition fits the GPU's memory, the result is the partition without a limit,
    with a notice.

    Args:
        plan: the plan of a step, built as if all stages took equal times.
        layers: all layers of the model.
        times: times of every layer.
        flops: FLOPs of the layers, for comparison with a balanced partition; None if not known.
        layer_sizes: function that returns the bytes of each layer: the maximum over tensor ranks.
            It is called only if there is a memory limit.
        config: the resolved configuration.
        device: device of the stages.

    Raises:
        ValueError: if no partition fits the configured limit.
    """
    configured = config.parallel.memory_limit_gib
    divide_within = _divider(plan, layers, times, flops, config)
    limit = configured * GIB if configured else memory_bytes(device)
    if limit is None:
        return divide_within(None, None)
    try:
        return divide_within(layer_sizes(), limit)
    except ValueError as error:
        if configured:
            raise ValueError(f"--parallel.memory-limit-gib {configured:g}: {error}") from None
        return replace(divide_within(None, None), notices=(str(error),))


def _divider(
    plan: Plan,
    layers: Sequence[nn.Module],
    times: Sequence[LayerTimes],
    flops: Sequence[float] | None,
    config: Config,
) -> Callable[[Sequence[LayerBytes] | None, float | None], Division]:
    """Returns a function that partitions the model within a memory limit.

    The returned function has two parameters: the bytes of each layer, and the memory limit of a
    rank in bytes. Both are None if there is no limit.
    """
    name, stages = config.parallel.schedule, plan.total_stages

    def planner(costs: Costs | None, limit: float | None) -> Plan:
        if not registry.plans_by_times(name):
            return plan
        return schedules.build(name, plan.stages, plan.microbatches, plan.chunks, costs, limit)

    baselines = {"uniform": (uniform(len(layers), stages), plan)}
    if flops is not None:
        again = activation_checkpointing.fully_recomputed(config, layers)
        cut = balanced(activation_checkpointing.with_recompute(flops, again), stages)
        costs = stage_costs(times_by_flops(flops, again), cut)
        baselines["balanced"] = cut, planner(costs, None)
    return partial(divide, times, planner, baselines)


def trace_layer_bytes(
    model: Model,
    layers: list[nn.Module],
    config: Config,
    topology: Topology,
    device: torch.device,
    ways: int = 1,
) -> list[LayerBytes]:
    """Returns the memory that each layer needs on one rank, traced on the meta device.

    Args:
        model: the model that defines the layers.
        layers: all layers of the model.
        config: the resolved configuration.
        topology: the parallel axes, and this rank's position on them.
        device: device of the stages.
        ways: number of pipeline ranks that hold each layer: 2 for a bidirectional schedule,
            otherwise 1.

    Raises:
        TraceError: if a layer cannot be traced. The message names the layer.
    """
    recomputed = activation_checkpointing.recomputed_layers(config, layers)
    costs = trace(model, layers, config, topology, recomputed)
    return layer_bytes(costs, layers, config, topology.dp, device, ways)


def max_over_ranks(ranks: Sequence[Sequence[LayerBytes]]) -> list[LayerBytes]:
    """Returns the bytes of each layer: the maximum over the tensor ranks.

    The maximum is computed separately for states, activations and temporary memory.

    Args:
        ranks: per tensor rank, the bytes of each layer.
    """
    return [
        LayerBytes(*(max(parts) for parts in zip(*layer, strict=True)))
        for layer in zip(*ranks, strict=True)
    ]


def layer_bytes(
    costs: Sequence[LayerCost], layers: Sequence[nn.Module], config: Config, dp: int, device: torch.device,
    ways: int = 1,
) -> list[LayerBytes]:  # fmt: skip
    """Returns the bytes of every layer on one rank: states, activations and temporary memory.

    Offloaded data and module buffers are not included.

    Args:
        costs: traced costs of the layers.
        layers: all layers of the model.
        config: the resolved configuration.
        dp: number of data-parallel ranks.
        device: device of the stages.
        ways: number of pipeline ranks that hold each layer: 2 for a bidirectional schedule,
            otherwise 1. The layer's optimizer states are divided between these ranks.
    """
    size = config.zero.shard_size
    shards = dp if size == "all" else int(size)
    width, each = dtype(config.precision.dtype).itemsize, _state_bytes(config, shards, device, ways)
    found, previous_keeps = [], False
    for cost, layer in zip(costs, layers, strict=True):
        params = list(layer.parameters())
        states = sum(param.numel() * (each if param.requires_grad else width) for param in params)
        kept = cost.kept + cost.input * (cost.keeps_input or previous_keeps)
        found.append(
            LayerBytes(math.ceil(states), kept, max(0, max(cost.forward, cost.backward) - kept))
        )
        previous_keeps = cost.keeps_output
    return found


def _state_bytes(config: Config, shards: int, device: torch.device, ways: int) -> float:
    """Returns the bytes of model states on the device per element of a trained parameter.

    Model states are parameters, gradients and optimizer states.
    """
    zero, width = config.zero, dtype(config.precision.dtype).itemsize
    grad = dtype(config.precision.grad_dtype or "fp32").itemsize
    slices = shards if zero.stage else 1
    away = ("nvme", "cpu") if is_accelerator(device) else ("nvme",)
    params = 0 if zero.offload_params in away else width / (shards if zero.stage == 3 else 1)
    grads = grad / (shards if zero.stage >= 2 else 1)
    optimizer = optimizer_bytes(width, len(state_names(config.optim))) / slices
    once = ways if zero.offload_optimizer == zero.offload_params == "none" else 1
    kept = params + grads + (0 if zero.offload_optimizer in away else optimizer / once)
    return kept + (width + grad / slices) * is_asynchronous(config.parallel.schedule)
