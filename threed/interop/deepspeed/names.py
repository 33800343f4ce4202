"""The names of the module `deepspeed`: those that threed offers, and what to use instead of others.

`OFFERED` lists deepspeed's modules with the names that threed offers, and where each name is defined.
`REFUSED` lists names that threed does not offer, of modules and of the engine, with what to use instead.
Any other name is refused, too. `refusal` returns the text of the error; `not_offered` and `Refused` are
for arguments and methods.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

VERSION = "0.19.8"  # the version of DeepSpeed whose API is offered

_TORCH = "torch.distributed"
_INIT = {"api.init": "Init"}
_PARAMETERS = {"api.zero": "GatheredParameters", "api.marks": "ZeroParamStatus"}
_EXTERNAL = {"api.fixed": "register_external_parameter=none unregister_external_parameter=none"}
_PIPE = {"pipeline_module": "PipelineModule LayerSpec TiedLayerSpec"}
_ENGINE = {"engine": "DeepSpeedEngine"}
_LOGGING = "logger log_dist set_log_level_from_string"
_LEAVES = (
    "set_z3_leaf_modules set_z3_leaf_modules_by_name set_z3_leaf_modules_by_suffix"
    " unset_z3_leaf_modules get_z3_leaf_modules z3_leaf_module"
)
_SAFE = {
    "api.zero": "safe_get_full_fp32_param safe_set_full_fp32_param safe_get_full_optimizer_state"
    " safe_set_full_optimizer_state safe_get_full_grad",
}
# module of deepspeed -> {module that defines the names: the names}. A module is relative to
# `threed.interop.deepspeed`, unless it begins with "torch". "name=other" means that the module defines
# the name as `other`.
# The names in `api.fixed` have no effect or a fixed result, because parameters are gathered wherever
# they are used, layers and sequences are not split over ranks, no buffers are kept between steps,
# collectives are not logged, and wrapped modules have no expert ranks.
OFFERED: Mapping[str, Mapping[str, str]] = {
    "deepspeed": {
        "initialization": "initialize",
        "names": "__version__=VERSION version=VERSION",
        "api.comm": "init_distributed",
        "api.accelerator": "get_accelerator",
        "api.config": "DeepSpeedConfig DeepSpeedConfigError",
        "api.utils": "logger log_dist OnDevice add_config_arguments __version_major__ __version_minor__ __version_patch__",
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
        "api.comm": "init_distributed get_rank get_world_size get_local_rank get_world_group is_initialized",
        "api.fixed": "configure=none log_summary=none",
        _TORCH: "barrier all_reduce all_gather all_gather_into_tensor all_gather_object all_to_all all_to_all_single"
        " broadcast broadcast_object_list gather scatter reduce reduce_scatter reduce_scatter_tensor send recv isend"
        " irecv P2POp batch_isend_irecv monitored_barrier new_group destroy_process_group get_global_rank"
        " get_process_group_ranks get_backend is_available ReduceOp ProcessGroup"
        " get_all_ranks_from_group=get_process_group_ranks",
    },
    "deepspeed.git_version_info": {"names": "version=VERSION", "api.utils": "torch_info"},
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
        "api.fixed": "reset=none",
    },
    "deepspeed.runtime.config": {"api.config": "DeepSpeedConfig DeepSpeedConfigError"},
    "deepspeed.runtime.dataloader": {"api.utils": "RepeatingLoader"},
    "deepspeed.runtime.engine": _ENGINE,
    "deepspeed.runtime.lr_schedules": {
        "api.lr_schedules": "VALID_LR_SCHEDULES LR_RANGE_TEST ONE_CYCLE WARMUP_LR WARMUP_DECAY_LR WARMUP_COSINE_LR"
        " WARMUP_MIN_LR WARMUP_MAX_LR WARMUP_NUM_STEPS WARMUP_TYPE WARMUP_LOG_RATE WARMUP_LINEAR_RATE WARMUP_MIN_RATIO"
        " COS_MIN_RATIO TOTAL_NUM_STEPS WarmupLR WarmupDecayLR WarmupCosineLR add_tuning_arguments",
    },
    "deepspeed.runtime.pipe": _PIPE,
    "deepspeed.runtime.pipe.engine": {"pipeline_engine": "PipelineEngine"},
    "deepspeed.runtime.pipe.module": _PIPE,
    "deepspeed.runtime.pipe.topology": {
        "api.topology": "ProcessTopology PipeDataParallelTopology PipeModelDataParallelTopology PipelineParallelGrid",
    },
    "deepspeed.runtime.utils": {
        "api.utils": "see_memory_usage set_random_seed move_to_device clone_tensors_for_torch_save"
    },
    "deepspeed.runtime.zero": {**_INIT, **_EXTERNAL, **_PARAMETERS},
    "deepspeed.runtime.zero.config": {"api.config": "ZeroStageEnum OffloadDeviceEnum"},
    "deepspeed.runtime.zero.offload_config": {"api.config": "OffloadDeviceEnum OffloadStateTypeEnum"},
    "deepspeed.runtime.zero.partition_parameters": {
        **_INIT, **_EXTERNAL,
        "api.zero": "GatheredParameters zero_wrapper_for_fp_tensor_constructor",
        "api.marks": "ZeroParamStatus is_zero_param",
        "torch": "_orig_torch_arange=arange _orig_torch_empty=empty",
        "api.accelerator": "get_accelerator",
    },
    "deepspeed.utils": {
        "api.utils": f"{_LOGGING} {_LEAVES} OnDevice RepeatingLoader instrument_w_nvtx",
        "api.comm": "is_initialized",
        **_SAFE,
    },
    "deepspeed.utils.groups": {
        "api.comm": "_get_data_parallel_group=get_world_group get_data_parallel_group=get_world_group"
        " _get_data_parallel_world_size=get_world_size get_data_parallel_world_size=get_world_size"
        " _get_data_parallel_rank=get_rank get_data_parallel_rank=get_rank",
        "api.fixed": "_get_sequence_parallel_world_size=one get_model_parallel_world_size=one"
        " get_tensor_model_parallel_world_size=one _get_sequence_parallel_rank=zero get_model_parallel_rank=zero"
        " get_tensor_model_parallel_rank=zero",
    },
    "deepspeed.utils.logging": {"api.utils": _LOGGING},
    "deepspeed.utils.tensor_fragment": _SAFE,
    "deepspeed.utils.torch": {"api.utils": "required_torch_version"},
    "deepspeed.utils.z3_leaf_module": {"api.utils": _LEAVES},
    "deepspeed.utils.zero_to_fp32": {
        "api.zero_to_fp32": "get_fp32_state_dict_from_zero_checkpoint convert_zero_checkpoint_to_fp32_state_dict"
        " convert_zero_checkpoint_to_state_dict load_state_dict_from_zero_checkpoint",
    },
}  # fmt: skip
# Further names of modules, as in deepspeed.
ALIASES = {
    "deepspeed.zero": "deepspeed.runtime.zero",
    "deepspeed.checkpointing": "deepspeed.runtime.activation_checkpointing.checkpointing",
}


def _by_name(rows: Mapping[str, str], prefix: str = "") -> dict[str, str]:
    return {prefix + name: instead for names, instead in rows.items() for name in names.split()}


# Names of the engine -> what to use instead.
_OF_ENGINE = {
    "get_fp32_state_dict": "use engine.full_state_dict(), which gathers the weights on rank 0",
    "clip_fp32_gradients": "use the config's gradient_clipping",
    "set_lr": 'set engine.optimizer.param_groups[i]["lr"]; engine.get_lr() returns the learning rates',
    "losses monitor tput_timer timers wall_clock_breakdown get_wall_clock_timers steps_per_print": "use engine.metrics",
    "amp_enabled torch_autocast_enabled torch_autocast_dtype": 'use the config\'s "bf16": {"enabled": true}',
    "_config zero_offload_optimizer zero_offload_param zero_reduce_bucket_size zero_allgather_bucket_size"
    " zero_param_persistence_threshold zero_sub_group_size communication_data_type zero_allow_untested_optimizer"
    " zero_reduce_scatter zero_overlap_comm zero_contiguous_gradients":
        "use engine.config, the ds_config, or engine.translation, the configuration in effect",
    "set_data_post_process_func curriculum_learning_enabled set_custom_curriculum_learning_schedule":
        "use a custom DataLoader",
    "offload_states reload_states": "use the config's zero_optimization.offload_optimizer and offload_param",
    "get_sequence_parallel_group": "the sequences of a wrapped module are not split over ranks: build the model from"
        " threed.layers, and use threed.Engine with a topology",
    "coalesce_grad_reduction": "not needed: gradients of several backwards are reduced together",
    "scale": "use engine.backward(loss), which scales the loss",
    "get_data_parallel_rank": "use engine.topology.axis(\"dp\").index",
    "register_compile_pass get_compile_time get_deepcompile_backend": "use engine.compile()",
    "sparse_tensor_module_names sparse_gradients_enabled": "use dense gradients",
    "random_ltd_enabled random_ltd_initialize": "drop tokens in the module's forward",
}  # fmt: skip
# Names of `PipelineModule` -> what to use instead.
_OF_PIPELINE = {
    "ckpt_prefix ckpt_layer_path ckpt_layer_path_list": "use engine.save_checkpoint and engine.load_checkpoint",
    "get_additional_losses": "add all losses in loss_fn",
    "get_tied_weights_and_groups": "not needed: engine.train_batch sums the gradients of tied weights",
    "is_checkpointable_results": "set activation_checkpoint_interval, or checkpointable_layers",
}  # fmt: skip
# Names of modules, or of attributes, with or without their module -> what to use instead. The longest
# match applies, and a module's entry applies to its content.
_OF_MODULES = {
    "deepspeed.autotuning": "use `threed plan`, which estimates memory and speed",
    "deepspeed.checkpoint": "use engine.save_checkpoint, whose checkpoints load on any number of ranks",
    "deepspeed.compile": "use torch.compile",
    "deepspeed.compression": "use the full model",
    "deepspeed.elasticity": "use `threed` or torchrun with --nnodes MIN:MAX",
    "deepspeed.inference deepspeed.init_inference deepspeed.InferenceEngine deepspeed.DeepSpeedInferenceConfig"
    " deepspeed.runtime.hybrid_engine deepspeed.DeepSpeedHybridEngine":
        "use the module itself inside `with engine.gathered():`",
    "deepspeed.launcher": "use torchrun, srun or mpirun",
    "deepspeed.linear": "use peft for LoRA",
    "deepspeed.module_inject deepspeed.ops.transformer deepspeed.DeepSpeedTransformerLayer"
    " deepspeed.DeepSpeedTransformerConfig deepspeed.replace_transformer_layer": "use the model's own layers",
    "deepspeed.moe": "use threed.layers.MixtureOfExperts in a model of threed.layers, or threed.from_transformers",
    "deepspeed.monitor": "use engine.metrics",
    "deepspeed.nvme": "use the config's offload_optimizer and offload_param with device nvme",
    "deepspeed.ops": "use the config's optimizer; threed has its own kernels",
    "deepspeed.ops.adagrad deepspeed.ops.lamb deepspeed.ops.muon deepspeed.runtime.fp16.onebit FusedLamb OnebitAdam"
    " OnebitLamb ZeroOneAdam": "use AdamW of torch, or the config's optimizer AdamW, Adam, SGD or Lion",
    "deepspeed.ops.sparse_attention": "use threed.layers.SparseAttention in a model of threed.layers",
    "deepspeed.profiling": "use engine.metrics, or torch.profiler",
    "deepspeed.runtime.sequence_parallel deepspeed.sequence deepspeed.utils.groups._get_sequence_parallel_group"
    " UlyssesSPAttentionHF UlyssesSPDataLoaderAdapter":
        "use threed.layers or threed.from_transformers with --parallel.cp, because the sequences of a wrapped module are"
        " not split over ranks",
    "deepspeed.runtime.superoffload deepspeed.runtime.zenflow": "use the config's offload_optimizer",
    "deepspeed.runtime.tensor_parallel deepspeed.set_autotp_mode deepspeed.tp_model_init get_model_parallel_group"
    " get_tensor_model_parallel_group":
        "use threed.layers with tp, because the layers of a wrapped module are not split over ranks",
    "deepspeed.runtime.zero.tiling": "use torch.nn.Linear; zero.tile of a threed configuration",
    "CheckpointFunction": "use deepspeed.checkpointing.checkpoint",
    "DualPipeVModule": "use deepspeed.PipelineModule, or threed.layers with --parallel.schedule",
    "FP16_Optimizer": "use the config's fp16",
    "BF16_Optimizer": "use the config's bf16",
    "LRRangeTest OneCycle": "use WarmupLR, WarmupDecayLR or WarmupCosineLR, or a scheduler of torch",
    "TiledLinear": "use torch.nn.Linear",
    "get_cuda_rng_tracker": "use torch's generator: the layers of a wrapped module are not split over ranks",
    "safe_get_local_fp32_param safe_get_local_grad safe_get_local_optimizer_state safe_set_local_fp32_param"
    " safe_set_local_grad safe_set_local_optimizer_state": "use safe_get_full_fp32_param and"
        " safe_get_full_optimizer_state, because slices differ from DeepSpeed's",
    "safe_set_full_grad safe_update_full_grad_vectorized":
        "use register_hook on the parameter, because gradients are summed in the engine's buffers",
}  # fmt: skip
REFUSED: Mapping[str, str] = (
    _by_name(_OF_MODULES)
    | _by_name(_OF_ENGINE, "engine.")
    | _by_name(_OF_PIPELINE, "PipelineModule.")
)
_OTHERWISE = "use DeepSpeed itself, or threed's own API (docs/guide/deepspeed.md)"


def refusal(name: str) -> str:
    """Returns the error text for a name that threed does not offer.

    Args:
        name: dotted name, such as "deepspeed.ops.lamb.FusedLamb" or "engine.set_lr".
    """
    first, *_, last = parts = name.split(".")
    owner = "engine" if first.endswith("Engine") else first
    if owner in ("engine", "PipelineModule"):
        public = "use public names, such as those in docs/guide/deepspeed.md"
        return not_offered(name, REFUSED.get(f"{owner}.{last}", public))
    prefixes = [".".join(parts[:count]) for count in range(len(parts), 1, -1)]
    instead = next((REFUSED[key] for key in (name, last, *prefixes) if key in REFUSED), _OTHERWISE)
    return not_offered(name, instead)


def not_offered(name: str, instead: str) -> str:
    """Returns the error text for a use that threed does not offer.

    Args:
        name: the use, such as "FusedAdam.step()".
        instead: what to use instead.
    """
    return f"threed does not offer {name}: {instead}"


class Refused:
    """A method or function that raises an error, whatever its arguments.

    Args:
        name: the name of the method, for the error.
        instead: what to use instead.
        kind: class of the error.
    """

    def __init__(
        self, name: str, instead: str, kind: type[Exception] = NotImplementedError
    ) -> None:
        self._kind, self._text = kind, not_offered(name, instead)
        self.__doc__ = f"Raises {kind.__name__}: {instead}."

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise self._kind(self._text)
