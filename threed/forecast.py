"""What a configured run will take, before any tensor moves: who stands where, bytes per rank, bubble, traffic.

forecast = Forecast.of(config, world_size)      # config: resolved
print(forecast.text())                          # what a run prints at its start, and --dry-run prints only
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from threed import schedules
from threed.config import Config
from threed.models.dimensions import decoder, layer_flops
from threed.pipeline.build import partition
from threed.pipeline.checkpoints import BUFFERS, with_recompute
from threed.planner import (
    LayerCost,
    Offload,
    block_cost,
    communication_bytes,
    drive_buffers,
    fully_recomputed,
    rank_bytes,
    regime,
    stage_parameters,
    transformer_costs,
    update_loans,
)
from threed.planner import train_flops_per_token as flops_per_token
from threed.precision import dtype
from threed.topology import AXES, coordinates, default_device, grid_sizes, place_label
from threed.zero.layout import PIECES, SMALLEST
from threed.zero.setup import rule

MIB = 2**20


@dataclass(frozen=True)
class RankForecast:
    """A rank's layers, and the bytes it will hold: parameters, gradients, optimizer, activations, buffers, peak.

    sends: bytes it sends in a step over tp, pp, dp and cp.
    """

    rank: int
    label: str
    layers: range
    bytes: dict[str, int]
    sends: dict[str, int]


@dataclass(frozen=True)
class Forecast:
    """The prediction: of the whole run, and of each rank."""

    config: Config
    sizes: dict[str, int]
    parameters: int
    microbatches: int
    bubble: float
    flops_per_token: float
    ranks: Sequence[RankForecast]

    @classmethod
    def of(cls, config: Config, world: int) -> Forecast:
        """The forecast for a resolved configuration in a world of `world` ranks; ValueError when it cannot be cut."""
        p, train = config.parallel, config.train
        sizes = grid_sizes(world, pp=p.pp, dp=p.dp, cp=p.cp, tp=p.tp)
        flops = layer_flops(config.model, train.micro_batch)
        again = recomputed_layers(config)
        stages = partition(p.partition, with_recompute(flops, again if full(config) else ()), p.pp)
        microbatches = train.global_batch // (train.micro_batch * sizes["dp"])
        plan = schedules.build(p.schedule, p.pp, microbatches)
        timeline = _timeline(flops, stages, plan, again if full(config) else ())
        whole = decoder(config.model, micro_batch=train.micro_batch)
        held = _held_and_sent(config, sizes, stages, plan, timeline)
        ranks = []
        for rank in range(world):
            place = coordinates(rank, sizes)
            stage, column = place["pp"], place["tp"]
            ranks.append(RankForecast(rank, place_label(place, sizes), stages[stage], *held[stage, column]))
        parameters = stage_parameters(transformer_costs(whole, config.model.layers))
        per_token = flops_per_token(whole, config.model.layers)
        return cls(config, sizes, parameters, microbatches, timeline.bubble, per_token, ranks)

    def text(self) -> str:
        """The forecast for people: one line a fact, one line a rank (the first 16)."""
        c, train = self.config, self.config.train
        grid = " × ".join(f"{axis} {self.sizes[axis]}" for axis in AXES if self.sizes[axis] > 1) or "one rank"
        widths, moments = _widths(c), _moments(c)
        sends = {axis: max(rank.sends[axis] for rank in self.ranks) for axis in AXES}
        sent = " + ".join(f"{axis} {size / MIB:.1f}" for axis, size in sends.items() if size)
        lines = [
            f"model      {c.model.arch}, {self.parameters / 1e6:.2f} M parameters, {c.precision.dtype}",
            f"states     {regime(*widths, **_sharing(c, self.sizes['dp']), moments=moments)}",
            f"ranks      {grid}",
            f"a step     {train.global_batch} × {c.model.seq} tokens, {self.microbatches} micro-batches a data rank",
            f"pipeline   {c.parallel.schedule}, ideal bubble {self.bubble:.1%}",
            *([f"recompute  {_recompute_text(c)}"] if c.recompute.mode != "none" else []),
            *([f"traffic    up to {sent} MiB sent by a rank in a step"] if sent else []),
            *(_line(rank) for rank in self.ranks[:16]),
        ]
        return "\n".join(lines + [f"  … and {len(self.ranks) - 16} more"] * (len(self.ranks) > 16))


def _line(rank: RankForecast) -> str:
    device = [f"{name} {size / MIB:.1f}" for name, size in rank.bytes.items() if name not in ("peak", "offloaded")]
    away = f"; offloaded {rank.bytes['offloaded'] / MIB:.1f}" if "offloaded" in rank.bytes else ""
    parts = " + ".join(device) + away
    layers = f"layers {rank.layers.start}–{rank.layers.stop - 1}"
    return f"  rank {rank.rank:<3} {rank.label:<15} {layers:<14} {rank.bytes['peak'] / MIB:8.1f} MiB = {parts}"


def _widths(config: Config) -> tuple[int, int]:
    """Bytes of a parameter and of a gradient."""
    return _width(config.precision.dtype), _width(config.precision.grad_dtype or "fp32")


def _moments(config: Config) -> int:
    """What the optimizer keeps of each parameter."""
    return len(rule(config.optim).parts)


def _width(name: str) -> int:
    return dtype(name).itemsize


def _sharing(config: Config, data_ranks: int) -> dict[str, int]:
    """Who holds slices of what, in the planner's words."""
    zero = config.zero
    shards = data_ranks if zero.shard_size == "all" or zero.stage == 0 else zero.shard_size
    return {
        "zero_stage": zero.stage,
        "shards": shards,
        "replicas": data_ranks // shards,
        "resident": zero.resident,
    }


def _timeline(
    flops: Sequence[float], stages: Sequence[range], plan: schedules.Plan, again: Sequence[int]
) -> schedules.Timeline:
    """The schedule played out with each stage's own cost; backward is twice forward, and forward `again`."""
    forward = tuple(sum(flops[i] for i in stage) / 3 for stage in stages)
    backward = tuple(
        once + sum(flops[i] for i in stage if i in again) / 3 for once, stage in zip(forward, stages, strict=True)
    )
    return schedules.simulate(plan, schedules.Costs(forward, backward, forward))


def full(config: Config) -> bool:
    """Whether whole layers are recomputed."""
    return config.recompute.mode == "full"


def recomputed_layers(config: Config) -> range:
    """The layers of which something is computed again: each n-th block."""
    return range(0) if config.recompute.mode == "none" else range(1, config.model.layers + 1)[:: config.recompute.every]


def _recompute_text(config: Config) -> str:
    """What is kept, and where."""
    r, sliced = config.recompute, config.parallel.sequence and config.parallel.tp > 1
    layers = "each block" if r.every == 1 else f"one block in {r.every}"
    if r.mode == "selective":
        return f"{', '.join(r.ops)} of {layers}"
    parts = [f"{layers} from its input"]
    if r.partition:
        parts.append("sliced over tp" + (" (by sequence parallelism already)" if sliced else ""))
    if r.offload == "cpu":
        parts.append("in host memory" + ("" if on_gpu() else " (where it is anyway: there is no GPU)"))
    elif r.offload == "nvme":
        parts.append(f"in {config.zero.nvme_path}")
    return ", ".join(parts + ["in an arena"] * r.arena)


def on_gpu() -> bool:
    """Whether ranks compute on GPUs here."""
    return default_device().type == "cuda"


def layer_costs(config: Config, tensor_rank: int) -> list[LayerCost]:
    """The model's layers as one tensor rank sees them."""
    p = config.parallel
    dims = decoder(
        config.model, micro_batch=config.train.micro_batch, tensor=p.tp, tensor_rank=tensor_rank,
        sequence=bool(p.sequence), element_bytes=_width(config.precision.dtype),
    )  # fmt: skip
    costs, r = transformer_costs(dims, config.model.layers), config.recompute
    block = block_cost(replace(dims, recompute=r.ops)) if r.mode == "selective" else costs[1]
    if full(config):
        sliced = p.tp if r.partition and not dims.scattered else 1
        away = r.offload == "nvme" or (r.offload == "cpu" and on_gpu())
        block = fully_recomputed(block, sliced, BUFFERS if away else 0)
    for number in recomputed_layers(config):
        costs[number] = replace(block, name=costs[number].name)
    return costs


def _held_and_sent(
    config: Config, sizes: dict[str, int], stages: Sequence[range], plan: schedules.Plan, timeline: schedules.Timeline
) -> dict[tuple[int, int], tuple[dict[str, int], dict[str, int]]]:
    """Bytes held and sent by (stage, tensor rank): data-parallel ranks are alike."""
    found = {}
    for column in range(sizes["tp"]):
        costs = layer_costs(config, column)
        for stage, layers in enumerate(stages):
            held = _held(config, sizes, costs[layers.start : layers.stop], timeline.peak_activations[stage])
            found[stage, column] = held, _sent(config, sizes, costs, layers, plan.ranks[stage], plan.microbatches)
    return found


def _held(config: Config, sizes: dict[str, int], layers: Sequence[LayerCost], live: float) -> dict[str, int]:
    param_bytes, grad_bytes = _widths(config)
    return rank_bytes(
        layers, live=live, param_bytes=param_bytes, grad_bytes=grad_bytes, moments=_moments(config),
        prefetch=config.zero.prefetch, **_sharing(config, sizes["dp"]),
        bucket_bytes=int(config.zero.bucket_mib * MIB),
        message_bytes=2 * layers[0].output_bytes if sizes["pp"] > 1 else 0,
        offload=_offload(config, layers, sizes["dp"]),
    )  # fmt: skip


def _offload(config: Config, layers: Sequence[LayerCost], data_ranks: int) -> Offload:
    """What ZeRO keeps elsewhere than on the device; beside a CPU, host memory is no other place."""
    zero, delayed = config.zero, config.zero.delayed_update
    places = {"none": False, "cpu": on_gpu(), "nvme": True}
    optimizer, params = zero.offload_optimizer != "none", zero.offload_params != "none"
    swaps = "nvme" in (zero.offload_optimizer, zero.offload_params)
    return Offload(
        optimizer, params, places[zero.offload_optimizer], places[zero.offload_params],
        masters=delayed or (on_gpu() and optimizer != params), delayed=delayed,
        buffers=_drive_bytes(config, layers, _sharing(config, data_ranks)["shards"]) if swaps else 0, tile=zero.tile,
    )  # fmt: skip


def _drive_bytes(config: Config, layers: Sequence[LayerCost], shards: int) -> int:
    """The buffers between memory and a drive."""
    zero, narrow = config.zero, _widths(config)[0] < 4
    params, optimizer = zero.offload_params == "nvme", zero.offload_optimizer == "nvme"
    blocks = [layer for layer in layers if zero.tile > 1 and layer.name.startswith("blocks.")]
    units = [layer for layer in layers if layer not in blocks]
    sliced = max((layer.sliced(zero.resident) for layer in units), default=0) if zero.stage == 3 else 0
    tile = max((-(-layer.largest // zero.tile) for layer in blocks), default=0)
    whole = max(stage_parameters(layers) // PIECES, SMALLEST)
    bucket = min(int(zero.bucket_mib * MIB) // _widths(config)[1], max(sliced, tile) or whole)
    moments = _moments(config)
    loans = update_loans(optimizer, params, narrow=narrow, zero_stage=zero.stage, moments=moments)
    gathered = (zero.prefetch + 1) * -(-sliced // bucket) + 2 * -(-tile // bucket)
    count, _ = drive_buffers(gathered if params else 0, loans, optimizer * (moments + narrow))
    return count * bucket // shards * max(4, *_widths(config))


def _sent(
    config: Config, sizes: dict[str, int], costs: Sequence[LayerCost], stage: range,
    actions: Sequence[schedules.Action], microbatches: int,
) -> dict[str, int]:  # fmt: skip
    first, last = stage.start == 0, stage.stop == len(costs)
    param_bytes, grad_bytes = _widths(config)
    return communication_bytes(
        costs[stage.start : stage.stop], microbatches=microbatches, actions=actions, param_bytes=param_bytes,
        reduce_bytes=_width(config.precision.reduce_dtype) if config.precision.reduce_dtype else grad_bytes,
        prefetch=config.zero.prefetch, **_sharing(config, sizes["dp"]), last=last,
        input_bytes=0 if first else costs[stage.start - 1].output_bytes,
        tied_elsewhere=bool(config.model.tied) and first != last,
    )  # fmt: skip


def checkpoint_bytes(parameters: int, name: str) -> int:
    """Bytes of a checkpoint: masters and two moments of every parameter."""
    return 3 * parameters * max(_width(name), 4)
