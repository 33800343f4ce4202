"""Finds invalid combinations of keys before a run starts. A problem is one line with a fix.

    problems = find_problems(config, world_size=8)      # [] if the configuration is valid

The module `requirements` lists features that are not implemented yet, and pairs of keys in which
the first key requires certain values of the second. The functions `_check_...` check sizes, such as
whether one is a multiple of another. The values of single keys are not checked here, because
`threed.config.values` declares which values are valid.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

from threed import schedules
from threed.config import architectures
from threed.config.groups import (
    Config,
    ConfigError,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    key_name,
)
from threed.config.requirements import (
    ASYNCHRONOUS,
    GRAPHS,
    REFUSALS,
    REQUIREMENTS,
    Refusal,
    Requirement,
    listed,
    value_of,
)
from threed.config.resolution import context_fits, context_multiple, derive_dp, schedule_problem
from threed.config.schema import written
from threed.core.messages import counted
from threed.schedules import registry

MOST_MICROBATCHES = 100_000  # Maximum per step, because larger plans take much time and memory.


def find_refusals(
    config: Config, groups: tuple[str, ...] = ("parallel", "zero", "recompute")
) -> list[str]:
    """Returns the problems for which an engine rejects a configuration, one line each.

    Args:
        config: configuration to check.
        groups: groups of keys whose `REQUIREMENTS` are checked. `REFUSALS` are checked for all
            groups.
    """
    required = [row for row in REQUIREMENTS if row.key.partition(".")[0] in groups]
    required += ASYNCHRONOUS if registry.is_asynchronous(config.parallel.schedule) else ()
    rows: tuple[Refusal | Requirement, ...] = (*REFUSALS, *required)
    found = [row.find(config) for row in rows]
    return [problem for problem in found if problem] + list(_check_drive(config))


def find_graph_problems(config: Config) -> list[str]:
    """Returns why passes of a configuration cannot be CUDA graphs, one line each."""
    run = config.run.model_copy(update={"graphs": True})
    found = [row.find(config.model_copy(update={"run": run})) for row in GRAPHS]
    return [problem for problem in found if problem]


def find_problems(
    config: Config,
    world_size: int,
    local_world: int | None = None,
    machines: tuple[int, int] | None = None,
) -> list[str]:
    """Returns all problems of an unresolved configuration, one line each.

    Args:
        config: the configuration as loaded.
        world_size: number of ranks.
        local_world: number of ranks on this machine; None if not known.
        machines: minimum and maximum number of machines of an elastic job; None for other jobs.
    """
    problems = find_refusals(config, tuple(Config.model_fields))
    dp = None
    try:
        dp = derive_dp(config, world_size)
    except ConfigError as error:
        how = "--nproc-per-node"
        if local_world not in (None, world_size):
            how = f"--nnodes × {how}, now {local_world} on this machine"
        problems.append(f"{error} (torchrun {how})")
    # A custom model defines the meaning of the keys, so its heads and layers are not checked.
    sizes = () if config.model.record is architectures.CUSTOM else (_check_heads, _check_layers)
    for check in (*sizes, _check_sequence, _check_run, _check_export):
        problems += check(config)
    problems += find_model_problems(config.model)
    for check_ranks in (
        _check_schedule,
        find_batch_problems,
        _check_shard_size,
        _check_experts,
        _check_replicas,
    ):
        problems += check_ranks(config, dp)
    if machines is not None and not problems:
        problems += check_sizes(config, machines, local_world or 1)
    return list(dict.fromkeys(problems))


def _divisors(number: int) -> list[int]:
    # finds all divisors of numbers up to 10**12, and only some of larger ones, to limit the time
    small = [n for n in range(1, min(math.isqrt(number), 10**6) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def around(number: int, step: int) -> str:
    """Returns the multiples of `step` nearest to `number`, as text."""
    below = number // step * step
    return listed(sorted({below or step, below + step}))


def _check_shard_size(config: Config, dp: int | None) -> Iterator[str]:
    size, cp = config.zero.shard_size, config.parallel.cp
    if config.zero.stage and size != "all" and dp is not None and dp * cp % size:
        ranks = f"dp {dp}" if cp == 1 else f"dp {dp} × cp {cp} = {dp * cp}"
        given = f"--zero.shard-size {size} does not divide {ranks}"
        yield f"{given}: use {listed(_divisors(dp * cp))}, or all"


def _check_experts(config: Config, dp: int | None) -> Iterator[str]:
    p = config.parallel
    ranks = p.cp * p.tp * (dp or 1)
    if dp is not None and ranks % p.ep:
        given = f"--parallel.ep {p.ep} does not divide dp {dp} × cp {p.cp} × tp {p.tp} = {ranks}"
        yield f"{given}: use {listed(_divisors(ranks))}"
    experts = (dict(config.model) | config.model.record.resolved(dict(config.model)))["experts"]
    if experts is not None and experts % p.ep:
        given = f"--parallel.ep {p.ep} does not divide --model.experts {experts}"
        yield f"{given}: use {listed(_divisors(experts))}"
    seq, parts = config.model.seq, context_multiple(config) * p.tp
    if experts is not None and p.sequence is False and seq % (p.cp * p.tp):
        given = f"--model.seq {seq} with experts is not divisible by --parallel.tp {p.tp} × --parallel.cp {p.cp}"
        yield f"{given}: use {around(seq, parts)}, so that each tensor rank routes a part of the tokens"
    if config.experts.room and p.ep == 1:
        yield "--experts.room without --parallel.ep above 1, so no rows of tokens are sent: leave it out"


def _check_drive(config: Config) -> Iterator[str]:
    keys = ("zero.offload-optimizer", "zero.offload-params", "recompute.offload")
    to_nvme = [f"--{key} nvme" for key in keys if value_of(config, key) == "nvme"]
    if to_nvme and config.zero.nvme_path is None:
        yield f"{', '.join(to_nvme)}: set --zero.nvme-path FOLDER, on a fast local drive"
    if config.zero.nvme_path is not None and not to_nvme:
        yield "--zero.nvme-path without anything offloaded to it: use --zero.offload-optimizer nvme, or leave it out"


def heads_fit(heads: int, kv_heads: int, tp: int) -> bool:
    """Returns whether attention heads can be sharded over tensor-parallel ranks.

    The number of query heads must be a multiple of the number of key/value heads, and of `tp`. If
    there are at least as many key/value heads as ranks, their number must be a multiple of `tp`, so
    that every rank has the same number. Otherwise `tp` must be a multiple of their number, so that
    the same number of ranks share each key/value head.

    Args:
        heads: number of query heads.
        kv_heads: number of key/value heads.
        tp: number of tensor-parallel ranks.
    """
    return heads % kv_heads == 0 and heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0)


def _check_heads(config: Config) -> Iterator[str]:
    model, tp = config.model, config.parallel.tp
    kv_heads = model.kv_heads or model.heads
    fits = [n for n in _divisors(model.heads) if heads_fit(model.heads, kv_heads, n)]
    if model.heads % kv_heads:
        usable = listed(_divisors(model.heads))
        yield f"--model.kv-heads {kv_heads} does not divide --model.heads {model.heads}: use {usable}"
    elif model.heads % tp:
        yield f"--model.heads {model.heads} is not divisible by --parallel.tp {tp}: use --parallel.tp {listed(fits)}"
    elif tp not in fits:
        rule = "one must be a multiple of the other"
        yield f"--model.kv-heads {kv_heads} and --parallel.tp {tp}: {rule}; use --parallel.tp {listed(fits)}"
    else:
        yield from _check_context(config, model.heads // tp, max(kv_heads // tp, 1))
    if model.head_dim is None and model.hidden % model.heads:
        given, near = f"--model.hidden {model.hidden}", around(model.hidden, model.heads)
        yield f"{given} is not divisible by --model.heads {model.heads}: use --model.hidden {near}, or give --model.head-dim"


def _check_context(config: Config, heads: int, kv_heads: int) -> Iterator[str]:
    """Yields a problem if the context ranks cannot divide the heads of a tensor rank."""
    cp, u = config.parallel.cp, config.parallel.cp_heads
    if cp == 1 or u == "auto" or context_fits(heads, kv_heads, cp, u):
        return
    given = f"--parallel.cp-heads {u} with {counted(heads, 'head')} and {counted(kv_heads, 'key/value head')}"
    fits = [n for n in _divisors(cp) if context_fits(heads, kv_heads, cp, n)]
    of = f"{given} per tensor rank and --parallel.cp {cp}"
    rule = (
        "it must divide cp and the heads, and divide the key/value heads or be a multiple of them"
    )
    yield f"{of}: {rule}; use {listed(fits)}, or auto"


def _check_layers(config: Config) -> Iterator[str]:
    layers, pp, further = config.model.layers, config.parallel.pp, config.model.mtp_depth
    if layers < pp:
        fix = f"use --parallel.pp of at most {layers}"
        yield f"--model.layers {layers} < --parallel.pp {pp}: a stage needs at least one layer; {fix}"
    yield from find_partition_problems(config.parallel, layers + further + 2)


def find_partition_problems(
    p: ParallelConfig, layers: int, stages: int | None = None
) -> Iterator[str]:
    """Yields the problems of a partition that lists the number of layers of each stage.

    Args:
        p: the `parallel` keys.
        layers: number of layers, embedding and head included.
        stages: number of stages of the plan, if known.
    """
    if not isinstance(p.partition, tuple):
        return
    given, total = f"--parallel.partition {written(p.partition)}", sum(p.partition)
    if stages is not None and len(p.partition) != stages:
        fix = f"give {counted(stages, 'number')}, one for each of {named_stages(p, stages)}"
        yield f"{given} is for {counted(len(p.partition), 'stage')}: {fix}"
    if total != layers:
        yield f"{given} makes {total} layers: {layers} are needed, embedding and head included"


def named_stages(p: ParallelConfig, stages: int) -> str:
    """Returns the flags that determine the number of stages, for a message."""
    chunks = f" × {counted(stages // p.pp, 'chunk')} of --parallel.schedule {p.schedule}"
    return f"--parallel.pp {p.pp}{chunks if stages != p.pp else ''}"


def _check_schedule(config: Config, dp: int | None) -> Iterator[str]:
    """Yields problems of the schedule with the configured stages, micro-batches and layers."""
    name, p, train = config.parallel.schedule, config.parallel, config.train
    rows = train.micro_batch * (dp or 1)
    # if the global batch cannot be divided into micro-batches, find_batch_problems reports the problem
    known = dp is not None and train.global_batch % rows == 0
    count = train.global_batch // rows if known else 2 * p.pp
    if count > MOST_MICROBATCHES:
        given = f"--train.global-batch {train.global_batch} makes {counted(count, 'micro-batch')} per data rank"
        yield f"{given}: a plan has at most {MOST_MICROBATCHES}; use a larger --train.micro-batch"
        return
    try:
        sizes = (name, p.pp, count, p.chunks)
        if plan := schedules.build(*sizes) if known else registry.build_some(name, p.pp, p.chunks):
            yield from _check_stages(config, plan.total_stages)
    except ValueError as error:
        yield schedule_problem(error, config, dp)


def _check_stages(config: Config, stages: int) -> Iterator[str]:
    """Yields problems of the plan's number of stages.

    There must be at least as many layers as stages. A partition that lists numbers of layers must
    have one number per stage.
    """
    p, layers, further = config.parallel, config.model.layers, config.model.mtp_depth
    count = layers + further + 2
    if layers >= p.pp and count < stages:  # _check_layers reports layers < pp
        with_further = f", --model.mtp-depth {further}" if further else ""
        given = f"--model.layers {layers}{with_further}, with embedding and head {count}, for the {stages} stages"
        fix = f"use --model.layers {stages - further - 2} or more, or another schedule"
        yield f"{given} of {named_stages(p, stages)}: {fix}"
    yield from find_partition_problems(p, count, stages)


def _check_sequence(config: Config) -> Iterator[str]:
    p, seq = config.parallel, config.model.seq
    tp = p.tp if p.sequence is not False else 1
    context = context_multiple(config)
    if seq % (context * tp) == 0:
        return
    given = f"--model.seq {seq} is not divisible by"
    off = ", or turn sequence parallelism off with --parallel.sequence false" if tp > 1 else ""
    if context == 1:
        yield f"{given} --parallel.tp {tp}: use {around(seq, tp)}{off}"
        return
    parts = f"{context * tp}, for --parallel.cp {p.cp}" + (
        f" and --parallel.tp {tp}" if tp > 1 else ""
    )
    yield f"{given} {parts}: use {around(seq, context * tp)}{off if seq % context == 0 else ''}"


def find_unused(optim: OptimConfig, flags: Collection[str]) -> Iterator[str]:
    """Yields a problem for each flag of an optimizer setting that no optimizer of the run uses.

    Unused keys in a preset or TOML file, and flags with the default value, are not problems.

    Args:
        optim: the configuration of the optimizers.
        flags: keys that were given as flags, as `group.field`.
    """
    defaults = OptimConfig.model_fields
    names = {optim.name, *(group.name for group in optim.groups)}
    for key, users in (("momentum", {"sgd"}), ("betas", {"adamw", "lion"}), ("eps", {"adamw"})):
        value, own = getattr(optim, key), defaults[key].default
        if f"optim.{key}" in flags and value != own and names.isdisjoint(users):
            given = f"--optim.{key} {written(value)} with --optim.name {optim.name}"
            yield f"{given}, which does not use it: leave it out, or use the default {written(own)}"


def find_size_problems(config: Config, **sizes: int) -> list[str]:
    """Returns a problem if parallel sizes of the configuration are not those of the topology.

    Args:
        config: configuration to check; sizes that are not set are not checked.
        sizes: size of each axis of the topology, by name.
    """
    given = {axis: getattr(config.parallel, axis) for axis in sizes}
    differ = [axis for axis, size in sizes.items() if given[axis] not in (None, size)]
    if not differ:
        return []
    own = " and ".join(f"parallel.{axis} is {given[axis]}" for axis in differ)
    theirs = " and ".join(f"{axis} {sizes[axis]}" for axis in differ)
    fix = ", ".join(f'"{axis}": {sizes[axis]}' for axis in differ)
    return [
        f"{own}, but the topology has {theirs}: set parallel={{{fix}}} in the Config, as in the topology"
    ]


def find_batch_problems(config: Config, dp: int | None) -> Iterator[str]:
    """Yields a problem if the global batch cannot be divided into micro-batches.

    Args:
        config: configuration to check.
        dp: number of data ranks; None if not known.
    """
    batch, micro = config.train.global_batch, config.train.micro_batch
    if dp is None or batch % (micro * dp) == 0:
        return
    divisors = _divisors(batch // dp) if batch % dp == 0 else []
    smaller = max((n for n in divisors if n < micro), default=0)
    other = f", or --train.micro-batch {smaller}" if smaller else ""
    product = f"--train.micro-batch {micro} × dp {dp} = {micro * dp}"
    use = around(batch, micro * dp)
    yield f"--train.global-batch {batch} is not divisible by {product}: use {use}{other}"


def _check_replicas(config: Config, dp: int | None) -> Iterator[str]:
    p, every = config.parallel, config.run.check_replicas
    if every and dp == p.tp == p.pp == p.cp == 1:
        yield f"--run.check-replicas {every} on one rank: there are no replicas; leave it out"


def _check_run(config: Config) -> Iterator[str]:
    if config.run.replicate == "neighbor" and config.checkpoint.memory_every == 0:
        given = "--run.replicate neighbor with --checkpoint.memory-every 0"
        yield f"{given}: there are no copies in memory; use --checkpoint.memory-every 1, or --run.replicate none"
    optim, steps, stop = config.optim, config.train.steps, config.train.stop_after
    if stop is not None and stop > steps:
        yield f"--train.stop-after {stop} is past --train.steps {steps}: use at most {steps}, or --train.steps {stop}"
    if optim.warmup and optim.warmup >= steps:
        fix = f"leave it out, or use --optim.warmup {steps // 2}, or --train.steps {optim.warmup + 1} or more"
        yield f"--optim.warmup {optim.warmup} with --train.steps {steps}: the rate never decays from its peak; {fix}"
    if optim.min_lr is not None and optim.min_lr > optim.lr:
        yield f"--optim.min-lr {optim.min_lr:g} is above --optim.lr {optim.lr:g}: use at most {optim.lr:g}"


def find_model_problems(model: ModelConfig) -> Iterator[str]:
    """Yields problems of a model: keys that its architecture does not have, and inconsistent sizes.

    Args:
        model: the `model` keys, resolved or not.
    """
    yield from _check_pairs(model)
    yield from _check_keys(model)
    yield from _check_positions(model)
    yield from _check_choices(model)
    if model.mtp_depth >= model.seq:
        given = f"--model.mtp-depth {model.mtp_depth} with --model.seq {model.seq}"
        yield f"{given}: no token is so far ahead; use at most {model.seq - 1}"


def _check_pairs(model: ModelConfig) -> Iterator[str]:
    if model.record.latent:
        if model.rope_dim is not None and model.rope_dim % 2:
            given = f"--model.rope-dim {model.rope_dim}"
            yield f"{given}: rotary positions turn pairs; use --model.rope-dim {model.rope_dim + 1}"
        return
    share = model.partial_rotary_factor
    turned = int((model.head_dim or model.hidden // model.heads) * share)
    known = model.head_dim or model.hidden % model.heads == 0
    if model.record.learned_positions or not known or turned % 2 == 0:
        return
    if share == 1.0:
        yield f"heads of size {turned}: rotary positions turn pairs; use --model.head-dim {turned + 1}"
    else:
        given = f"--model.partial-rotary-factor {share:g} turns {turned} dimensions of a head"
        yield f"{given}: rotary positions turn pairs; use another --model.partial-rotary-factor"


def _check_keys(model: ModelConfig) -> Iterator[str]:
    """Yields a problem for each key that has a value although the architecture does not have it."""
    record, records = model.record, architectures.REGISTERED.values()
    for key in sorted(frozenset[str]().union(*(other.takes for other in records)) - record.takes):
        value, own = getattr(model, key), record.resolved(dict(model) | {key: None}).get(key)
        if value not in (ModelConfig.model_fields[key].default, own):
            having = " or ".join(other.name for other in records if key in other.takes)
            yield f"--model.{key_name(key)} {written(value)} is for --model.arch {having}: leave it out with {model.arch}"


def _check_positions(model: ModelConfig) -> Iterator[str]:
    positions, d = model.positions or model.seq, model.head_dim or model.hidden // model.heads
    if positions < model.seq:
        yield f"--model.positions {positions} is less than --model.seq {model.seq}: use {model.seq} or more"
    if (scaling := model.rope_scaling) is None:
        return
    pairs = int(d * model.partial_rotary_factor) // 2
    for name in ("short_factor", "long_factor"):
        if (numbers := getattr(scaling, name)) is not None and len(numbers) != pairs:
            given = (
                f"--model.rope-scaling with {counted(len(numbers), 'number')} of {key_name(name)}"
            )
            yield f"{given}: a head turns {counted(pairs, 'pair')}; give {counted(pairs, 'number')}"


def _check_choices(model: ModelConfig) -> Iterator[str]:
    """Yields a problem if a token cannot have its experts, or if no block has experts."""
    keys = dict(model) | model.record.resolved(dict(model))
    experts, each = keys["experts"], keys["experts_per_token"]
    if experts is None:
        return
    if too_many := each is not None and each > experts:
        given = f"--model.experts-per-token {each} with --model.experts {experts}"
        yield f"{given}: use at most {experts}"
    groups, chosen = model.expert_groups, model.groups_per_token
    if experts % groups:
        given = f"--model.expert-groups {groups} does not divide --model.experts {experts}"
        yield f"{given}: use {listed(_divisors(experts))}"
    elif chosen > groups or (not too_many and (each or 0) > experts // groups * chosen):
        given = f"--model.groups-per-token {chosen} of --model.expert-groups {groups}"
        yield f"{given} cannot have {each} of {counted(experts, 'expert')}: use other numbers"
    dense, every = model.dense_layers, model.expert_every
    if model.layers // every * every <= dense:
        given = f"--model.dense-layers {dense} and --model.expert-every {every}"
        yield f"{given} with --model.layers {model.layers}: no block has experts; use smaller numbers"


def _check_export(config: Config) -> Iterator[str]:
    model, export = config.model, config.checkpoint.export_hf
    for limit in model.layout.inexpressible(dict(model)) if export else ():
        yield f"{limit}: the Hugging Face layout cannot express that; leave it out, or use --checkpoint.export-hf false"


def check_vocab(config: Config, tokenizer_vocab: int) -> Iterator[str]:
    """Yields a problem if the model's vocabulary is smaller than the tokenizer's.

    Args:
        config: configuration to check.
        tokenizer_vocab: smallest vocabulary size that has all ids of encoded text.
    """
    vocab = config.model.vocab
    if vocab is not None and vocab < tokenizer_vocab:
        tokens = f"the tokenizer's {tokenizer_vocab} tokens ({config.data.tokenizer})"
        fix = f"use --model.vocab {tokenizer_vocab}, or leave it out; pretrained weights need their own tokenizer"
        yield f"--model.vocab {vocab} is less than {tokens}: {fix}"


def check_sizes(config: Config, machines: tuple[int, int], ranks: int) -> Iterator[str]:
    """Yields a problem if the configuration is invalid for some number of machines of the job.

    An elastic job that loses a machine continues with fewer machines, so the configuration must be
    valid for every number from the minimum to the maximum.

    Args:
        config: configuration to check.
        machines: minimum and maximum number of machines.
        ranks: ranks per machine.
    """
    p, train = config.parallel, config.train
    model_ranks, flag = p.tp * p.pp * p.cp, f"--nnodes {machines[0]}:{machines[1]}"
    sizes = [n * ranks for n in range(machines[0], machines[1] + 1)]
    if p.dp is not None and len({p.dp * model_ranks, *sizes}) > 1:
        yield f"{flag} with --parallel.dp {p.dp}: the data ranks follow from the machines; leave --parallel.dp out"
        return
    if invalid := [size for size in sizes if size % model_ranks]:
        factors = f"tp {p.tp} × pp {p.pp}" + (f" × cp {p.cp}" if p.cp > 1 else "")
        found = f"{flag} may give {counted(invalid[0], 'rank')}"
        yield f"{found}, not a multiple of {factors}: start a multiple of it on each machine"
        return
    ranks_of = [size // model_ranks for size in sizes]
    fits = [dp for dp in ranks_of if train.global_batch % (train.micro_batch * dp) == 0]
    if bad := sorted(set(ranks_of) - set(fits)):
        product = train.micro_batch * math.lcm(*ranks_of)
        rows = -(-train.global_batch // product) * product
        given = (
            f"--train.global-batch {train.global_batch} with micro-batches of {train.micro_batch}"
        )
        works = f"works for dp {', '.join(map(str, fits)) or 'none'}"
        yield f"{flag} may give dp {bad[0]}, and {given} {works}: use --train.global-batch {rows}, or fewer machines"
