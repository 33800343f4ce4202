"""Replacements for the attributes of DeepSpeed's engine that `DeepSpeedEngine` does not have."""

from __future__ import annotations

WEIGHTS = "use engine.full_state_dict(), which gathers the weights on rank 0"
CONFIG = "use engine.translation, which has the configuration as it is applied"
RATE = 'set engine.optimizer.param_groups[i]["lr"]; engine.get_lr() returns the learning rates'
METRICS = "use engine.metrics"
ACCUMULATION = "use engine.step() after each backward: it updates at the accumulation boundary only"

_ROWS = {
    "save_16bit_model save_fp16_model _zero3_consolidated_16bit_state_dict get_fp32_state_dict": WEIGHTS,
    "load_module_state_dict": "use engine.engine.load_full_state_dict(weights)",
    "load_state_dict": "use engine.engine.load_full_state_dict(weights), or engine.load_checkpoint(folder)",
    "no_sync": ACCUMULATION,
    "set_gradient_accumulation_steps set_train_batch_size set_train_micro_batch_size": "use the config's batch sizes",
    "allreduce_gradients": "use engine.step(), which sums gradients over ranks",
    "clip_fp32_gradients gradient_clipping": "use the config's gradient_clipping",
    "destroy": "not needed: an engine's memory is freed with its last reference",
    "set_lr": RATE,
    "client_lr_scheduler": "use engine.lr_scheduler",
    "get_mom get_type": "use engine.optimizer.param_groups[0]",
    "get_loss_scale loss_scale cur_scale": "use engine.optimizer.loss_scale",
    "get_batch_info": "use engine.train_batch_size() and engine.train_micro_batch_size_per_gpu()",
    "was_step_applied overflow": "use engine.skipped_steps before and after the step",
    "losses": METRICS,
    "fp16_enabled bfloat16_enabled amp_enabled get_data_types dynamic_loss_scale": CONFIG,
    "config _config zero_optimization zero_optimization_partition_gradients zero_offload_optimizer": CONFIG,
    "zero_optimization_partition_weights zero_cpu_offload zero_allow_untested_optimizer": CONFIG,
    "optimizer_name scheduler_name scheduler_params optimizer_params": CONFIG,
    "data_parallel_group mp_world_size dp_world_size local_rank": "use engine.topology",
    "monitor tput_timer timers wall_clock_breakdown": METRICS,
    "basic_optimizer client_optimizer": "use engine.optimizer",
    "deepspeed_io set_dataloader": "use training_data of threed.initialize, or a custom DataLoader",
    "set_data_post_process_func curriculum_learning_enabled": "use a custom DataLoader",
    "offload_states reload_states": "use the config's zero_optimization.offload_optimizer and offload_param",
    "empty_partition_cache": "not needed: gathered parameters are freed after use",
    "module_named_parameters": "use engine.module.named_parameters()",
    "get_sequence_parallel_group": "not needed: sequences are not split over ranks",
}  # fmt: skip
INSTEAD = {name: instead for names, instead in _ROWS.items() for name in names.split()}
