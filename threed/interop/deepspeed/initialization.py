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
from threed.interop.deepspeed.api.comm import get_world_size, init_distributed
from threed.interop.deepspeed.config.optimizers import find_groups, hyper_parameters, read_optimizer
from threed.interop.deepspeed.config.reader import read
from threed.interop.deepspeed.config.translate import ModelFacts, Translation, translate
from threed.interop.deepspeed.data import deepspeed_io
from threed.interop.deepspeed.engine import DeepSpeedEngine
from threed.interop.deepspeed.ownership import owner
from threed.interop.deepspeed.pipeline_engine import PipelineEngine, prepare
from threed.interop.deepspeed.pipeline_module import PipelineModule
from threed.interop.deepspeed.repeated_training import refuse_search, replaced_optimizers
from threed.interop.deepspeed.views import EngineOptimizer
from threed.ops.precision import DTYPES

OPTIMIZER = "pass a torch optimizer, or a function that creates one for model_parameters"


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: str | Path | Mapping[str, Any] | None = None,
    mesh_param: Any = None,
    config_params: str | Path | Mapping[str, Any] | None = None,
    topology: Topology | None = None,
) -> tuple[DeepSpeedEngine, EngineOptimizer | None, DataLoader[Any] | None, Any]:
    """Creates the DeepSpeed-compatible engine for a module. Collective.

    Initializes the process group if necessary, also in a world of one rank. If the module belongs
    to an engine of an earlier call, this engine is destroyed first.

    Args:
        args: an object whose attribute `deepspeed_config` is the configuration; or None.
        model: any nn.Module. An engine that was destroyed stands for its module.
        optimizer: an optimizer whose class and hyper-parameters are used (torch's AdamW, Adam or
            SGD, or one of DeepSpeed's classes), or a function that creates it for
            `model_parameters`. None: the optimizer of `config`; without one, the engine only evaluates.
        model_parameters: parameters, or parameter groups, which may have their own lr or
            weight_decay. Together they must contain all parameters that require gradients.
        training_data: a dataset for the returned loader.
        lr_scheduler: a torch scheduler of the passed optimizer, or a function that creates one for
            a given optimizer. `engine.step` advances it. None: the schedule of `config`.
        distributed_port: has no effect.
        mpu: an object with `get_model_parallel_world_size()`, which must return 1; or None.
        dist_init_required: has no effect.
        collate_fn: the loader's `collate_fn`.
        config: the path of a ds_config.json, a dict, or a JSON text in Base64.
        mesh_param: not supported.
        config_params: another name of `config`.
        topology: a topology with data parallelism only; None creates one.

    Returns:
        (engine, optimizer, loader, scheduler). The optimizer is the engine's optimizer, or None if
        the engine only evaluates. The loader yields batches of `training_data`; without
        `training_data`, the loader is None. The scheduler is the passed scheduler, or a view of the
        schedule in `config`, or None.

    Raises:
        ConfigError: if arguments or the configuration are invalid; the message lists all problems.
        NotImplementedError: within `Trainer.hyperparameter_search` on several ranks.
        RuntimeError: if a step of an earlier engine of the module is in progress.
    """
    model, config = _check_arguments(args, model, config, config_params, mpu, mesh_param)
    ds, notes = read(config), replaced_optimizers()
    if (earlier := owner(model)) is not None:
        notes.append("model: its engine of an earlier call of initialize is destroyed")
        earlier.destroy()
    init_distributed()
    refuse_search(get_world_size())
    used = dict(ds)
    optimizer, groups = _use_passed(used, model, optimizer, model_parameters, lr_scheduler, notes)
    trains = "optimizer" in used
    make_trainer: Any = None
    make: type[DeepSpeedEngine] = DeepSpeedEngine
    if isinstance(model, PipelineModule):
        if topology is not None:
            raise ConfigError(["topology: pass num_stages or topology to PipelineModule instead"])
        make, topology = PipelineEngine, model.axes
        translation, make_trainer = prepare(model, used, groups, notes)
    else:
        topology, translation = _translated(used, model, groups, topology, trains)
    loader = None
    if training_data is not None:
        loader = deepspeed_io(training_data, topology, translation, collate_fn)
    given = (model, topology, translation, optimizer, loader, notes, ds, collate_fn)
    engine = make(*given, trains=trains, make_trainer=make_trainer)
    _set_scheduler(engine, lr_scheduler, optimizer)
    if engine.global_rank == 0 and engine.notes:
        print(*(f"threed: {note}" for note in engine.notes), sep="\n", file=sys.stderr)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _set_scheduler(
    engine: DeepSpeedEngine, scheduler: Any, passed: torch.optim.Optimizer | None
) -> None:
    """Sets the scheduler of an engine that trains.

    Args:
        engine: the engine.
        scheduler: the scheduler, or a function that creates it for an optimizer; or None.
        passed: the optimizer that was passed to `initialize`, or None.

    Raises:
        ConfigError: if the engine cannot use the scheduler.
    """
    own = passed or engine.optimizer
    if scheduler is None or own is None:
        return
    scheduler = scheduler(own) if callable(scheduler) else scheduler
    if problem := _scheduler_problem(scheduler, own):
        raise ConfigError([f"lr_scheduler: {problem}"])
    engine.set_scheduler(scheduler)


def _translated(
    ds: Mapping[str, Any], model: nn.Module, given: Iterable[Any] | None, topology: Topology | None,
    trains: bool,
) -> tuple[Topology, Translation]:  # fmt: skip
    """Returns the topology and the translated configuration of a plain module. Collective.

    Args:
        ds: the ds_config, with the sections of the passed optimizer and scheduler.
        model: the module.
        given: parameters or groups that the engine trains; None for one group of all parameters.
        topology: the topology; None creates one.
        trains: whether the engine has an optimizer.
    """
    groups = find_groups(model, given, hyper_parameters(ds)) if trains else ()
    facts, topology = find_facts(model), topology or Topology()
    # The first collective connects all ranks. It must precede `translate`: if `translate` raises a
    # ConfigError, the rank may exit, and if the rank was not connected, all other ranks would wait
    # for it.
    collectives.exchange(None, topology.axis("world"))
    return topology, translate(ds, topology.dp, facts, groups, trains)


def _check_arguments(
    args: Any, model: Any, config: Any, config_params: Any, mpu: Any, mesh_param: Any
) -> tuple[nn.Module, Any]:
    """Returns the module and the configuration.

    Raises:
        ConfigError: if an argument is missing or not supported.
    """
    config = config_params if config is None else config
    attributes = vars(args) if hasattr(args, "__dict__") else {}
    given = [attributes.get(name) for name in ("deepspeed_config", "deepscale_config")]
    problems = []
    for found in given:
        if found is not None and config is not None and config != found:
            problems.append("config: given twice, also in args.deepspeed_config: pass one of them")
        config = found if config is None else config
    missing = {"model": model, "config": config}
    problems += [f"{name}: not given" for name, value in missing.items() if value is None]
    if isinstance(args, nn.Module):
        problems = [
            "model: pass it by keyword (model=…): the first argument is args, as in DeepSpeed"
        ]
    if isinstance(model, DeepSpeedEngine):
        if owner(model.module) is model:
            problems.append("model: it is an engine: pass engine.module")
        model = model.module
    if mesh_param is not None:
        problems.append(
            "mesh_param: threed does not offer sequence parallelism for a plain module: build it from threed.layers,"
            " and use threed.Engine with a topology"
        )
    if mpu is not None and (size := _model_parallel_size(mpu)) > 1:
        problems.append(
            f"mpu: threed does not offer {size} model-parallel ranks for a plain module: build it from threed.layers,"
            " and use threed.Engine with a topology"
        )
    if problems:
        raise ConfigError(problems)
    return model, config


def _model_parallel_size(mpu: Any) -> int:
    for name in ("get_model_parallel_world_size", "get_tensor_model_parallel_world_size"):
        if callable(size := getattr(mpu, name, None)):
            return int(size())
    return 1


def _use_passed(
    ds: dict[str, Any], model: nn.Module, optimizer: Any, model_parameters: Iterable[Any] | None,
    lr_scheduler: Any, notes: list[str],
) -> tuple[torch.optim.Optimizer | None, Iterable[Any] | None]:  # fmt: skip
    """Replaces sections of a ds_config by the passed optimizer and scheduler.

    Args:
        ds: the ds_config, whose sections are replaced or removed.
        model: the module.
        optimizer: the passed optimizer, or a function that creates it, or None.
        model_parameters: the passed parameters, or None.
        lr_scheduler: the passed scheduler, or None.
        notes: gets a note for each section and argument without effect.

    Returns:
        The optimizer, and the parameters or groups that the engine trains; None for one group of
        all parameters.

    Raises:
        ConfigError: if the optimizer or the scheduler is not supported.
    """
    if callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
        params = model.parameters() if model_parameters is None else model_parameters
        optimizer = optimizer([*params])
    if problem := _scheduler_problem(lr_scheduler, optimizer):
        raise ConfigError([f"lr_scheduler: {problem}"])
    if "scheduler" in ds and lr_scheduler is not None:
        notes.append("scheduler: no effect: the program's scheduler is used")
        del ds["scheduler"]
    if optimizer is None:
        if not ds.get("optimizer"):
            ds.pop("optimizer", None)
            ds.pop("scheduler", None)
            notes.append(
                "optimizer: none in the call and the configuration: the engine only evaluates"
            )
        return None, model_parameters
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError([f"optimizer: a {type(optimizer).__name__}: {OPTIMIZER}"])
    if "optimizer" in ds:
        notes.append("optimizer: no effect: the one passed to initialize is used")
    ds["optimizer"], text = read_optimizer(optimizer)
    notes.append(text)
    if model_parameters is not None:
        notes.append("model_parameters: no effect: the groups of the passed optimizer are used")
    return optimizer, optimizer.param_groups


def _scheduler_problem(scheduler: Any, optimizer: torch.optim.Optimizer | None) -> str | None:
    """Returns the reason why a scheduler that the program passes cannot be used, or None."""
    if scheduler is None or callable(scheduler):
        return None
    if not callable(getattr(scheduler, "step", None)):
        return "pass a torch scheduler, or a function that creates one for an optimizer"
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        return (
            "ReduceLROnPlateau needs a metric: call its step(metric) in the program, and pass None"
        )
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
