"""DeepSeek-V2: as DeepSeek-V3, but experts are chosen by softmax, without biases (arXiv 2405.04434)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from threed.config.architectures import record
from threed.config.architectures.deepseek_v3 import DEEPSEEK_V3
from threed.config.architectures.record import Keys


def _method(keys: Keys) -> str:
    return "group_limited_greedy" if keys["expert_groups"] > 1 else "greedy"


def _limits(keys: Keys) -> Iterator[str]:
    yield from DEEPSEEK_V3.limits(keys)
    if keys["normalize_experts"]:  # transformers does not read norm_topk_prob of this family
        yield "--model.normalize-experts true"


_ABSENT = {
    "n_routed_experts": 64, "num_experts_per_tok": ..., "moe_intermediate_size": 1407, "n_shared_experts": 2,
    "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": False, "first_k_dense_replace": 0,
}  # fmt: skip

record.register(
    replace(
        DEEPSEEK_V3,
        name="deepseek_v2",
        title="DeepSeek-V2",
        model_type="deepseek_v2",
        hf_class="DeepseekV2ForCausalLM",
        rules=tuple(
            rule
            for rule in DEEPSEEK_V3.rules
            if rule not in record.MTP and "correction_bias" not in rule.hf
        ),
        keys=tuple(
            replace(key, absent=_ABSENT.get(key.hf, key.absent))
            for key in DEEPSEEK_V3.keys
            if key.hf != "num_nextn_predict_layers"
        ),
        fixed={
            **record.SILU_GATES,
            "attention_bias": False,
            "mlp_bias": False,
            "scoring_func": "softmax",
            "topk_method": _method,
            "moe_layer_freq": 1,
        },
        absent={"topk_method": "greedy"},
        written={},
        defaults={**DEEPSEEK_V3.defaults, "normalize_experts": False},
        limits=_limits,
        routing={"group_score": "best"},
    )
)
