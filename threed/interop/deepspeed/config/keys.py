"""Keys of a ds_config.

`DeepSpeedConfig` has the supported keys, with DeepSpeed's defaults. `NO_EFFECT` lists keys that are
accepted but have no effect, each with the reason. `REFUSED` lists keys for which threed supports
only some values or no value; each entry has the supported values and the reason. Both tables use
full names of keys, such as "zero_optimization.overlap_comm". If a key is "auto" and threed cannot
derive its value, an error is raised. Its message ends with a fix, which is the `description` of the
key's field.

Names and defaults follow DeepSpeed 0.19.8 (deepspeed/runtime/config.py, constants.py,
precision_config.py, zero/config.py, lr_schedules.py).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any

from threed.config.schema import BaseModel, BeforeValidator, ConfigDict, Field
from threed.config.values import Betas, Count, Natural, NonNegative, Positive, Share

MASTERS = "master weights and optimizer states are always fp32"
ONE_UPDATE = "there is one implementation of each optimizer"
PINNED = "host memory is always page-locked if there is a GPU"
REMOVED = "DeepSpeed has removed it too"
OFF, ON = (False,), (True,)


def _word(words: str, absent: str = "") -> BeforeValidator:
    """Returns a validator that accepts certain words in any case and returns them in lower case.

    Args:
        words: the words to accept, separated by spaces.
        absent: words that DeepSpeed supports and threed does not. For these words, the error
            message is "is not supported" instead of "is not known".
    """

    def validate(value: object) -> str:
        text, listed = str(value).lower(), words.split()
        if text in words.lower().split():
            return text
        what = "is not supported" if text in absent.split() else "is not known"
        raise ValueError(f"{what}: use {', '.join(listed[:-1])} or {listed[-1]}")

    return BeforeValidator(validate)


def _dtype(value: object) -> str:
    name = str(value).lower().removeprefix("torch.")
    for dtype, names in DTYPES.items():
        if name in names:
            return dtype
    raise ValueError("is not known: use fp32, bf16 or fp16")


def _folder(value: object) -> str:
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else ""
    if not isinstance(path, str) or not path:
        raise ValueError("is not a folder: set it to a path")
    return os.path.expanduser(path)


DTYPES = {
    "fp32": ("fp32", "float32", "float"),
    "bf16": ("bf16", "bfloat16"),
    "fp16": ("fp16", "float16", "half"),
}
DType = Annotated[str, BeforeValidator(_dtype)]
Device = Annotated[str, _word("none cpu nvme")]
Ramp = Annotated[str, _word("log linear")]
TagValidation = Annotated[str, _word("Warn Ignore Fail")]
OptimizerName = Annotated[str, _word(
    "AdamW Adam SGD Lion", "adagrad lamb onebitadam zerooneadam onebitlamb muadam muadamw musgd muon",
)]  # fmt: skip
SchedulerName = Annotated[
    str, _word("WarmupLR WarmupDecayLR WarmupCosineLR", "onecycle lrrangetest")
]
SparseMode = Annotated[str, _word("dense fixed variable bigbird bslongformer")]
SparseDirection = Annotated[str, _word("unidirectional bidirectional")]
ELEMENTS = "set it to a number of elements (the model's config has no hidden size)"
STEPS = "set it to the number of optimizer steps"


class Group(BaseModel):
    """Base class of a group of keys. A group without supported keys uses this class itself."""

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)


class Params(Group):
    """The keys of the group `optimizer.params` for all supported optimizers together."""

    lr: Positive = Field(1e-3, description="set it to the learning rate")
    weight_decay: NonNegative = 0.0
    betas: Betas = (0.9, 0.999)
    eps: Positive = 1e-8
    momentum: Share = 0.0
    adam_w_mode: bool = True


class Optimizer(Group):
    """The keys of the group `optimizer`."""

    type: OptimizerName | None = None
    params: Params = Params()


class SchedulerParams(Group):
    """The keys of the group `scheduler.params` for all supported schedulers together."""

    warmup_type: Ramp = Field("log", description="set it to log or linear")
    warmup_num_steps: Count = Field(1000, description=STEPS)
    total_num_steps: Count | None = Field(None, description=STEPS)
    warmup_min_lr: NonNegative = 0.0
    warmup_max_lr: NonNegative | None = None
    warmup_min_ratio: NonNegative = 0.0
    cos_min_ratio: NonNegative = 0.0001


class Scheduler(Group):
    """The keys of the group `scheduler`."""

    type: SchedulerName | None = None
    params: SchedulerParams = SchedulerParams()


class Offload(Group):
    """The keys of the group `offload_optimizer` or `offload_param`."""

    device: Device = Field("none", description="set it to none, cpu or nvme")
    nvme_path: Annotated[str, BeforeValidator(_folder)] | None = Field(
        None, description="set it to a folder on a fast local drive"
    )


class Zero(Group):
    """The keys of the group `zero_optimization`."""

    stage: Annotated[Natural, Field(lt=4)] = 0
    reduce_bucket_size: Count | None = Field(None, description=ELEMENTS)
    sub_group_size: Count | None = None
    stage3_param_persistence_threshold: Natural = Field(100_000, description=ELEMENTS)
    stage3_gather_16bit_weights_on_model_save: bool = False
    mics_shard_size: Annotated[int, Field(ge=-1)] = -1
    zero_quantized_weights: bool = False
    zero_quantized_gradients: bool = False
    offload_optimizer: Offload = Offload()
    offload_param: Offload = Offload()
    cpu_offload: bool = False
    cpu_offload_param: bool = False
    cpu_offload_params: bool = False


class Bf16(Group):
    """The keys of the group `bf16`, which may also be named `bfloat16`."""

    enabled: bool = Field(False, description="set it to true or false")


class Fp16(Bf16):
    """The keys of the group `fp16`, including the loss scale."""

    auto_cast: bool = False
    loss_scale: NonNegative = 0.0
    initial_scale_power: Annotated[Natural, Field(lt=128)] = 16
    loss_scale_window: Count = 1000
    hysteresis: Count = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: Positive = 1.0


class DataTypes(Group):
    """The keys of the group `data_types`."""

    param_dtype: DType | None = None
    grad_accum_dtype: DType | None = None


class Checkpoint(Group):
    """The keys of the group `checkpoint`."""

    tag_validation: TagValidation = Field("warn", description="set it to Warn, Ignore or Fail")


class SparseAttention(Group):
    """The keys of the group `sparse_attention` for all modes together, with DeepSpeed's defaults.

    DeepSpeed 0.19 has removed the group; the defaults are those of DeepSpeed 0.18.
    """

    mode: SparseMode = "fixed"
    block: Count = 16
    different_layout_per_head: bool = False
    attention: SparseDirection = "bidirectional"
    num_local_blocks: Count = 4
    num_global_blocks: Count = 1
    horizontal_global_attention: bool = False
    num_different_global_patterns: Count = 1
    num_random_blocks: Natural = 0
    local_window_blocks: list[Count] = Field([4], min_length=1)
    global_block_indices: list[Natural] = Field([0])
    global_block_end_indices: list[Natural] | None = None
    num_sliding_window_blocks: Count = 3


class DeepSpeedConfig(Group):
    """A ds_config: the supported top-level keys, and the groups of keys."""

    train_batch_size: Count | None = None
    train_micro_batch_size_per_gpu: Count | None = None
    gradient_accumulation_steps: Count | None = None
    gradient_clipping: NonNegative = 1.0
    communication_data_type: DType | None = None
    dataloader_drop_last: bool = False
    fp16: Fp16 = Fp16()
    bf16: Bf16 = Bf16()
    data_types: DataTypes = DataTypes()
    zero_optimization: Zero = Zero()
    optimizer: Optimizer = Optimizer()
    scheduler: Scheduler = Scheduler()
    checkpoint: Checkpoint = Checkpoint()
    sparse_attention: SparseAttention = SparseAttention()
    compile: Group = Group()
    tensor_parallel: Group = Group()


RENAMED = {
    "bfloat16": "bf16",
    "zero_optimization.param_persistence_threshold": "zero_optimization.stage3_param_persistence_threshold",
    "zero_optimization.gather_16bit_weights_on_model_save":
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save":
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
}  # fmt: skip


def _by_name(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Merges tables into one table by full key name, such as "zero_optimization.overlap_comm".

    Args:
        tables: name of a group -> (names of keys in this group -> their common value). The names
            of several keys with the same value are separated by spaces.
    """
    return {
        f"{group}.{key}".removeprefix("."): what
        for group, table in tables.items()
        for keys, what in table.items()
        for key in keys.split()
    }


NO_EFFECT: Mapping[str, str] = _by_name({
    "": {
        "steps_per_print log_level": "use engine.metrics, which has the loss, gradient norm and learning rate of each step",
        "wall_clock_breakdown memory_breakdown flops_profiler timers": "use the times in engine.metrics, or torch.profiler",
        "comms_logger": "bytes sent are always counted, per axis: topology.traffic",
        "dump_state": "use engine.translation, which has the configuration in effect",
        "disable_python_gc": "Python's garbage collection is not changed",
        "disable_allgather": "the ZeRO stage determines the gather",
        "prescale_gradients gradient_predivide_factor": "the loss is divided before the backward",
        "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer": "the update is threed's own, at every stage",
        "aio": "threed splits transfers into pieces of fixed size; many are in flight at once, through host memory",
        "activation_checkpointing":
            "it configures deepspeed.checkpointing: use the model's gradient_checkpointing_enable()",
        "vocabulary_size": "DeepSpeed uses it only for a warning",
        "nebula datastates": "checkpoints are written to the folder you name",
        "pipeline seq_parallel_communication_data_type use_data_before_expert_parallelism": "every rank runs the full model",
    },
    "zero_optimization": {
        "stage3_prefetch_bucket_size prefetch_bucket_size stage3_max_live_parameters max_live_parameters"
        " stage3_max_reuse_distance max_reuse_distance stage3_module_granularity_threshold stage3_allgather_sequential"
        " stage3_use_all_reduce_for_fetch_params memory_efficient_linear leaf_module":
            "parameters are gathered per unit, with prefetch, and released after use",
        "contiguous_gradients reduce_scatter allgather_partitions allgather_bucket_size round_robin_gradients"
        " use_multi_rank_bucket_allreduce overlap_comm":
            "every rank owns a slice of every bucket; reduction and gather of a bucket overlap with computation",
        "load_from_fp32_weights": MASTERS,
        "elastic_checkpoint pipeline_loading_checkpoint": "checkpoints load on any number of ranks; each reads its slices",
        "compute_grad_norm": "the norm is always computed, because it decides whether a step is skipped",
        "stage3_model_persistence_threshold model_persistence_threshold":
            "only stage3_param_persistence_threshold decides which parameters stay unsharded",
        "stage3_partition_stream_chunk_size": "build the model on the meta device to shard it unit by unit",
        "ignore_unused_parameters": "unused parameters are always supported",
        "legacy_stage1": "there is one implementation",
        "parameter_alignment": "slices are aligned",
        "override_module_apply": "the module's methods are not replaced",
        "log_trace_cache_warnings": "these warnings do not exist",
        "enable_sanity_checks": "ranks compare their buckets at start",
        "save_muon_momentum_buffer_in_memory": "Muon is not supported",
        "cpu_offload_use_pin_memory": PINNED,
    },
    "zero_optimization.offload_optimizer": {
        "buffer_count": "there is one buffer per bucket slice in flight; set reduce_bucket_size",
        "pin_memory": PINNED,
        "pipeline_read pipeline_write": "reading the next bucket and writing the last one always overlap with the update",
        "fast_init": "initial states are zeros, which are never written",
        "super_offload": "there is one implementation: transfers of buckets overlap with the backward and the update",
        "cpuadam_cores_perc": "the update uses torch's threads: set OMP_NUM_THREADS",
    },
    "zero_optimization.offload_param": {
        "buffer_count buffer_size": "there is one buffer per bucket slice in flight; set reduce_bucket_size",
        "max_in_cpu": "with nvme all slices are on the drive, and only buffers are in memory",
        "pin_memory": PINNED,
    },
    "bf16": {
        "immediate_grad_update": "a gradient is added to its bucket as soon as it is computed",
        "check_grad_overflow": "a step whose gradients are not finite is always skipped, on every rank",
    },
    "checkpoint": {
        "load_universal": "every checkpoint loads on any number of ranks",
        "parallel_write writer": "every rank writes its own slices",
        "checkpoint_serialization": "checkpoints are safetensors",
    },
    "compile": {
        "autoep_non_moe free_activation free_activation_threshold offload_activation_pin_memory double_buffer debug_log"
        " symmetric_memory sync_before_reduce sync_after_reduce sync_before_allgather sync_after_allgather passes"
        " keep_int_input_tensors keep_all_input_tensors": "DeepCompile is off",
    },
    "tensor_parallel": {
        "preset_model partition_config tp dtype": "the module is not tensor-parallel",
    },
    "optimizer": {
        "legacy_fusion": ONE_UPDATE,
    },
    "optimizer.params": {
        "fused foreach differentiable capturable set_grad_none torch_adam": ONE_UPDATE,
    },
})  # fmt: skip
REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = _by_name({
    "": {
        "gradient_allreduce_op": (("mean",), "gradients are of the loss averaged over ranks"),
        "managed_gradient_accumulation": (ON, "engine.step() updates at the accumulation boundary"),
        "sparse_gradients graph_harvesting progressive_layer_drop eigenvalue": (OFF, REMOVED),
        "sequence_parallel_size": ((1,), "a module cannot be split so: build it from threed.layers, and use --parallel.cp"),
        "seq_parallel_comm_data_type": ((), "sequences are not split over ranks"),
        "weight_quantization": ((), "train in bf16"),
        "compression_training quantize_training": ((), REMOVED),
        "amp": (OFF, "use bf16 or fp16; DeepSpeed has removed it too"),
        "torch_autocast": (OFF, 'use "bf16": {"enabled": true}, which casts the weights'),
        "autotuning": (OFF, "set the batch sizes; `threed plan` forecasts memory and communication"),
        "elasticity": (OFF, "set the batch sizes; checkpoints load on any number of ranks"),
        "data_efficiency curriculum_learning": (OFF, "sample in the data loader you pass"),
        "hybrid_engine": (OFF, "generate with the module itself"),
        "tensorboard wandb csv_monitor comet":
            (OFF, "log engine.metrics in the training loop, such as with torch.utils.tensorboard; Trainer: report_to"),
        "expert_parallel": (OFF, "use layers.MixtureOfExperts and --parallel.ep"),
    },
    "zero_optimization": {
        "zenflow": ((), "every update uses all gradients of its step; remove the key"),
        "zero_hpz_partition_size": ((0, 1), "use mics_shard_size to shard within a group of ranks"),
        "zero_quantized_nontrainable_weights": (OFF, "use zero_quantized_weights for all weights"),
        "zeropp_loco_param": ((), REMOVED),
        "mics_hierarchical_params_gather": (OFF, "a gather is one collective over the shard group"),
    },
    "zero_optimization.offload_optimizer": {
        "ratio": ((1,), "states are offloaded completely or not at all; set 1, or device none"),
    },
    "fp16": {
        "fp16_master_weights_and_grads": (OFF, MASTERS),
    },
    "bf16": {
        "bf16_master_weights_and_grads bf16_optimizer_states": (OFF, MASTERS),
    },
    "data_types": {
        "buffer_dtype": ((), "buffers keep their dtypes: cast them before initialize"),
        "keep_in_fp32_modules": (("auto",), "all modules run in the compute dtype, with fp32 master weights"),
    },
    "checkpoint": {
        "use_node_local_storage": (OFF, "a checkpoint is one folder shared by all ranks"),
    },
    "compile": {
        "deepcompile offload_activation offload_opt_states offload_parameters":
            (OFF, "use torch.compile, the model's own checkpointing, and the offload of zero_optimization"),
    },
    "tensor_parallel": {
        "autotp_size tp_size": ((0, 1), "build the model from threed.layers, and use threed.Engine with a topology"),
    },
    "scheduler.params": {
        "last_batch_iteration": ((-1,), "engine.load_checkpoint() restores the step"),
    },
    "optimizer.params": {
        "max_grad_norm": ((0,), "use the top-level gradient_clipping"),
        "maximize": (OFF, "change the loss's sign"),
        "fp32_optimizer_states": (ON, MASTERS),
        "bias_correction": (ON, "the moments' bias is always corrected"),
        "amsgrad": (OFF, "use the plain second moment"),
        "dampening nesterov": (OFF, "use plain momentum"),
    },
})  # fmt: skip
