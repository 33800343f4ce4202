"""Derives the model configuration of a Megatron-LM checkpoint from the arguments of its run.

Megatron-LM defines these arguments (`args`) in megatron/training/arguments.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from threed.checkpoint.files import CheckpointError, plain
from threed.config import ModelConfig
from threed.config.checks import find_model_problems
from threed.config.migration.megatron_flags import ARCHITECTURES, LLAMA3_SCALING
from threed.config.resolution import resolve_model
from threed.config.schema import ValidationError

# Arguments that can enable an unsupported feature, each with the values for which the feature stays
# disabled. A feature is also disabled if its argument is missing.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "num_experts": (None, 0), "multi_latent_attention": (None, False), "mtp_num_layers": (None, 0),
    "squared_relu": (None, False), "quick_geglu": (None, False), "apply_layernorm_1p": (None, False),
    "apply_residual_connection_post_layernorm": (None, False), "rotary_interleaved": (None, False),
    "rotary_percent": (None, 1.0), "rotary_seq_len_interpolation_factor": (None, 1), "no_rope_freq": (None, 0),
    "window_size": (None,), "softmax_type": (None, "vanilla"), "attention_output_gate": (None, False),
    "hybrid_layer_pattern": (None,), "hybrid_override_pattern": (None,), "is_hybrid_model": (None, False),
    "heterogeneous_layers_config_path": (None,), "heterogeneous_layers_config_encoded_json": (None,),
    "experimental_attention_variant": (None,), "linear_attention_freq": (None,), "glu_linear_offset": (None, 0.0),
    "activation_func_clamp_value": (None,), "use_mup": (None, False),
    "qk_l2_norm": (None, False), "mrope_section": (None,), "spec": (None,),
}  # fmt: skip


def model_of(args: Mapping[str, Any], where: str) -> ModelConfig:
    """Returns the model configuration of a checkpoint.

    Args:
        args: the arguments of the Megatron-LM run.
        where: the path of the checkpoint, for messages.

    Raises:
        CheckpointError: if the model is not supported; the message lists every unsupported
            argument.
    """
    unsupported = [name for name, same in UNSUPPORTED.items() if args.get(name) not in same]
    problems = [f"{name} {plain(args[name])}" for name in unsupported]
    norm = args.get("normalization", "LayerNorm")
    positions = args.get("position_embedding_type", "learned_absolute")
    gated = bool(args.get("swiglu"))
    if (norm, positions, gated) not in ARCHITECTURES:
        problems.append(
            f"normalization {plain(norm)} with position_embedding_type {plain(positions)} and swiglu {gated}:"
            " supported are RMSNorm with rope and swiglu (Llama), and LayerNorm with learned_absolute (GPT-2)"
        )
    if not gated and not (args.get("openai_gelu") or args.get("bias_gelu_fusion")):
        kind = "gelu by the error function (neither bias_gelu_fusion nor openai_gelu)"
        problems.append(f"{kind}: only its tanh form is supported")
    if problems:
        what = "; ".join(problems)
        raise CheckpointError(f"{where} has a model that threed does not support: {what}")
    try:
        model = resolve_model(ModelConfig.model_validate(_keys(args, gated)))
    except ValidationError as error:
        details = error.errors(include_input=False)[:3]
        problems = [f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}" for detail in details]
    except (ValueError, TypeError, KeyError) as error:
        problems = [" ".join(str(error).split())]
    else:
        problems = list(find_model_problems(model))
    if problems:
        raise CheckpointError(f"{where}: its args: {plain('; '.join(problems), 2000)}")
    return model


def _keys(args: Mapping[str, Any], gated: bool) -> dict[str, Any]:
    """Returns the values of the `ModelConfig`, by key.

    Args:
        args: the arguments of the Megatron-LM run.
        gated: whether the MLP is gated (SwiGLU).

    Raises:
        KeyError, TypeError, ValueError: if `args` are incomplete or invalid.
    """
    heads, positions = args["num_attention_heads"], args["max_position_embeddings"]
    grouped = bool(args.get("group_query_attention")) and args.get("num_query_groups")
    keys = {
        "arch": "gpt", "layers": args["num_layers"], "hidden": args["hidden_size"], "heads": heads,
        "kv_heads": args["num_query_groups"] if grouped else heads, "head_dim": args.get("kv_channels"),
        "ffn": args["ffn_hidden_size"], "vocab": args["padded_vocab_size"], "seq": positions, "positions": positions,
        "norm_eps": args.get("norm_epsilon", args.get("layernorm_epsilon", 1e-5)),
        "tied": not args.get("untie_embeddings_and_output_weights"),
    }  # fmt: skip
    bias, qk_norm = bool(args.get("add_bias_linear", True)), bool(args.get("qk_layernorm"))
    qkv_bias_alone = bool(args.get("add_qkv_bias")) and not bias
    if qkv_bias_alone and (qk_norm or not gated):
        given = "add_qkv_bias without add_bias_linear"
        raise ValueError(f"{given}, with qk_layernorm or LayerNorm, is not supported")
    if not qkv_bias_alone:
        keys |= {"bias": bias, "mlp_bias": bias}
    if gated:
        keys |= {
            "arch": "qwen2" if qkv_bias_alone else "llama", "rope_theta": float(args.get("rotary_base", 10000)),
            **({"qk_norm": True} if qk_norm else {}),
        }  # fmt: skip
    if gated and args.get("use_rope_scaling"):
        factor = float(args.get("rope_scaling_factor", 8.0))
        keys["rope_scaling"] = {**LLAMA3_SCALING, "factor": factor}
    return keys
