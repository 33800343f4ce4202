"""Memory and traffic of one rank per step, computed from its blueprint and the costs of its layers.

    costs = trace(blueprint.model, blueprint.layers, config, topology, blueprint.recomputed)
    footprint(blueprint, costs)             # bytes by kind, and bytes sent over each axis

The blueprint is on the meta device (`Topology.on_meta`). The bytes of parameters, gradients and
optimizer states are the sizes of the storages that an engine would create. The memory of gradient
reductions is measured by running ZeRO's `Reducer` on the meta device.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from threed.checkpoint.copies import memory_bytes
from threed.checkpoint.sections import held
from threed.config import CheckpointConfig, Config, ConfigError
from threed.core.device import peak_bytes, reset_peak
from threed.distributed import collectives
from threed.distributed.codecs import EXACT
from threed.distributed.grid import AXES
from threed.distributed.sharding import spec_of
from threed.distributed.topology import EXPERTS, Topology, default_device
from threed.layers import MicroBatch
from threed.layers.contract import contract
from threed.models import Model, Wrapped, options_of
from threed.ops.precision import dtype
from threed.pipeline import activation_checkpointing
from threed.pipeline.activation_checkpointing import recomputed_layers
from threed.pipeline.trace import META, LayerCost, Pass, TraceError, Tracer, Watch, stated_flops
from threed.pipeline.transport import SlicedLinks, links
from threed.planner.blueprint import Blueprint
from threed.planner.gathering import Gathering, gathering
from threed.planner.order import with_order
from threed.planner.reductions import Reductions
from threed.schedules import Action, Kind
from threed.schedules.action import COMPUTE
from threed.zero import setup
from threed.zero.layout import Group, Layout
from threed.zero.optimistic import copied_bytes
from threed.zero.snapshot import copy_bytes
from threed.zero.state import State, forecast_states, holdings, new_state, storages

# Number of messages to other stages that are in flight at the same time.
MESSAGES = 2


@dataclass(frozen=True)
class Footprint:
    """Memory and traffic of one rank.

    Attributes:
        bytes: bytes on the device, by kind: `parameters`, `gradients`, `optimizer`, `activations`
            and `buffers`. If the device is a CPU, there are also `saving` (asynchronous
            checkpoints) and `copies` (in-memory checkpoints). `peak` is the sum of these kinds.
            `offloaded` is not included in `peak`: it is the number of bytes on a drive and, if the
            device is a GPU, in host memory. It is missing if this number is 0.
        sends: bytes sent per step, by axis: tp, pp, dp, cp and ep.
        gathers: part of the bytes sent over dp that gathers of parameters send.
    """

    bytes: dict[str, int]
    sends: dict[str, int]
    gathers: int = 0


def trace(
    model: Model,
    layers: list[nn.Module],
    config: Config,
    topology: Topology,
    recomputed: Sequence[int] = (),
) -> list[LayerCost]:
    """Returns the cost of every layer on this rank, traced on the meta device.

    A model whose inputs are not 'tokens' and 'labels' must define `example(micro_batch)`, which
    returns a batch with `micro_batch` rows.

    Args:
        model: the model that defines the layers.
        layers: all layers of the model.
        config: the resolved configuration.
        topology: the parallel axes, and this rank's position on them.
        recomputed: indices of the layers with activation recomputation.

    Raises:
        TraceError: if a layer cannot run on the meta device, or if the last layer returns no loss.
            The message names the layer.
    """
    wide, grads = dtype(config.precision.dtype), dtype(config.precision.grad_dtype or "fp32")
    activation_checkpointing.configure(config, layers)
    tracer = Tracer(example(model, config), wide, grads, topology.traffic, topology.journal)
    costs = tracer.trace(
        layers, activation_checkpointing.for_tracing(config, recomputed, model.slicing)
    )
    tracer.require_loss(layers)
    if config.recompute.mode == "full":
        for number in recomputed:
            costs[number] = _with_stored_input(costs[number], config, default_device().type)
    return costs


def flops(model: Model, layers: list[nn.Module], config: Config, topology: Topology) -> list[int]:
    """Returns every layer's forward FLOPs on this rank.

    They are computed by the layers' `flops` methods if all layers have this method, otherwise
    traced on the meta device.
    """
    rows, seq = config.train.micro_batch, config.model.seq
    stated = stated_flops(layers, rows * seq // model.slicing.context.size, seq)
    if stated is None:
        return [cost.flops for cost in trace(model, layers, config, topology)]
    return stated


def _with_stored_input(cost: LayerCost, config: Config, device: str) -> LayerCost:
    """Returns the cost of a recomputed layer, adapted to the place where its input is saved.

    This place is an arena, host memory, a drive, or the input tensor itself.
    """
    r = config.recompute
    # If inputs are sliced, the layer does not keep its full input, and `kept` counts the slice.
    copied = cost.input if cost.keeps_input else cost.kept
    if r.offload == "nvme" or (r.offload == "cpu" and device != "cpu"):
        passing = cost.backward + activation_checkpointing.BUFFERS * copied
        return replace(cost, kept=0, keeps_input=False, elsewhere=copied, backward=passing)
    return replace(cost, kept=copied, keeps_input=False) if r.arena else cost


def example(model: Model, config: Config, device: torch.device = META) -> MicroBatch:
    """Returns a micro-batch with valid but arbitrary values, by default on the meta device."""
    rows, precision = config.train.micro_batch, config.precision
    seq = config.model.seq // model.slicing.context.size  # positions of this rank
    length = config.model.seq
    all_ids = torch.arange(rows * length, device=device).remainder(config.model.vocab or 1)
    all_ids = all_ids.view(rows, length)
    ids = all_ids[:, :seq].contiguous()
    batch = {"tokens": ids, "labels": ids.clone(), "samples": torch.arange(rows, device=device)}
    if (own := options_of(model).example) is not None:
        casts = precision.cast_inputs
        batch = {"samples": batch["samples"]} | {
            name: _to_device(
                device,
                value,
                dtype(precision.dtype) if casts and value.is_floating_point() else value.dtype,
            )
            for name, value in own(rows).items()
        }
    tokens, labels, samples = (batch.pop(name, None) for name in ("tokens", "labels", "samples"))
    weight = torch.full((), 1.0 / (rows * seq), dtype=torch.float64, device=device)
    chunks = config.recompute.loss_chunks
    full = (all_ids, all_ids.clone()) if seq < length else None
    return MicroBatch(
        tokens, labels, samples, weight, inputs=batch or None, loss_chunks=chunks, full=full
    )


def _to_device(device: torch.device, value: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns `value` on `device` with dtype `dtype`; if it is a meta tensor, returns zeros."""
    if value.is_meta:
        return torch.zeros_like(value, dtype=dtype, device=device)
    return value.to(device, dtype)


class Fixed:
    """The part of a rank's footprint that does not depend on activations.

    Args:
        blueprint: the rank's blueprint, on the meta device.

    Attributes:
        bytes: bytes of parameters, gradients, optimizer states and copies, as in `Footprint`.
        sends: bytes that gathers and reductions send per step, by axis.
        gathers: part of the bytes sent over dp that gathers of parameters send.
        gathered: the gathers of each chunk.
        reductions: memory of gradient reductions.
    """

    def __init__(self, blueprint: Blueprint) -> None:
        layout, traffic = blueprint.layout, blueprint.topology.traffic
        before = Counter(traffic)
        states = [new_state(bucket, layout.policy) for bucket in layout.buckets]
        self.gathered = _gather(blueprint)
        self.gathers = traffic["dp"] - before["dp"]
        self.reductions = Reductions(blueprint, states)
        self.sends = {axis: traffic[axis] - before[axis] for axis in (*AXES, EXPERTS)}
        self.bytes = _state_bytes(blueprint, states)


def _state_bytes(blueprint: Blueprint, states: Sequence[State]) -> dict[str, int]:
    """Returns the bytes of parameters, gradients, optimizer states and copies of them, by kind."""
    config, layout = blueprint.config, blueprint.layout
    gpu = default_device().type == "cuda"
    sizes = holdings(layout, states, gpu)
    if blueprint.optimistic:
        sizes["optimizer"] += copied_bytes(states)
    if config.zero.delayed_update:
        sizes["optimizer"] += sum(
            bucket.share * layout.policy.grad_dtype.itemsize for bucket in layout.buckets
        )
    saving = save_bytes(config.checkpoint, layout, states, gpu)
    copies = memory_bytes(config, layout, states, gpu)
    if gpu:
        sizes["offloaded"] += saving + copies
        return sizes
    return sizes | {kind: size for kind, size in (("saving", saving), ("copies", copies)) if size}


def save_bytes(config: CheckpointConfig, layout: Layout, states: Sequence[State], gpu: bool) -> int:
    """Returns an upper bound of the host memory of asynchronous saves per rank, in bytes.

    Args:
        config: the group `checkpoint` of the configuration.
        layout: layout of this rank's parameters.
        states: optimizer states of this rank.
        gpu: whether the rank uses a GPU.
    """
    if not config.every or config.async_ is False:
        return 0
    sections = held(layout, forecast_states(layout, states))
    written = itertools.chain.from_iterable(h.extents(h.numbers[0]) for h in sections)
    return copy_bytes(written, layout.policy, gpu)


def footprint(
    blueprint: Blueprint, costs: Sequence[LayerCost], fixed: Fixed | None = None
) -> Footprint:
    """Returns the memory and traffic of this rank.

    Args:
        blueprint: the rank's blueprint, on the meta device.
        costs: costs of all layers of the model, see `trace`.
        fixed: the part that does not depend on `costs`, if it is known already.
    """
    fixed = fixed or Fixed(blueprint)
    sizes, sends, gathered = dict(fixed.bytes), dict(fixed.sends), fixed.gathered
    chunks = [[costs[number] for number in chunk] for chunk in blueprint.chunks]
    if blueprint.layer_major:
        kept, peak = _activations_by_layer(blueprint, chunks[0], fixed.reductions, gathered[0])
    else:
        kept, peak = _activations(blueprint, chunks, fixed.reductions, gathered)
    constant = _tile_bytes(blueprint.layout) + _constant_bytes(blueprint, chunks)
    elsewhere = sum(cost.elsewhere for chunk in chunks for cost in chunk)
    offloaded = sizes.pop("offloaded") + blueprint.live * elsewhere
    copies = {kind: sizes.pop(kind) for kind in ("saving", "copies") if kind in sizes}
    sizes |= {"activations": kept, "buffers": peak - kept + constant} | copies
    sizes["peak"] = sum(sizes.values())
    _count_pass_traffic(blueprint, chunks, sends)
    if offloaded:
        sizes["offloaded"] = offloaded
    return Footprint(sizes, sends, fixed.gathers)


def decide_order(
    config: Config, model: Model, layers: list[nn.Module], topology: Topology
) -> Config:
    """Returns the configuration with `zero.order` decided, the same on all ranks. Collective.

    With `zero.order` "auto", a model that cannot be traced gets the order "micro".

    Raises:
        ConfigError: if the order is `layer` and the model is a wrapped module.
    """
    if isinstance(model, Wrapped):
        if config.zero.order == "layer":
            fix = "it runs all its layers in one call: build it from threed.layers, or use --zero.order micro"
            raise ConfigError([f"--zero.order layer with a wrapped module: {fix}"])
        return with_order(config, lambda: [(0, 0)])

    def facts() -> list[tuple[int, int]]:
        try:
            costs = trace(model, layers, config, topology, recomputed_layers(config, layers))
            own = order_facts(config, layers, costs)
        except TraceError:
            own = (0, 0)
        return collectives.exchange(own, topology.axis("tp"))

    return with_order(config, facts)


def order_facts(
    config: Config, layers: Sequence[nn.Module], costs: Sequence[LayerCost]
) -> tuple[int, int]:
    """Returns the bytes by which the order of a step is chosen (`order.choose`).

    Returns:
        (kept, freed), two numbers of bytes on this tensor rank: the activations that one
        micro-batch keeps, and the parameters that ZeRO-3 frees between uses. Parameters with fewer
        than `zero.resident` elements are not freed. Of each larger parameter, the slices of other
        ranks are freed; if parameters are offloaded, this rank's slice is freed, too.
    """
    zero, data = config.zero, config.parallel.dp or 1
    ranks = data if zero.shard_size == "all" else int(zero.shard_size)
    params = {spec_of(param).name: param for layer in layers for param in layer.parameters()}
    large = [
        param
        for param in params.values()
        if param.numel() * spec_of(param).tile[1] >= max(zero.resident, 1)
    ]
    nbytes = sum(param.numel() for param in large) * dtype(config.precision.dtype).itemsize
    # Layer-major order: all layers except the last keep the activations of all micro-batches. The
    # last layer runs the backward of a micro-batch directly after its forward. Until then, the
    # micro-batch keeps only the input of this layer.
    kept = Pass(costs[:-1] or costs).kept + costs[-1].input
    return kept, nbytes if zero.offload_params != "none" else nbytes * (ranks - 1) // ranks


@contextmanager
def measuring(
    layout: Layout, states: Sequence[State], device: torch.device
) -> Iterator[Callable[[], int]]:
    """Context manager that measures the peak of tensor memory in a `with` statement.

    On a GPU, this is the peak of torch's allocator. On a CPU, it is the peak of all tensors that
    operations use, together with the storages of `layout` and `states`.

    Yields:
        A function that returns the peak until now, in bytes.
    """
    if device.type == "cuda":
        reset_peak(device)
        yield lambda: peak_bytes(device)
        return
    with Watch(real=True) as watch:
        watch.look_at(storages(layout, states))
        yield lambda: watch.most


def _constant_bytes(blueprint: Blueprint, chunks: Sequence[Sequence[LayerCost]]) -> int:
    """Returns the bytes that are allocated throughout a step.

    They belong to the batch, cached tables, host buffers for drives, messages between stages, and
    module buffers. On a CPU, every rank has the module buffers of all layers of the model.
    """
    train, seq, edges = blueprint.config.train, blueprint.config.model.seq, [0]
    for chunk, numbers in zip(chunks, blueprint.chunks, strict=True):
        edges += [chunk[0].input, chunk[-1].output if numbers.stop < len(blueprint.layers) else 0]
    cp = blueprint.topology.cp
    own = 2 * seq // cp * (cp > 1)  # a copy of this rank's tokens and labels
    batch = train.global_batch // blueprint.topology.dp * (2 * seq + 1 + own) * 8
    drives = sum(drive.nbytes * drive.count for drive in blueprint.layout.policy.drives)
    layers = blueprint.held if default_device().type == "cuda" else range(len(blueprint.layers))
    buffer_bytes = {
        id(buffer): buffer.nbytes for n in layers for buffer in blueprint.layers[n].buffers()
    }
    tables = max(cost.cached for chunk in chunks for cost in chunk) + _decoding_bytes(blueprint)
    return batch + tables + drives + MESSAGES * max(edges) + sum(buffer_bytes.values())


def _activations(
    blueprint: Blueprint,
    chunks: Sequence[Sequence[LayerCost]],
    reductions: Reductions,
    gathered: Sequence[Gathering[Group]],
) -> tuple[int, int]:
    """Returns the peak of kept activations, and the peak including temporary memory, in bytes."""
    passes, width = [Pass(chunk) for chunk in chunks], blueprint.layout.policy.param_dtype.itemsize
    plan, rank = blueprint.pipeline.plan, blueprint.topology.axis("pp").index
    actions = [
        part for action in plan.ranks[rank] if action.kind in COMPUTE for part in action.parts
    ]
    last = {
        (a.chunk, a.microbatch >= 0): n for n, a in enumerate(actions) if a.kind in (Kind.B, Kind.W)
    }
    ending = [
        number
        for (_, own), number in last.items()
        if not (own and plan.is_left(rank, plan.microbatches - 1))
    ]
    current = kept = peak = passes[0].kept * (plan.begun[rank] if plan.begun else 0)
    standing = reductions.standing
    units = list(itertools.accumulate((len(chunk) for chunk in chunks), initial=0))
    for number, action in enumerate(actions):
        chunk_pass, full = passes[action.chunk], gathered[action.chunk]
        if action.kind is Kind.F:
            peak = max(peak, current + chunk_pass.forward + standing + full.forward * width)
            current = current + chunk_pass.kept
            kept = max(kept, current)
            continue
        # If the backward is split into the actions I (gradient of the input) and W (gradients of
        # the weights), the activations of a micro-batch are kept until W.
        if action.kind is Kind.W:
            peak, current = max(peak, current + standing), current - chunk_pass.kept
            standing = max(standing, reductions.kept_between if reductions.always else 0)
            continue
        reduces = reductions.always or number in ending
        first = units[action.chunk]
        for unit, (nbytes, numel) in enumerate(
            zip(chunk_pass.backward, full.backward, strict=True), first
        ):
            extra = numel * width + (reductions.during[unit] if reduces else 0)
            peak = max(peak, current - chunk_pass.kept + nbytes + extra)
        current -= 0 if action.kind is Kind.I else chunk_pass.kept
        standing = max(standing, reductions.kept_between if reductions.always else 0)
    # In an asynchronous plan (2BW), a rank first runs the remaining backwards of the previous step.
    # A rank with fewer of them than another rank completes that step earlier. Its reducer keeps
    # buffers while it waits for the other rank.
    pending = plan.asynchronous and plan.begun[rank] < plan.before
    return kept, max(peak + reductions.waiting * pending, reductions.end)


def _activations_by_layer(
    blueprint: Blueprint,
    layers: Sequence[LayerCost],
    reductions: Reductions,
    gathered: Gathering[Group],
) -> tuple[int, int]:
    """Returns the results of `_activations` for layer-major order.

    While a layer runs one micro-batch, each other micro-batch either waits for the layer or has
    already run through it. The peak is at the layer's first or last micro-batch. The last layer of
    the model runs forward and backward of one micro-batch at a time, and keeps the gradient of its
    input.
    """
    rest = blueprint.pipeline.plan.microbatches - 1
    width = blueprint.layout.policy.param_dtype.itemsize
    # `kept`: bytes that the layers before `unit` keep for the backward, over all micro-batches.
    kept = peak = all_kept = 0
    previous_keeps = False  # whether the previous layer keeps its output
    for unit, cost in enumerate(layers):
        stays = cost.input * (cost.keeps_input or previous_keeps)
        passed = cost.kept + stays + cost.output
        # A micro-batch that waits for its backward through this layer keeps the gradient of the
        # layer's output. If the layer keeps the output for the backward, the output exists, too.
        waiting = passed + cost.output * cost.keeps_output
        if unit == len(layers) - 1:
            all_kept = kept + rest * cost.input + cost.kept + stays
            passed = waiting = cost.input * (1 + previous_keeps)
        forward = kept + rest * max(passed, cost.input) + cost.forward
        backward = (
            kept + rest * max(waiting, cost.input) + cost.backward + stays * (not cost.keeps_input)
        )
        peak = max(peak, forward + reductions.standing + gathered.forward * width)
        peak = max(peak, backward + reductions.during[unit] + gathered.backward[unit] * width)
        kept += (rest + 1) * (cost.kept + stays)
        previous_keeps = cost.keeps_output
    return all_kept, max(peak, reductions.end)


def _gather(blueprint: Blueprint) -> list[Gathering[Group]]:
    """Adds the bytes of a step's gathers to `topology.traffic`; returns the gathers per chunk."""
    layout, chunks, first = blueprint.layout, list[Gathering[Group]](), 0
    actions = blueprint.pipeline.plan.ranks[blueprint.topology.axis("pp").index]
    if blueprint.layer_major:  # one gather per pass, whatever the number of micro-batches
        actions = (Action(Kind.F, 0), Action(Kind.B, 0))
    times = Counter(
        {group: 1 for group in layout.groups if group.key.trainable and not group.sliced}
    )
    for number, chunk in enumerate(blueprint.chunks):
        units = [
            _gathered_by(layout, blueprint.units_of(layer))
            for layer in range(first, first + len(chunk))
        ]
        reads = [
            contract(blueprint.layers[n]).backward_reads_weights or n in blueprint.fully_recomputed
            for n in chunk
        ]
        found = gathering(
            units, reads, actions, prefetch=blueprint.config.zero.prefetch, chunk=number
        )
        times.update(found.times)
        chunks.append(found)
        first += len(chunk)
    codec = setup.weight_codec(blueprint.config)
    for group, count in times.items():
        for bucket in group.buckets:
            part = torch.empty(bucket.share, dtype=layout.policy.param_dtype, device=META)
            before = blueprint.topology.traffic["dp"]
            collectives.start_all_gather(part, group.shard, codec=codec if group.sliced else EXACT)
            blueprint.topology.traffic["dp"] += (blueprint.topology.traffic["dp"] - before) * (
                count - 1
            )
    # Pipeline ranks with replicas of the same slice each update a part of it, and then gather the
    # updated parts.
    for bucket in layout.buckets:
        part = torch.empty(bucket.updates, dtype=layout.policy.param_dtype, device=META)
        collectives.start_all_gather(part, bucket.group.holders)
    return chunks


def _decoding_bytes(blueprint: Blueprint) -> int:
    """Returns the temporary bytes for decoding the largest bucket of compressed weights."""
    sliced = [group for group in blueprint.layout.groups if group.sliced]
    codec = setup.weight_codec(blueprint.config)
    if codec == EXACT or not sliced:
        return 0
    largest = max(bucket.last - bucket.first for group in sliced for bucket in group.buckets)
    message = codec.encode(torch.empty(1, largest, dtype=torch.float32, device=META))
    return message.nbytes + 2 * largest * blueprint.layout.policy.param_dtype.itemsize


def _tile_bytes(layout: Layout) -> int:
    """Returns the peak bytes of gathered tiles: one tile is in use while the next is gathered."""
    tiles = sorted((group.numel for group in layout.groups if group.key.tile), reverse=True)[:2]
    return sum(tiles) * layout.policy.param_dtype.itemsize


def _gathered_by(layout: Layout, units: range) -> dict[Group, int]:
    """Returns the parameter groups that units gather before they run, with numbers of elements."""
    groups = [
        group
        for group in layout.groups
        if group.key.tile is None and any(unit in units for unit in group.key.units or ())
    ]
    return {group: group.numel for group in groups}


def _count_pass_traffic(
    blueprint: Blueprint, chunks: Sequence[Sequence[LayerCost]], sends: dict[str, int]
) -> None:
    """Adds to `sends` the bytes that this rank sends in the forwards and backwards of a step.

    The collectives in the rank's layers, and the messages to other stages, send these bytes.
    """
    plan, topology = blueprint.pipeline.plan, blueprint.topology
    microbatches = plan.microbatches // plan.ways
    rank = topology.axis("pp").index
    tensor = topology.axis("tp")
    sliced = isinstance(links(blueprint.model, topology), SlicedLinks)
    for number, chunk in enumerate(chunks):
        for cost in chunk:
            for axis, nbytes in cost.sent.items():
                sends[axis] += microbatches * nbytes
        for kind, sent, back in (
            (Kind.F, chunk[-1].output, chunk[0].input),
            (Kind.B, chunk[0].input, chunk[-1].output),
        ):
            passes = [
                find(rank, Action(kind, 0, number)) for find in (plan.consumer, plan.producer)
            ]
            to, source = (place is not None and place[0] != rank for place in passes)
            sends["pp"] += microbatches * to * sent // (tensor.size if sliced else 1)
            sends["tp"] += (
                microbatches * source * back // tensor.size * (tensor.size - 1) if sliced else 0
            )
