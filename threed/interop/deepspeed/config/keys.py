"""The keys of a ds_config that change nothing here, and those that are refused, each with its reason.

Of every group a `Table` (see `section`): keys without effect, keys of which only some values are taken, and groups that
must be off. `section.close(TOP)` says what applies of it.
"""

from __future__ import annotations

from threed.interop.deepspeed.config.section import Table

MASTERS = "master weights and optimizer states are always fp32"
ONE_UPDATE = "there is one implementation of each optimizer"
PINNED = "host memory is page-locked wherever there is a GPU"
REMOVED = "DeepSpeed has removed it too"

TOP = Table({
    "steps_per_print log_level": "nothing is printed; engine.metrics has every step's loss, norm and learning rate",
    "wall_clock_breakdown memory_breakdown flops_profiler timers": "see the seconds in engine.metrics, torch.profiler",
    "tensorboard wandb csv_monitor comet": "the loop is yours: log engine.metrics where you like",
    "comms_logger": "bytes sent are always counted, per axis: topology.traffic",
    "dump_state": "engine.notes says what applies",
    "disable_python_gc": "garbage collection is left alone",
    "disable_allgather": "the gather is chosen by the ZeRO stage",
    "prescale_gradients gradient_predivide_factor": "the loss is divided before the backward",
    "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer": "the update is threed's own, at every stage",
    "vocabulary_size": "DeepSpeed only warns by it",
    "nebula datastates": "checkpoints are written to the folder you name",
    "pipeline seq_parallel_communication_data_type use_data_before_expert_parallelism": "every rank runs all of it",
}, {
    "gradient_allreduce_op": (("mean",), "the mean is what a loss averaged over ranks gives"),
    "managed_gradient_accumulation": ((True,), "engine.step() acts at the accumulation boundary"),
    "sparse_gradients graph_harvesting": ((False,), REMOVED),
    "sequence_parallel_size": ((1,), "context parallelism comes with a later release"),
    "seq_parallel_comm_data_type": ((), "sequences are not cut over ranks"),
    "sparse_attention": ((), "use the attention of the model; DeepSpeed has removed it too"),
    "weight_quantization": ((), "train in bf16"),
    "compression_training quantize_training": ((), REMOVED),
}, {
    "amp": "use bf16 or fp16; DeepSpeed has removed it too",
    "torch_autocast": 'use "bf16": {"enabled": true}, which casts the weights',
    "autotuning": "write the batch sizes; `threed plan` shows what a layout costs",
    "elasticity": "write the batch sizes; checkpoints load on any number of ranks",
    "data_efficiency curriculum_learning": "sample in the data loader you pass",
    "hybrid_engine": "generate with the module itself",
    "progressive_layer_drop eigenvalue": REMOVED,
    "expert_parallel": "experts come with a later release",
})  # fmt: skip

ZERO = Table({
    "stage3_prefetch_bucket_size prefetch_bucket_size stage3_max_live_parameters max_live_parameters"
    " stage3_max_reuse_distance max_reuse_distance stage3_module_granularity_threshold stage3_allgather_sequential"
    " stage3_use_all_reduce_for_fetch_params memory_efficient_linear leaf_module":
        "parameters are gathered unit by unit, the next ones ahead, and released after use",
    "contiguous_gradients reduce_scatter allgather_partitions allgather_bucket_size round_robin_gradients"
    " use_multi_rank_bucket_allreduce overlap_comm":
        "every rank owns a slice of every bucket, reduced and gathered as a whole while others compute",
    "load_from_fp32_weights": MASTERS,
    "elastic_checkpoint pipeline_loading_checkpoint": "checkpoints load slice by slice on any number of ranks",
    "compute_grad_norm": "the norm is always computed; it tells whether a step must be skipped",
    "stage3_model_persistence_threshold model_persistence_threshold":
        "stage3_param_persistence_threshold alone decides what stays",
    "stage3_gather_16bit_weights_on_model_save gather_16bit_weights_on_model_save"
    " stage3_gather_fp16_weights_on_model_save": "engine.full_state_dict() gathers the weights",
    "stage3_partition_stream_chunk_size": "build the model on the meta device to slice it unit by unit",
    "ignore_unused_parameters": "unused parameters are always fine",
    "legacy_stage1": "there is one implementation",
    "parameter_alignment": "slices are aligned",
    "override_module_apply": "the module's methods are left alone",
    "log_trace_cache_warnings": "nothing is logged",
    "enable_sanity_checks": "ranks compare their buckets at start",
    "save_muon_momentum_buffer_in_memory": "there is no Muon",
    "cpu_offload_use_pin_memory": PINNED,
}, {
    "zenflow": ((), "every update has the whole gradient of its step; leave it out"),
    "zero_hpz_partition_size": ((0, 1), "use mics_shard_size to slice within a group of ranks"),
    "zero_quantized_nontrainable_weights": ((False,), "use zero_quantized_weights for all weights"),
    "zeropp_loco_param": ((), REMOVED),
    "mics_hierarchical_params_gather": ((False,), "a gather goes over the shard group at once"),
})  # fmt: skip

OFFLOAD_OPTIMIZER = Table({
    "buffer_count": "a buffer holds a bucket's slice, and there are as many as are under way; see reduce_bucket_size",
    "pin_memory": PINNED,
    "pipeline_read pipeline_write": "the next bucket is always read, and the last one written, while one is updated",
    "fast_init": "fresh states are zeros, which nobody has to write",
    "super_offload": "there is one implementation: buckets leave while backward runs, and return while they update",
    "cpuadam_cores_perc": "the update takes torch's threads: set OMP_NUM_THREADS",
}, {"ratio": ((1,), "a part of the states on the host; write 1 for all of them, or device none")})  # fmt: skip

OFFLOAD_PARAM = Table({
    "buffer_count buffer_size": "there are as many buffers of a bucket's slice as are under way: reduce_bucket_size",
    "max_in_cpu": "with nvme all slices live on the drive, and only buffers are in memory",
    "pin_memory": PINNED,
})  # fmt: skip

AIO = Table({
    "block_size": "a transfer is cut into pieces of threed's own size",
    "queue_depth intra_op_parallelism thread_count single_submit overlap_events": "many pieces move at once, always",
    "use_gds": "what is read from the drive passes through host memory",
})  # fmt: skip

ACTIVATION_CHECKPOINTING = Table({
    "partition_activations cpu_checkpointing contiguous_memory_optimization number_checkpoints profile"
    " synchronize_checkpoint_boundary":
        "deepspeed.checkpointing is called by models: use the model's own, as gradient_checkpointing_enable()",
})  # fmt: skip

FP16 = Table({}, {
    "auto_cast": ((False,), "cast floating-point inputs to fp16 in the batch"),
    "fp16_master_weights_and_grads": ((False,), MASTERS),
})  # fmt: skip

BF16 = Table({
    "immediate_grad_update": "gradients go to their bucket as soon as they are there",
    "check_grad_overflow": "a step whose gradients are not finite is always skipped, on every rank",
}, {"bf16_master_weights_and_grads bf16_optimizer_states": ((False,), MASTERS)})  # fmt: skip

DATA_TYPES = Table({}, {
    "buffer_dtype": ((), "buffers become the compute dtype, as module.to(dtype) makes them"),
    "keep_in_fp32_modules": (("auto",), "all modules run in the compute dtype, and masters are fp32"),
})  # fmt: skip

CHECKPOINT = Table({
    "tag_validation": "ranks must always agree on the tag",
    "load_universal": "every checkpoint loads on any number of ranks",
    "parallel_write writer": "every rank writes what it owns",
    "checkpoint_serialization": "checkpoints are safetensors",
}, {"use_node_local_storage": ((False,), "a checkpoint is one folder that all ranks see")})  # fmt: skip

COMPILE = Table({
    "autoep_non_moe free_activation free_activation_threshold offload_activation_pin_memory double_buffer debug_log"
    " symmetric_memory sync_before_reduce sync_after_reduce sync_before_allgather sync_after_allgather passes"
    " keep_int_input_tensors keep_all_input_tensors": "DeepCompile is off",
}, {
    "deepcompile": ((False,), "use torch.compile on the module's own functions"),
    "offload_activation": ((False,), "use the model's own checkpointing"),
    "offload_opt_states": ((False,), "use zero_optimization.offload_optimizer"),
    "offload_parameters": ((False,), "use zero_optimization.offload_param"),
})  # fmt: skip

TENSOR_PARALLEL = Table({"preset_model partition_config tp dtype": "the module is not sliced"}, {
    "autotp_size tp_size": ((0, 1), "build the model from threed.layers, and use threed.Engine with a topology"),
})  # fmt: skip

SCHEDULER = Table(
    {}, {"last_batch_iteration": ((-1,), "engine.load_checkpoint() restores the step")}
)
OPTIMIZER = Table({"legacy_fusion": ONE_UPDATE})
PARAMS = Table({"fused foreach differentiable capturable set_grad_none": ONE_UPDATE}, {
    "max_grad_norm": ((0,), "use the top-level gradient_clipping"),
    "maximize": ((False,), "change the loss's sign"),
})  # fmt: skip
ADAM = Table({"torch_adam": ONE_UPDATE}, {
    "fp32_optimizer_states": ((True,), MASTERS),
    "bias_correction": ((True,), "the moments' bias is always corrected"),
    "amsgrad": ((False,), "use the plain second moment"),
})  # fmt: skip
SGD = Table(
    {}, {"dampening": ((0,), "use plain momentum"), "nesterov": ((False,), "use plain momentum")}
)
LION = Table({}, {"fp32_optimizer_states": ((True,), MASTERS)})
