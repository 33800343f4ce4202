"""The keys of a ds_config that change nothing here, and those that are refused, each with its reason.

settle(section, TOP)           # notes and problems for whatever of the table is in the section
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from threed.ds_config.section import Section

ACTIVATIONS = (
    "it configures deepspeed.checkpointing, which a model has to call; use the model's own, such as"
    " gradient_checkpointing_enable()"
)
ALWAYS_ASYNC = "transfers are always asynchronous, many pieces at once"
BUFFERS = "a buffer holds a bucket's slice, and there are as many as are under way; see reduce_bucket_size"
MASTERS = "master weights and optimizer states are always fp32"
OVERLAP = "reductions and gathers always overlap compute"
PREFETCH = "parameters are gathered unit by unit, the next ones ahead, and released after use"
PINNED = "host memory is page-locked wherever there is a GPU"
PROFILE = "engine.metrics has loss, norm, learning rate and seconds of a step; use torch.profiler for more"


@dataclass(frozen=True)
class Table:
    """Keys of one group: key -> why it has no effect; key -> (values that are fine, why others are refused);
    groups that are refused unless they say "enabled": false -> why."""

    ignored: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, tuple[tuple[Any, ...], str]] = field(default_factory=dict)
    blocks: Mapping[str, str] = field(default_factory=dict)


def settle(section: Section, table: Table) -> None:
    """Notes what has no effect, and refuses what is not there."""
    for key, why in table.ignored.items():
        section.ignore(key, why)
    for key, (off, why) in table.refused.items():
        section.refuse(key, off, why)
    for key, why in table.blocks.items():
        section.refuse_block(key, why)
    section.close()


def nothing(table: Table, why: str) -> Table:
    """The same keys, all of them without effect."""
    return Table(ignored=dict.fromkeys((*table.ignored, *table.refused), why))


TOP = Table(
    ignored={
        "steps_per_print": "nothing is printed; engine.metrics has every step's loss, norm and learning rate",
        "wall_clock_breakdown": PROFILE,
        "memory_breakdown": PROFILE,
        "flops_profiler": PROFILE,
        "comms_logger": "bytes sent are always counted, per axis: topology.traffic",
        "tensorboard": "the loop is yours: log engine.metrics where you like",
        "wandb": "the loop is yours: log engine.metrics where you like",
        "csv_monitor": "the loop is yours: log engine.metrics where you like",
        "comet": "the loop is yours: log engine.metrics where you like",
        "dump_state": "engine.notes says what applies",
        "log_level": "nothing is logged",
        "timers": PROFILE,
        "disable_python_gc": "garbage collection is left alone",
        "disable_allgather": "the gather is chosen by the ZeRO stage",
        "prescale_gradients": "the loss is divided before the backward, by micro-batches and ranks",
        "gradient_predivide_factor": "the loss is divided before the backward, by micro-batches and ranks",
        "zero_allow_untested_optimizer": "every optimizer that is there works with every stage",
        "zero_force_ds_cpu_optimizer": "the update is threed's own, wherever it runs",
        "vocabulary_size": "DeepSpeed only warns by it",
        "nebula": "checkpoints are written to the folder you name",
        "datastates": "checkpoints are written to the folder you name",
        "pipeline": "the module runs whole on every rank",
        "seq_parallel_communication_data_type": "sequences are not cut over ranks",
        "use_data_before_expert_parallelism": "there are no experts",
    },
    refused={
        "gradient_allreduce_op": (("mean",), "the mean is what a loss averaged over ranks gives"),
        "managed_gradient_accumulation": ((True,), "engine.step() acts at the accumulation boundary"),
        "sparse_gradients": ((False,), "gradients are reduced dense; DeepSpeed has removed it too"),
        "graph_harvesting": ((False,), "DeepSpeed has removed it too"),
        "sequence_parallel_size": ((1,), "context parallelism comes with a later release"),
        "sparse_attention": ((), "use the attention of the model; DeepSpeed has removed it too"),
        "weight_quantization": ((), "train in bf16"),
        "compression_training": ((), "DeepSpeed has removed it too"),
        "quantize_training": ((), "DeepSpeed has removed it too"),
        "seq_parallel_comm_data_type": ((), "sequences are not cut over ranks"),
    },
    blocks={
        "amp": "use bf16 or fp16; DeepSpeed has removed it too",
        "torch_autocast": 'use "bf16": {"enabled": true}, which casts the weights',
        "autotuning": "write the batch sizes; `threed plan` shows what a layout costs",
        "data_efficiency": "sample in the data loader you pass",
        "hybrid_engine": "generate with the module itself",
        "elasticity": "write the batch sizes; checkpoints load on any number of ranks",
        "curriculum_learning": "sample in the data loader you pass",
        "progressive_layer_drop": "DeepSpeed has removed it too",
        "eigenvalue": "DeepSpeed has removed it too",
        "expert_parallel": "experts come with a later release",
    },
)

ZERO = Table(
    ignored={
        "overlap_comm": OVERLAP,
        "contiguous_gradients": "gradients always go to contiguous buckets",
        "reduce_scatter": "stages 1 to 3 always reduce-scatter",
        "allgather_partitions": "parameters are always all-gathered",
        "allgather_bucket_size": "a gather takes what a bucket or a unit has",
        "use_multi_rank_bucket_allreduce": "every rank owns a slice of every bucket",
        "round_robin_gradients": "every rank owns a slice of every bucket",
        "load_from_fp32_weights": MASTERS,
        "elastic_checkpoint": "checkpoints load on any number of ranks",
        "compute_grad_norm": "the norm is always computed; it tells whether a step must be skipped",
        "stage3_prefetch_bucket_size": PREFETCH,
        "prefetch_bucket_size": PREFETCH,
        "stage3_max_live_parameters": PREFETCH,
        "max_live_parameters": PREFETCH,
        "stage3_max_reuse_distance": PREFETCH,
        "max_reuse_distance": PREFETCH,
        "stage3_model_persistence_threshold": "stage3_param_persistence_threshold alone decides what stays",
        "model_persistence_threshold": "stage3_param_persistence_threshold alone decides what stays",
        "stage3_gather_16bit_weights_on_model_save": "engine.full_state_dict() gathers the weights",
        "gather_16bit_weights_on_model_save": "engine.full_state_dict() gathers the weights",
        "stage3_gather_fp16_weights_on_model_save": "engine.full_state_dict() gathers the weights",
        "stage3_module_granularity_threshold": PREFETCH,
        "stage3_use_all_reduce_for_fetch_params": PREFETCH,
        "stage3_allgather_sequential": PREFETCH,
        "stage3_partition_stream_chunk_size": "build the model on the meta device to slice it unit by unit",
        "ignore_unused_parameters": "unused parameters are always fine",
        "legacy_stage1": "there is one implementation",
        "parameter_alignment": "slices are aligned",
        "memory_efficient_linear": PREFETCH,
        "pipeline_loading_checkpoint": "checkpoints are read slice by slice",
        "override_module_apply": "the module's methods are left alone",
        "log_trace_cache_warnings": "nothing is logged",
        "enable_sanity_checks": "ranks compare their buckets at start",
        "save_muon_momentum_buffer_in_memory": "there is no Muon",
        "leaf_module": "parameters are gathered where they are used; no module needs a mark",
        "cpu_offload_use_pin_memory": PINNED,
    },
    refused={
        "zenflow": ((), "every update has the whole gradient of its step; leave it out"),
        "zero_hpz_partition_size": ((0, 1), "use mics_shard_size to slice within a group of ranks"),
        "zero_quantized_weights": ((False,), "weights are gathered as they are"),
        "zero_quantized_nontrainable_weights": ((False,), "weights are kept as they are"),
        "zero_quantized_gradients": ((False,), "use communication_data_type for narrower gradients"),
        "zeropp_loco_param": ((), "DeepSpeed has removed it too"),
        "mics_hierarchical_params_gather": ((False,), "a gather goes over the shard group at once"),
    },
)

OFFLOAD_OPTIMIZER = Table(
    ignored={
        "buffer_count": BUFFERS,
        "pin_memory": PINNED,
        "pipeline_read": "the next bucket is always read while one is updated",
        "pipeline_write": "the last bucket is always written while one is updated",
        "fast_init": "fresh states are zeros, which nobody has to write",
        "super_offload": "there is one implementation: buckets leave while backward runs, and return while they update",
        "cpuadam_cores_perc": "the update takes torch's threads: set OMP_NUM_THREADS",
    },
    refused={"ratio": ((1,), "a part of the states on the host; write 1 for all of them, or device none")},
)

OFFLOAD_PARAM = Table(
    ignored={
        "buffer_count": BUFFERS,
        "buffer_size": BUFFERS,
        "max_in_cpu": "with nvme all slices live on the drive, and only buffers are in memory",
        "pin_memory": PINNED,
    },
)

AIO = Table(
    ignored={
        "block_size": "a transfer is cut into pieces of threed's own size",
        "queue_depth": ALWAYS_ASYNC,
        "intra_op_parallelism": ALWAYS_ASYNC,
        "thread_count": ALWAYS_ASYNC,
        "single_submit": ALWAYS_ASYNC,
        "overlap_events": ALWAYS_ASYNC,
        "use_gds": "what is read from the drive passes through host memory",
    },
)

ACTIVATION_CHECKPOINTING = Table(
    ignored={
        "partition_activations": "a module that is wrapped is not sliced, and so are its activations not",
        **dict.fromkeys(
            ("cpu_checkpointing", "contiguous_memory_optimization", "number_checkpoints",
             "synchronize_checkpoint_boundary", "profile"),
            ACTIVATIONS,
        ),
    },
)  # fmt: skip

FP16 = Table(
    refused={
        "auto_cast": ((False,), "cast floating-point inputs to fp16 in the batch"),
        "fp16_master_weights_and_grads": ((False,), MASTERS),
    },
)

BF16 = Table(
    ignored={
        "immediate_grad_update": "gradients go to their bucket as soon as they are there",
        "check_grad_overflow": "a step whose gradients are not finite is always skipped, on every rank",
    },
    refused={
        "bf16_master_weights_and_grads": ((False,), MASTERS),
        "bf16_optimizer_states": ((False,), MASTERS),
    },
)

DATA_TYPES = Table(
    refused={
        "buffer_dtype": ((), "buffers become the compute dtype, as module.to(dtype) makes them"),
        "keep_in_fp32_modules": (("auto",), "all modules run in the compute dtype, and masters are fp32"),
    },
)

CHECKPOINT = Table(
    ignored={
        "tag_validation": "ranks must always agree on the tag",
        "load_universal": "every checkpoint loads on any number of ranks",
        "parallel_write": "every rank writes what it owns",
        "writer": "every rank writes what it owns",
        "checkpoint_serialization": "checkpoints are safetensors",
    },
    refused={"use_node_local_storage": ((False,), "a checkpoint is one folder that all ranks see")},
)

COMPILE = Table(
    ignored=dict.fromkeys(
        ("autoep_non_moe", "free_activation", "free_activation_threshold", "offload_activation_pin_memory",
         "double_buffer", "symmetric_memory", "debug_log", "sync_before_reduce", "sync_after_reduce",
         "sync_before_allgather", "sync_after_allgather", "keep_int_input_tensors", "keep_all_input_tensors", "passes"),
        "DeepCompile is off",
    ),
    refused={
        "deepcompile": ((False,), "use torch.compile on the module's own functions"),
        "offload_activation": ((False,), "use the model's own checkpointing"),
        "offload_opt_states": ((False,), "use zero_optimization.offload_optimizer"),
        "offload_parameters": ((False,), "use zero_optimization.offload_param"),
    },
)  # fmt: skip

TENSOR_PARALLEL = Table(
    ignored=dict.fromkeys(("preset_model", "partition_config", "tp", "dtype"), "the module is not sliced"),
    refused={
        "autotp_size": ((0, 1), "build the model from threed.layers, and use threed.Engine with a topology"),
        "tp_size": ((0, 1), "build the model from threed.layers, and use threed.Engine with a topology"),
    },
)
