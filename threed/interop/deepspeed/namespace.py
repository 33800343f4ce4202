"""The module `deepspeed` as threed provides it: its names, and the import of it.

    threed.install_as_deepspeed()          # before transformers, accelerate or deepspeed
    import deepspeed                       # threed's implementation
    engine, *_ = deepspeed.initialize(model=model, config="ds_config.json")

`OFFERED` lists deepspeed's modules with the names that threed provides, and where each name is
defined. A name is imported on its first use, so `import deepspeed` does not import torch. `REFUSED`
lists names that threed does not provide, with what to use instead. Any other name is refused, too.

A refused name raises AttributeError, and in `from deepspeed.x import name` ImportError, both with
the text "threed does not offer deepspeed.x.name: use ...". A refused module raises ImportError, so
programs can use `try: import deepspeed.x`.

`importlib.metadata.version("deepspeed")` is `VERSION`, the version of DeepSpeed whose API is
provided. accelerate and transformers regard a package without such metadata as missing.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import os
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

VERSION = "0.19.8"

_HERE = "threed.interop.deepspeed"
_TORCH = "torch.distributed"
_ZERO = {
    "api.init": "Init",
    "api.zero": "GatheredParameters",
    "api.marks": "ZeroParamStatus ZeroParamType",
    "api.fixed": "register_external_parameter=none unregister_external_parameter=none",
}
_PIPE = {
    "pipeline_module": "PipelineModule LayerSpec TiedLayerSpec",
}
_ENGINE = {"engine": "DeepSpeedEngine"}
_LOGGING = {
    "api.utils": "logger log_dist log_dist_once=log_dist print_dist set_log_level_from_string"
}
_LEAVES = {
    "api.utils": "set_z3_leaf_modules set_z3_leaf_modules_by_name set_z3_leaf_modules_by_suffix"
    " unset_z3_leaf_modules=set_z3_leaf_modules",
    "api.fixed": "set_z3_leaf_module=none get_z3_leaf_modules=empty z3_leaf_module=false"
    " z3_leaf_parameter=false",
}
_SAFE = {
    "api.zero": "safe_get_full_fp32_param safe_set_full_fp32_param safe_get_full_optimizer_state"
    " safe_set_full_optimizer_state safe_get_full_grad",
}
_TOPOLOGY = {
    "api.topology": "ProcessTopology PipeDataParallelTopology PipeModelDataParallelTopology"
    " PipelineParallelGrid",
}
# module of deepspeed -> {module that defines the names: the names}. A module is relative to
# `threed.interop.deepspeed`, unless it begins with "torch". "name=other" means that the module defines
# the name as `other`.
# The names in `api.fixed` have no effect or a fixed result, because parameters are gathered wherever
# they are used, layers and sequences are not split over ranks, no buffers are kept between steps,
# collectives are not logged, and there are no experts.
OFFERED: Mapping[str, Mapping[str, str]] = {
    "deepspeed": {
        "initialization": "initialize",
        "namespace": "__version__=VERSION version=VERSION",
        "api.comm": "init_distributed",
        "api.accelerator": "get_accelerator",
        "api.config": "DeepSpeedConfig DeepSpeedConfigError",
        "api.utils": "logger log_dist OnDevice add_config_arguments __version_major__ __version_minor__"
        " __version_patch__ DeepSpeedOptimizerCallable DeepSpeedSchedulerCallable",
        "pipeline_module": "PipelineModule",
        "pipeline_engine": "PipelineEngine",
        **_ENGINE,
    },
    "deepspeed.accelerator": {
        "api.accelerator": "get_accelerator DeepSpeedAccelerator",
        "api.fixed": "is_current_accelerator_supported=true",
    },
    "deepspeed.checkpoint": {},
    "deepspeed.checkpoint.utils": {"api.utils": "clone_tensors_for_torch_save"},
    "deepspeed.comm": {
        "api.comm": "init_distributed get_rank get_world_size get_local_rank get_world_group"
        " is_initialized",
        "api.fixed": "configure=none log_summary=none",
        _TORCH: "barrier all_reduce all_gather all_gather_into_tensor all_gather_object all_to_all"
        " all_to_all_single broadcast broadcast_object_list gather scatter reduce reduce_scatter"
        " reduce_scatter_tensor send recv isend irecv P2POp batch_isend_irecv monitored_barrier"
        " new_group destroy_process_group get_global_rank get_process_group_ranks get_backend"
        " is_available ReduceOp ProcessGroup get_all_ranks_from_group=get_process_group_ranks",
    },
    "deepspeed.git_version_info": {
        "namespace": "version=VERSION",
        "api.utils": "git_hash git_branch torch_info",
    },
    "deepspeed.launcher": {},
    "deepspeed.launcher.runner": {"api.utils": "DEEPSPEED_ENVIRONMENT_NAME"},
    "deepspeed.moe": {},
    "deepspeed.moe.utils": {
        "api.utils": "has_moe_layers split_params_into_different_moe_groups_for_optimizer",
        "api.fixed": "is_moe_param=false",
    },
    "deepspeed.ops": {"api.optimizers": "__compatible_ops__=COMPATIBLE"},
    "deepspeed.ops.adam": {"api.optimizers": "DeepSpeedCPUAdam FusedAdam"},
    "deepspeed.ops.lion": {"api.optimizers": "DeepSpeedCPULion FusedLion"},
    "deepspeed.pipe": _PIPE,
    "deepspeed.runtime": {},
    "deepspeed.runtime.activation_checkpointing": {},
    "deepspeed.runtime.activation_checkpointing.checkpointing": {
        "api.checkpointing": "checkpoint non_reentrant_checkpoint=checkpoint configure is_configured"
        " model_parallel_cuda_manual_seed",
        "api.fixed": "reset=none set_num_layers=none model_parallel_reconfigure_tp_seed=none",
    },
    "deepspeed.runtime.config": {"api.config": "DeepSpeedConfig DeepSpeedConfigError"},
    "deepspeed.runtime.constants": {"api.config": "ROUTE_TRAIN ROUTE_EVAL ROUTE_PREDICT"},
    "deepspeed.runtime.dataloader": {"api.utils": "RepeatingLoader"},
    "deepspeed.runtime.engine": {
        **_ENGINE,
        "api.utils": "DeepSpeedOptimizerCallable DeepSpeedSchedulerCallable",
    },
    "deepspeed.runtime.lr_schedules": {
        "api.lr_schedules": "VALID_LR_SCHEDULES LR_SCHEDULE LR_RANGE_TEST ONE_CYCLE WARMUP_LR"
        " WARMUP_DECAY_LR WARMUP_COSINE_LR WARMUP_MIN_LR WARMUP_MAX_LR WARMUP_NUM_STEPS WARMUP_TYPE"
        " WARMUP_LOG_RATE WARMUP_LINEAR_RATE WARMUP_MIN_RATIO COS_MIN_RATIO TOTAL_NUM_STEPS WarmupLR"
        " WarmupDecayLR WarmupCosineLR add_tuning_arguments",
    },
    "deepspeed.runtime.pipe": _PIPE,
    "deepspeed.runtime.pipe.engine": {"pipeline_engine": "PipelineEngine"},
    "deepspeed.runtime.pipe.module": _PIPE,
    "deepspeed.runtime.pipe.topology": _TOPOLOGY,
    "deepspeed.runtime.utils": {
        "api.utils": "see_memory_usage set_random_seed move_to_device clone_tensors_for_torch_save"
    },
    "deepspeed.runtime.zero": _ZERO,
    "deepspeed.runtime.zero.config": {"api.config": "ZeroStageEnum OffloadDeviceEnum"},
    "deepspeed.runtime.zero.offload_config": {"api.config": "OffloadDeviceEnum OffloadStateTypeEnum"},
    "deepspeed.runtime.zero.partition_parameters": {
        "api.init": "Init",
        "api.zero": f"{_ZERO['api.zero']} zero_wrapper_for_fp_tensor_constructor _orig_torch_arange"
        " _orig_torch_empty _orig_torch_zeros _orig_torch_ones _orig_torch_full",
        "api.marks": f"{_ZERO['api.marks']} is_zero_param",
        "api.fixed": f"{_ZERO['api.fixed']} shutdown_init_context=none restore_init_context=none",
        "api.accelerator": "get_accelerator",
    },
    "deepspeed.utils": {
        "api.utils": f"{_LOGGING['api.utils']} {_LEAVES['api.utils']} OnDevice RepeatingLoader"
        " instrument_w_nvtx",
        "api.fixed": _LEAVES["api.fixed"],
        "api.comm": "is_initialized",
        **_SAFE,
    },
    "deepspeed.utils.groups": {
        "api.comm": "_get_data_parallel_group=get_world_group"
        " _get_sequence_data_parallel_group=get_world_group"
        " get_data_parallel_group=get_world_group _get_data_parallel_world_size=get_world_size"
        " _get_sequence_data_parallel_world_size=get_world_size"
        " get_data_parallel_world_size=get_world_size _get_data_parallel_rank=get_rank"
        " _get_sequence_data_parallel_rank=get_rank get_data_parallel_rank=get_rank"
        " _get_data_parallel_group_ranks=get_world_group_ranks mesh_device",
        "api.fixed": "_get_model_parallel_world_size=one _get_sequence_parallel_world_size=one"
        " get_model_parallel_world_size=one get_tensor_model_parallel_world_size=one"
        " _get_sequence_parallel_rank=zero _get_broadcast_src_rank=zero"
        " get_model_parallel_rank=zero get_tensor_model_parallel_rank=zero",
    },
    "deepspeed.utils.logging": _LOGGING,
    "deepspeed.utils.tensor_fragment": _SAFE,
    "deepspeed.utils.torch": {"api.utils": "required_torch_version register_grad_hook"},
    "deepspeed.utils.z3_leaf_module": _LEAVES,
    "deepspeed.utils.zero_to_fp32": {
        "api.zero_to_fp32": "get_fp32_state_dict_from_zero_checkpoint"
        " convert_zero_checkpoint_to_fp32_state_dict convert_zero_checkpoint_to_state_dict"
        " load_state_dict_from_zero_checkpoint",
    },
}  # fmt: skip
# Further names of modules, as in deepspeed.
ALIASES = {
    "deepspeed.zero": "deepspeed.runtime.zero",
    "deepspeed.checkpointing": "deepspeed.runtime.activation_checkpointing.checkpointing",
}

_ADAMW = "use AdamW of torch, or the config's optimizer AdamW, Adam, SGD or Lion"
_SCHEDULES = "use WarmupLR, WarmupDecayLR or WarmupCosineLR, or a scheduler of torch"
_GENERATE = "use the module itself inside `with engine.gathered():`"
_SEQUENCE = "use shorter sequences or gradient checkpointing, because threed does not split sequences over ranks"
_TENSOR = (
    "use threed.layers with tp, because the layers of a wrapped module are not split over ranks"
)
_EXPERTS = "use dense layers, because threed has no experts"
_GRADIENT = (
    "use register_hook on the parameter, because gradients are summed in the engine's buffers"
)
_LOCAL = "use safe_get_full_fp32_param and safe_get_full_optimizer_state, because slices differ from DeepSpeed's"
_KERNELS = "use the config's optimizer; threed has its own kernels"
_LAYERS = "use the model's own layers"
# name of a module, or of an attribute, with or without its module -> what to use instead. The
# longest match applies, and a module's entry applies to its content.
REFUSED: Mapping[str, str] = {
    "deepspeed.autotuning": "use `threed plan`, which estimates memory and speed",
    "deepspeed.checkpoint": "use engine.save_checkpoint, whose checkpoints load on any number of ranks",
    "deepspeed.compile": "use torch.compile",
    "deepspeed.compression": "use the full model",
    "deepspeed.elasticity": "use `threed` or torchrun with --nnodes MIN:MAX",
    "deepspeed.inference": _GENERATE,
    "deepspeed.init_inference": _GENERATE,
    "deepspeed.InferenceEngine": _GENERATE,
    "deepspeed.DeepSpeedInferenceConfig": _GENERATE,
    "deepspeed.launcher": "use torchrun, srun or mpirun",
    "deepspeed.linear": "use peft for LoRA",
    "deepspeed.module_inject": _LAYERS,
    "deepspeed.moe": _EXPERTS,
    "deepspeed.monitor": "use engine.metrics",
    "deepspeed.nvme": "use the config's offload_optimizer and offload_param with device nvme",
    "deepspeed.ops": _KERNELS,
    "deepspeed.ops.adagrad": _ADAMW,
    "deepspeed.ops.lamb": _ADAMW,
    "deepspeed.ops.muon": _ADAMW,
    "deepspeed.ops.sparse_attention": "use the attention of the model",
    "deepspeed.ops.transformer": _LAYERS,
    "deepspeed.DeepSpeedTransformerLayer": _LAYERS,
    "deepspeed.DeepSpeedTransformerConfig": _LAYERS,
    "deepspeed.replace_transformer_layer": _LAYERS,
    "deepspeed.profiling": "use engine.metrics, or torch.profiler",
    "deepspeed.runtime.fp16.onebit": _ADAMW,
    "deepspeed.runtime.hybrid_engine": _GENERATE,
    "deepspeed.DeepSpeedHybridEngine": _GENERATE,
    "deepspeed.runtime.sequence_parallel": _SEQUENCE,
    "deepspeed.runtime.superoffload": "use the config's offload_optimizer",
    "deepspeed.runtime.tensor_parallel": _TENSOR,
    "deepspeed.runtime.zenflow": "use the config's offload_optimizer",
    "deepspeed.runtime.zero.tiling": "use torch.nn.Linear; zero.tile of a threed configuration",
    "deepspeed.sequence": _SEQUENCE,
    "deepspeed.set_autotp_mode": _TENSOR,
    "deepspeed.tp_model_init": _TENSOR,
    "deepspeed.utils.groups._get_sequence_parallel_group": _SEQUENCE,
    "CheckpointFunction": "use deepspeed.checkpointing.checkpoint",
    "DualPipeVModule": "use deepspeed.PipelineModule, or threed.layers with --parallel.schedule",
    "FusedLamb": _ADAMW,
    "FP16_Optimizer": "use the config's fp16",
    "BF16_Optimizer": "use the config's bf16",
    "LRRangeTest": _SCHEDULES,
    "OneCycle": _SCHEDULES,
    "OnebitAdam": _ADAMW,
    "OnebitLamb": _ADAMW,
    "TiledLinear": "use torch.nn.Linear",
    "UlyssesSPAttentionHF": _SEQUENCE,
    "UlyssesSPDataLoaderAdapter": _SEQUENCE,
    "ZeroOneAdam": _ADAMW,
    "get_cuda_rng_tracker": "use torch's generator: the layers of a wrapped module are not split over ranks",
    "get_model_parallel_group": _TENSOR,
    "get_tensor_model_parallel_group": _TENSOR,
    "safe_get_local_fp32_param": _LOCAL,
    "safe_get_local_grad": _LOCAL,
    "safe_get_local_optimizer_state": _LOCAL,
    "safe_set_full_grad": _GRADIENT,
    "safe_set_local_fp32_param": _LOCAL,
    "safe_set_local_grad": _LOCAL,
    "safe_set_local_optimizer_state": _LOCAL,
    "safe_update_full_grad_vectorized": _GRADIENT,
}
_OTHERWISE = "use DeepSpeed itself, or threed's own API (docs/guide/deepspeed.md)"
# Modules that read at their import whether deepspeed is present. If it is, they import
# `_IMPORTED_IF_PRESENT`.
_DECIDE_AT_IMPORT = ("accelerate.utils", "transformers.integrations.deepspeed")
_IMPORTED_IF_PRESENT = "accelerate.utils.deepspeed"


def refusal(name: str) -> str:
    """Returns the error text for a name of deepspeed that threed does not provide.

    Args:
        name: dotted name, such as "deepspeed.ops.lamb.FusedLamb".
    """
    short = name.rpartition(".")[2]
    parts = name.split(".")
    prefixes = [".".join(parts[:count]) for count in range(len(parts), 1, -1)]
    keys = (name, short, *prefixes)
    instead = next((REFUSED[key] for key in keys if key in REFUSED), _OTHERWISE)
    return f"threed does not offer {name}: {instead}"


class Namespace(types.ModuleType):
    """A module of deepspeed, whose names are imported on their first use.

    Args:
        name: name of the module in deepspeed.
        targets: name -> (module that defines it, its name there).
        children: name of a submodule -> full name.
    """

    def __init__(
        self, name: str, targets: Mapping[str, tuple[str, str]], children: Mapping[str, str]
    ) -> None:
        super().__init__(name, f"threed's implementation of {name}.")
        self.__path__: list[str] = []
        self._targets, self._children = targets, children

    def __getattr__(self, name: str) -> Any:
        if name in self._targets:
            module, attribute = self._targets[name]
            value = getattr(importlib.import_module(module), attribute)
        elif name in self._children:
            value = modules()[self._children[name]]
        elif name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        else:
            raise AttributeError(refusal(f"{self.__name__}.{name}"))
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._targets, *self._children})


@functools.cache
def modules() -> Mapping[str, Namespace]:
    """Returns all modules of deepspeed that threed provides, by full name."""
    names = {**{name: name for name in OFFERED}, **ALIASES}
    children: dict[str, dict[str, str]] = {name: {} for name in names}
    for name, target in names.items():
        parent, _, child = name.rpartition(".")
        if parent:
            children[parent][child] = target
    made = {
        name: Namespace(name, dict(_targets(rows)), children[name])
        for name, rows in OFFERED.items()
    }
    return made | {name: made[target] for name, target in ALIASES.items()}


def _targets(rows: Mapping[str, str]) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yields (name, (module that defines it, its name there)) for the rows of a module."""
    for module, names in rows.items():
        absolute = module.startswith("torch")
        home = module if absolute else f"{_HERE}.{module}"
        for entry in names.split():
            name, _, other = entry.partition("=")
            yield name, (home, other or name)


class _Metadata(importlib.metadata.Distribution):
    """The metadata of a distribution `deepspeed` of version `VERSION`."""

    def read_text(self, filename: str) -> str | None:
        texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: deepspeed\nVersion: {VERSION}\n"
            "Summary: DeepSpeed's API, implemented by threed\n",
            "top_level.txt": "deepspeed\n",
        }
        return texts.get(filename)

    def locate_file(self, path: str | os.PathLike[str]) -> Any:
        return path


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of `deepspeed`, and its distribution."""

    def find_spec(
        self, fullname: str, path: object = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != "deepspeed":
            return None
        if fullname not in modules():
            # Without the argument `name`: if the error has the name of the module, the statement
            # `from deepspeed.x import y` replaces the error by one with another text.
            raise ModuleNotFoundError(refusal(fullname))
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return modules()[spec.name]

    def exec_module(self, module: types.ModuleType) -> None:
        """Has no effect, because names are imported on their first use."""

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterator[importlib.metadata.Distribution]:
        """Yields the distribution `deepspeed` if `context` asks for it, or for all."""
        if context is None or context.name in (None, "deepspeed"):
            yield _Metadata()


def install_as_deepspeed() -> None:
    """Makes `import deepspeed` import threed's implementation of DeepSpeed's API.

    Call this function before transformers, accelerate, trl or deepspeed are imported. Afterwards,
    programs that use DeepSpeed, also through these libraries, train with threed. Only the current
    process is affected. `python -m threed.interop.deepspeed script.py` calls this function, and then
    runs an unchanged script. A second call has no effect.

    `importlib.metadata.version("deepspeed")` is the version of DeepSpeed whose API is provided.

    Raises:
        RuntimeError: if DeepSpeed has been imported; or if accelerate or transformers have been
            imported, and have found no DeepSpeed.

    Example:

        import threed

        threed.install_as_deepspeed()

        from transformers import Trainer, TrainingArguments

        trainer = Trainer(model, TrainingArguments(deepspeed="ds_config.json"), ...)
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    fix = "call threed.install_as_deepspeed() first, before the import of"
    if "deepspeed" in sys.modules:
        raise RuntimeError(f"DeepSpeed itself has been imported: {fix} deepspeed")
    late = [name.partition(".")[0] for name in _DECIDE_AT_IMPORT if name in sys.modules]
    if late and _IMPORTED_IF_PRESENT not in sys.modules:
        raise RuntimeError(f"{late[0]} has been imported and found no deepspeed: {fix} {late[0]}")
    sys.meta_path.insert(0, _Finder())
