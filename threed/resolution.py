"""Fills in what a configuration leaves open: what follows from other keys, the vocabulary and the number of ranks.

config = resolve(config, vocab=260, world_size=8)          # everything that is derived, filled in
"""

from __future__ import annotations

from typing import Any

from threed import schedules
from threed.config import Config, ConfigError, DType, ModelConfig
from threed.schema import BaseModel


def derive_dp(config: Config, world_size: int) -> int:
    """Data-parallel ranks of this world. Raises ConfigError where tp x pp x cp x dp is not the world size."""
    parallel = config.parallel
    others = parallel.tp * parallel.pp * parallel.cp
    dp = parallel.dp or max(1, world_size // others)
    if others * dp == world_size:
        return dp
    factors = f"tp {parallel.tp} × pp {parallel.pp}" + (
        f" × cp {parallel.cp}" if parallel.cp > 1 else ""
    )
    if parallel.dp is None:
        sizes = " or ".join(str(n) for n in sorted({others * dp, others * (dp + 1)}))
        raise ConfigError(
            [
                f"world size {world_size} is not a multiple of {factors} = {others}: start {sizes} ranks"
            ]
        )
    problem = f"world size {world_size} ≠ {factors} × dp {dp} = {others * dp}"
    if world_size % others == 0:
        raise ConfigError(
            [f"{problem}: use --parallel.dp {world_size // others}, or start {others * dp} ranks"]
        )
    raise ConfigError([f"{problem}: start {others * dp} ranks, or {others} with --parallel.dp 1"])


def count_microbatches(config: Config, dp: int) -> int:
    """Micro-batches that a data rank runs in a step, of whole ones."""
    return max(1, config.train.global_batch // (config.train.micro_batch * dp))


def default_warmup(steps: int) -> int:
    """Returns the default warm-up of a run of `steps` steps."""
    return min(20, steps // 2)


def resolve(config: Config, vocab: int, world_size: int | None = None) -> Config:
    """Returns the configuration with every derived value; dp stays open without a world size.

    None remains where it is a value: `train.stop_after`, `data.path`, `zero.nvme_path`, `log.profile_steps`. The path
    of a schedule's file becomes absolute.

    Args:
        vocab: the number of tokens of the data.

    Raises:
        ConfigError: the schedule's file is wrong.
    """
    name, dtype = config.run.name or config.model.arch, config.precision.dtype
    widest: DType = "fp64" if dtype == "fp64" else "fp32"
    derived: dict[str, dict[str, Any]] = {
        "precision": {"grad_dtype": widest, "reduce_dtype": config.precision.grad_dtype or widest},
        "optim": {"min_lr": config.optim.lr / 10, "warmup": default_warmup(config.train.steps)},
        "run": {"name": name, "dir": f"runs/{name}"},
        "checkpoint": {"memory_every": int(config.run.replicate == "neighbour")},
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
    schedule = schedules.absolute(p.schedule)
    try:
        chunks = p.chunks or schedules.own_chunks(schedule, *sizes)
    except ValueError as error:
        raise ConfigError([schedule_problem(error, config, dp)]) from error
    derived = {"dp": dp, "sequence": p.tp > 1, "chunks": chunks}
    return _fill(p, derived).model_copy(update={"schedule": schedule})


def schedule_problem(error: ValueError, config: Config, dp: int | None = None) -> str:
    """Returns what a schedule refuses, with the flags that change it."""
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
        dp = None  # it is another one then
    if "microbatches" in needs:
        fixes.append(_batch_of(config, needs["microbatches"], dp))
    return f"{given}; use {' and '.join(fixes)}, or another --parallel.schedule"


def _batch_of(config: Config, microbatches: int, dp: int | None) -> str:
    """Returns the flags for so many micro-batches."""
    train = config.train
    if dp is None:
        return f"--train.global-batch {microbatches} × --train.micro-batch × dp"
    rows, rest = divmod(train.global_batch, microbatches * dp)
    smaller = f" or --train.micro-batch {rows}" if rows and not rest else ""
    return f"--train.global-batch {microbatches * train.micro_batch * dp}{smaller}"


def resolve_model(model: ModelConfig, vocab: int | None = None) -> ModelConfig:
    """Returns a model with the values that its keys have by default; the vocabulary stays open without one."""
    derived = model.record.resolved(dict(model))
    if model.vocab is None and vocab is not None:
        derived["vocab"] = vocab
    return model.model_copy(update=derived)


def spelt_as(saved: ModelConfig, model: ModelConfig) -> ModelConfig:
    """Returns a saved model in the terms of another, which may have the same layers and weights.

    A Qwen3 without windows becomes a Llama with `qk_norm`, if `model` is one.
    """
    windows = saved.window is not None or saved.layer_pattern is not None
    same = (saved.arch, model.arch, model.qk_norm, windows) == ("qwen3", "llama", True, False)
    return saved.model_copy(update={"arch": "llama", "qk_norm": True}) if same else saved
