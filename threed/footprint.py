"""What a rank holds and sends in a step, read off its blueprint and the costs of its layers.

    costs = trace(blueprint.model, blueprint.layers, config, topology, blueprint.recomputed)
    footprint(blueprint, costs)             bytes by purpose, and bytes sent over each axis

Blueprints are those of `Topology.drawn`. Parameters, gradients and optimizer states are the storages that an engine
makes; reductions are those of ZeRO's own reducer, run on gradients that are shapes only.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from threed import collectives
from threed.blueprint import Blueprint
from threed.checkpoint.copies import memory_bytes
from threed.checkpoint.saving import save_bytes
from threed.checks import LAYER_MAJOR
from threed.collectives import EXACT
from threed.config import Config, ConfigError
from threed.device import peak_bytes, reset_peak
from threed.layers import MicroBatch
from threed.layers.contract import contract
from threed.models import Model, Wrapped, options_of
from threed.pipeline import activation_checkpointing
from threed.pipeline.activation_checkpointing import recomputed_layers
from threed.pipeline.trace import META, LayerCost, Pass, TraceError, Tracer, Watch, stated_flops
from threed.pipeline.transport import SlicedLinks, links
from threed.planner.gathering import Gathering, gathering
from threed.planner.grid import AXES
from threed.planner.order import choose
from threed.precision import dtype
from threed.schedules import Action, Kind
from threed.schedules.action import COMPUTE
from threed.sharding import spec_of
from threed.topology import Topology, default_device
from threed.zero import setup
from threed.zero.layout import Group, Layout
from threed.zero.optimistic import copied_bytes
from threed.zero.reducer import Reducer
from threed.zero.state import State, holdings, new_state, storages

MESSAGES = 2  # to other stages, on their way at once
STEADY = 3  # rounds after which one more finds the buffers that it needs


@dataclass(frozen=True)
class Footprint:
    """bytes: parameters, gradients, optimizer, activations, buffers, `saving` where checkpoints are written beside
    training, `copies` in the machine's memory, their sum as `peak`; what is kept elsewhere than on the device is
    `offloaded`, if there is any. sends: bytes over tp, pp, dp and cp in a step."""

    bytes: dict[str, int]
    sends: dict[str, int]


def trace(
    model: Model,
    layers: list[nn.Module],
    config: Config,
    topology: Topology,
    recomputed: Sequence[int] = (),
) -> list[LayerCost]:
    """The cost of every layer to this rank, `recomputed` those that compute something again.

    A model whose layers need more than 'tokens' and 'labels' says by `example(micro_batch)` what else: a batch of so
    many rows. Raises TraceError naming a layer that cannot be run on the meta device.
    """
    wide, grads = dtype(config.precision.dtype), dtype(config.precision.grad_dtype or "fp32")
    tracer = Tracer(example(model, config), wide, grads, topology.traffic)
    costs = tracer.trace(
        layers, activation_checkpointing.on_paper(config, recomputed, model.slicing)
    )
    if config.recompute.mode == "full":
        for number in recomputed:
            costs[number] = _moved(costs[number], config, default_device().type)
    return costs


def flops(model: Model, layers: list[nn.Module], config: Config, topology: Topology) -> list[int]:
    """The forward FLOPs of every layer on this rank: as layers state them, or else by tracing them."""
    stated = stated_flops(layers, config.train.micro_batch * config.model.seq, config.model.seq)
    return (
        [cost.flops for cost in trace(model, layers, config, topology)]
        if stated is None
        else stated
    )


def _moved(cost: LayerCost, config: Config, device: str) -> LayerCost:
    """The cost of a layer whose input is kept as a copy: in an arena, or elsewhere than on the device."""
    r = config.recompute
    # of slices that is all that the layer keeps
    copied = cost.input if cost.keeps_input else cost.kept
    if r.offload == "nvme" or (r.offload == "cpu" and device != "cpu"):
        passing = cost.backward + activation_checkpointing.BUFFERS * copied
        return replace(cost, kept=0, keeps_input=False, elsewhere=copied, backward=passing)
    return replace(cost, kept=copied, keeps_input=False) if r.arena else cost


def example(model: Model, config: Config, device: torch.device = META) -> MicroBatch:
    """A micro-batch on the meta device, or one of any values on another."""
    rows, seq, precision = config.train.micro_batch, config.model.seq, config.precision
    ids = torch.arange(rows * seq, device=device).remainder(config.model.vocab or 1).view(rows, seq)
    batch = {"tokens": ids, "labels": ids.clone(), "samples": torch.arange(rows, device=device)}
    if (own := options_of(model).example) is not None:
        casts = precision.cast_inputs
        batch = {"samples": batch["samples"]} | {
            name: _on(
                device,
                value,
                dtype(precision.dtype) if casts and value.is_floating_point() else value.dtype,
            )
            for name, value in own(rows).items()
        }
    tokens, labels, samples = (batch.pop(name, None) for name in ("tokens", "labels", "samples"))
    weight = torch.full((), 1.0 / (rows * seq), dtype=torch.float64, device=device)
    chunks = config.recompute.loss_chunks
    return MicroBatch(tokens, labels, samples, weight, inputs=batch or None, loss_chunks=chunks)


def _on(device: torch.device, value: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor of an example on a device; zeros where it has no values."""
    return (
        torch.zeros_like(value, dtype=dtype, device=device)
        if value.is_meta
        else value.to(device, dtype)
    )


def footprint(blueprint: Blueprint, costs: Sequence[LayerCost]) -> Footprint:
    """What this rank holds and sends. costs: of all layers of the model."""
    config, layout, traffic = blueprint.config, blueprint.layout, blueprint.topology.traffic
    delayed, before = config.zero.delayed_update, Counter(traffic)
    states = [new_state(bucket, layout.policy) for bucket in layout.buckets]
    held = holdings(layout, states, default_device().type == "cuda")
    if blueprint.optimistic:
        held["optimizer"] += copied_bytes(states)
    if delayed:
        held["optimizer"] += sum(
            bucket.share * layout.policy.grad_dtype.itemsize for bucket in layout.buckets
        )
    gathered = _gather(blueprint)
    chunks = [[costs[number] for number in chunk] for chunk in blueprint.chunks]
    reductions = _Reductions(blueprint, states)
    if blueprint.layer_major:
        kept, most = _activations_by_layer(blueprint, chunks[0], reductions, gathered[0])
    else:
        kept, most = _activations(blueprint, chunks, reductions, gathered)
    held["activations"] = kept
    held["buffers"] = most - kept + _tiles(layout) + _standing(blueprint, chunks)
    sends = {axis: traffic[axis] - before[axis] for axis in AXES}
    _passes_send(blueprint, chunks, sends)
    elsewhere = held.pop("offloaded") + _kept_elsewhere(blueprint, chunks)
    gpu = default_device().type == "cuda"
    saving = save_bytes(config.checkpoint, layout, states, gpu)
    held |= {"saving": saving} if saving and not gpu else {}
    copies = memory_bytes(config, layout, states, gpu)
    held |= {"copies": copies} if copies and not gpu else {}
    elsewhere += saving + copies if gpu else 0
    held["peak"] = sum(held.values())
    return Footprint({**held, **({"offloaded": elsewhere} if elsewhere else {})}, sends)


def decide_order(
    config: Config, model: Model, layers: list[nn.Module], topology: Topology
) -> Config:
    """The configuration with `zero.order` decided, alike on all ranks, where it is auto. Collective.

    Raises ConfigError for `layer` with a wrapped module. A model that cannot be traced runs by micro-batch.
    """
    if isinstance(model, Wrapped):
        if config.zero.order == "layer":
            fix = "it runs all its layers in one call: build it from threed.layers, or use --zero.order micro"
            raise ConfigError([f"--zero.order layer with a wrapped module: {fix}"])
        return with_order(config, lambda: [(0, 0)])

    def facts() -> list[tuple[int, int]]:
        try:
            costs = trace(model, layers, config, topology, recomputed_layers(config, layers))
            mine = order_facts(config, layers, costs)
        except TraceError:
            mine = (0, 0)
        return collectives.exchange(mine, topology.axis("tp"))

    return with_order(config, facts)


def with_order(config: Config, facts: Callable[[], Sequence[tuple[int, int]]]) -> Config:
    """The configuration with `zero.order` decided where it is auto (`planner.order`).

    facts: gives the `order_facts` of every tensor rank.
    """
    p, zero, train = config.parallel, config.zero, config.train
    if zero.order != "auto":
        return config
    microbatches, order = train.global_batch // (train.micro_batch * (p.dp or 1)), "micro"
    if zero.stage == 3 and microbatches > 1 and p.pp == 1 and p.schedule in LAYER_MAJOR:
        kept, freed = zip(*facts(), strict=True)
        order = choose(microbatches, max(kept), min(freed))
    return config.model_copy(update={"zero": zero.model_copy(update={"order": order})})


def order_facts(
    config: Config, layers: Sequence[nn.Module], costs: Sequence[LayerCost]
) -> tuple[int, int]:
    """Bytes that one micro-batch keeps on this tensor rank, and those of parameters that ZeRO-3 does not keep whole."""
    zero, data = config.zero, config.parallel.dp or 1
    ranks = data if zero.shard_size == "all" else int(zero.shard_size)
    params = {spec_of(param).name: param for layer in layers for param in layer.parameters()}
    large = [
        param
        for param in params.values()
        if param.numel() * spec_of(param).tile[1] >= max(zero.resident, 1)
    ]
    nbytes = sum(param.numel() for param in large) * dtype(config.precision.dtype).itemsize
    # the last layer runs a micro-batch at a time
    kept = Pass(costs[:-1] or costs).kept + costs[-1].input
    return kept, nbytes if zero.offload_params != "none" else nbytes * (ranks - 1) // ranks


@contextmanager
def measuring(
    layout: Layout, states: Sequence[State], device: torch.device
) -> Iterator[Callable[[], int]]:
    """While this is open, finds the most bytes that tensors have in memory at once, those of the layout and the states
    among them: by a GPU's allocator, or by looking at every operation on a CPU."""
    if device.type == "cuda":
        reset_peak(device)
        yield lambda: peak_bytes(device)
        return
    with Watch(real=True) as watch:
        watch.look_at(storages(layout, states))
        yield lambda: watch.most


def _standing(blueprint: Blueprint, chunks: Sequence[Sequence[LayerCost]]) -> int:
    """What is there all the time: the batch, cached tables, buffers of drives, messages between stages, and buffers of
    modules: in the host's memory of every rank those of all layers."""
    train, seq, edges = blueprint.config.train, blueprint.config.model.seq, [0]
    for chunk, held in zip(chunks, blueprint.chunks, strict=True):
        edges += [chunk[0].input, chunk[-1].output if held.stop < len(blueprint.layers) else 0]
    batch = train.global_batch // blueprint.topology.dp * (2 * seq + 1) * 8
    drives = sum(drive.nbytes * drive.count for drive in blueprint.layout.policy.drives)
    layers = blueprint.held if default_device().type == "cuda" else range(len(blueprint.layers))
    own = {id(buffer): buffer.nbytes for n in layers for buffer in blueprint.layers[n].buffers()}
    tables = max(cost.cached for chunk in chunks for cost in chunk) + _decoded(blueprint)
    return batch + tables + drives + MESSAGES * max(edges) + sum(own.values())


def _activations(
    blueprint: Blueprint,
    chunks: Sequence[Sequence[LayerCost]],
    reductions: _Reductions,
    gathered: Sequence[Gathering[Group]],
) -> tuple[int, int]:
    """The most bytes that micro-batches keep at once, and the most with what a pass needs beside them."""
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
    now = kept = most = passes[0].kept * (plan.begun[rank] if plan.begun else 0)
    units = list(itertools.accumulate((len(chunk) for chunk in chunks), initial=0))
    for number, action in enumerate(actions):
        one, whole = passes[action.chunk], gathered[action.chunk]
        if action.kind is Kind.F:
            most = max(most, now + one.forward + reductions.standing + whole.forward * width)
            now = now + one.kept
            kept = max(kept, now)
            continue
        # a product into the gradients' memory; what an I has used is there until then
        if action.kind is Kind.W:
            most, now = max(most, now + reductions.standing), now - one.kept
            reductions.standing = max(
                reductions.standing, reductions.left if reductions.always else 0
            )
            continue
        leaving = reductions.always or number in ending
        first = units[action.chunk]
        for unit, (nbytes, numel) in enumerate(
            zip(one.backward, whole.backward, strict=True), first
        ):
            beside = numel * width + (reductions.during[unit] if leaving else 0)
            most = max(most, now - one.kept + nbytes + beside)
        now -= 0 if action.kind is Kind.I else one.kept
        reductions.standing = max(reductions.standing, reductions.left if reductions.always else 0)
    waits = plan.asynchronous and plan.begun[rank] < plan.before  # for the sums of another stage
    return kept, max(most + reductions.waiting * waits, reductions.end)


def _activations_by_layer(
    blueprint: Blueprint,
    layers: Sequence[LayerCost],
    reductions: _Reductions,
    gathered: Gathering[Group],
) -> tuple[int, int]:
    """The same where a layer runs all micro-batches before the next. Beside the one that runs, others wait before the
    layer or have passed it: most bytes are alive at the first micro-batch or at the last. The last layer runs forward
    and backward of one, and leaves the gradient of its input."""
    others = blueprint.pipeline.plan.microbatches - 1
    width = blueprint.layout.policy.param_dtype.itemsize
    kept = most = all_kept = 0  # of all micro-batches, by the layers before
    kept_before = False  # whether the layer before keeps what it handed on
    for unit, cost in enumerate(layers):
        stays = cost.input * (cost.keeps_input or kept_before)
        passed = cost.kept + stays + cost.output
        # for their backward, with the gradient of the output
        waiting = passed + cost.output * cost.keeps_output
        if unit == len(layers) - 1:
            all_kept = kept + others * cost.input + cost.kept + stays
            passed = waiting = cost.input * (1 + kept_before)
        forward = kept + others * max(passed, cost.input) + cost.forward
        backward = (
            kept
            + others * max(waiting, cost.input)
            + cost.backward
            + stays * (not cost.keeps_input)
        )
        most = max(most, forward + reductions.standing + gathered.forward * width)
        most = max(most, backward + reductions.during[unit] + gathered.backward[unit] * width)
        kept += (others + 1) * (cost.kept + stays)
        kept_before = cost.keeps_output
    return all_kept, max(most, reductions.end)


def _kept_elsewhere(blueprint: Blueprint, chunks: Sequence[Sequence[LayerCost]]) -> int:
    """The most bytes of inputs that layers which are recomputed keep on a drive, or in the memory of the host."""
    return blueprint.live * sum(cost.elsewhere for chunk in chunks for cost in chunk)


def _gather(blueprint: Blueprint) -> list[Gathering[Group]]:
    """Counts what is gathered in a step as sent; what each chunk gathers."""
    layout, chunks, first = blueprint.layout, list[Gathering[Group]](), 0
    actions = blueprint.pipeline.plan.ranks[blueprint.topology.axis("pp").index]
    if blueprint.layer_major:  # all micro-batches are one pass
        actions = (Action(Kind.F, 0), Action(Kind.B, 0))
    times = Counter(
        {group: 1 for group in layout.groups if group.key.trainable and not group.sliced}
    )
    for number, chunk in enumerate(blueprint.chunks):
        units = [_gathered_by(layout, unit) for unit in range(first, first + len(chunk))]
        reads = [
            contract(blueprint.layers[n]).backward_reads_weights or n in blueprint.again
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
    # after an update the pipeline ranks that share a slice complete it
    for bucket in layout.buckets:
        part = torch.empty(bucket.updates, dtype=layout.policy.param_dtype, device=META)
        collectives.start_all_gather(part, bucket.group.holders)
    return chunks


def _decoded(blueprint: Blueprint) -> int:
    """Returns the bytes that decoding the largest encoded bucket takes besides its result."""
    sliced = [group for group in blueprint.layout.groups if group.sliced]
    codec = setup.weight_codec(blueprint.config)
    if codec == EXACT or not sliced:
        return 0
    largest = max(bucket.last - bucket.first for group in sliced for bucket in group.buckets)
    message = codec.encode(torch.empty(1, largest, dtype=torch.float32, device=META))
    return message.nbytes + 2 * largest * blueprint.layout.policy.param_dtype.itemsize


def _tiles(layout: Layout) -> int:
    """The most bytes of tiles that are whole at once: one in use, and one on its way."""
    tiles = sorted((group.numel for group in layout.groups if group.key.tile), reverse=True)[:2]
    return sum(tiles) * layout.policy.param_dtype.itemsize


def _gathered_by(layout: Layout, unit: int) -> dict[Group, int]:
    """What a unit gathers before it runs, and how many elements that is."""
    groups = [
        group
        for group in layout.groups
        if group.key.tile is None and unit in (group.key.units or ())
    ]
    return {group: group.numel for group in groups}


def _passes_send(
    blueprint: Blueprint, chunks: Sequence[Sequence[LayerCost]], sends: dict[str, int]
) -> None:
    """Adds what layers send, and what goes to other stages, for every micro-batch."""
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


class _Reductions:
    """ZeRO's reducer, run with gradients that are shapes only: bytes that it needs beside the layout's storages.

    during: while and after each unit's backward. end: at the end of a step. waiting: before that, for other stages.
    always: in every backward, not only in the last one; then `left` stay in between.
    """

    def __init__(self, blueprint: Blueprint, states: Sequence[State]) -> None:
        layout, config = blueprint.layout, blueprint.config
        reducer = Reducer(layout, setup.gradient_codecs(config), whole_step=blueprint.layer_major)
        self.always = reducer.rounds
        plan = blueprint.pipeline.plan
        self.passes = plan.microbatches // plan.ways  # of a chunk
        rounds = min(self.passes, STEADY) if reducer.rounds else 1
        traffic, before = blueprint.topology.traffic, Counter(blueprint.topology.traffic)
        staged = [drive.take() for drive in layout.policy.drives]  # counted with the drives
        with Watch([*storages(layout, states), *staged]) as watch:
            # buffers stay from step to step
            for _ in range(2 if layout.policy.slices_gradients and rounds < STEADY else 1):
                traffic.clear()
                traffic.update(before)
                self._step(blueprint, reducer, rounds, watch)
            self.standing = watch.bytes()  # from step to step

    def _step(self, blueprint: Blueprint, reducer: Reducer, rounds: int, watch: Watch) -> None:
        """Runs a step of so many rounds; the rounds that are not run are as the last one is."""
        traffic = blueprint.topology.traffic
        reducer.begin(rounds)
        self.during: dict[int, int] = {}
        for _ in range(rounds):
            before = Counter(traffic)
            last = sum(len(chunk) for chunk in blueprint.chunks)
            for chunk in reversed(range(len(blueprint.chunks))):
                first = last - len(blueprint.chunks[chunk])
                self._backward(reducer, blueprint.layout, range(first, last), watch)
                reducer.pass_ended(chunk)
                last = first
        self.left = watch.begin()
        for label in traffic if self.always else ():
            traffic[label] += (traffic[label] - before[label]) * (self.passes - rounds)
        asynchronous = blueprint.pipeline.plan.asynchronous
        finish = reducer.close() if asynchronous else reducer.finish
        self.waiting = watch.bytes()
        finish()
        self.end = watch.most

    def _backward(self, reducer: Reducer, layout: Layout, units: range, watch: Watch) -> None:
        """Every parameter of some units gets its gradients."""
        found = torch.empty((), dtype=layout.policy.grad_dtype, device=META)
        for unit in reversed(units):
            watch.begin()
            for slot in reversed(layout.slots):
                for _ in range(slot.units.count(unit) if slot.param.requires_grad else 0):
                    reducer.sink_of(slot).add(found.expand(slot.param.shape))
            if not self.always:
                reducer.unit_ended(unit)
            self.during[unit] = watch.most
