"""DeepSeek-V3: latent attention, and experts chosen by groups and biases (arXiv 2412.19437)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from threed.config.architectures import record
from threed.config.architectures.record import (
    ATTENTION,
    HF_BLOCK,
    MLP,
    Architecture,
    Key,
    Keys,
    one,
)

_HF = f"{HF_BLOCK}.self_attn"


def _limits(keys: Keys) -> Iterator[str]:
    if keys["kv_heads"] not in (None, keys["heads"]):
        yield f"--model.kv-heads {keys['kv_heads']} with --model.heads {keys['heads']}"
    if not keys["shared_experts"]:
        yield "--model.shared-experts 0"


def _or_one(count: int | None) -> int:
    return count or 1


def _or_zero(count: int | None) -> int:
    return count or 0


_SHARED = (
    *record.linear(f"{HF_BLOCK}.mlp.shared_experts.gate_proj", {f"{MLP}.shared.gate": "s"}, "h"),
    *record.linear(f"{HF_BLOCK}.mlp.shared_experts.up_proj", {f"{MLP}.shared.up": "s"}, "h"),
    *record.linear(f"{HF_BLOCK}.mlp.shared_experts.down_proj", {f"{MLP}.shared.down": "h"}, "s"),
)

DEEPSEEK_V3 = record.register(
    Architecture(
        "deepseek_v3",
        "DeepSeek-V3",
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        rules=(
            *record.EMBEDDING,
            *record.PRE_NORMS,
            one(f"{_HF}.q_proj.weight", f"{ATTENTION}.query.weight", "aq h", "no_query_rank"),
            one(f"{_HF}.q_a_proj.weight", f"{ATTENTION}.query_down.weight", "r h", "query_rank"),
            one(f"{_HF}.q_a_layernorm.weight", f"{ATTENTION}.query_norm.weight", "r", "query_rank"),
            one(f"{_HF}.q_b_proj.weight", f"{ATTENTION}.query_up.weight", "aq r", "query_rank"),
            one(f"{_HF}.kv_a_proj_with_mqa.weight", f"{ATTENTION}.kv_down.weight", "g h"),
            one(f"{_HF}.kv_a_layernorm.weight", f"{ATTENTION}.kv_norm.weight", "c"),
            one(f"{_HF}.kv_b_proj.weight", f"{ATTENTION}.kv_up.weight", "au c"),
            one(f"{_HF}.o_proj.weight", f"{ATTENTION}.out.weight", "h aw"),
            *record.DENSE_MLP,
            *record.experts(f"{HF_BLOCK}.mlp", "gate_proj", "up_proj", "down_proj"),
            one(
                f"{HF_BLOCK}.mlp.gate.e_score_correction_bias",
                f"{MLP}.router.balance",
                "e",
                "experts",
            ),
            *(replace(rule, needs="shared_experts") for rule in _SHARED),
            *record.MTP,
            *record.HEAD,
        ),
        keys=(
            *(key for key in record.decoder_keys() if key.hf != "head_dim"),
            Key("q_lora_rank", "query_rank", 1536),
            Key("kv_lora_rank", "kv_rank", 512),
            Key("qk_nope_head_dim", "nope_dim", 128),
            Key("qk_rope_head_dim", "rope_dim", 64),
            Key("v_head_dim", "value_dim", 128),
            Key("n_routed_experts", "experts", 256, other="num_local_experts"),
            Key("num_experts_per_tok", "experts_per_token", 8),
            Key("moe_intermediate_size", "expert_ffn", 2048),
            Key("n_shared_experts", "shared_experts", 1),
            Key("n_group", "expert_groups", 8, _or_one),
            Key("topk_group", "groups_per_token", 4, _or_one),
            Key("routed_scaling_factor", "expert_scale", 2.5),
            Key("norm_topk_prob", "normalize_experts", True),
            Key("first_k_dense_replace", "dense_layers", 3, _or_zero),
            Key("num_nextn_predict_layers", "mtp_depth", 0, _or_zero, other="num_mtp_layers"),
        ),
        fixed={
            **record.SILU_GATES,
            "attention_bias": False,
            "rope_interleave": True,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "moe_layer_freq": 1,
        },
        accepted=record.ROUTER_LOSS
        | {
            "head_dim",
            "qk_head_dim",
            "ep_size",
            "pretraining_tp",
            "aux_loss_alpha",
            "seq_aux",
        },
        takes=record.ROTARY
        | {
            "experts",
            "experts_per_token",
            "expert_ffn",
            "shared_experts",
            "expert_groups",
            "groups_per_token",
        }
        | {"expert_scale", "normalize_experts", "dense_layers"}
        | {"kv_rank", "query_rank", "nope_dim", "rope_dim", "value_dim"},
        defaults={**record.EXPERTS, **record.LATENT},
        limits=_limits,
        latent=True,
        routing={"score": "sigmoid", "bias": True, "epsilon": 1e-20},
    )
)
