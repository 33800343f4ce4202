"""The presets of published models have the shapes of the published configurations."""

from __future__ import annotations

from typing import Any

import pytest

from threed.config import architectures
from threed.config.architectures import spelling
from threed.config.arguments import load
from threed.config.resolution import resolve_model

_LLAMA = {
    "model_type": "llama", "hidden_act": "silu", "max_position_embeddings": 8192, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False, "vocab_size": 128256,
}  # fmt: skip
_QWEN = {
    "model_type": "qwen3", "head_dim": 128, "hidden_act": "silu", "num_key_value_heads": 8, "rms_norm_eps": 1e-6,
    "rope_theta": 1000000, "tie_word_embeddings": False, "use_sliding_window": False, "sliding_window": None,
    "vocab_size": 151936, "attention_bias": False,
}  # fmt: skip
# The keys with an influence on the model, of config.json in the repositories at huggingface.co:
# meta-llama/Meta-Llama-3-8B and -70B, Qwen/Qwen3-8B-Base, Qwen3-32B and Qwen3-30B-A3B, google/gemma-3-12b-pt
# (text_config, with the defaults of its keys in transformers), mistralai/Mistral-7B-v0.3 and Mixtral-8x7B-v0.1,
# openai/gpt-oss-20b, deepseek-ai/DeepSeek-V2-Lite and DeepSeek-V3
PUBLISHED: dict[str, dict[str, Any]] = {
    "llama3-8b": _LLAMA | {
        "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32,
    },
    "llama3-70b": _LLAMA | {
        "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 80,
    },
    "qwen3-8b": _QWEN | {
        "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_hidden_layers": 36,
        "max_position_embeddings": 32768,
    },
    "qwen3-32b": _QWEN | {
        "hidden_size": 5120, "intermediate_size": 25600, "num_attention_heads": 64, "num_hidden_layers": 64,
        "max_position_embeddings": 40960,
    },
    "gemma3-12b": {
        "model_type": "gemma3_text", "hidden_size": 3840, "intermediate_size": 15360, "num_attention_heads": 16,
        "num_hidden_layers": 48, "num_key_value_heads": 8, "head_dim": 256, "vocab_size": 262208,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0, "sliding_window": 1024, "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "mistral-7b": {
        "model_type": "mistral", "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "sliding_window": None,
        "tie_word_embeddings": False, "vocab_size": 32768,
    },
    "mixtral-8x7b": {
        "model_type": "mixtral", "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": False, "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": None, "tie_word_embeddings": False,
        "vocab_size": 32000,
    },
    "qwen3-30b-a3b": _QWEN | {
        "model_type": "qwen3_moe", "decoder_sparse_step": 1, "hidden_size": 2048, "intermediate_size": 6144,
        "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [], "moe_intermediate_size": 768,
        "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
    },
    # without its quantization_config: the published weights of experts are in mxfp4
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "attention_bias": True, "attention_dropout": 0.0, "experts_per_token": 4,
        "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
        "intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072, "num_attention_heads": 64, "num_experts_per_tok": 4,
        "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False,
        "rms_norm_eps": 1e-5, "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": False,
        },
        "swiglu_limit": 7.0, "tie_word_embeddings": False, "vocab_size": 201088,
    },
    "deepseek-v2-lite": {
        "model_type": "deepseek_v2", "attention_bias": False, "attention_dropout": 0.0, "aux_loss_alpha": 0.001,
        "ep_size": 1, "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2048,
        "intermediate_size": 10944, "kv_lora_rank": 512, "max_position_embeddings": 163840,
        "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64,
        "n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 16, "num_experts_per_tok": 6,
        "num_hidden_layers": 27, "num_key_value_heads": 16, "pretraining_tp": 1, "q_lora_rank": None,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000,
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
        "routed_scaling_factor": 1.0, "scoring_func": "softmax", "seq_aux": True, "tie_word_embeddings": False,
        "topk_group": 1, "topk_method": "greedy", "v_head_dim": 128, "vocab_size": 102400,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3", "attention_bias": False, "attention_dropout": 0.0, "ep_size": 1,
        "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168, "intermediate_size": 18432,
        "kv_lora_rank": 512, "max_position_embeddings": 163840, "moe_intermediate_size": 2048, "moe_layer_freq": 1,
        "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
        "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-6, "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
        "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc", "v_head_dim": 128,
        "vocab_size": 129280,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_the_published_shapes(name: str) -> None:
    record = architectures.of_type(PUBLISHED[name]["model_type"])
    given = load(["--preset", name])[0].model
    # the presets train without the further layers of published models
    read = {**spelling.read(record, PUBLISHED[name]), "seq": given.seq, "mtp_depth": 0}
    published = resolve_model(type(given).model_validate({**read, "arch": record.name}))
    assert resolve_model(given) == published
