"""The measured times and the bytes of a model's layers: what `--parallel.partition measured` cuts by.

    times = layer_times(model, layers, config, topology)        collective: the same on every rank
    division(plan, layers, times, ...).ranges                   the layers of each stage

Every rank measures all layers at once, under the load that a step will have, and all take the
median over ranks.
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

from threed import collectives, schedules
from threed.config import Config
from threed.device import is_accelerator, memory_bytes
from threed.footprint import example, trace
from threed.models import Model
from threed.pipeline import activation_checkpointing, compiling
from threed.pipeline.timing import Timer
from threed.pipeline.trace import LayerCost, TraceError
from threed.planner.measured import (
    Division,
    LayerBytes,
    LayerTimes,
    divide,
    stage_costs,
    times_by_flops,
)
from threed.planner.memory import optimizer_bytes
from threed.planner.partition import balanced, uniform
from threed.precision import dtype
from threed.schedules import Costs, Plan, is_asynchronous
from threed.topology import Topology
from threed.zero.setup import state_names

GIB = 2**30


def layer_times(
    model: Model,
    layers: list[nn.Module],
    config: Config,
    topology: Topology,
    device: torch.device | None = None,
) -> list[LayerTimes]:
    """Returns the times of every layer, measured here; the same on every rank. Collective.

    Args:
        device: where to measure; by default the topology's.

    Raises:
        RuntimeError: a layer cannot be run alone.
    """
    world = topology.axis("world")
    collectives.barrier(world)
    mine = _measure(model, layers, config, topology, device or topology.device)
    everyone = collectives.exchange(mine, world)
    return [
        LayerTimes(*(statistics.median(values) for values in zip(*layer, strict=True)))
        for layer in zip(*everyone, strict=True)
    ]


def _measure(
    model: Model, layers: list[nn.Module], config: Config, topology: Topology, device: torch.device
) -> list[LayerTimes]:
    """The times on this rank; what layers send meanwhile is not counted."""
    before, precision = Counter(topology.traffic), config.precision
    numbers = activation_checkpointing.recomputed_layers(config, layers)
    timer = Timer(
        example(model, config, device), dtype(precision.dtype), dtype(precision.grad_dtype or "fp32"), device,
        config.train.seed, lambda layer: compiling.compile_layers([layer], layers, config.run),
    )  # fmt: skip
    try:
        return timer.measure(
            layers, activation_checkpointing.on_paper(config, numbers, model.slicing, device)
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
    """Cuts a model by times measured here. Collective.

    Args:
        costs: returns FLOPs of the layers, to compare with; without them if layers cannot be traced.
    """

    def held() -> list[LayerBytes]:
        mine = held_by(model, layers, config, topology, topology.device, plan.ways)
        return fullest(collectives.exchange(mine, topology.axis("tp")))

    times, flops = layer_times(model, layers, config, topology), None
    with contextlib.suppress(TraceError):
        flops = costs()
    return division(plan, layers, times, flops, held, config, topology.device)


def division(
    plan: Plan, layers: Sequence[nn.Module], times: Sequence[LayerTimes], flops: Sequence[float] | None,
    held: Callable[[], Sequence[LayerBytes]], config: Config, device: torch.device,
) -> Division:  # fmt: skip
    """Cuts a model by its layers' times. A schedule that plans by times is planned by them.

    The limit of memory is the configuration's, else a GPU's memory, which is no reason to refuse a
    run.

    Args:
        flops: FLOPs of the layers, if known, to compare with a balanced cut.
        held: returns bytes of the layers, on the fullest rank.

    Raises:
        ValueError: no cut fits.
    """
    asked, cut = config.parallel.memory_limit_gib, _cutter(plan, layers, times, flops, config)
    limit = asked * GIB if asked else memory_bytes(device)
    if limit is None:
        return cut(None, None)
    try:
        return cut(held(), limit)
    except ValueError as error:
        if asked:
            raise ValueError(f"--parallel.memory-limit-gib {asked:g}: {error}") from None
        return replace(cut(None, None), notices=(str(error),))


def _cutter(
    plan: Plan,
    layers: Sequence[nn.Module],
    times: Sequence[LayerTimes],
    flops: Sequence[float] | None,
    config: Config,
) -> Callable[[Sequence[LayerBytes] | None, float | None], Division]:
    """What cuts, given bytes of the layers and the limit of a rank."""
    name, stages = config.parallel.schedule, plan.total_stages

    def planner(costs: Costs | None, limit: float | None) -> Plan:
        if not schedules.plans_by_times(name):
            return plan
        return schedules.build(name, plan.stages, plan.microbatches, plan.chunks, costs, limit)

    others = {"uniform": (uniform(len(layers), stages), plan)}
    if flops is not None:
        again = activation_checkpointing.whole_again(config, layers)
        cut = balanced(activation_checkpointing.with_recompute(flops, again), stages)
        costs = stage_costs(times_by_flops(flops, again), cut)
        others["balanced"] = cut, planner(costs, None)
    return partial(divide, times, planner, others)


def held_by(
    model: Model,
    layers: list[nn.Module],
    config: Config,
    topology: Topology,
    device: torch.device,
    ways: int = 1,
) -> list[LayerBytes]:
    """Bytes of every layer on this rank, if it held it. Raises TraceError naming a layer that cannot be traced."""
    recomputed = activation_checkpointing.recomputed_layers(config, layers)
    costs = trace(model, layers, config, topology, recomputed)
    return layer_bytes(costs, layers, config, topology.dp, device, ways)


def fullest(ranks: Sequence[Sequence[LayerBytes]]) -> list[LayerBytes]:
    """The most of several tensor ranks, layer by layer."""
    return [
        LayerBytes(*(max(parts) for parts in zip(*layer, strict=True)))
        for layer in zip(*ranks, strict=True)
    ]


def layer_bytes(
    costs: Sequence[LayerCost], layers: Sequence[nn.Module], config: Config, dp: int, device: torch.device,
    ways: int = 1,
) -> list[LayerBytes]:  # fmt: skip
    """States, activations of a micro-batch, and what a layer needs beside them while it runs, on one rank.

    costs: as traced. ways: ranks that hold each layer, and share its optimizer states. What is kept elsewhere than on
    the device is not counted, nor are buffers.
    """
    size = config.zero.shard_size
    shards = dp if size == "all" else int(size)
    width, each = dtype(config.precision.dtype).itemsize, _state_bytes(config, shards, device, ways)
    found, handed_on = [], False
    for cost, layer in zip(costs, layers, strict=True):
        params = list(layer.parameters())
        states = sum(param.numel() * (each if param.requires_grad else width) for param in params)
        kept = cost.kept + cost.input * (cost.keeps_input or handed_on)
        found.append(
            LayerBytes(math.ceil(states), kept, max(0, max(cost.forward, cost.backward) - kept))
        )
        handed_on = cost.keeps_output
    return found


def _state_bytes(config: Config, shards: int, device: torch.device, ways: int) -> float:
    """Bytes of a trained parameter's states on the device."""
    zero, width = config.zero, dtype(config.precision.dtype).itemsize
    grad, slices = (
        dtype(config.precision.grad_dtype or "fp32").itemsize,
        shards if zero.stage else 1,
    )
    away = ("nvme", "cpu") if is_accelerator(device) else ("nvme",)
    params = 0 if zero.offload_params in away else width / (shards if zero.stage == 3 else 1)
    grads = grad / (shards if zero.stage >= 2 else 1)
    optimizer = optimizer_bytes(width, len(state_names(config.optim))) / slices
    once = ways if zero.offload_optimizer == zero.offload_params == "none" else 1
    kept = params + grads + (0 if zero.offload_optimizer in away else optimizer / once)
    return kept + (width + grad / slices) * is_asynchronous(config.parallel.schedule)
