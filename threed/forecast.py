"""What a configured run will take, before any tensor moves: who stands where, bytes per rank, bubble, traffic.

forecast = Forecast.of(config, world_size)      # config: resolved
print(forecast.text())                          # what a run prints at its start, and --dry-run prints only
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from threed import schedules
from threed.config import Config
from threed.models.dimensions import decoder, layer_flops
from threed.pipeline.build import partition
from threed.planner import LayerCost, rank_bytes, regime, stage_parameters, transformer_costs
from threed.planner import train_flops_per_token as flops_per_token
from threed.precision import dtype
from threed.topology import AXES, coordinates, grid_sizes, place_label

MIB = 2**20


@dataclass(frozen=True)
class RankForecast:
    """A rank's layers, and the bytes it will hold: parameters, gradients, optimizer, activations, buffers, peak."""

    rank: int
    label: str
    layers: range
    bytes: dict[str, int]


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
        stages = partition(p.partition, flops, p.pp)
        microbatches = train.global_batch // (train.micro_batch * sizes["dp"])
        timeline = _timeline(config, flops, stages, microbatches)
        whole = decoder(config.model, micro_batch=train.micro_batch)
        ranks = [_rank(config, sizes, rank, stages, timeline) for rank in range(world)]
        parameters = stage_parameters(transformer_costs(whole, config.model.layers))
        per_token = flops_per_token(whole, config.model.layers)
        return cls(config, sizes, parameters, microbatches, timeline.bubble, per_token, ranks)

    def text(self) -> str:
        """The forecast for people: one line a fact, one line a rank (the first 16)."""
        c, train = self.config, self.config.train
        grid = " × ".join(f"{axis} {self.sizes[axis]}" for axis in AXES if self.sizes[axis] > 1) or "one rank"
        widths = _width(c.precision.dtype), _width(c.precision.grad_dtype or "fp32")
        lines = [
            f"model      {c.model.arch}, {self.parameters / 1e6:.2f} M parameters, {c.precision.dtype}",
            f"states     {regime(*widths, c.zero.stage, self.sizes['dp'])}",
            f"ranks      {grid}",
            f"a step     {train.global_batch} × {c.model.seq} tokens, {self.microbatches} micro-batches a data rank",
            f"pipeline   {c.parallel.schedule}, ideal bubble {self.bubble:.1%}",
            *(_line(rank) for rank in self.ranks[:16]),
        ]
        return "\n".join(lines + [f"  … and {len(self.ranks) - 16} more"] * (len(self.ranks) > 16))


def _line(rank: RankForecast) -> str:
    parts = " + ".join(f"{name} {size / MIB:.1f}" for name, size in rank.bytes.items() if name != "peak")
    layers = f"layers {rank.layers.start}–{rank.layers.stop - 1}"
    return f"  rank {rank.rank:<3} {rank.label:<15} {layers:<14} {rank.bytes['peak'] / MIB:8.1f} MiB = {parts}"


def _width(name: str) -> int:
    return dtype(name).itemsize


def _timeline(config: Config, flops: Sequence[float], stages: Sequence[range], microbatches: int) -> schedules.Timeline:
    """The schedule played out with each stage's own cost; backward is twice forward."""
    forward = tuple(sum(flops[i] for i in stage) / 3 for stage in stages)
    plan = schedules.build(config.parallel.schedule, config.parallel.pp, microbatches)
    return schedules.simulate(plan, schedules.Costs(forward, forward, forward))


def layer_costs(config: Config, tensor_rank: int) -> list[LayerCost]:
    """The model's layers as one tensor rank sees them."""
    p = config.parallel
    dims = decoder(
        config.model, micro_batch=config.train.micro_batch, tensor=p.tp, tensor_rank=tensor_rank,
        sequence=bool(p.sequence), element_bytes=_width(config.precision.dtype),
    )  # fmt: skip
    return transformer_costs(dims, config.model.layers)


def _rank(
    config: Config, sizes: dict[str, int], rank: int, stages: Sequence[range], timeline: schedules.Timeline
) -> RankForecast:
    place = coordinates(rank, sizes)
    stage = stages[place["pp"]]
    layers = layer_costs(config, place["tp"])[stage.start : stage.stop]
    held = rank_bytes(
        layers, live=timeline.peak_activations[place["pp"]], param_bytes=_width(config.precision.dtype),
        grad_bytes=_width(config.precision.grad_dtype or "fp32"), zero_stage=config.zero.stage, shards=sizes["dp"],
        bucket_bytes=int(config.zero.bucket_mib * MIB),
        message_bytes=2 * layers[0].output_bytes if sizes["pp"] > 1 else 0,
    )  # fmt: skip
    return RankForecast(rank, place_label(place, sizes), stage, held)


def checkpoint_bytes(parameters: int, name: str) -> int:
    """Bytes of a checkpoint: masters and two moments of every parameter."""
    return 3 * parameters * max(_width(name), 4)
