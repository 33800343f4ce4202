"""Names of DeepSpeed's engine and `PipelineModule` that threed does not offer, and what to use instead."""

from __future__ import annotations

WEIGHTS = "use engine.full_state_dict(), which gathers the weights on rank 0"
CONFIG = "use engine.config, the ds_config, or engine.translation, the configuration in effect"
RATE = 'set engine.optimizer.param_groups[i]["lr"]; engine.get_lr() returns the learning rates'
METRICS = "use engine.metrics"
PUBLIC = "use public names, such as those in docs/guide/deepspeed.md"

_ROWS = {
    "get_fp32_state_dict": WEIGHTS,
    "clip_fp32_gradients": "use the config's gradient_clipping",
    "set_lr": RATE,
    "losses monitor tput_timer timers wall_clock_breakdown get_wall_clock_timers steps_per_print": METRICS,
    "amp_enabled torch_autocast_enabled torch_autocast_dtype": 'use the config\'s "bf16": {"enabled": true}',
    "_config zero_offload_optimizer zero_offload_param zero_reduce_bucket_size zero_allgather_bucket_size": CONFIG,
    "zero_param_persistence_threshold zero_sub_group_size communication_data_type": CONFIG,
    "zero_allow_untested_optimizer zero_reduce_scatter zero_overlap_comm zero_contiguous_gradients": CONFIG,
    "set_data_post_process_func curriculum_learning_enabled set_custom_curriculum_learning_schedule":
        "use a custom DataLoader",
    "offload_states reload_states": "use the config's zero_optimization.offload_optimizer and offload_param",
    "get_sequence_parallel_group": "sequences are not split over ranks: build the model from threed.layers, and use"
        " threed.Engine with a topology",
    "coalesce_grad_reduction": "not needed: gradients of several backwards are reduced together",
    "scale": "use engine.backward(loss), which scales the loss",
    "get_data_parallel_rank": "use engine.topology.axis(\"dp\").index",
    "register_compile_pass get_compile_time get_deepcompile_backend": "use engine.compile()",
    "sparse_tensor_module_names sparse_gradients_enabled": "use dense gradients",
    "random_ltd_enabled random_ltd_initialize": "drop tokens in the module's forward",
    # of PipelineModule
    "ckpt_prefix ckpt_layer_path ckpt_layer_path_list": "use engine.save_checkpoint and engine.load_checkpoint",
    "get_additional_losses": "add all losses in loss_fn",
    "get_tied_weights_and_groups": "not needed: engine.train_batch sums the gradients of tied weights",
    "is_checkpointable_results": "set activation_checkpoint_interval, or checkpointable_layers",
}  # fmt: skip
INSTEAD = {name: instead for names, instead in _ROWS.items() for name in names.split()}


def refusal(owner: str, name: str) -> str:
    """Returns the error text for an attribute of DeepSpeed that threed does not offer.

    Args:
        owner: the object or class, such as "engine".
        name: the attribute.
    """
    return f"threed does not offer {owner}.{name}: {INSTEAD.get(name, PUBLIC)}"
