"""Tiny decoders of `transformers`, trained by `threed.from_transformers` and in plain PyTorch."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import threed
from threed import Config, Topology
from threed.layers.context import Context
from threed.layers.slicing import ExpertRanks
from threed.ops.positions import in_documents
from threed.testing.ranks import preload

VOCAB, LENGTH, ROWS, STEPS = 61, 12, 4, 3
# Adam's eps. If a gradient is zero but for rounding, such as the gradient of a bias of keys, a small eps would turn
# this rounding into updates of the size of the learning rate.
EPS = {torch.float64: 1e-8, torch.float32: 1e-3}
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
    "use_cache": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
}  # fmt: skip
# Keys without which a family's defaults are too large or not valid for a tiny model.
MIXED = ["linear_attention", "full_attention", "linear_attention"]
HEAD, WINDOW = {"head_dim": 8}, {"sliding_window": 5}
KEYS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("ernie4_5", "gemma", "glm", "glm4", "helium", "ministral3", "seed_oss", "vaultgemma"), HEAD),
    **dict.fromkeys(("cohere2", "olmo3"), WINDOW),
    **dict.fromkeys(("gemma2", "gemma3_text", "ministral"), HEAD | WINDOW),
    "exaone4": {**WINDOW, "sliding_window_pattern": 2},
    **{kind: {"rotary_dim": 4, "num_key_value_heads": None, "intermediate_size": None} for kind in ("codegen", "gptj")},
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 32},
    "gpt_neox": {"num_key_value_heads": None},
    "granite": {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.7},
    **{kind: {"layer_types": MIXED} for kind in ("olmo_hybrid", "qwen3_5_text")},
    "deepseek_v3": {
        "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 10, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6,
        "v_head_dim": 5, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
        "moe_intermediate_size": 20, "first_k_dense_replace": 1, "num_mtp_layers": 0,
    },
    "deepseek_v2": {
        "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 10, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6,
        "v_head_dim": 5, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20,
        "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
    },
    "gpt_oss": {
        **HEAD, **WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 7.0,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": False, "original_max_position_embeddings": 8,
        },
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3": {**HEAD, "tie_word_embeddings": True},
    "qwen3_moe": {
        **HEAD, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "norm_topk_prob": True,
        "mlp_only_layers": [0],
    },
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "youtu": {
        "num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
        "v_head_dim": 8,
    },
}  # fmt: skip
PLANNED = [
    "arcee", "codegen", "cohere", "cohere2", "cwm", "ernie4_5", "exaone", "exaone4", "gemma", "gemma2", "gemma3_text",
    "glm", "glm4", "gpt_neox", "gptj", "granite", "helium", "hyperclovax", "internlm3", "iquestcoder", "jais2", "llama",
    "ministral", "ministral3", "mistral", "olmo", "olmo2", "olmo3", "olmo_hybrid", "phi", "phi3", "qwen2", "qwen3",
    "qwen3_5_text", "seed_oss", "smollm3", "starcoder2", "vaultgemma", "youtu",
]  # fmt: skip
REBUILT = [
    "gpt2",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "phi3",
    "gemma2",
    "gemma3_text",
    "mixtral",
    "qwen3_moe",
    "gpt_oss",
    "deepseek_v2",
]
preload(
    "tests.hf_decoders",
    *(
        f"transformers.models.{n}.modeling_{n}"
        for n in ("gpt2", "gpt_neox", "granite", "llama", "olmo2", "qwen3")
    ),
)


def planned(kinds: list[str]) -> list[str]:
    """Returns the families for which the installed version of transformers has plans."""
    return [
        kind for kind in kinds if kind in CONFIG_MAPPING and CONFIG_MAPPING[kind].base_model_pp_plan
    ]


def make(kind: str, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """Returns a causal language model with the same weights in each call.

    No weight is constant, so that an exchange of two weights would change the results.
    """
    keys = {**SIZES, **KEYS.get(kind, {}), **changes}
    if kind == "gpt2":
        keys = {
            key: keys[key] for key in ("vocab_size", "bos_token_id", "eos_token_id", *KEYS[kind])
        }
    unset = ("pad_token_id", "q_lora_rank")  # of which None is a value; else it means the default
    keys = {key: value for key, value in keys.items() if value is not None or key in unset}
    config = CONFIG_MAPPING[kind](**keys)
    for key, value in vars(config).items():
        if ("dropout" in key or "pdrop" in key) and isinstance(value, float) and key not in changes:
            setattr(config, key, 0.0)
    config._experts_implementation = "eager"  # torch has no grouped product of fp64 matrices
    torch.manual_seed(0)
    with casts(dtype):
        model = hf.AutoModelForCausalLM.from_config(config, dtype=dtype)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn(param.shape, generator=draw) * 0.05)
    return model.to(dtype)


def randomized(module: Any) -> Any:
    """Returns a module for evaluation, with weights and biases for which every part changes the logits."""
    draw = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for key, tensor in (*module.named_parameters(), *module.named_buffers()):
            if tensor.dim() > 1:
                std = 0.3 if "embed" in key else 1.2 / tensor.shape[-1] ** 0.5
                std = (
                    5.0 if "gate_up_proj_bias" in key else std
                )  # beyond the limit of the activation
                tensor.normal_(0.0, std, generator=draw)
            elif "sinks" in key or "router.bias" in key:
                tensor.normal_(0.0, 1.0, generator=draw)
            elif "correction_bias" in key:
                tensor.normal_(0.0, 0.1, generator=draw)
    return module.eval()


class Wide(TorchFunctionMode):
    """Replaces casts to fp32 by casts to fp64."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.Tensor.float:
            return args[0].double()
        for i, value in enumerate(args):  # few calls have one, but all calls pass here
            if value is torch.float32:
                args = (*args[:i], torch.float64, *args[i + 1 :])
        if not kwargs:
            return function(*args)
        kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in kwargs.items()}
        return function(*args, **kwargs)


def casts(dtype: torch.dtype) -> AbstractContextManager[object]:
    """Returns `Wide` for fp64, else a context without effect."""
    return Wide() if dtype == torch.float64 else nullcontext()


def batch(step: int) -> dict[str, Tensor]:
    """Returns the global batch of a step; some labels are ignored."""
    draw = torch.Generator().manual_seed(100 + step)
    ids = torch.randint(3, VOCAB, (ROWS, LENGTH + 1), generator=draw)
    ignored = torch.rand(ROWS, LENGTH, generator=draw) < torch.linspace(0, 0.5, ROWS).view(-1, 1)
    return {
        "tokens": ids[:, :-1].contiguous(),
        "labels": ids[:, 1:].masked_fill(ignored, -100).contiguous(),
    }


@dataclass(frozen=True)
class Trained:
    """Losses per step, gradient norms per step, and the weights after the last step."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]


def documents(step: int) -> Tensor:
    """Returns the documents [b s] of a step's batch."""
    draw = torch.Generator().manual_seed(200 + step)
    return (torch.rand(ROWS, LENGTH, generator=draw) < 0.3).cumsum(1)


def train_plainly(kind: str, dtype: torch.dtype, packed: bool = False) -> Trained:
    """Trains the unmodified model with torch's AdamW on one process.

    With `packed`, rows are packed documents: transformers keeps them apart by their positions.
    """
    model = make(kind, dtype).train()
    params, named = list(model.parameters()), list(model.named_parameters())
    matrices = {name for name, p in named if p.dim() > 1 and not name.endswith("bias")}
    groups = [
        {"params": [p for n, p in named if (n in matrices) == decays], "weight_decay": 0.1 * decays}
        for decays in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), eps=EPS[dtype])
    losses, norms = [], []
    for step in range(STEPS):
        data, more = batch(step), {}
        if packed:
            numbers = documents(step)
            more["position_ids"] = in_documents(numbers)[0].t()
            data["labels"][:, :-1][numbers[:, 1:] != numbers[:, :-1]] = -100
        with casts(dtype):
            logits = model(input_ids=data["tokens"], **more).logits
        loss = F.cross_entropy(logits.flatten(0, 1), data["labels"].flatten())
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(params, 0.5)))
        optimizer.step()
        losses.append(loss.item())
    return Trained(losses, norms, {n: v.detach() for n, v in model.state_dict().items()})


def config_of(
    model: Any, dtype: torch.dtype, topology: Topology, **groups: dict[str, Any]
) -> Config:
    """Returns the resolved configuration of a training run; `groups` overrides its keys."""
    cp, heads = topology.cp, model.slicing.context.heads.size
    values: dict[str, dict[str, Any]] = {
        "model": {**dict(model.config), "seq": LENGTH},
        "parallel": {
            "tp": topology.tp, "pp": topology.pp, "dp": topology.dp, "sequence": model.slicing.sequence,
            "cp": cp, **({"cp_heads": heads} if cp > 1 else {}),
        },
        "precision": {"dtype": "fp64" if dtype == torch.float64 else "fp32"},
        "zero": {"resident": 0},
        "train": {"global_batch": ROWS, "micro_batch": 1, "steps": STEPS, "grad_clip": 0.5},
        "optim": {"lr": 3e-3, "warmup": 0, "schedule": "constant", "eps": EPS[dtype]},
    }  # fmt: skip
    for name, keys in groups.items():
        values[name] = {**values.get(name, {}), **keys}
    return threed.config.resolve(Config.model_validate(values), VOCAB, topology.world)


def engine_of(
    kind: str, plan: bool, dtype: torch.dtype, topology: Topology, sequence: bool = False,
    cp_heads: int = 1, **groups: dict[str, Any],
) -> Any:  # fmt: skip
    """Returns an engine of `from_transformers` of a model."""
    experts = ExpertRanks.of(topology, groups.get("parallel", {}).get("ep", 1))
    context = Context.of(topology, cp_heads)
    slicing = threed.Slicing(topology.axis("tp"), sequence, context=context, experts=experts)
    with casts(dtype):
        model = threed.from_transformers(make(kind, dtype), slicing, plan=plan)
    return threed.Engine(model, topology, config_of(model, dtype, topology, **groups))


def train(engine: Any, dtype: torch.dtype, packed: bool = False) -> Trained:
    """Trains an engine of `engine_of`. Collective."""
    losses, norms = [], []
    topology = engine.topology
    for step in range(STEPS):
        own = {
            key: value.chunk(topology.dp)[topology.axis("dp").index]
            for key, value in (
                batch(step) | ({"documents": documents(step)} if packed else {})
            ).items()
        }
        with casts(dtype):
            metrics = engine.step(own)
        losses.append(float(metrics.loss))
        norms.append(float(metrics.grad_norm))
    return Trained(losses, norms, engine.model.hf_state_dict(engine.full_state_dict()))


def difference(a: Trained, b: Trained) -> float:
    """Returns the largest difference of losses, norms and weights.

    Only rank 0 has weights in `a`. Losses and norms above 1 are compared relative to their values.
    """
    numbers = zip(a.losses + a.norms, b.losses + b.norms, strict=True)
    worst = [abs(x - y) / max(1.0, abs(y)) for x, y in numbers]
    if a.weights:
        assert a.weights.keys() == b.weights.keys()
        worst += [
            float((a.weights[n].double() - b.weights[n].double()).abs().max()) for n in b.weights
        ]
    return max(worst)
