"""Forecast of a run before any tensor is allocated: ranks, bytes per rank, bubble and traffic.

    forecast = Forecast.of(config, world_size)      # config: resolved
    print(forecast.text())                          # as at the start of a run and with --dry-run

The stages of all pipeline ranks are built on the meta device, which allocates no memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from threed import models, schedules
from threed.config import Config, ConfigError
from threed.config.resolution import context_multiple
from threed.core import gpu_rates
from threed.core.device import Specification, assume, memory_bytes
from threed.core.device import name as device_name
from threed.core.messages import counted
from threed.distributed.grid import AXES, Grid
from threed.distributed.topology import EXPERTS, default_device
from threed.layers import Slicing
from threed.memory.sizes import regime
from threed.models import Model, options_of
from threed.models.measured_partition import Division
from threed.monitor.meter import peak_tflops
from threed.ops.precision import dtype
from threed.planner.imbalance import LOADS, Imbalance
from threed.planner.longest import Longest, longest, step_of
from threed.planner.stages import Column, Stages, divide
from threed.planner.step_time import StepTime, forward_flops, step_time, unmodelled
from threed.schedules import registry, simulation
from threed.zero.setup import check_groups, state_names

GIB = 2**30
# The FLOP/s that computation is assumed to reach, divided by the device's peak FLOP/s. Megatron-LM
# reached 44 to 52 % of an A100's peak, including the time of messages and bubbles (arXiv
# 2104.04473, table 1).
EFFICIENCY = 0.5
_VERSIONS = "two of the parameters, and a copy of the gradient slices; updates are one step late"


@dataclass(frozen=True)
class RankForecast:
    """The forecast of one rank.

    Attributes:
        rank: global rank.
        label: coordinates of the rank, such as 'pp0 dp1'.
        layers: for each chunk of the rank, the indices of its layers.
        bytes: bytes by kind, and `peak`; see `Footprint`.
        sends: bytes sent per step, by axis: tp, pp, dp, cp and ep. Those of ep are for equal
            numbers of tokens per expert.
    """

    rank: int
    label: str
    layers: Sequence[range]
    bytes: dict[str, int]
    sends: dict[str, int]


@dataclass(frozen=True)
class Forecast:
    """The forecast of a run.

    Attributes:
        config: the resolved configuration.
        model: name of the model.
        sizes: number of ranks per axis.
        parameters: number of parameters of the model.
        active: number of parameters that compute a token, without experts that it is not sent to.
        microbatches: number of micro-batches per step and data rank.
        bubble: idle fraction of one pipeline rank between its first and its last action. The rank
            is the one with the longest time between these actions (arXiv 2401.10241).
        idle: idle fraction of the time of the step; mean over pipeline ranks.
        flops_per_token: FLOPs of forward and backward per token.
        ranks: forecast of each rank.
        division: the partition by measured times; None if the configuration does not use it.
        ways: number of pipeline ranks that hold each stage: 2 for a bidirectional schedule,
            otherwise 1.
        step_flops: the FLOPs that one device could execute during a step's forwards and backwards
            if it were never idle. This is a simulated time, in the unit FLOPs. None if FLOPs are
            not known.
        measured_s: simulated time of a step's forwards and backwards in seconds, if it was computed
            from measured times of layers; otherwise None.
        states: the bytes of model states per parameter, and their sharding, as text.
        device: name of the GPU, of this machine or as given to `of`; None for a CPU.
        memory: bytes of memory of the GPU; None for a CPU.
        time: predicted time of a step by its parts; None if the rates of the device are not known
            (`core.gpu_rates`), or if `unmodelled` is not empty.
        unmodelled: the settings because of which `time` is not known.
        assumed: the GPU that was given to `of`, or None.
        stages: the stages on the meta device, for the forecast of other lengths of sequences.
        note: empty if `ranks` includes the memory of activations; otherwise the reason why this
            memory is not known.
        asynchronous: whether the steps of the schedule overlap.
    """

    config: Config
    model: str
    sizes: dict[str, int]
    parameters: int
    active: int
    microbatches: int
    bubble: float
    idle: float
    flops_per_token: float
    ranks: Sequence[RankForecast]
    states: str
    division: Division | None = None
    ways: int = 1
    step_flops: float | None = None
    measured_s: float | None = None
    device: str | None = None
    memory: int | None = None
    note: str = ""
    asynchronous: bool = False
    time: StepTime | None = None
    unmodelled: Sequence[str] = ()
    assumed: Specification | None = None
    stages: Stages | None = field(default=None, repr=False)

    @classmethod
    def of(
        cls, config: Config, world: int, build: Callable[[Slicing], Model] | None = None,
        division: Division | None = None, gpu: str | None = None,
    ) -> Forecast:  # fmt: skip
        """Returns the forecast of a configuration.

        Args:
            config: the resolved configuration.
            world: number of ranks.
            build: function that builds a custom model of `threed.layers` for a `Slicing`; by
                default, the model of `config.model` is built.
            division: the engine's partition by measured times. None: this function measures the
                layers itself if `--parallel.partition` is measured.
            gpu: a key of `core.gpu_rates.DEVICES`, for a forecast for machines with such GPUs;
                by default, the forecast is for this machine's device.

        Raises:
            ConfigError: if the rates of `gpu` are not known.
            ValueError: if the model cannot be partitioned.
        """
        spec = None if gpu is None else _device(gpu, config).spec
        with assume(spec):
            return replace(cls._of(config, world, build, division), assumed=spec)

    @classmethod
    def _of(
        cls, config: Config, world: int, build: Callable[[Slicing], Model] | None,
        division: Division | None,
    ) -> Forecast:  # fmt: skip
        custom = build is not None
        build = build or (lambda slicing: models.build(config.model, slicing))
        p = config.parallel
        grid = Grid.of(world, pp=p.pp, dp=p.dp, cp=p.cp, tp=p.tp)
        # A column consists of the ranks with the same tensor-parallel index. Columns whose
        # parameters have the same shapes share a forecast.
        unique: dict[object, Column] = {}
        columns = [Column(config, grid, build, number) for number in range(grid.tp)]
        columns = [unique.setdefault(column.shapes, column) for column in columns]
        shares = grid.tp * grid.cp  # ranks that divide a layer's work
        unsharded_times = division is None and shares > 1
        stages = Stages(
            columns, config, lambda flops: division or divide([*unique.values()], flops, build)
        )
        config, flops, pipeline = stages.config, stages.flops, stages.pipeline
        division = division or pipeline.division
        alone = config.model_copy(update={"parallel": p.model_copy(update={"ep": 1})})
        unsharded = columns[0] if shares * p.ep == 1 else Column(alone, Grid(), build, 0)
        if p.ep > 1:  # a column has only the names of its own experts
            check_groups(config, unsharded.layers)
        ranks = []
        for rank in range(world):
            position = grid.coordinates(rank)
            sizes = stages.footprints[columns[position["tp"]]][position["pp"]]
            layers = pipeline.layout.chunks(position["pp"])
            ranks.append(RankForecast(rank, grid.label(rank), layers, sizes.bytes, sizes.sends))
        costs = division.costs if division else columns[0].stage_costs(flops, pipeline)
        timeline = schedules.simulate(pipeline.plan, costs)
        # FLOPs per token are computed from traced FLOPs, because a model's custom costs may have a
        # different unit.
        counted = sum(3.0 * cost.flops for cost in unsharded.costs)
        per_token = counted / (config.train.micro_batch * config.model.seq)
        arch = config.model.arch.rpartition(":")[2]  # the NAME of FILE.py:NAME
        name = type(unsharded.model).__name__ if custom else arch
        custom_costs = options_of(unsharded.model).costs is not None
        gpu = device_name(default_device())
        rates, missing, time = gpu_rates.find(gpu), unmodelled(config), None
        if division or not any(cost.operations[0] for cost in unsharded.costs):
            rates = None
        if rates is not None and not missing:
            rows = config.train.global_batch // config.train.micro_batch
            work = 3.0 * forward_flops(unsharded.costs) * rows / world
            first, same = columns[0], [column.costs for column in stages.footprints]
            time = step_time(
                rates, grid, same, stages.blueprints[first], stages.footprints[first], work
            )
        return cls(
            config, name, grid.sizes, unsharded.parameters, unsharded.active, pipeline.plan.microbatches,
            timeline.bubble, fmean(simulation.idle_shares(timeline.spans)), per_token, ranks,
            _states_text(config, grid.sizes), division, pipeline.plan.ways,
            step_flops=None if division or custom_costs else timeline.makespan / grid.tp,
            measured_s=timeline.makespan if division and not unsharded_times else None,
            device=gpu, memory=memory_bytes(default_device()), note=columns[0].note, time=time,
            asynchronous=registry.is_asynchronous(p.schedule),
            unmodelled=missing if rates else (), stages=stages,
        )  # fmt: skip

    @functools.cached_property
    def longest(self) -> Longest | None:
        """The longest sequence that fits into the memory of the GPU, with the same micro-batch.

        None if it is not known: there is no GPU, stages are balanced by measured times, or the
        memory of activations is not known or does not depend on `model.seq`. The search makes up to
        `longest.FORECASTS` more forecasts of the memory.
        """
        limit, stages = self.memory, self.stages
        if limit is None or stages is None or self.division or self.note:
            return None
        model = stages.columns[0].model
        if isinstance(model, models.Wrapped) or options_of(model).example is not None:
            return None
        seq = self.config.model.seq
        return longest(self.peak_at, seq, stages.peak, limit, self._step_of_lengths)

    @property
    def _step_of_lengths(self) -> int:
        parts = context_multiple(self.config) * self.sizes["tp"]
        return step_of(self.config.model.seq, parts)

    def peak_at(self, seq: int) -> int:
        """Returns the largest peak of a rank in bytes, with sequences of another length.

        Raises:
            ValueError: if the model cannot run on such sequences.
        """
        assert self.stages is not None
        with assume(self.assumed):
            return self.stages.at(seq).peak

    def with_imbalance(self, load: float) -> Imbalance | None:
        """Returns the memory and time if the busiest expert rank gets more tokens than the mean.

        None if no rank can: the model has no experts, or every rank holds all of them.

        Args:
            load: tokens of the busiest expert rank in every layer and micro-batch, divided by the
                mean; at least 1.
        """
        if self.stages is None or self.config.parallel.ep == 1:
            return None
        with assume(self.assumed):
            found = self.stages.busy(load)
        peak = max(one.bytes["peak"] for _, stages in found.values() for one in stages)
        seconds = None
        if self.time is not None:
            rates, first = gpu_rates.find(self.device), self.stages.columns[0]
            assert rates is not None
            costs = [same for same, _ in found.values()]
            blueprints, sizes = self.stages.blueprints[first], found[first][1]
            grid, flops = first.grid, self.time.flops
            seconds = step_time(rates, grid, costs, blueprints, sizes, flops).total
        return Imbalance(load, peak, seconds)

    def imbalance_text(self) -> str:
        """Returns lines with the cost of an imbalance between expert ranks; empty without one."""
        lines: list[str] = []
        for load in LOADS:
            found = self.with_imbalance(load)
            if found is None:
                return ""
            text = f"{load:g} times the mean of tokens: {_gib(found.peak)} GiB"
            if found.seconds is not None and self.time is not None:
                text += f", {found.seconds:.3g} s (+{found.seconds / self.time.total - 1:.1%})"
            lines.append(f"{'' if lines else 'imbalance':<10} busiest expert rank has {text}")
        return "\n".join(lines)

    def longest_text(self) -> str:
        """Returns a line with `longest`; empty if it is not known."""
        found = self.longest
        if found is None:
            return ""
        memory = f"{_gib(self.memory or 0)} GiB"
        if not found.seq:
            return f"longest    no sequence fits into {memory}: {self._step_of_lengths:,} tokens are too long"
        least = "" if found.exact else "at least "
        why = f"; the model takes no longer one: {found.why}" if found.why else ""
        return f"longest    a sequence of {least}{found.seq:,} tokens fits into {memory}{why}"

    @property
    def seconds(self) -> float | None:
        """Predicted time of a step's forwards and backwards in seconds; None if it is not known.

        With `--parallel.partition measured`, it is computed from the measured times of the layers.
        Otherwise it is the total of `time`, with messages and the update. If `time` is not known,
        it is `step_seconds` at the peak of this machine's GPU, if that peak is known
        (`monitor.meter`), without messages.
        """
        if self.division is not None:
            return self.measured_s
        if self.time is not None:
            return self.time.total
        peak = peak_tflops(self.device, self.config.precision.dtype)
        return None if peak is None or self.step_flops is None else self.step_seconds(peak)

    def step_seconds(
        self, tflops: float, gb_per_s: float | None = None, efficiency: float = EFFICIENCY
    ) -> float:
        """Returns seconds per step: FLOPs / (peak × efficiency) + bytes / bandwidth.

        The FLOPs are `step_flops`, from a simulation in which the times of stages are proportional
        to their FLOPs. The bytes are the bytes that the rank with the most traffic sends. Messages
        are assumed not to overlap with computation. The time of the weight update is not included.

        Args:
            tflops: peak of a device in TFLOP/s.
            gb_per_s: bandwidth of a device in GB/s; by default messages take no time.
            efficiency: FLOP/s that computation reaches, divided by the peak FLOP/s.

        Raises:
            ValueError: if FLOPs are not known, because stages are balanced by custom costs or by
                measured times.
        """
        if self.step_flops is None:
            raise ValueError(
                "FLOPs of a step are not known: layers have measured times or custom costs"
            )
        sent = max(sum(rank.sends.values()) for rank in self.ranks)
        messages = 0.0 if gb_per_s is None else sent / (gb_per_s * 1e9)
        return self.step_flops / (tflops * 1e12 * efficiency) + messages

    def dry_run_text(self) -> str:
        """Returns the text of a dry run: `text`, `longest_text` and `imbalance_text`."""
        return "\n".join(filter(None, (self.text(), self.longest_text(), self.imbalance_text())))

    def text(self) -> str:
        """Returns the forecast as text.

        It has one line per property of the run, then one line per group of ranks with equal layers
        and bytes.
        """
        c, train = self.config, self.config.train
        grid = (
            " × ".join(f"{axis} {self.sizes[axis]}" for axis in AXES if self.sizes[axis] > 1)
            or "one rank"
        )
        grid += f", experts over {c.parallel.ep}" if c.parallel.ep > 1 else ""
        batches = counted(self.microbatches, "micro-batch")
        sends = {axis: max(rank.sends[axis] for rank in self.ranks) for axis in (*AXES, EXPERTS)}
        sent = " + ".join(f"{axis} {_gib(size)}" for axis, size in sends.items() if size)
        division = self.division
        parts = () if division is None else (division.text(), *division.notices)
        lines = [
            f"model      {self.model}, {self._parameters_text()}, {c.precision.dtype}",
            f"states     {self.states}{_ways_text(c, self.ways)}",
            f"versions   {_VERSIONS}" if self.asynchronous else "",
            f"ranks      {grid}",
            f"a step     {train.global_batch} × {c.model.seq} tokens, {batches} per data rank",
            f"time       {self._time_text(self.seconds)}" if self.seconds else "",
            *([] if self.time is None else self.time.lines()),
            f"time       not modelled: {', '.join(self.unmodelled)}" if self.unmodelled else "",
            f"pipeline   {c.parallel.schedule}, ideal bubble {self.bubble:.1%}",
            *(f"partition  {text}" for text in parts),
            f"order      {_order_text(self.microbatches)}" if c.zero.order == "layer" else "",
            f"recompute  {_recompute_text(c)}" if c.recompute.mode != "none" else "",
            f"memory     {self.note}" if self.note else "",
            f"traffic    up to {sent} GiB sent per rank and step" if sent else "",
            *_lines(self.ranks),
        ]
        return "\n".join(filter(None, lines))

    def _parameters_text(self) -> str:
        text = f"{self.parameters / 1e6:.2f} M parameters"
        if self.active == self.parameters:
            return text
        return f"{text} ({self.active / 1e6:.2f} M compute each token)"

    def _time_text(self, seconds: float) -> str:
        tokens = self.config.train.global_batch * self.config.model.seq / seconds
        if self.time is not None:
            all_pairs = self.flops_per_token * tokens / (len(self.ranks) * self.time.peak)
            shares = f"MFU {self.time.mfu:.1%} ({all_pairs:.1%} as in perf/mfu)"
            return (
                f"{seconds:.3g} s, {tokens:,.0f} tokens/s, {shares}, predicted for {self.device}:"
            )
        by = (
            "by measured times" if self.division else f"at {EFFICIENCY:.0%} of {self.device}'s peak"
        )
        return f"{seconds:.3g} s, {tokens:,.0f} tokens/s {by}, without messages and updates"


def _device(gpu: str, config: Config) -> gpu_rates.Device:
    """Returns the rates of a GPU. Raises ConfigError if they are not known, or of no use."""
    found = gpu_rates.find(gpu)
    if found is None:
        raise ConfigError(
            [f"--gpu {gpu}: its rates are not known; use {', '.join(gpu_rates.DEVICES)}"]
        )
    if config.parallel.partition == "measured" and config.parallel.pp > 1:
        fix = "use --parallel.partition balanced"
        raise ConfigError([f"--gpu {gpu}: only this machine's device can be measured; {fix}"])
    return found


def _lines(ranks: Sequence[RankForecast]) -> list[str]:
    """Returns one line per group of ranks with equal layers and bytes.

    The lines are sorted by the first rank of each group.
    """
    groups: dict[str, list[RankForecast]] = {}
    for rank in ranks:
        groups.setdefault(_sizes_text(rank), []).append(rank)
    heads = [_ranks_text(same) for same in groups.values()]
    width = max(map(len, heads))
    return [f"  {head:<{width}}  {holds}" for head, holds in zip(heads, groups, strict=True)]


def _ranks_text(same: Sequence[RankForecast]) -> str:
    """Returns the first and the last rank of a group as text.

    If ranks between them are not in the group, the text includes the number of ranks of the group.
    """
    first, last, count = same[0], same[-1], len(same)
    if count == 1:
        return f"rank {first.rank}  {first.label}"
    some = f" ({count} ranks)" if last.rank - first.rank >= count else ""
    return f"rank {first.rank} – rank {last.rank}{some}  {first.label} – {last.label}"


def _sizes_text(rank: RankForecast) -> str:
    """Returns the layers and bytes of a rank as text."""
    device = [
        f"{name} {_gib(size)}"
        for name, size in rank.bytes.items()
        if name not in ("peak", "offloaded")
    ]
    away = f"; offloaded {_gib(rank.bytes['offloaded'])}" if "offloaded" in rank.bytes else ""
    layers = "layers " + ", ".join(f"{chunk.start}–{chunk.stop - 1}" for chunk in rank.layers)
    return f"{layers:<14} {_gib(rank.bytes['peak']):>6} GiB = {' + '.join(device)}{away}"


def _gib(size: float) -> str:
    """Returns a number of bytes in GiB as text; small numbers have more decimals."""
    gib = size / GIB
    return f"{gib:.1f}" if gib >= 10 else f"{gib:.2f}" if gib >= 1 else f"{gib:.4f}"


def _states_text(config: Config, sizes: Mapping[str, int]) -> str:
    """Returns the bytes of model states per parameter, and their sharding, as text.

    Args:
        config: the resolved configuration.
        sizes: number of ranks per axis.
    """
    zero, precision, dp = config.zero, config.precision, sizes["dp"] * sizes["cp"]
    shards = dp if zero.shard_size == "all" or zero.stage == 0 else int(zero.shard_size)
    names = (precision.dtype, precision.grad_dtype or "fp32")
    param_bytes, grad_bytes = (dtype(name).itemsize for name in names)
    return regime(
        param_bytes, grad_bytes, zero.stage, shards, replicas=dp // shards,
        moments=len(state_names(config.optim)), resident=zero.resident,
    )  # fmt: skip


def _order_text(microbatches: int) -> str:
    """Returns a description of layer-major order."""
    gathered = "parameters are gathered and gradients reduced once per pass"
    return f"each layer runs all micro-batches ({microbatches}): {gathered}; activations of all of them are kept"


def _ways_text(config: Config, ways: int) -> str:
    """Returns a text about stages that several pipeline ranks hold.

    The text is empty if each stage is on only one pipeline rank.
    """
    zero = config.zero
    shared = "share" if zero.offload_optimizer == zero.offload_params == "none" else "each keep"
    return (
        f"; every stage is on {ways} ranks, which {shared} its optimizer state" if ways > 1 else ""
    )


def _recompute_text(config: Config) -> str:
    """Returns a text with the recomputed layers or operations, and the place of saved inputs."""
    r, sliced = config.recompute, config.parallel.sequence
    layers = "each block" if r.every == 1 else f"one block in {r.every}"
    if r.mode == "selective":
        return f"{', '.join(r.ops)} of {layers}"
    parts = [f"{layers} from its input"]
    if r.partition:
        parts.append("sliced over tp" + (" (by sequence parallelism already)" if sliced else ""))
    if r.offload == "cpu":
        parts.append(
            "in host memory"
            + ("" if default_device().type == "cuda" else " (no effect without a GPU)")
        )
    elif r.offload == "nvme":
        parts.append(f"in {config.zero.nvme_path}")
    return ", ".join(parts + ["in an arena"] * r.arena)


def checkpoint_bytes(parameters: int, name: str) -> int:
    """Returns the bytes of a checkpoint with master weights and two moments of every parameter."""
    return 3 * parameters * max(dtype(name).itemsize, 4)
