"""Predicts the time of a step on a GPU, part by part, from the operations of the traced layers.

    time = step_time(device, stages, layers, blueprints, footprints, flops)
    time.total, time.mfu, time.products, ...
    print("\n".join(time.lines()))

The layers are traced on the meta device, with the kernels that a GPU would run, so every matrix
product, every attention and the bytes of all other kernels are known (`pipeline.operations`). Their
times follow from the rates of the device (`core.gpu_rates`). The times of the layers are the costs of a
simulation of the schedule, which gives the bubble. Collectives of tensor, context and expert ranks
run in order beside the operations between their start and the wait for them; only the time for which
an operation waits is exposed. If a schedule pairs forwards with backwards, each computes while the
other one waits. Experts get equally many tokens. Gathers and reductions of ZeRO overlap with
the computation that the stage permits, and slow it down.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from math import inf

from threed import schedules
from threed.config import Config
from threed.core.gpu_rates import INTERFERENCE, READ_S, Device, LinkRate
from threed.distributed.grid import Grid
from threed.distributed.topology import EXPERTS
from threed.models.measured_partition import LayerTimes, stage_costs
from threed.ops.precision import dtype
from threed.pipeline.operations import Operation
from threed.pipeline.trace import LayerCost
from threed.planner.blueprint import Blueprint
from threed.planner.memory_estimate import Footprint
from threed.schedules import Costs, Kind
from threed.schedules.action import COMPUTE
from threed.zero.setup import state_names

_NAMES = {"product": "products", "attention": "attention", "memory": "elementwise"}


@dataclass(frozen=True)
class Parts:
    """Seconds of operations, by part.

    Attributes:
        products: matrix products.
        attention: fused attention, forward and backward.
        elementwise: all other kernels of the layers, with the loss.
        launches: time between kernels, and the time for which the device waits for the host.
        tensor: exposed time of collectives of tensor parallelism.
        context: exposed time of messages of context parallelism.
        experts: exposed time of the messages that take tokens to experts and back.
        sent: time of these collectives and messages, exposed or not.
    """

    products: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    launches: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    experts: float = 0.0
    sent: float = 0.0

    def plus(self, other: Parts, times: float = 1.0) -> Parts:
        """Returns the sum of these parts and of another's, `times` times."""
        pairs = ((getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        return Parts(*(own + times * more for own, more in pairs))

    @property
    def computed(self) -> float:
        """The time of kernels, with the time between them."""
        return self.products + self.attention + self.elementwise + self.launches

    @property
    def exposed(self) -> float:
        """The time for which operations wait for messages, and by which messages slow them."""
        return self.tensor + self.context + self.experts

    @property
    def total(self) -> float:
        """The time of the operations."""
        return self.computed + self.exposed

    def hiding(self, seconds: float) -> Parts:
        """Returns these parts if other passes run for some seconds of the exposed time."""
        left = 1 - max(0.0, seconds) / self.exposed if self.exposed else 1.0
        names = ("tensor", "context", "experts")
        return replace(self, **{name: getattr(self, name) * left for name in names})


@dataclass(frozen=True, kw_only=True)
class StepTime(Parts):
    """The predicted time of a step, in seconds, on the pipeline rank that computes the longest.

    Attributes:
        optimizer: gradient norm and update of the weights.
        pipeline: exposed time of messages between stages.
        data: exposed time of gathers and reductions, with the time by which they slow computation.
        bubble: idle time of the schedule.
        communication: time of all collectives and messages of the rank, exposed or not.
        flops: FLOPs of the model per device, without recomputation; causal attention counts half.
        device: name of the device.
        peak: peak FLOP/s of the device.
    """

    optimizer: float
    pipeline: float
    data: float
    bubble: float
    communication: float
    flops: float
    device: str
    peak: float

    @property
    def exposed(self) -> float:
        """The time of communication that does not overlap with computation."""
        return super().exposed + self.pipeline + self.data

    @property
    def total(self) -> float:
        """The time of the step."""
        return self.computed + self.optimizer + self.exposed + self.bubble

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization, with half of the FLOPs of full attention."""
        return self.flops / (self.total * self.peak)

    def lines(self) -> Iterator[str]:
        """Yields the parts as the rows of a table, with milliseconds and shares of the step."""
        parts = {
            "matrix products": self.products, "attention": self.attention,
            "elementwise and loss": self.elementwise, "launches": self.launches,
            "optimizer": self.optimizer, "exposed: tensor parallelism": self.tensor,
            **({"exposed: context parallelism": self.context} if self.context else {}),
            **({"exposed: expert parallelism": self.experts} if self.experts else {}),
            "exposed: stages": self.pipeline, "exposed: gathers, reductions": self.data,
            "pipeline bubble": self.bubble, "total": self.total,
        }  # fmt: skip
        for name, seconds in parts.items():
            yield f"  {name:<29}{seconds * 1e3:>10.1f} ms {seconds / self.total:>6.1%}"
        yield f"  {'communication, in all':<29}{self.communication * 1e3:>10.1f} ms"


def unmodelled(config: Config) -> list[str]:
    """Returns the settings for which the time of a step is not modelled."""
    zero = config.zero
    found = {
        f"--precision.dtype {config.precision.dtype}": dtype(config.precision.dtype).itemsize != 2,
        f"--zero.offload-optimizer {zero.offload_optimizer}": zero.offload_optimizer != "none",
        f"--zero.offload-params {zero.offload_params}": zero.offload_params != "none",
        f"--zero.tile {zero.tile}": zero.tile > 1,
        f"--recompute.offload {config.recompute.offload}": config.recompute.offload != "none",
        "--run.compile true": config.run.compile,
    }
    return [name for name, used in found.items() if used]


def forward_flops(costs: Sequence[LayerCost]) -> int:
    """Returns the FLOPs of the forwards of layers, without masked pairs of causal attention."""
    return sum(operation.flops for cost in costs for operation in cost.operations[0])


def step_time(
    device: Device, grid: Grid, columns: Sequence[Sequence[LayerCost]], blueprints: Sequence[Blueprint],
    footprints: Sequence[Footprint], flops: float,
) -> StepTime:  # fmt: skip
    """Predicts the time of a step.

    Args:
        device: the GPU.
        grid: the number of ranks per axis.
        columns: for each group of equal tensor-parallel ranks, the costs of all layers.
        blueprints: blueprint of each pipeline rank.
        footprints: traffic of each pipeline rank.
        flops: FLOPs of the model per step and device, without recomputation.
    """
    next_stage = device.link(grid.ranks(0, "pp")[:2])
    rings = blueprints[0].model.slicing.context.ring.size
    reads = not blueprints[0].config.experts.room
    layers = [
        max((_layer(device, cost, rings, reads) for cost in same), key=lambda parts: parts[0].total)
        for same in zip(*columns, strict=True)
    ]
    pipeline = blueprints[0].pipeline
    costs = stage_costs([times for _, times in layers], pipeline.layout.ranges)
    if pipeline.plan.pairs:
        pairs = [[layers[n][0] for n in stage] for stage in pipeline.layout.ranges]
        costs = replace(costs, overlapped=tuple(map(_pair_seconds, pairs)))
    alone = schedules.simulate(pipeline.plan, costs)
    # bytes of the largest message between stages; a rank alone sends none
    sizes = [
        each.sends["pp"] / max(1, sent)
        for each, sent in zip(footprints, alone.messages, strict=True)
    ]
    message = next_stage.seconds(max(sizes))
    with_messages = schedules.simulate(pipeline.plan, replace(costs, send=message))
    busy = [sum(end - begin for _, begin, end in rank) for rank in alone.spans]
    rank = max(range(len(busy)), key=busy.__getitem__)
    parts, passes = _of_rank(blueprints[rank], [parts for parts, _ in layers])
    parts = parts.hiding(parts.total - busy[rank])
    link = _data_link(device, blueprints[rank])
    data, exposed = _data(blueprints[rank], footprints[rank], link, costs, passes)
    between = next_stage.seconds(footprints[rank].sends["pp"], alone.messages[rank])
    return StepTime(
        **vars(parts), optimizer=_optimizer_bytes(blueprints[rank]) / device.bandwidth,
        pipeline=max(0.0, with_messages.makespan - alone.makespan), data=exposed,
        bubble=max(0.0, alone.makespan - busy[rank]), communication=parts.sent + data + between,
        flops=flops, device=device.spec.name, peak=device.peak * 1e12,
    )  # fmt: skip


def _data_link(device: Device, blueprint: Blueprint) -> LinkRate:
    """Returns the rate of gathers and reductions: the mean over parameters, weighted by bytes.

    Experts are sharded over fewer ranks than other parameters, which may be on other machines.
    """
    groups = [group for group in blueprint.layout.groups if group.shard.size > 1]
    links = [(device.link(g.shard.ranks), g.numel * (1 - 1 / g.shard.size)) for g in groups]
    sent = sum(numel for _, numel in links)
    if not sent:
        return device.link((0,))
    rate = sent / sum(numel / link.gb_per_s for link, numel in links)
    return LinkRate(rate, max(link.latency for link, _ in links))


def _layer(device: Device, cost: LayerCost, ring: int, reads: bool) -> tuple[Parts, LayerTimes]:
    """Returns the parts of a layer's time for a micro-batch, and the times of its actions.

    Args:
        device: the GPU.
        cost: cost of the layer.
        ring: number of ranks of a ring of context parallelism. A hop computes half of the pairs
            (`layers.context`), and the trace has all of them.
        reads: whether the host reads the numbers of rows for experts (not with `--experts.room`).
    """
    passes = [[_half(one) for one in some] if ring > 1 else list(some) for some in cost.operations]
    passes = [[replace(one, read=one.read and reads) for one in some] for some in passes]
    (forward, lead), (backward, _) = (_parts(device, operations) for operations in passes)
    if lead < inf:  # the host also reads in the layer before
        forward, _ = _parts(device, passes[0], lead)
    weights = sum(
        operation_seconds(device, one)
        for one in cost.operations[1]
        if one.kind == "product" and one.backward
    )
    both = forward.plus(backward)
    launched = sum(one.launches for some in cost.operations for one in some)
    # The host is far ahead of the device, so only its time for the whole layer counts.
    waits = max(0.0, device.gap_seconds(launched, host=True) - both.total)
    slower = 1 + waits / both.total if both.total else 1.0
    times = LayerTimes(
        forward.total * slower, (backward.total - weights) * slower, weights * slower
    )
    return both.plus(Parts(launches=waits)), times


def _pair_seconds(layers: Sequence[Parts]) -> float:
    """Returns the time of a forward and a backward of a stage that run at the same time.

    Each computes while the other one waits for messages, which slow the computation.
    """
    total, exposed = sum(parts.total for parts in layers), sum(parts.exposed for parts in layers)
    return total - (1 - INTERFERENCE) * min(exposed, total - exposed)


def _half(operation: Operation) -> Operation:
    if operation.kind == "attention":
        return replace(operation, flops=operation.flops // 2)
    return operation


def operation_seconds(device: Device, operation: Operation) -> float:
    """Returns the time of an operation that is not a message."""
    if operation.kind == "product":
        return device.product_seconds(operation.shape, operation.wide, operation.groups)
    if operation.kind == "memory":
        return operation.nbytes / device.bandwidth
    length, head = operation.shape
    return device.attention_seconds(
        operation.flops, operation.nbytes, length, head, operation.backward
    )


def _parts(
    device: Device, operations: Sequence[Operation], lead: float = inf
) -> tuple[Parts, float]:
    """Returns the time of a layer's forward or backward, and the lead of the host at its end.

    Messages over an axis run one after the other, each from its start or from the end of the
    previous one. An operation after a wait begins when the message has ended. The rest of a
    message's time overlaps with operations, and slows them.

    After the host has read a result, the device waits for the host to launch the next kernels,
    until the host is ahead again.

    Args:
        device: the GPU.
        operations: the operations, in order.
        lead: seconds by which the host is ahead of the device at the beginning.
    """
    found, sent = defaultdict[str, float](float), defaultdict[str, float](float)
    waited, ends = defaultdict[str, float](float), dict[int, float]()
    free = defaultdict[str, float](float)  # when the last message over an axis has ended
    now, host = 0.0, -lead
    for operation in operations:
        axis = operation.axis
        if operation.kind == "message":
            taken = device.link(operation.ranks, pattern=operation.pattern).seconds(
                operation.nbytes
            )
            sent[axis] += taken
            free[axis] = ends[operation.number] = max(now, free[axis]) + taken
        elif operation.kind == "wait":
            waits = max(0.0, ends[operation.number] - now)
            now, waited[axis] = now + waits, waited[axis] + waits
            host = now + READ_S if operation.read else host
        else:
            taken = operation_seconds(device, operation)
            gap = device.gap_seconds(operation.launches)
            host += device.gap_seconds(operation.launches, host=True)
            idle = max(0.0, host - now)
            found[_NAMES[operation.kind]] += taken
            found["launches"] += gap + idle
            now += taken + gap + idle
    for axis, name in (("tp", "tensor"), ("cp", "context"), (EXPERTS, "experts")):
        found[name] = waited[axis] + INTERFERENCE * (sent[axis] - waited[axis])
    return Parts(**found, sent=sum(sent.values())), now - host


def _of_rank(blueprint: Blueprint, layers: Sequence[Parts]) -> tuple[Parts, int]:
    """Returns the parts of a rank's step, and its number of forwards."""
    rank, total = blueprint.topology.axis("pp").index, Parts()
    counts = Counter(
        part.chunk
        for action in blueprint.pipeline.plan.ranks[rank]
        if action.kind in COMPUTE
        for part in action.parts
        if part.kind is Kind.F
    )
    for chunk, numbers in enumerate(blueprint.chunks):
        for number in numbers:
            total = total.plus(layers[number], counts[chunk])
    return total, sum(counts.values())


def _data(
    blueprint: Blueprint, footprint: Footprint, link: LinkRate, costs: Costs, passes: int
) -> tuple[float, float]:
    """Returns the time of gathers and reductions, and the time by which they lengthen the step.

    They run in the forwards and backwards that the ZeRO stage permits. The first gather and the
    last reduction never overlap.
    """
    if footprint.sends["dp"] == 0:
        return 0.0, 0.0
    stage, buckets = blueprint.config.zero.stage, max(1, len(blueprint.layout.buckets))
    units = max(1, len(blueprint.held))
    rounds = max(1, passes // max(1, len(blueprint.chunks)))
    if blueprint.layer_major:
        rounds = 1
    gathers = units * (2 * rounds if stage == 3 else 1)
    reductions = buckets * (rounds if stage >= 2 else 1)
    gather = link.seconds(footprint.gathers, gathers)
    reduce = link.seconds(footprint.sends["dp"] - footprint.gathers, reductions)
    forward = _stage_seconds(costs, blueprint, "forward")
    backward = _stage_seconds(costs, blueprint, "backward_input", "backward_weight")
    # Seconds per step: gathers that run in backwards, and computation that can overlap with transfers.
    late = gather / 2 if stage == 3 else 0.0
    during_gathers = forward * (passes if stage == 3 else 1)
    during_reductions = backward * (passes if stage >= 2 or blueprint.layer_major else 1)
    first, last = gather / gathers, reduce / reductions
    exposed = max(first, gather - late - during_gathers)
    exposed += max(last, late + reduce - during_reductions)
    total = gather + reduce
    return total, exposed + INTERFERENCE * max(0.0, total - exposed)


def _stage_seconds(costs: Costs, blueprint: Blueprint, *names: str) -> float:
    """Returns the mean over this rank's stages of the sum of their costs of these names."""
    plan, rank = blueprint.pipeline.plan, blueprint.topology.axis("pp").index
    stages = [plan.stage_of(rank, chunk) for chunk in range(len(blueprint.chunks))]
    times: list[float] = [getattr(costs, name)[stage] for stage in stages for name in names]
    return sum(time / len(stages) for time in times)


def _optimizer_bytes(blueprint: Blueprint) -> int:
    """Returns the bytes that the gradient norm and the update read and write on this rank."""
    config = blueprint.config
    states = 2 * 4 * (1 + len(state_names(config.optim)))  # master weights and moments
    grads = 2 * dtype(config.precision.grad_dtype or "fp32").itemsize
    each = states + grads + dtype(config.precision.dtype).itemsize
    return each * sum(bucket.updates for bucket in blueprint.layout.buckets)
