"""The measured times and the bytes of a model's layers: what `--parallel.partition measured` cuts by.

    found = layer_times(model, layers, config, topology)        collective: the same on every rank
    division(plan, found, ...).ranges                           the layers of each stage

Phases: rank 0 looks for the times of an earlier start in the cache folder; if there are none, every rank measures all
layers at once, under the load that a step will have, and all take the median over ranks, which rank 0 keeps. A file is
of one machine, model, format and micro-batch (its name), and of one version of threed and torch (its content).
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from threed import collectives, schedules
from threed.atomic import building, cache_folder
from threed.config import Config
from threed.device import is_accelerator, memory_bytes, processor
from threed.footprint import example, trace
from threed.layers import Slicing
from threed.layers.contract import contract
from threed.models import Model
from threed.parse import parse_json
from threed.pipeline import activation_checkpointing, compiling
from threed.pipeline.timing import Timer
from threed.pipeline.trace import LayerCost, TraceError
from threed.planner.measured import (
    Division,
    LayerBytes,
    LayerTimes,
    divide,
    divide_and_plan,
    stage_costs,
    times_by_flops,
)
from threed.planner.memory import optimizer_bytes
from threed.planner.partition import balanced, uniform
from threed.precision import dtype
from threed.schedules import Costs, Plan, is_asynchronous
from threed.topology import Axis, Topology
from threed.zero.setup import state_names

GIB = 2**30


@dataclass(frozen=True)
class Found:
    """times: of every layer. notices: what there is to say about a file that could not be used."""

    times: list[LayerTimes]
    notices: tuple[str, ...] = ()


def layer_times(
    model: Model,
    layers: list[nn.Module],
    config: Config,
    topology: Topology,
    device: torch.device | None = None,
) -> Found:
    """The times of every layer on this machine, from the cache or measured here; the same on every rank. Collective.

    device: where, if not on the topology's. RuntimeError naming a layer that cannot be run alone.
    """
    device, world = device or topology.device, topology.axis("world")
    entry = Entry.of(model, layers, config, device) if world.index == 0 else None
    known, notice = (None, "") if entry is None else entry.read()
    known, notice = collectives.exchange((known, notice), world)[0]
    if known is None:
        collectives.barrier(world)
        everyone = collectives.exchange(_measure(model, layers, config, topology, device), world)
        known = [[statistics.median(values) for values in zip(*layer, strict=True)]
                 for layer in zip(*everyone, strict=True)]  # fmt: skip
        if entry is not None:
            entry.write(known)
    return Found([LayerTimes(*layer) for layer in known], (notice,) if notice else ())


def known_times(
    model: Model, layers: list[nn.Module], config: Config, device: torch.device
) -> Found | None:
    """What is in the cache for these layers, if anything usable is; of this process alone."""
    times, _ = Entry.of(model, layers, config, device).read()
    return None if times is None else Found([LayerTimes(*layer) for layer in times])


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


# ------------------------------------------------------------------------------------------------------------- cache


@dataclass(frozen=True)
class Entry:
    """A file of times. identity: what they are of; the file's name is its hash. made_by: with which versions."""

    path: Path
    identity: dict[str, Any]
    made_by: dict[str, str]

    @classmethod
    def of(
        cls, model: Model, layers: list[nn.Module], config: Config, device: torch.device
    ) -> Entry:
        """The entry of a model's layers, as this rank has them."""
        numbers, r = activation_checkpointing.recomputed_layers(config, layers), config.recompute
        identity = {
            "layers": [hashlib.sha256(_described(layer)).hexdigest()[:16] for layer in layers],
            "model": config.model.model_dump(mode="json"),
            "dtype": [config.precision.dtype, config.precision.grad_dtype],
            "micro_batch": config.train.micro_batch,
            "tp": [model.slicing.tp.size, model.slicing.sequence_parallel],
            "recompute": [r.mode, r.ops, r.partition, r.loss_chunks, numbers],
            "compile": [config.run.compile, config.run.compile_backend],
            "processor": [
                processor(device),
                torch.get_num_threads() if device.type == "cpu" else 0,
            ],
        }
        text = json.dumps(identity, sort_keys=True)
        name = f"times-{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"
        made_by = {name: _version(name) for name in ("threed", "torch")}
        return cls(cache_folder()[0] / "times" / name, json.loads(text), made_by)

    def read(self) -> tuple[list[list[float]] | None, str]:
        """The times, or None; and what is wrong with a file that is there."""
        try:
            data = parse_json(self.path.read_bytes(), str(self.path))
            times = [[float(part) for part in layer] for layer in data["times"]]
            fits = len(times) == len(self.identity["layers"]) and all(
                len(layer) == 3 for layer in times
            )
            if (
                data["identity"] != self.identity
                or not fits
                or not all(0 <= t < 1e6 for row in times for t in row)
            ):
                raise ValueError("it holds something else")
        except FileNotFoundError:
            return None, ""
        except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
            return None, f"{self.path} is broken ({error}): layers were timed again"
        if data.get("made_by") != self.made_by:
            return (
                None,
                f"{self.path} is of {_listed(data.get('made_by'))}: layers were timed again",
            )
        return times, ""

    def write(self, times: list[list[float]]) -> None:
        """Keeps the times; a folder that cannot be written to only costs the next start its time."""
        text = json.dumps(
            {"identity": self.identity, "made_by": self.made_by, "times": times}, indent=1
        )
        with contextlib.suppress(OSError), building(self.path) as (scratch,):
            scratch.write_text(text + "\n", encoding="utf-8")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def _listed(made_by: object) -> str:
    return (
        " and ".join(f"{k} {v}" for k, v in made_by.items())
        if isinstance(made_by, dict)
        else "another version"
    )


def _described(layer: nn.Module) -> bytes:
    """What a layer's times depend on, in any process: classes and their source, shapes, plain settings."""
    sources: dict[str, str] = {}
    text = repr(_describe(layer, contract(layer).name, sources, ()))
    return f"{text}\n{sorted(sources.items())}".encode()


def _describe(value: Any, name: str, sources: dict[str, str], around: tuple[int, ...]) -> Any:
    """Plain values that say how a value is built, whatever the layer's name; sources: collects those of classes."""
    if isinstance(value, Tensor):
        return tuple(value.shape), str(value.dtype), value.requires_grad
    if isinstance(value, str):
        return value.replace(name, "") if name else value
    if isinstance(value, int | float | type(None)):
        return value
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if id(value) in around or isinstance(value, Slicing | Axis):
        return kind
    inside = partial(_describe, name=name, sources=sources, around=(*around, id(value)))
    if isinstance(value, dict):
        return [
            (str(key).replace(name, "") if name else str(key), inside(item))
            for key, item in value.items()
        ]
    if isinstance(value, list | tuple):
        return [inside(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(repr(inside(item)) for item in value)
    if isinstance(value, nn.Module):
        if not kind.startswith(("torch.", "threed.")):
            sources[kind] = _source(type(value))
        return kind, inside(vars(value))
    if is_dataclass(value):
        return kind, [(field.name, inside(getattr(value, field.name))) for field in fields(value)]
    return f"{kind} {getattr(value, '__qualname__', '')}"


def _source(kind: type) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        return ""


# --------------------------------------------------------------------------------------------------------------- cut


def cut_by_times(
    model: Model,
    config: Config,
    topology: Topology,
    costs: Callable[[list[nn.Module]], Sequence[float]],
) -> Callable[[Plan, list[nn.Module]], Division]:
    """Returns what an engine cuts its model by: a function of the plan and the model's layers. That is collective.

    costs: gives FLOPs of layers, to compare with; the comparison is left out where layers cannot be traced.
    """

    def held(plan: Plan, layers: list[nn.Module]) -> list[LayerBytes]:
        mine = held_by(model, layers, config, topology, topology.device, plan.ways)
        everyone = collectives.exchange(mine, topology.axis("tp"))
        return fullest([[LayerBytes(*layer) for layer in rank] for rank in everyone])

    def cut(plan: Plan, layers: list[nn.Module]) -> Division:
        found = layer_times(model, layers, config, topology)
        flops = None
        with contextlib.suppress(TraceError):
            flops = costs(layers)
        return division(
            plan, layers, found, flops, lambda: held(plan, layers), config, topology.device
        )

    return cut


def division(
    plan: Plan, layers: Sequence[nn.Module], found: Found, flops: Sequence[float] | None,
    held: Callable[[], Sequence[LayerBytes]], config: Config, device: torch.device,
) -> Division:  # fmt: skip
    """Cuts a model by its layers' times; a schedule that plans by times is planned by them.

    flops: what it would be balanced by otherwise, if that is known. held: gives bytes of the layers, on the fullest
    rank. The limit of memory is the configuration's; without one it is a GPU's memory, which is no reason to refuse a
    run. Raises ValueError where no cut fits.
    """
    asked, cut = config.parallel.memory_limit_gib, _cutter(plan, layers, found, flops, config)
    limit = asked * GIB if asked else memory_bytes(device)
    if limit is None:
        return replace(cut(None, None), notices=found.notices)
    try:
        return replace(cut(held(), limit), notices=found.notices)
    except ValueError as error:
        if asked:
            raise ValueError(f"--parallel.memory-limit-gib {asked:g}: {error}") from None
        return replace(cut(None, None), notices=(*found.notices, str(error)))


def _cutter(
    plan: Plan,
    layers: Sequence[nn.Module],
    found: Found,
    flops: Sequence[float] | None,
    config: Config,
) -> Callable[[Sequence[LayerBytes] | None, float | None], Division]:
    """What cuts, given bytes of the layers and the limit of a rank."""
    name, stages = config.parallel.schedule, plan.total_stages
    again = (
        activation_checkpointing.recomputed_layers(config, layers)
        if config.recompute.mode == "full"
        else ()
    )
    cuts = {"uniform": uniform(len(layers), stages)}
    if flops is not None:
        cuts["balanced"] = balanced(activation_checkpointing.with_recompute(flops, again), stages)
    if not schedules.plans_by_times(name):
        return partial(divide, found.times, plan, cuts)

    def planner(costs: Costs | None, limit: float | None) -> Plan:
        return schedules.build(name, plan.stages, plan.microbatches, plan.chunks, costs, limit)

    others = {"uniform": (cuts["uniform"], plan)}
    if flops is not None:
        costs = stage_costs(times_by_flops(flops, again), cuts["balanced"])
        others["balanced"] = cuts["balanced"], planner(costs, None)
    return partial(divide_and_plan, found.times, planner, others)


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
    away = ("nvme", "cpu") if is_accelerator(device) else ("nvme",)
    params = 0 if zero.offload_params in away else width / (shards if zero.stage == 3 else 1)
    grads = dtype(config.precision.grad_dtype or "fp32").itemsize / (
        shards if zero.stage >= 2 else 1
    )
    optimizer = optimizer_bytes(width, len(state_names(config.optim))) / (
        shards if zero.stage else 1
    )
    once = ways if zero.offload_optimizer == zero.offload_params == "none" else 1
    kept = params + grads + (0 if zero.offload_optimizer in away else optimizer / once)
    again = width + dtype(config.precision.grad_dtype or "fp32").itemsize / (
        shards if zero.stage else 1
    )
    return kept + again * is_asynchronous(config.parallel.schedule)
