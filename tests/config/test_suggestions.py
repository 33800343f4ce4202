"""Unknown flags get the right suggestion or none: misspelled keys, and names of other frameworks."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from threed.config.arguments import GROUPS
from threed.config.groups import Config, ZeroConfig
from threed.config.schema import ValidationError
from threed.config.suggestions import suggest

# The names of other frameworks, by the keys to suggest for them; "" if threed has no such key.
MEGATRON: Mapping[str, str] = {
    "checkpoint.async":
        "async-save",
    "checkpoint.every":
        "save-interval",
    "data.path":
        "data-path",
    "data.split":
        "split",
    "data.tokenizer":
        "tokenizer-type tokenizer-model",
    "log.every":
        "log-interval",
    "log.profile-steps":
        "profile",
    "log.project":
        "wandb-project",
    "model.arch":
        "position-embedding-type use-rotary-position-embeddings normalization swiglu add-qkv-bias",
    "model.bias":
        "disable-bias-linear",
    "model.dropout":
        "hidden-dropout",
    "model.ffn":
        "ffn-hidden-size",
    "model.experts":
        "num-experts",
    "model.experts-per-token":
        "moe-router-topk",
    "parallel.ep":
        "expert-model-parallel-size",
    "model.head-dim":
        "kv-channels",
    "model.heads":
        "num-attention-heads",
    "model.hidden":
        "hidden-size",
    "model.kv-heads":
        "group-query-attention num-query-groups",
    "model.layers":
        "num-layers",
    "model.norm-eps":
        "norm-epsilon",
    "model.partial-rotary-factor model.arch":
        "rotary-percent",
    "model.positions":
        "max-position-embeddings",
    "model.qk-norm":
        "qk-layernorm",
    "model.rope-scaling":
        "use-rope-scaling",
    "model.rope-theta":
        "rotary-base",
    "model.seq":
        "seq-length",
    "model.tied":
        "untie-embeddings-and-output-weights",
    "model.vocab":
        "vocab-size",
    "model.window model.arch":
        "window-size",
    "optim.betas":
        "adam-beta1",
    "optim.eps":
        "adam-eps",
    "optim.groups":
        "decoupled-lr",
    "optim.lr":
        "lr",
    "optim.min-lr":
        "min-lr",
    "optim.momentum":
        "sgd-momentum",
    "optim.name":
        "optimizer",
    "optim.schedule":
        "lr-decay-style",
    "optim.warmup":
        "lr-warmup-iters lr-warmup-fraction lr-warmup-samples",
    "optim.weight-decay":
        "weight-decay",
    "parallel.chunks parallel.schedule":
        "num-layers-per-virtual-pipeline-stage num-virtual-stages-per-pipeline-rank",
    "parallel.cp":
        "context-parallel-size",
    "parallel.partition":
        "decoder-first-pipeline-num-layers pipeline-model-parallel-layout",
    "parallel.pp":
        "pipeline-model-parallel-size",
    "parallel.sequence":
        "sequence-parallel",
    "parallel.tp":
        "tensor-model-parallel-size",
    "precision.dtype":
        "bf16 fp16",
    "precision.grad-dtype":
        "accumulate-allreduce-grads-in-fp32",
    "precision.loss-scale":
        "loss-scale",
    "precision.reduce-dtype":
        "grad-reduce-in-bf16",
    "recompute.mode":
        "recompute-activations recompute-granularity recompute-method recompute-num-layers",
    "recompute.ops":
        "recompute-modules",
    "recompute.partition":
        "distribute-saved-activations",
    "run.dir":
        "save",
    "run.dir checkpoint.resume":
        "load",
    "data.packing":
        "reset-position-ids reset-attention-mask eod-mask-loss",
    "run.hang-timeout":
        "distributed-timeout-minutes",
    "train.eval-every":
        "eval-interval",
    "train.eval-samples":
        "eval-iters",
    "train.global-batch":
        "global-batch-size",
    "train.grad-clip":
        "clip-grad",
    "train.micro-batch":
        "micro-batch-size",
    "train.seed":
        "seed",
    "train.steps":
        "train-iters train-samples",
    "train.steps train.stop-after":
        "lr-decay-iters",
    "train.stop-after":
        "exit-interval",
    "train.time-limit":
        "exit-duration-in-mins",
    "zero.bucket-mib":
        "ddp-bucket-size",
    "zero.offload-optimizer":
        "optimizer-cpu-offload",
    "zero.shard-size":
        "num-distributed-optimizer-instances",
    "zero.stage":
        "use-distributed-optimizer use-torch-fsdp2 use-megatron-fsdp data-parallel-sharding-strategy",
    "":
        "squared-relu attention-dropout init-method-std make-vocab-size-divisible-by softmax-type"
        " account-for-embedding-in-pipeline-split overlap-grad-reduce overlap-param-gather fp8-format"
        " initial-loss-scale attention-softmax-in-fp32 rampup-batch-size start-weight-decay"
        " train-data-path data-cache-path vocab-file merge-file mock-data num-workers"
        " finetune no-load-optim no-load-rng no-save-optim"
        " ckpt-format exit-signal-handler tensorboard-dir distributed-backend use-flash-attn"
        " transformer-impl use-mcore-models cross-entropy-loss-fusion no-masked-softmax-fusion rerun-mode",
}  # fmt: skip
TRAINING_ARGUMENTS: Mapping[str, str] = {
    "checkpoint.every":
        "save_strategy save_steps",
    "checkpoint.keep":
        "save_total_limit",
    "checkpoint.resume":
        "resume_from_checkpoint",
    "log.every":
        "logging_strategy logging_steps",
    "log.project":
        "project",
    "log.wandb":
        "report_to",
    "optim.betas":
        "adam_beta1 adam_beta2",
    "optim.betas optim.eps":
        "optim_args",
    "optim.eps":
        "adam_epsilon",
    "optim.groups":
        "optim_target_modules",
    "optim.lr":
        "learning_rate",
    "optim.name":
        "optim",
    "optim.schedule":
        "lr_scheduler_type lr_scheduler_kwargs",
    "optim.warmup":
        "warmup_steps",
    "optim.weight-decay":
        "weight_decay",
    "parallel.tp parallel.pp":
        "parallelism_config",
    "precision.dtype":
        "bf16 fp16 bf16_full_eval fp16_full_eval",
    "recompute.mode":
        "activation_checkpointing activation_checkpointing_kwargs gradient_checkpointing"
        " gradient_checkpointing_kwargs",
    "run.compile":
        "torch_compile",
    "run.compile-backend":
        "torch_compile_backend",
    "run.dir":
        "output_dir",
    "run.hang-timeout":
        "ddp_timeout",
    "run.name":
        "run_name",
    "train.eval-every":
        "eval_strategy eval_steps do_eval",
    "train.global-batch":
        "gradient_accumulation_steps",
    "train.grad-clip":
        "max_grad_norm",
    "train.micro-batch":
        "per_device_train_batch_size per_device_eval_batch_size",
    "train.seed":
        "seed data_seed",
    "train.steps":
        "num_train_epochs max_steps",
    "zero.bucket-mib":
        "ddp_bucket_cap_mb",
    "zero.stage":
        "fsdp fsdp_config deepspeed",
    "":
        "average_tokens_across_devices label_smoothing_factor tf32 torch_compile_mode use_liger_kernel"
        " liger_kernel_config use_cache neftune_noise_alpha torch_empty_cache_steps auto_find_batch_size"
        " logging_first_step log_on_each_node logging_nan_inf_filter include_num_input_tokens_seen"
        " log_level log_level_replica disable_tqdm trackio_space_id trackio_bucket_id"
        " trackio_static_space_id eval_delay prediction_loss_only eval_on_start eval_do_concat_batches"
        " eval_use_gather_object eval_accumulation_steps include_for_metrics batch_eval_metrics"
        " save_only_model save_on_each_node enable_jit_checkpoint push_to_hub hub_token hub_private_repo"
        " hub_model_id hub_strategy hub_always_push hub_revision load_best_model_at_end"
        " metric_for_best_model greater_is_better ignore_data_skip restore_callback_states_from_checkpoint"
        " full_determinism use_cpu accelerator_config dataloader_drop_last dataloader_num_workers"
        " dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor"
        " dataloader_multiprocessing_context dataloader_in_order remove_unused_columns label_names"
        " train_sampling_strategy length_column_name ddp_find_unused_parameters ddp_broadcast_buffers"
        " ddp_static_graph ddp_backend debug skip_memory_metrics do_train do_predict local_rank",
}  # fmt: skip
DEEPSPEED: Mapping[str, str] = {
    "parallel.cp":
        "sequence_parallel_size",
    "checkpoint.export-hf":
        "zero_optimization.gather_16bit_weights_on_model_save"
        " zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "checkpoint.resume":
        "checkpoint.load_universal",
    "log.every":
        "steps_per_print",
    "log.profile-steps":
        "comms_logger flops_profiler wall_clock_breakdown",
    "log.wandb":
        "tensorboard wandb",
    "optim.betas":
        "optimizer.params.betas",
    "optim.eps":
        "optimizer.params.eps",
    "optim.lr":
        "optimizer.params.lr scheduler.params.warmup_max_lr",
    "optim.min-lr":
        "scheduler.params.cos_min_ratio",
    "optim.momentum":
        "optimizer.params.momentum",
    "optim.name":
        "optimizer optimizer.type",
    "optim.schedule":
        "scheduler.type",
    "optim.warmup":
        "scheduler.params.warmup_num_steps",
    "optim.weight-decay":
        "optimizer.params.weight_decay",
    "parallel.schedule optim.schedule":
        "scheduler",
    "parallel.tp":
        "tensor_parallel tensor_parallel.autotp_size tensor_parallel.tp tensor_parallel.tp_size",
    "precision.dtype":
        "bf16 bf16.enabled fp16 fp16.enabled tensor_parallel.dtype",
    "precision.grad-dtype":
        "data_types.grad_accum_dtype",
    "precision.loss-scale":
        "fp16.loss_scale",
    "precision.reduce-dtype":
        "communication_data_type",
    "recompute.mode":
        "activation_checkpointing",
    "run.compile":
        "compile",
    "train.global-batch":
        "gradient_accumulation_steps train_batch_size",
    "train.grad-clip":
        "gradient_clipping optimizer.params.max_grad_norm",
    "train.micro-batch":
        "train_micro_batch_size_per_gpu",
    "train.steps":
        "scheduler.params.total_num_steps",
    "zero.bucket-mib":
        "zero_optimization.allgather_bucket_size zero_optimization.offload_optimizer.buffer_count"
        " zero_optimization.offload_param.buffer_count zero_optimization.offload_param.buffer_size"
        " zero_optimization.reduce_bucket_size zero_optimization.sub_group_size",
    "zero.compress-gradients":
        "zero_optimization.zero_quantized_gradients",
    "zero.compress-weights":
        "zero_optimization.zero_quantized_weights",
    "zero.nvme-path":
        "zero_optimization.offload_optimizer.nvme_path zero_optimization.offload_param.nvme_path",
    "zero.offload-optimizer":
        "zero_optimization.cpu_offload zero_optimization.offload_optimizer"
        " zero_optimization.offload_optimizer.device",
    "zero.offload-params":
        "compile.offload_parameters zero_optimization.cpu_offload_param"
        " zero_optimization.cpu_offload_params zero_optimization.offload_param"
        " zero_optimization.offload_param.device",
    "zero.prefetch":
        "zero_optimization.stage3_prefetch_bucket_size",
    "zero.resident":
        "zero_optimization.stage3_param_persistence_threshold",
    "zero.shard-size":
        "zero_optimization.mics_shard_size zero_optimization.zero_hpz_partition_size",
    "zero.stage":
        "zero_optimization zero_optimization.stage",
    "":
        "aio amp autotuning bf16.bf16_master_weights_and_grads bf16.bf16_optimizer_states"
        " bf16.check_grad_overflow bf16.immediate_grad_update checkpoint"
        " checkpoint.checkpoint_serialization checkpoint.parallel_write checkpoint.tag_validation"
        " checkpoint.use_node_local_storage checkpoint.writer comet compile.autoep_non_moe"
        " compile.debug_log compile.deepcompile compile.double_buffer compile.free_activation"
        " compile.free_activation_threshold compile.keep_all_input_tensors compile.keep_int_input_tensors"
        " compile.offload_activation compile.offload_activation_pin_memory compile.offload_opt_states"
        " compile.passes compile.symmetric_memory compile.sync_after_allgather compile.sync_after_reduce"
        " compile.sync_before_allgather compile.sync_before_reduce compression_training csv_monitor"
        " curriculum_learning data_efficiency data_types data_types.buffer_dtype"
        " data_types.keep_in_fp32_modules data_types.param_dtype dataloader_drop_last datastates"
        " disable_allgather disable_python_gc dump_state eigenvalue elasticity expert_parallel"
        " fp16.auto_cast fp16.consecutive_hysteresis fp16.fp16_master_weights_and_grads fp16.hysteresis"
        " fp16.initial_scale_power fp16.loss_scale_window fp16.min_loss_scale gradient_allreduce_op"
        " gradient_predivide_factor graph_harvesting hybrid_engine log_level managed_gradient_accumulation"
        " memory_breakdown nebula optimizer.legacy_fusion optimizer.params optimizer.params.adam_w_mode"
        " optimizer.params.amsgrad optimizer.params.bias_correction optimizer.params.capturable"
        " optimizer.params.dampening optimizer.params.differentiable optimizer.params.foreach"
        " optimizer.params.fp32_optimizer_states optimizer.params.fused optimizer.params.maximize"
        " optimizer.params.nesterov optimizer.params.set_grad_none optimizer.params.torch_adam pipeline"
        " prescale_gradients progressive_layer_drop quantize_training scheduler.params"
        " scheduler.params.last_batch_iteration scheduler.params.warmup_min_lr"
        " scheduler.params.warmup_min_ratio scheduler.params.warmup_type seq_parallel_comm_data_type"
        " seq_parallel_communication_data_type sparse_attention sparse_gradients"
        " tensor_parallel.partition_config tensor_parallel.preset_model timers torch_autocast"
        " use_data_before_expert_parallelism vocabulary_size weight_quantization"
        " zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_optimization.allgather_partitions"
        " zero_optimization.compute_grad_norm zero_optimization.contiguous_gradients"
        " zero_optimization.cpu_offload_use_pin_memory zero_optimization.elastic_checkpoint"
        " zero_optimization.enable_sanity_checks zero_optimization.ignore_unused_parameters"
        " zero_optimization.leaf_module zero_optimization.legacy_stage1"
        " zero_optimization.load_from_fp32_weights zero_optimization.log_trace_cache_warnings"
        " zero_optimization.max_live_parameters zero_optimization.max_reuse_distance"
        " zero_optimization.memory_efficient_linear zero_optimization.mics_hierarchical_params_gather"
        " zero_optimization.model_persistence_threshold"
        " zero_optimization.offload_optimizer.cpuadam_cores_perc"
        " zero_optimization.offload_optimizer.fast_init zero_optimization.offload_optimizer.pin_memory"
        " zero_optimization.offload_optimizer.pipeline_read"
        " zero_optimization.offload_optimizer.pipeline_write zero_optimization.offload_optimizer.ratio"
        " zero_optimization.offload_optimizer.super_offload zero_optimization.offload_param.max_in_cpu"
        " zero_optimization.offload_param.pin_memory zero_optimization.overlap_comm"
        " zero_optimization.override_module_apply zero_optimization.parameter_alignment"
        " zero_optimization.pipeline_loading_checkpoint zero_optimization.prefetch_bucket_size"
        " zero_optimization.reduce_scatter zero_optimization.round_robin_gradients"
        " zero_optimization.save_muon_momentum_buffer_in_memory"
        " zero_optimization.stage3_allgather_sequential"
        " zero_optimization.stage3_gather_fp16_weights_on_model_save"
        " zero_optimization.stage3_max_live_parameters zero_optimization.stage3_max_reuse_distance"
        " zero_optimization.stage3_model_persistence_threshold"
        " zero_optimization.stage3_module_granularity_threshold"
        " zero_optimization.stage3_partition_stream_chunk_size"
        " zero_optimization.stage3_use_all_reduce_for_fetch_params"
        " zero_optimization.use_multi_rank_bucket_allreduce zero_optimization.zenflow"
        " zero_optimization.zero_quantized_nontrainable_weights zero_optimization.zeropp_loco_param",
}  # fmt: skip

TORCHTITAN: Mapping[str, str] = {
    "checkpoint.async":
        "checkpoint.async_mode",
    "checkpoint.every":
        "checkpoint.interval checkpoint.enable_checkpoint",
    "checkpoint.export-hf":
        "checkpoint.last_save_in_hf",
    "checkpoint.keep":
        "checkpoint.keep_latest_k",
    "checkpoint.resume":
        "checkpoint.initial_load_path checkpoint.initial_load_in_hf",
    "log.every":
        "metrics.log_freq",
    "log.profile-steps":
        "profiler.enable_profiling profiling.enable_profiling",
    "log.wandb":
        "metrics.enable_wandb",
    "model.seq":
        "training.seq_len",
    "optim.lr":
        "optimizer.lr",
    "optim.schedule":
        "lr_scheduler.decay_type",
    "optim.warmup":
        "lr_scheduler.warmup_steps",
    "parallel.cp":
        "parallelism.context_parallel_degree",
    "parallel.ep":
        "parallelism.expert_parallel_degree",
    "parallel.partition":
        "parallelism.module_fqns_per_model_part",
    "parallel.pp":
        "parallelism.pipeline_parallel_degree",
    "parallel.schedule":
        "parallelism.pipeline_parallel_schedule parallelism.pipeline_parallel_schedule_csv",
    "parallel.sequence":
        "parallelism.enable_sequence_parallel",
    "parallel.tp":
        "parallelism.tensor_parallel_degree",
    "precision.dtype":
        "training.mixed_precision_param",
    "recompute.mode":
        "activation_checkpoint.mode",
    "run.compile":
        "compile.enable training.compile",
    "run.dir":
        "job.dump_folder checkpoint.folder",
    "train.global-batch":
        "training.global_batch_size",
    "train.global-batch model.seq":
        "training.num_tokens_per_train_step",
    "train.grad-clip":
        "training.max_norm",
    "train.micro-batch":
        "training.local_batch_size",
    "train.micro-batch model.seq":
        "training.num_tokens_per_microbatch_per_dp_rank",
    "train.seed":
        "debug.seed training.seed",
    "train.steps":
        "training.steps",
    "zero.offload-optimizer zero.offload-params":
        "training.enable_cpu_offload",
    "zero.shard-size":
        "parallelism.data_parallel_replicate_degree",
    "zero.stage":
        "parallelism.data_parallel_shard_degree",
    "":
        "job.config_file model.flavor",
}  # fmt: skip


@pytest.mark.parametrize(
    ("table", "least"),
    [(MEGATRON, 124), (TRAINING_ARGUMENTS, 60), (DEEPSPEED, 40), (TORCHTITAN, 40)],
)
def test_names_of_other_frameworks(table: Mapping[str, str], least: int) -> None:
    names = {name: keys for keys, line in table.items() for name in line.split()}
    assert len(names) >= least
    found = {name: " ".join(flag[2:] for flag in suggest(name, GROUPS)[0]) for name in names}
    assert {name: keys for name, keys in found.items() if keys != names[name]} == {}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("load", " (Megatron-LM: use --run.dir, --checkpoint.resume)"),
        ("fp16", " (Megatron-LM: use --precision.dtype fp16)"),
        ("overlap-grad-reduce", " (Megatron-LM: not needed: always on)"),
        (
            "batch-size",
            " (Megatron-LM: not supported: use --micro-batch-size; in threed: --train.micro-batch)",
        ),
        ("moe-anything", " (Megatron-LM: not supported: add the flags of threed for experts"),
        ("tensor-model-paralel-size", " (Megatron-LM: use --parallel.tp)"),
        ("learning_rate", " (TrainingArguments: use --optim.lr)"),
        ("lerning_rate", " (TrainingArguments: use --optim.lr)"),
        ("train.learning_rate", " (TrainingArguments: use --optim.lr)"),
        ("disable_tqdm", " (TrainingArguments: there is no progress bar)"),
        ("zero_optimization.overlap_comm", " (DeepSpeed: communication always overlaps"),
        ("train_batch_size", " (DeepSpeed: use --train.global-batch)"),
        ("training.local_batch_size", " (torchtitan: use --train.micro-batch)"),
        ("checkpoint.interval", " (torchtitan: use --checkpoint.every)"),
        ("job.config_file", " (torchtitan: --config FILE.toml reads a TOML file of threed)"),
        ("model.num-layers", " (did you mean --model.layers?)"),
        ("special-tokens", " (did you mean --data.special-tokens?)"),
        ("dryrun", " (did you mean --dry-run?)"),
    ],
)
def test_the_text_of_a_suggestion(name: str, text: str) -> None:
    assert suggest(name, GROUPS)[1].startswith(text)


@pytest.mark.parametrize(
    ("groups", "text"),
    [
        ({"zero": {"stge": 3}}, "zero.stge\n  no such key (did you mean --zero.stage?)"),
        ({"train": {"learning_rate": 3}}, "no such key (TrainingArguments: use --optim.lr)"),
        ({"zeroo": {"stage": 3}}, "zeroo\n  no such group (did you mean zero?)"),
        ({"zero": {"xyzzy": 3}}, "zero.xyzzy\n  no such key [type=extra_forbidden"),
        (
            {"zero": {"stage": 7, "xyzzy": 3}},
            "zero.stage\n  Input should be less than or equal to 3",
        ),
        ({"model": {"rope_scaling": "linear: x=1"}}, "x of 'linear': no such setting"),
    ],
)
def test_a_configuration_in_python_has_suggestions(
    groups: Mapping[str, Mapping[str, object]], text: str
) -> None:
    for make in (lambda: Config(**groups), lambda: Config.model_validate(groups)):  # type: ignore[arg-type]
        with pytest.raises(ValidationError) as caught:
            make()
        assert text in str(caught.value)
    assert Config.model_validate(Config(zero=ZeroConfig(stage=3))).zero.stage == 3


@pytest.mark.parametrize("name", ["xyzzy", "sample-rate", "img-h", "use-sharp", "hybrid_engine"])
def test_no_suggestion_is_better_than_a_wrong_one(name: str) -> None:
    assert suggest(name, GROUPS) == ([], "")


def test_every_key_is_found_with_one_letter_missing_or_twice() -> None:
    """Only very short keys are not found, or found in another group."""
    wrong = []
    for group, model in GROUPS.items():
        for key in (name.rstrip("_").replace("_", "-") for name in model.model_fields):
            middle = len(key) // 2
            for typo in (
                key[:middle] + key[middle + 1 :],
                key[:middle] + key[middle] + key[middle:],
            ):
                flags = suggest(f"{group}.{typo}", GROUPS)[0]
                if len(key) > 3 and f"--{group}.{key}" not in flags:
                    wrong.append(f"{group}.{typo}")
    assert wrong == []
