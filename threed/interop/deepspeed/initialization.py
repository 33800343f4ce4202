"""Implements `threed.initialize`, which has the interface of `deepspeed.initialize`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from threed.config import ConfigError
from threed.distributed import collectives
from threed.distributed.topology import Topology
from threed.interop.deepspeed.config.optimizers import find_groups, is_scheduled, read_optimizer
from threed.interop.deepspeed.config.reader import read
from threed.interop.deepspeed.config.translate import ModelFacts, translate
from threed.interop.deepspeed.data import deepspeed_io
from threed.interop.deepspeed.engine import DeepSpeedEngine
from threed.interop.deepspeed.views import EngineOptimizer
from threed.ops.precision import DTYPES


def initialize(
    model: nn.Module | None = None,
    config: str | Path | Mapping[str, Any] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    topology: Topology | None = None,
) -> tuple[DeepSpeedEngine, EngineOptimizer, DataLoader[Any] | None, Any]:
    """Creates the DeepSpeed-compatible engine for a module. Collective.

    Initializes the process group if necessary.

    Args:
        model: any nn.Module.
        config: the path of a ds_config.json, or a dict.
        optimizer: a torch AdamW, Adam or SGD whose class and hyper-parameters are used; None means
            the optimizer that `config` defines.
        model_parameters: parameters, or parameter groups, which may have their own lr or
            weight_decay. Together they must contain all parameters that require gradients.
        training_data: a dataset for the returned loader.
        lr_scheduler: a torch scheduler of the passed optimizer, or a function that creates a
            scheduler for a given optimizer. `engine.step` advances the scheduler. None means the
            schedule that `config` defines.
        collate_fn: the loader's `collate_fn`.
        topology: a topology with data parallelism only; None creates one.

    Returns:
        (engine, optimizer, loader, scheduler). The optimizer is the engine's optimizer. The loader
        yields batches of `training_data`; without `training_data`, the loader is None. The
        scheduler is the passed scheduler, or a view of the schedule in `config`, or None.

    Raises:
        ConfigError: if arguments or the configuration are invalid; the message lists all problems.
    """
    if model is None or config is None:
        given = {"model": model, "config": config}
        raise ConfigError([f"{name}: not given" for name, value in given.items() if value is None])
    if problem := _scheduler_problem(lr_scheduler, optimizer):
        raise ConfigError([f"lr_scheduler: {problem}"])
    ds = read(config)
    notes: list[str] = []
    if "scheduler" in ds and (lr_scheduler is not None or is_scheduled(optimizer)):
        notes.append("scheduler: no effect: the program's scheduler is used")
        del ds["scheduler"]
    if optimizer is not None:
        if "optimizer" in ds:
            notes.append("optimizer: no effect: the one passed to initialize is used")
        ds["optimizer"], text = read_optimizer(optimizer)
        notes.append(text)
        if model_parameters is not None:
            notes.append("model_parameters: no effect: the groups of the passed optimizer are used")
        model_parameters = optimizer.param_groups
    groups = find_groups(model, model_parameters, _hyper_parameters(ds))
    facts = find_facts(model)
    topology = topology or Topology()
    # The first collective connects all ranks. It must precede `translate`: if `translate` raises a
    # ConfigError, the rank may exit, and if the rank was not connected, all other ranks would wait
    # for it.
    collectives.exchange(None, topology.axis("world"))
    translation = translate(ds, topology.dp, facts, groups)
    loader = None
    if training_data is not None:
        batch, last = translation.micro_batch, translation.drop_last
        loader = deepspeed_io(training_data, topology, batch, last, collate_fn)
    engine = DeepSpeedEngine(model, topology, translation, optimizer, loader, notes)
    if callable(lr_scheduler):
        own = optimizer or engine.optimizer
        lr_scheduler = lr_scheduler(own)
        if problem := _scheduler_problem(lr_scheduler, own):
            raise ConfigError([f"lr_scheduler: {problem}"])
    if lr_scheduler is not None:
        engine.lr_scheduler = lr_scheduler
    if topology.rank == 0:
        print(*(f"threed: {note}" for note in engine.notes), sep="\n", file=sys.stderr)
    return engine, engine.optimizer, loader, engine.lr_scheduler


def _scheduler_problem(scheduler: Any, optimizer: torch.optim.Optimizer | None) -> str | None:
    """Returns the reason why a scheduler that the program passes cannot be used, or None."""
    if scheduler is None or callable(scheduler):
        return None
    if not callable(getattr(scheduler, "step", None)):
        return "pass a torch scheduler, or a function that creates one for an optimizer"
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        return "ReduceLROnPlateau needs a metric: call its step(metric) in the program, and pass no"
    if optimizer is None or getattr(scheduler, "optimizer", optimizer) is not optimizer:
        return "it belongs to another optimizer: pass its optimizer as `optimizer`"
    return None


def find_facts(model: nn.Module) -> ModelFacts:
    """Returns the hidden size and the most common dtype of a model.

    The hidden size is read from the model's attribute `config`, as in Hugging Face's DeepSpeed
    integration.
    """
    counts = dict.fromkeys(DTYPES.values(), 0)
    for param in model.parameters():
        counts[param.dtype] = counts.get(param.dtype, 0) + param.numel()
    names = {dtype: name for name, dtype in DTYPES.items()}
    config = getattr(model, "config", None)
    hidden = _hidden_size(config) or _hidden_size(getattr(config, "text_config", None))
    return ModelFacts(hidden, names.get(max(counts, key=counts.__getitem__)))


def _hidden_size(config: object) -> int | None:
    size = getattr(config, "hidden_size", None) or max(getattr(config, "hidden_sizes", None) or [0])
    return int(size) if size else None


def _hyper_parameters(ds: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns optimizer.params of a ds_config; empty if invalid (`translate` raises the error)."""
    section = ds.get("optimizer")
    params = section.get("params") if isinstance(section, Mapping) else None
    return params if isinstance(params, Mapping) else {}
