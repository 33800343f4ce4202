"""Fills in the values of a configuration that follow from other keys, vocabulary and world size.

    config = resolve(config, vocab=260, world_size=8)

A resolved configuration is the result of `resolve`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from threed import schedules
from threed.config import architectures
from threed.config.groups import Config, ConfigError, DType, ModelConfig
from threed.config.schema import BaseModel
from threed.core.messages import counted
from threed.core.source import names_model
from threed.schedules import registry


def derive_dp(config: Config, world_size: int) -> int:
    """Returns the number of data-parallel ranks.

    Args:
        config: configuration with the parallel sizes.
        world_size: number of ranks.

    Raises:
        ConfigError: if tp x pp x cp x dp is not the world size.
    """
    parallel = config.parallel
    model_ranks = parallel.tp * parallel.pp * parallel.cp
    dp = parallel.dp or max(1, world_size // model_ranks)
    if model_ranks * dp == world_size:
        return dp
    factors = f"tp {parallel.tp} × pp {parallel.pp}" + (
        f" × cp {parallel.cp}" if parallel.cp > 1 else ""
    )
    if parallel.dp is None:
        sizes = " or ".join(str(n) for n in sorted({model_ranks * dp, model_ranks * (dp + 1)}))
        raise ConfigError(
            [
                f"world size {world_size} is not a multiple of {factors} = {model_ranks}: start {sizes} ranks"
            ]
        )
    problem = f"world size {world_size} ≠ {factors} × dp {dp} = {model_ranks * dp}"
    if world_size % model_ranks == 0:
        raise ConfigError(
            [
                f"{problem}: use --parallel.dp {world_size // model_ranks}, or start {counted(model_ranks * dp, 'rank')}"
            ]
        )
    raise ConfigError(
        [
            f"{problem}: start {counted(model_ranks * dp, 'rank')}, or {model_ranks} with --parallel.dp 1"
        ]
    )


def count_microbatches(config: Config, dp: int) -> int:
    """Returns the number of micro-batches per data rank and step, rounded down, at least 1."""
    return max(1, config.train.global_batch // (config.train.micro_batch * dp))


def default_warmup(steps: int) -> int:
    """Returns the default number of warm-up steps for a run of `steps` steps."""
    return min(20, steps // 2)


def resolve(config: Config, vocab: int, world_size: int | None = None) -> Config:
    """Returns the configuration with all derived values filled in.

    Keys for which None is a meaningful value stay None, such as `train.stop_after`, `data.path`,
    `zero.nvme_path` and `log.profile_steps`. The path of a schedule file becomes absolute.

    Args:
        config: the checked configuration.
        vocab: vocabulary size of the tokenizer, used if `model.vocab` is not set.
        world_size: number of ranks. If None, `parallel.dp` is not filled in.

    Raises:
        ConfigError: if the schedule file is invalid, or the world size is not the product of the
            parallel sizes.
    """
    name = config.run.name or config.model.arch.rpartition(":")[2]
    dtype = config.precision.dtype
    widest: DType = "fp64" if dtype == "fp64" else "fp32"
    derived: dict[str, dict[str, Any]] = {
        "precision": {"grad_dtype": widest, "reduce_dtype": config.precision.grad_dtype or widest},
        "optim": {"min_lr": config.optim.lr / 10, "warmup": default_warmup(config.train.steps)},
        "run": {"name": name, "dir": f"runs/{name}"},
        "checkpoint": {"memory_every": int(config.run.replicate == "neighbor")},
    }
    groups = {group: _fill(getattr(config, group), values) for group, values in derived.items()}
    groups["parallel"] = _resolve_parallel(config, world_size)
    groups["model"] = resolve_model(config.model, vocab)
    return config.model_copy(update=groups)


def _fill(group: BaseModel, values: dict[str, Any]) -> BaseModel:
    return group.model_copy(
        update={key: value for key, value in values.items() if getattr(group, key) is None}
    )


def _resolve_parallel(config: Config, world_size: int | None) -> BaseModel:
    p, dp = config.parallel, None if world_size is None else derive_dp(config, world_size)
    sizes = () if dp is None else (p.pp, count_microbatches(config, dp))
    schedule = registry.absolute(p.schedule)
    try:
        chunks = p.chunks or registry.own_chunks(schedule, *sizes)
    except ValueError as error:
        raise ConfigError([schedule_problem(error, config, dp)]) from error
    derived = {"dp": dp, "sequence": p.tp > 1, "chunks": chunks}
    values = {"schedule": schedule, "cp_heads": context_heads(config)}
    return _fill(p, derived).model_copy(update=values)


def context_heads(config: Config) -> int:
    """Returns the number of context ranks that exchange positions for heads: `parallel.cp_heads`.

    For `auto` it is the number with which a rank sends the fewest bytes. The heads of a custom
    model are not known here; its context ranks form a ring.

    Args:
        config: the configuration, resolved or not.
    """
    p, model = config.parallel, config.model
    if p.cp_heads != "auto":
        return p.cp_heads
    if model.record is architectures.CUSTOM:
        return 1
    heads, kv_heads = model.heads // p.tp, max((model.kv_heads or model.heads) // p.tp, 1)
    fits = [u for u in range(1, p.cp + 1) if context_fits(heads, kv_heads, p.cp, u)]
    wide = 2 if config.precision.dtype in ("bf16", "fp16") else 1

    def sent(u: int) -> float:
        return context_traffic(heads, kv_heads, p.cp, u, wide)

    return min(fits, key=sent, default=1)


def context_multiple(config: Config) -> int:
    """Returns the number of which sequence lengths must be multiples for context parallelism."""
    return context_chunks(config.parallel.cp, context_heads(config))


def context_chunks(cp: int, heads: int) -> int:
    """Returns the number of chunks of a sequence that context ranks hold; two per rank of a ring.

    Args:
        cp: number of context ranks.
        heads: number of ranks that exchange positions for heads.
    """
    return cp if heads == cp else 2 * cp


def context_fits(heads: int, kv_heads: int, cp: int, u: int) -> bool:
    """Returns whether u of cp context ranks can exchange positions for heads.

    Args:
        heads: number of query heads of a tensor rank.
        kv_heads: number of key/value heads of a tensor rank.
        cp: number of context ranks.
        u: number of ranks that exchange positions for heads.
    """
    return cp % u == 0 and heads % u == 0 and (kv_heads % u == 0 or u % kv_heads == 0)


def context_traffic(heads: int, kv_heads: int, cp: int, u: int, wide: int) -> float:
    """Returns what a context rank sends per layer and micro-batch, forward and backward.

    The unit is the size of one head at the positions of a rank. The sums of gradients of keys and
    values travel around the ring in a format that is `wide` times as large.

    Args:
        heads: number of query heads of a tensor rank.
        kv_heads: number of key/value heads of a tensor rank.
        cp: number of context ranks.
        u: number of ranks that exchange positions for heads.
        wide: size of a gradient in the ring, relative to that of an activation.
    """
    ring, full = cp // u, max(kv_heads, u)
    exchange = 4 * (heads + full) * (u - 1) / u
    return exchange + (2 * full * (2 * (ring - 1) + wide * ring) if ring > 1 else 0)


def schedule_problem(error: ValueError, config: Config, dp: int | None = None) -> str:
    """Returns the line that reports an error of a schedule, with the flags that fix the error.

    Args:
        error: error of the schedule.
        config: configuration of the run.
        dp: number of data ranks, if known.
    """
    if not isinstance(error, schedules.SizesError):
        return f"--parallel.schedule {str(error).removeprefix('schedule ')}"
    p, needs = config.parallel, error.needs
    given = f"--parallel.schedule {error.problem.removeprefix('schedule ')}"
    if "chunks" in needs:
        fix = f"use --parallel.chunks {needs['chunks']}, or leave it out"
        return f"--parallel.chunks {p.chunks} with {given}; {fix}"
    fixes = []
    if needs.get("stages", p.pp) != p.pp:
        fixes.append(f"--parallel.pp {needs['stages']}")
        dp = None  # dp depends on pp, so dp is unknown for the new pp
    if "microbatches" in needs:
        fixes.append(_batch_of(config, needs["microbatches"], dp))
    return f"{given}; use {' and '.join(fixes)}, or another --parallel.schedule"


def _batch_of(config: Config, microbatches: int, dp: int | None) -> str:
    """Returns flags that result in `microbatches` micro-batches per data rank and step."""
    train = config.train
    if dp is None:
        return f"--train.global-batch {microbatches} × --train.micro-batch × dp"
    rows, rest = divmod(train.global_batch, microbatches * dp)
    smaller = f" or --train.micro-batch {rows}" if rows and not rest else ""
    return f"--train.global-batch {microbatches * train.micro_batch * dp}{smaller}"


def resolve_model(model: ModelConfig, vocab: int | None = None) -> ModelConfig:
    """Returns a model configuration with the architecture's defaults filled in.

    Args:
        model: configuration of the model.
        vocab: vocabulary size, used if `model.vocab` is not set; None to leave it unset.
    """
    derived = model.record.resolved(dict(model))
    if names_model(model.arch):
        file, _, name = model.arch.rpartition(":")
        derived["arch"] = f"{Path(file).absolute()}:{name}"
    if model.vocab is None and vocab is not None:
        derived["vocab"] = vocab
    return model.model_copy(update=derived)
