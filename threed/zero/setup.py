"""Builds parts of ZeRO from the configuration: layout, update rule, learning rate, loss scale."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from threed.config import Config, ConfigError, OptimConfig, ParamGroup, PrecisionConfig
from threed.config.resolution import default_warmup
from threed.distributed import collectives
from threed.distributed.codecs import EXACT, Cast, Codec
from threed.distributed.sharding import ShardSpec, spec_of
from threed.distributed.topology import Axis, Topology
from threed.memory.io import Disk
from threed.memory.sizes import drive_buffers, update_buffers
from threed.memory.tiers import Drive, MetaDrive, Tier, memory_tier
from threed.ops.adam import Adam
from threed.ops.balance import Balance
from threed.ops.lion import Lion
from threed.ops.precision import LossScale, dtype
from threed.ops.quantize import Int8Blocks
from threed.ops.sgd import SGD
from threed.ops.update import Rule
from threed.schedules import Costs, Plan
from threed.schedules.post_update_validation import time_between_steps
from threed.schedules.registry import is_asynchronous
from threed.zero.early_updates import max_pending_buckets
from threed.zero.layout import DataAxes, GroupOptions, Layout, Policy
from threed.zero.reductions import GradientCodecs

# Learning-rate schedules: functions from progress after warm-up (0 to 1) to a factor f (0 to 1).
# The learning rate is min_lr + f * (lr - min_lr).
RATES: dict[str, Callable[[Tensor], Tensor]] = {
    "constant": torch.ones_like,
    "linear": lambda done: 1 - done,
    "cosine": lambda done: 0.5 * (1 + torch.cos(math.pi * done)),
    # warm-up, stable, decay: f stays 1, then decreases linearly to 0 in the last fifth of progress
    "wsd": lambda done: ((1 - done) / 0.2).clamp(max=1.0),
}


def shard_axes(config: Config, topology: Topology, over: str | None = None) -> tuple[str, str, str]:
    """Returns the names of the axes over which parameters are sharded, replicated and gathered.

    An empty name means that the axis contains only this rank. `Topology.prepare` creates the axes.

    Args:
        config: the configuration.
        topology: the process topology.
        over: `ShardSpec.over` of the parameters. If set, `zero.shard-size` is ignored, and slices
            are spread over all data ranks that have the same parameters.

    Returns:
        Three names (shard, replicas, gather). `shard` is the shard group S, and `replicas` is the
        replica group R, the ranks with the same slice. `gather` has the same ranks as S; under
        stage 3 it has a separate communicator, otherwise it is S itself.

    Raises:
        ConfigError: the shard size does not divide the number of data ranks.
    """
    stage, data, copies = config.zero.stage, topology.data_name, topology.data.size
    if over is None:
        n = copies if config.zero.shard_size == "all" else int(config.zero.shard_size)
        n = n if stage else 1
        if copies % n:
            raise ConfigError([f"--zero.shard-size {n} does not divide {data} {copies}"])
        shard = "" if n == 1 else data if n == copies else f"{data}/{n}"
        replicas = data if n == 1 else "" if n == copies else f"{data}%{n}"
    else:
        same = over.replace("/", "%") if "/" in over else ""
        shard, replicas = (same, "") if stage else ("", same)
    return shard, replicas, f"{shard}@gather" if shard and stage == 3 else shard


def check_tile(wanted: int, tile: int, wrapped: bool) -> None:
    """Raises ConfigError if the number of tiles differs between model and configuration.

    Args:
        wanted: number of tiles in the configuration (`zero.tile`).
        tile: number of tiles with which the model's layers were built.
        wrapped: whether the model is a wrapped module.
    """
    if wanted != tile:
        own = "build it with Slicing(..., tile=config.zero.tile)"
        fix = "wrapped modules are not tiled: leave it out" if wrapped else own
        raise ConfigError([f"--zero.tile {wanted}: this model was built with tile {tile}; {fix}"])


def policy(
    config: Config, topology: Topology, ways: int = 1, overs: Iterable[str] = (), trains: bool = True
) -> Policy:  # fmt: skip
    """Returns the policy for the memory layout of a pipeline stage's parameters.

    Args:
        config: the configuration.
        topology: the process topology.
        ways: 2 if two pipeline ranks hold every stage (bidirectional schedules), else 1.
        overs: all values of `ShardSpec.over` in the model.
        trains: whether parameters are trained; see `Policy`.
    """
    alone = Axis("dp", (topology.rank,), 0, None, topology.traffic)

    def axes(over: str | None = None) -> DataAxes:
        names = shard_axes(config, topology, over)
        return DataAxes(*(topology.axis(name) if name else alone for name in names))

    host = topology.device if topology.is_meta else torch.device("cpu")
    params, optimizer = _tiers(config, host, topology.is_meta)
    return Policy(
        stage=config.zero.stage, data=axes(), bucket_bytes=int(config.zero.bucket_mib * 2**20),
        param_dtype=dtype(config.precision.dtype), grad_dtype=dtype(config.precision.grad_dtype or "fp32"),
        resident=config.zero.resident, options=group_options(config), arena=config.recompute.arena,
        params_tier=params, optimizer_tier=optimizer, host=host,
        states_once=ways > 1 and params is None and optimizer is None,
        versions=1 + is_asynchronous(config.parallel.schedule), early=is_early(config),
        delayed=config.zero.delayed_update, trains=trains, dealt={over: axes(over) for over in overs},
    )  # fmt: skip


def _tiers(config: Config, host: torch.device, is_meta: bool) -> tuple[Tier | None, Tier | None]:
    """Returns (tier of parameters, tier of optimizer states); None means the device's memory."""
    zero = config.zero
    places: dict[str, Tier | None] = {"none": None, "cpu": memory_tier(host)}
    if "nvme" in (zero.offload_params, zero.offload_optimizer):
        places["nvme"] = MetaDrive(host) if is_meta else Drive(Disk(str(zero.nvme_path), "zero"))
    return places[zero.offload_params], places[zero.offload_optimizer]


def size_buffers(layout: Layout, config: Config, moments: int) -> None:
    """Sets the size and the number of drive buffers.

    Each buffer is as large as the largest slice, and there are enough buffers for all slices that
    are in use at the same time. If neither parameters nor states are on a drive, the call has no
    effect.

    Args:
        layout: layout of the parameters.
        config: the configuration.
        moments: number of state tensors of the update rule per parameter, such as 2 for Adam.
    """
    zero, policy = config.zero, layout.policy
    slices: Counter[int] = Counter()
    for group in layout.groups:
        for unit in group.key.units or ():
            slices[unit] += len(group.buckets) if group.key.tile is None else 0
    tiles = max((len(group.buckets) for group in layout.groups if group.key.tile), default=0)
    # per unit: number of slices of the unit and of the units that are prefetched during its use
    ahead = min(zero.prefetch, max(slices, default=0))
    at_once = [sum(slices[unit + n] for n in range(ahead + 1)) for unit in list(slices)]
    gathered = max(at_once, default=0) + 2 * tiles
    width = max(policy.param_dtype.itemsize, policy.grad_dtype.itemsize, 4)
    narrow, stage = policy.param_dtype.itemsize < 4, policy.stage
    swapped = zero.offload_optimizer == "nvme", zero.offload_params == "nvme"
    buffers = update_buffers(*swapped, narrow=narrow, zero_stage=stage, moments=moments)
    waiting = max_pending_buckets(layout) if policy.early else 0
    for drive in policy.drives:
        gather_buffers = gathered if drive is policy.params_tier else 0
        largest = max((b.share for group in layout.groups for b in group.buckets), default=1)
        drive.size_buffers(largest * width, drive_buffers(gather_buffers, buffers, waiting))


def group_options(config: Config) -> Callable[[ShardSpec], GroupOptions]:
    """Returns a function from a parameter's `ShardSpec` to its options.

    The first group of `optim.groups` whose pattern matches the parameter's name overrides the
    optimizer's options. They do not apply to a parameter whose record names its rule.
    """
    optim, groups = config.optim, config.optim.groups
    balance = GroupOptions(Balance(config.experts.bias_rate), own_rule=True)

    def of_name(name: str, decays: bool) -> GroupOptions:
        number = _group_number(optim, name)
        own = groups[number - 1] if number else ParamGroup(match="*")
        decay = optim.weight_decay if decays else 0.0
        return GroupOptions(
            rule(optim, own.name), number,
            decay if own.weight_decay is None else own.weight_decay,
        )  # fmt: skip

    def of(spec: ShardSpec) -> GroupOptions:
        if spec.rule is not None:
            return balance
        found = {of_name(piece.name, spec.decay) for piece in spec.pieces}
        if len(found) > 1:
            some = [piece.name for piece in spec.pieces]
            names = ", ".join(some if len(some) <= 6 else (*some[:3], "...", *some[-2:]))
            problem = f"gives {names} different options, but they are one matrix: match all"
            raise ConfigError([f"--optim.groups {problem}"])
        return found.pop()

    return of


def find_group_problems(
    optim: OptimConfig, layers: Iterable[nn.Module], world: Axis | None = None
) -> Iterator[str]:
    """Yields a message for each pattern of `optim.groups` that does not fit the model.

    A pattern must match some parameter, and all or none of the shards of a parameter that is
    distributed over data ranks (`ShardSpec.over`), such as the experts of a layer. Collective over
    `world` if there are such parameters.

    Args:
        optim: the optimizer's options, with the parameter groups.
        layers: all layers of the model.
        world: all ranks of the run. None, or an axis of the meta device: names of other ranks are
            not known, so nothing is checked if parameters are distributed over data ranks.
    """
    specs = [spec_of(param) for layer in layers for param in layer.parameters()]
    names = list(dict.fromkeys(piece.name for spec in specs for piece in spec.pieces))
    matched = [any(map(group.matches, names)) for group in optim.groups]
    dealt = [spec for spec in specs if spec.over and spec.rule is None]
    if optim.groups and any(spec.over for spec in specs):
        if world is None or (world.size > 1 and world.group is None):
            return
        numbers = [
            sorted({_group_number(optim, piece.name) for piece in spec.pieces}) for spec in dealt
        ]
        everyone = collectives.exchange([matched, numbers], world)
        matched = [any(found) for found in zip(*(one for one, _ in everyone), strict=True)]
        for spec, *of_ranks in zip(dealt, *(one for _, one in everyone), strict=True):
            if len({number for numbers in of_ranks for number in numbers}) > 1:
                yield (
                    f"--optim.groups gives {spec.pieces[0].name} and other shards of the same parameter different options:"
                    " match all of them, such as all experts of a layer"
                )
    some = ", ".join((*names[:3], "...", *names[-2:]) if len(names) > 6 else names)
    for group, found in zip(optim.groups, matched, strict=True):
        if not found:
            yield f"--optim.groups {group.match!r} matches no parameter: names are {some}"


def check_groups(config: Config, layers: Iterable[nn.Module]) -> None:
    """Raises ConfigError if a pattern of `optim.groups` does not fit a model.

    Args:
        config: the resolved configuration.
        layers: all layers of the model, not divided over ranks.
    """
    layers, options = list(layers), group_options(config)
    if problems := list(find_group_problems(config.optim, layers)):
        raise ConfigError(problems)
    for layer in layers:
        for param in layer.parameters():
            options(spec_of(param))


def _group_number(optim: OptimConfig, name: str) -> int:
    """Returns the number of the group of `optim.groups` with the parameter, from 1; 0: none."""
    return next((n for n, group in enumerate(optim.groups, 1) if group.matches(name)), 0)


def gradient_codecs(config: Config) -> GradientCodecs:
    """Returns the codecs that encode gradients for communication."""
    precision = config.precision
    cast = Cast(dtype(precision.reduce_dtype or precision.grad_dtype or "fp32"))
    return GradientCodecs(cast if config.zero.compress_gradients == "none" else Int8Blocks(), cast)


def weight_codec(config: Config) -> Codec:
    """Returns the codec that encodes sharded parameters when they are gathered."""
    return EXACT if config.zero.compress_weights == "none" else Int8Blocks()


def rule(optim: OptimConfig, name: str | None = None) -> Rule:
    """Returns an update rule with the hyperparameters of `optim`.

    Args:
        optim: the optimizer's options.
        name: name of the rule, such as "adamw" or "sgd"; by default `optim.name`.
    """
    name = name or optim.name
    if name == "sgd":
        return SGD(optim.momentum)
    if name == "lion":
        return Lion(*optim.betas)
    return Adam(*optim.betas, optim.eps)


def state_names(optim: OptimConfig) -> tuple[str, ...]:
    """Returns the names of the state tensors, such as moments, of all groups' update rules."""
    rules = [rule(optim, name) for name in (None, *(group.name for group in optim.groups))]
    return tuple(dict.fromkeys(name for each in rules for name in each.state_names))


def is_optimistic(config: Config, plan: Plan) -> bool:
    """Returns whether updates run before the gradient norm is known.

    If `parallel.optimistic-step` is "auto", they do so if three conditions hold: the plan lets
    ranks end their steps at different times, the plan is not asynchronous, and all parameters and
    states are on the device.
    """
    zero, asked = config.zero, config.parallel.optimistic_step
    if asked != "auto":
        return asked
    offloads = {zero.offload_optimizer, zero.offload_params} != {"none"}
    if plan.stages == 1 or plan.asynchronous or zero.delayed_update or offloads:
        return False
    # the result is a difference of two times; up to 1e-6, it is only a rounding error
    return time_between_steps(plan, Costs(1.0, 1.0, 1.0)) > 1e-6


def is_early(config: Config) -> bool:
    """Returns whether updates run during the backward (`threed.zero.early_updates`).

    If `zero.early-update` is "auto", updates do so if two conditions hold: `zero.order` is "layer",
    and both parameters and optimizer states are on a drive.
    """
    zero = config.zero
    if zero.early_update != "auto":
        return zero.early_update
    return zero.order == "layer" and zero.offload_optimizer == zero.offload_params == "nvme"


def learning_rate(optim: OptimConfig, steps: int) -> Callable[[Tensor], Tensor]:
    """Returns the learning-rate schedule of a run.

    The rate rises linearly to `optim.lr` during warm-up. Then it follows `optim.schedule`, which
    reaches its end after `steps` updates. Skipped steps do not advance the schedule, because they
    are not updates.

    Args:
        optim: the optimizer's options.
        steps: number of steps of the run.

    Returns:
        A function from the number of updates applied so far (fp64 scalar tensor) to the learning
        rate of the next update (scalar tensor).
    """
    shape, lr = RATES[optim.schedule], optim.lr
    min_lr, warmup = _end_and_warmup(optim, steps)

    def rate(done: Tensor) -> Tensor:
        rising = lr * (done + 1) / max(warmup, 1)
        progress = ((done - warmup) / max(steps - warmup, 1)).clamp(0, 1)
        return torch.where(done < warmup, rising, min_lr + (lr - min_lr) * shape(progress))

    return rate


def rate_factors(optim: OptimConfig) -> list[float]:
    """Returns the factor of each parameter group, by which the scheduled rate is multiplied.

    The first factor is 1, for parameters that no group of the configuration matches. Each further
    factor belongs to one group: its peak rate divided by `optim.lr`, or 1 if it sets no rate.
    """
    return [1.0, *(1.0 if group.lr is None else group.lr / optim.lr for group in optim.groups)]


def describe_rate(optim: OptimConfig, steps: int) -> str:
    """Returns a description of the learning-rate schedule for the log."""
    end, warmup = _end_and_warmup(optim, steps)
    warm = f"warm-up over {warmup} of {steps} steps to {optim.lr:g}" if warmup else f"{optim.lr:g}"
    return f"{warm}, then {optim.schedule}" + (
        "" if optim.schedule == "constant" else f" to {end:g}"
    )


def describe_rate_change(
    saved: Mapping[str, Any], config: Config, state: Mapping[str, Any]
) -> Iterator[str]:
    """Yields a line of text if the next step's learning rate differs from that of saved keys.

    If another version of threed saved keys that are not valid here, the rates are not compared.

    Args:
        saved: the configuration in a checkpoint, by group and key.
        config: the configuration of the run.
        state: the counters in the checkpoint.
    """
    done = torch.tensor(float(state["updates"]), dtype=torch.float64)
    with suppress(ValueError, KeyError, TypeError):
        optim, steps = OptimConfig.model_validate(saved["optim"]), int(saved["train"]["steps"])
        before = float(learning_rate(optim, steps)(done))
        now = float(learning_rate(config.optim, config.train.steps)(done))
        if abs(now - before) > 1e-9 * max(now, before):
            step, times = state["steps"] + 1, f", {now / before:.3g} times" if before else ""
            yield f"the learning rate of step {step} is {now:.4g}{times} the {before:.4g} of the checkpoint's keys"


def _end_and_warmup(optim: OptimConfig, steps: int) -> tuple[float, int]:
    end = optim.lr / 10 if optim.min_lr is None else optim.min_lr
    return end, default_warmup(steps) if optim.warmup is None else optim.warmup


def loss_scale(precision: PrecisionConfig) -> LossScale:
    """Returns the rule of the loss scale; without fp16 the scale is always 1."""
    if precision.dtype != "fp16":
        return LossScale(initial=1.0, dynamic=False)
    given = precision.loss_scale
    return LossScale() if given == "dynamic" else LossScale(initial=float(given), dynamic=False)
