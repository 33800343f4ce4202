"""Combinations of keys that cannot work, found before anything starts: each problem a line that names its fix.

    problems = find_problems(config, world_size=8)      # [] where all is well

`REFUSALS` are features that are not there yet; the functions below look at several keys together. Ranges of single keys
stand with the keys in `threed.config`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from threed import schedules
from threed.architectures.checks import export_limits as export_limits
from threed.architectures.checks import find_model_problems
from threed.config import Config, ConfigError, key_name
from threed.resolution import count_microbatches, derive_dp, schedule_problem
from threed.save_checks import check_copies, check_saves


@dataclass(frozen=True)
class Refusal:
    """A key of which only some values work so far."""

    group: str
    field: str
    works: tuple[object, ...]
    feature: str

    def find(self, config: Config) -> str | None:
        """The problem line if `config` asks for the feature."""
        value = getattr(getattr(config, self.group), self.field)
        if value in self.works:
            return None
        fix = " or ".join(_as_written(works) for works in self.works)
        flag = f"--{self.group}.{key_name(self.field)}"
        return f"{flag} {_as_written(value)}: {self.feature} is not there yet; use {flag} {fix}"


def _of_schedule(name: str) -> tuple[Refusal, ...]:
    """What is there of chunks under a schedule, a registered one too; `_check_schedule` looks into those of files."""
    if schedules.names_file(name) or schedules.chunks_are_free(name):
        return ()
    own = (None, schedules.own_chunks(name))
    return (Refusal("parallel", "chunks", own, f"another number of chunks with {name}"),)


_OTHERS = (
    Refusal("parallel", "cp", (1,), "context parallelism"),
    Refusal("parallel", "ep", (1,), "expert parallelism"),
    Refusal("precision", "dtype", ("fp32", "bf16", "fp16", "fp64"), "this format"),
)
MOST_MICROBATCHES = 100_000  # of a step; to build a plan takes time and memory for each
LAYER_MAJOR = ("1f1b", "gpipe")  # on one stage the same: no bubble, whatever comes first
REFUSALS = (*_OTHERS, *_of_schedule("interleaved"))
"""Features that are not there yet, under a schedule with any number of chunks. Who builds one deletes its line."""


def find_refusals(config: Config) -> list[str]:
    """What an engine refuses: the features that are not there yet, each with what is, and keys of memory that would do
    nothing."""
    missing = [
        problem
        for refusal in (*_OTHERS, *_of_schedule(config.parallel.schedule))
        if (problem := refusal.find(config))
    ]
    own = (
        _check_memory_limit,
        _check_offload,
        _check_order,
        _check_recompute,
        _check_optimistic,
        _check_asynchronous,
    )
    return [*missing, *(problem for look in own for problem in look(config))]


def find_problems(
    config: Config,
    world_size: int,
    local_world: int | None = None,
    tokenizer_vocab: int | None = None,
) -> list[str]:
    """All problems of this configuration in a world of `world_size` ranks, `local_world` of them on a machine.

    Pass the configuration as loaded, before it is resolved; `tokenizer_vocab` where the tokenizer is known.
    """
    problems = find_refusals(config)
    dp = None
    try:
        dp = derive_dp(config, world_size)
    except ConfigError as error:
        machines = local_world not in (None, world_size)
        how = (
            f"--nnodes × --nproc-per-node, now {local_world} on this machine"
            if machines
            else "--nproc-per-node"
        )
        problems.append(f"{error} (torchrun {how})")
    own = (
        _check_loss_scale,
        _check_heads,
        _check_layers,
        _check_sequence,
        _check_run,
        _check_recheck,
        check_saves,
        check_copies,
    )
    for check in (*own, _check_export):
        problems += check(config)
    problems += find_model_problems(config.model)
    problems += _check_schedule(config, dp)
    problems += _check_batch(config, dp)
    problems += _check_shard_size(config, dp)
    problems += _check_replicas(config, dp)
    problems += _check_vocab(config, tokenizer_vocab)
    return list(dict.fromkeys(problems))


def _as_written(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(str(item) for item in value)
    return "none" if value is None else str(value)


def _divisors(number: int) -> list[int]:
    # of any that is meant, all
    small = [n for n in range(1, min(math.isqrt(number), 10**6) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _listed(numbers: Iterable[int]) -> str:
    """At most twelve of them, "1, 2 or 3"."""
    words = [str(number) for number in numbers]
    if len(words) > 12:
        words = [*words[:11], words[-1]]
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _around(number: int, step: int) -> str:
    """The multiples of `step` nearest to `number`."""
    below = number // step * step
    return _listed(sorted({below or step, below + step}))


def _check_loss_scale(config: Config) -> Iterator[str]:
    dtype, scale = config.precision.dtype, config.precision.loss_scale
    if scale != "dynamic" and dtype != "fp16":
        given = f"--precision.loss-scale {scale:g} with --precision.dtype {dtype}"
        yield f"{given}: only fp16 needs its loss scaled; leave it out, or use --precision.dtype fp16"


def _check_memory_limit(config: Config) -> Iterator[str]:
    p = config.parallel
    if p.memory_limit_gib is not None and (p.partition != "measured" or p.pp == 1):
        given = f"--parallel.memory-limit-gib {p.memory_limit_gib:g} with --parallel.partition {_as_written(p.partition)}"
        why = "it bounds the cut by measured times over several pipeline ranks"
        yield f"{given} and --parallel.pp {p.pp}: {why}; use --parallel.partition measured, or leave it out"


def _check_shard_size(config: Config, dp: int | None) -> Iterator[str]:
    size, given = config.zero.shard_size, f"--zero.shard-size {config.zero.shard_size}"
    if size == "all":
        return
    if config.zero.stage == 0:
        yield f"{given} with --zero.stage 0: nothing is sliced; use --zero.shard-size all, or --zero.stage 1, 2 or 3"
        return
    if dp is not None and dp % size:
        yield f"{given} does not divide dp {dp}: use {_listed(_divisors(dp))}, or all"


def _check_offload(config: Config) -> Iterator[str]:
    zero = config.zero
    stage = f"with --zero.stage {zero.stage}"
    if zero.offload_optimizer != "none" and zero.stage == 0:
        what = f"--zero.offload-optimizer {zero.offload_optimizer} {stage}"
        yield f"{what}: it moves what ZeRO slices; use --zero.stage 1, 2 or 3"
    if zero.offload_params != "none" and zero.stage != 3:
        yield f"--zero.offload-params {zero.offload_params} {stage}: parameters are whole there; use --zero.stage 3"
    places = {
        "--zero.offload-optimizer": zero.offload_optimizer, "--zero.offload-params": zero.offload_params,
        "--recompute.offload": config.recompute.offload,
    }  # fmt: skip
    to_nvme = [flag for flag, place in places.items() if place == "nvme"]
    if to_nvme and zero.nvme_path is None:
        yield f"{' nvme, '.join(to_nvme)} nvme: say where with --zero.nvme-path FOLDER, on a fast local drive"
    if zero.nvme_path is not None and not to_nvme:
        yield "--zero.nvme-path without anything offloaded to it: use --zero.offload-optimizer nvme, or leave it out"
    if zero.tile > 1 and zero.stage != 3:
        why = "tiles are gathered one at a time, and there is nothing to gather"
        yield f"--zero.tile {zero.tile} {stage}: {why}; use --zero.stage 3, or leave it out"
    if zero.compress_weights != "none" and zero.stage != 3:
        given = f"--zero.compress-weights {zero.compress_weights} {stage}"
        yield f"{given}: parameters are in full there; use --zero.stage 3, or leave it out"
    if zero.delayed_update and zero.offload_optimizer != "cpu":
        yield "--zero.delayed-update true works on optimizer states in host memory: use --zero.offload-optimizer cpu"
    if zero.early_update is True and (zero.order, *list(places.values())[:2]) != (
        "layer",
        "nvme",
        "nvme",
    ):
        needs = (
            "--zero.order layer with both --zero.offload-optimizer and --zero.offload-params nvme"
        )
        yield f"--zero.early-update true needs {needs}; use auto, which is true there, or set these"


def _check_optimistic(config: Config) -> Iterator[str]:
    """What an update that may be undone does not go with."""
    if config.parallel.optimistic_step is not True:
        return
    given, zero = "--parallel.optimistic-step true", config.zero
    if config.parallel.pp == 1:
        yield f"{given} with --parallel.pp 1: no stage waits for another; use auto, or --parallel.pp 2 or more"
    if zero.delayed_update:
        yield f"{given} with --zero.delayed-update true: both let the next step begin early; use one of them"
    places = {
        "--zero.offload-optimizer": zero.offload_optimizer,
        "--zero.offload-params": zero.offload_params,
    }
    for flag, place in places.items():
        if place != "none" and not zero.delayed_update:
            yield f"{given} with {flag} {place}: it keeps copies of what is on the device; use auto, or {flag} none"


def _check_asynchronous(config: Config) -> Iterator[str]:
    """What steps that overlap, with an update one step late, do not go with."""
    p, zero = config.parallel, config.zero
    given = f"--parallel.schedule {p.schedule}"
    if not schedules.is_asynchronous(p.schedule):
        return
    if zero.stage > 1:
        why = "slices of gradients would be summed into those of the step before"
        yield f"{given} with --zero.stage {zero.stage}: {why}; use --zero.stage 0 or 1"
    places = {
        "--zero.offload-optimizer": zero.offload_optimizer,
        "--zero.offload-params": zero.offload_params,
    }
    for flag, place in places.items():
        if place != "none":
            yield f"{given} with {flag} {place}: both versions of the weights are on the device; use {flag} none"
    if zero.delayed_update or p.optimistic_step is True:
        late = "--zero.delayed-update" if zero.delayed_update else "--parallel.optimistic-step"
        yield f"{given} with {late} true: its update waits for nobody already; leave {late} out"
    if config.precision.dtype == "fp16":
        why = "a loss scale would change between a batch's forwards and backwards"
        yield f"{given} with --precision.dtype fp16: {why}; use bf16"


def _check_order(config: Config) -> Iterator[str]:
    """What `--zero.order layer` cannot do, or would do for nothing."""
    p, given = config.parallel, "--zero.order layer"
    if config.zero.order != "layer":
        return
    if config.zero.stage < 2:
        why = "parameters stay whole, and gradients are reduced once a step anyway"
        yield f"{given} with --zero.stage {config.zero.stage}: {why}; use --zero.stage 2 or 3, or --zero.order micro"
    if p.pp > 1:
        why = "a stage would have to wait for all micro-batches before its first layer"
        yield f"{given} with --parallel.pp {p.pp}: {why}; use --zero.order micro, or pp 1"
    elif p.schedule not in LAYER_MAJOR:
        yield f"{given} with --parallel.schedule {p.schedule}: use {' or '.join(LAYER_MAJOR)}, or --zero.order micro"


def heads_fit(heads: int, kv_heads: int, tp: int) -> bool:
    """Whether attention can be cut over tp ranks: whole groups of heads, and key/value heads shared by whole ranks."""
    return heads % kv_heads == 0 and heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0)


def _check_heads(config: Config) -> Iterator[str]:
    model, tp = config.model, config.parallel.tp
    kv_heads = model.kv_heads or model.heads
    fits = [n for n in _divisors(model.heads) if heads_fit(model.heads, kv_heads, n)]
    if model.heads % kv_heads:
        usable = _listed(_divisors(model.heads))
        yield f"--model.kv-heads {kv_heads} does not divide --model.heads {model.heads}: use {usable}"
    elif model.heads % tp:
        yield f"--model.heads {model.heads} is not divisible by --parallel.tp {tp}: use tp {_listed(fits)}"
    elif tp not in fits:
        rule = "one must be a multiple of the other"
        yield f"--model.kv-heads {kv_heads} and --parallel.tp {tp}: {rule}; use tp {_listed(fits)}"
    if model.head_dim is None and model.hidden % model.heads:
        given, near = f"--model.hidden {model.hidden}", _around(model.hidden, model.heads)
        yield f"{given} is not divisible by --model.heads {model.heads}: use hidden {near}, or give --model.head-dim"


def _check_layers(config: Config) -> Iterator[str]:
    layers, pp, counts = config.model.layers, config.parallel.pp, config.parallel.partition
    if layers < pp:
        yield f"--model.layers {layers} < --parallel.pp {pp}: a stage needs at least one layer; pp is at most {layers}"
    if not isinstance(counts, tuple):
        return
    given = f"--parallel.partition {_as_written(counts)}"
    if sum(counts) != layers + 2:
        yield f"{given} makes {sum(counts)} layers: {layers + 2} are needed (embedding, {layers} blocks, head)"


def _check_schedule(config: Config, dp: int | None) -> Iterator[str]:
    """Whether the schedule has a plan for the stages and micro-batches of this run, and the model layers for it."""
    name, p, train = config.parallel.schedule, config.parallel, config.train
    whole = dp is not None and train.global_batch % (train.micro_batch * dp) == 0
    # a batch that cannot be cut is said elsewhere
    count = count_microbatches(config, dp) if whole and dp else None
    if count is not None and count > MOST_MICROBATCHES:
        given = f"--train.global-batch {train.global_batch} makes {count} micro-batches a data rank"
        yield f"{given}: a plan has at most {MOST_MICROBATCHES}; use a larger --train.micro-batch"
    elif schedules.names_file(name):
        yield from _check_file(config, count)
    elif name in schedules.available():
        # another number is refused by name
        chunks = p.chunks if schedules.chunks_are_free(name) else None
        if schedules.is_asynchronous(name) and count is not None and count < p.pp:
            given = (
                f"--parallel.schedule {name} with {count} micro-batches and --parallel.pp {p.pp}"
            )
            rows = f"{p.pp * train.micro_batch * (dp or 1)}"
            fix = f"use --train.global-batch {rows} or more, or a smaller micro-batch"
            yield f"{given}: it needs one for each stage; {fix}"
            return
        try:
            plan = schedules.build(name, p.pp, count or 2 * p.pp, chunks)
        except ValueError as error:
            yield schedule_problem(error)
        else:
            yield from _check_stages(config, plan.total_stages)


def _check_stages(config: Config, stages: int) -> Iterator[str]:
    """Whether the layers are enough for the stages of a plan, and an explicit partition has a number for each."""
    p, layers = config.parallel, config.model.layers
    several = (
        f" × {stages // p.pp} chunks of --parallel.schedule {p.schedule}" if stages != p.pp else ""
    )
    if layers >= p.pp and layers + 2 < stages:  # fewer are refused already
        given = f"--model.layers {layers}, with embedding and head {layers + 2}, for the {stages} stages"
        yield f"{given} of --parallel.pp {p.pp}{several}: use --model.layers {stages - 2} or more, or another schedule"
    if isinstance(p.partition, tuple) and len(p.partition) != stages:
        given = f"--parallel.partition {_as_written(p.partition)} is for {len(p.partition)} stages"
        yield f"{given}: give {stages} numbers, one for each of --parallel.pp {p.pp}{several}"


def _check_file(config: Config, count: int | None) -> Iterator[str]:
    """The same of a schedule's file; count: micro-batches, where they are known."""
    name, p = config.parallel.schedule, config.parallel
    try:
        schedules.check_name(name)
        fixed = schedules.read_csv(name) if name.endswith(".csv") else None
        if fixed is not None and (fixed.stages, fixed.microbatches) != (
            p.pp,
            count or fixed.microbatches,
        ):
            given = f"{name} is for {fixed.stages} stages and {fixed.microbatches} micro-batches"
            fix = f"--parallel.pp {fixed.stages} and --train.global-batch {fixed.microbatches} × --train.micro-batch × dp"
            yield f"--parallel.schedule {given}, and this run has {p.pp} and {count or 'another number'}: use {fix}"
        elif count is not None:
            yield from _check_stages(
                config, schedules.build(name, p.pp, count, p.chunks).total_stages
            )
    except ValueError as error:
        yield schedule_problem(error)


def _check_sequence(config: Config) -> Iterator[str]:
    seq, tp = config.model.seq, config.parallel.tp
    if config.parallel.sequence is not False and seq % tp:
        off = "turn sequence parallelism off with --parallel.sequence false"
        yield f"--model.seq {seq} is not divisible by --parallel.tp {tp}: use {_around(seq, tp)}, or {off}"


def _check_recompute(config: Config) -> Iterator[str]:
    """Keys of recompute that would do nothing, or cannot be done, beside the others."""
    r, tp = config.recompute, config.parallel.tp
    if r.mode == "none" and r.every > 1:
        yield f"--recompute.every {r.every} with --recompute.mode none: use --recompute.mode full or selective"
    if r.mode != "selective" and r.ops != type(r)().ops:
        yield f"--recompute.ops {_as_written(r.ops)} is for --recompute.mode selective, not {r.mode}"
    if r.mode == "selective" and not r.ops:
        yield "--recompute.mode selective without --recompute.ops: name attention, activation or norm"
    inputs = {"partition": r.partition, "offload": r.offload, "arena": r.arena}
    for key, value in inputs.items() if r.mode != "full" else ():
        if value not in (False, "none"):
            given = f"--recompute.{key} {_as_written(value)} with --recompute.mode {r.mode}"
            yield f"{given}: it is about the inputs that recompute of whole layers keeps; use --recompute.mode full"
    if r.partition and tp == 1:
        yield "--recompute.partition true with --parallel.tp 1: there is no other rank to slice over; leave it out"
    if r.offload == "nvme" and r.arena:
        yield "--recompute.arena true with --recompute.offload nvme: a drive has buffers of constant size; leave it out"


def _check_batch(config: Config, dp: int | None) -> Iterator[str]:
    batch, micro = config.train.global_batch, config.train.micro_batch
    if dp is None or batch % (micro * dp) == 0:
        return
    smaller = max((n for n in range(1, micro) if batch % (n * dp) == 0), default=0)
    other = f", or --train.micro-batch {smaller}" if smaller else ""
    product = f"--train.micro-batch {micro} × dp {dp} = {micro * dp}"
    use = _around(batch, micro * dp)
    yield f"--train.global-batch {batch} is not divisible by {product}: use {use}{other}"


def _check_recheck(config: Config) -> Iterator[str]:
    """What changes weights between a step and its second computation."""
    if not config.run.recheck_bad_steps:
        return
    given = "--run.recheck-bad-steps true with"
    why = "weights change before a step could be computed again"
    if config.zero.delayed_update:
        yield f"{given} --zero.delayed-update true: {why}; use one of them"
    if schedules.is_asynchronous(config.parallel.schedule):
        yield f"{given} --parallel.schedule {config.parallel.schedule}: {why}; use another schedule, or leave it out"


def _check_replicas(config: Config, dp: int | None) -> Iterator[str]:
    p, every = config.parallel, config.run.check_replicas
    if every and dp == p.tp == p.pp == 1:
        yield f"--run.check-replicas {every} on one rank: it holds no copy of another's; leave it out"


def _check_run(config: Config) -> Iterator[str]:
    optim, steps, stop = config.optim, config.train.steps, config.train.stop_after
    if stop is not None and stop > steps:
        yield f"--train.stop-after {stop} is past --train.steps {steps}: use at most {steps}, or --train.steps {stop}"
    if optim.warmup and optim.warmup >= steps:
        fix = f"leave it out, or use --optim.warmup {steps // 2}, or --train.steps {optim.warmup + 1} or more"
        yield f"--optim.warmup {optim.warmup} with --train.steps {steps}: the rate never decays from its peak; {fix}"
    if optim.min_lr is not None and optim.min_lr > optim.lr:
        yield f"--optim.min-lr {optim.min_lr:g} is above --optim.lr {optim.lr:g}: use at most {optim.lr:g}"


def _check_export(config: Config) -> Iterator[str]:
    for limit in export_limits(config.model) if config.checkpoint.export_hf else ():
        yield f"{limit}: the Hugging Face layout cannot express that; drop it, or use --checkpoint.export-hf false"


def _check_vocab(config: Config, tokenizer_vocab: int | None) -> Iterator[str]:
    vocab = config.model.vocab
    if vocab is not None and tokenizer_vocab is not None and vocab < tokenizer_vocab:
        tokens = f"the tokenizer's {tokenizer_vocab} tokens ({config.data.tokenizer})"
        fix = f"use --model.vocab {tokenizer_vocab}, or leave it out; pretrained weights need their own tokenizer"
        yield f"--model.vocab {vocab} is less than {tokens}: {fix}"
