"""Every family of models against `transformers` itself: logits, state dicts, configurations, and training.

The weights come from `transformers`, which draws them at random; sizes are tiny and odd: heads of a size of their own,
fewer key/value heads, windows shorter than the sequence, scaled rotary angles.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import os
import random
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.configs import engine_of, share
from tests.harness import run_ranks
from threed.checkpoint.files import CheckpointError
from threed.checkpoint.lazy_tensors import MemoryTensor, read_box
from threed.config import Config, ModelConfig
from threed.config.checks import find_problems
from threed.config.resolution import resolve
from threed.distributed.sharding import spec_of
from threed.interop.huggingface.layouts import (
    config_of,
    entries,
    hf_to_state_dict,
    model_of,
    state_dict_to_hf,
)
from threed.layers import Causal, MicroBatch, Slicing
from threed.models import build
from threed.ops import attention
from threed.ops.precision import DTYPES

os.environ["HF_HUB_OFFLINE"] = "1"

VOCAB, SEQ = 53, 24
TOKENS = torch.randint(0, VOCAB, (2, SEQ), generator=torch.Generator().manual_seed(5))
# pad_token_id: transformers would not train that row of the table.
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 40, "intermediate_size": 56, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
LONG = {"short_factor": [1.0, 1.1, 1.5], "long_factor": [1.0, 2.5, 8.0]}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", {
        "vocab_size": VOCAB, "n_embd": 40, "n_layer": 3, "n_head": 4, "n_positions": 64, "resid_pdrop": 0.0,
        "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    }),
    "llama": ("Llama", {**SIZES, "rope_parameters": LLAMA3, "head_dim": 6}),
    "llama linear, biases": ("Llama", {
        **SIZES, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}, "attention_bias": True,
        "num_key_value_heads": 1,
    }),
    "mistral": ("Mistral", {**SIZES, "head_dim": 14, "sliding_window": 7}),
    "mistral yarn": ("Mistral", {
        **SIZES, "sliding_window": None, "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.3},
    }),
    "qwen2": ("Qwen2", {
        **SIZES, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2, "tie_word_embeddings": True,
    }),
    "qwen2 yarn": ("Qwen2", {**SIZES, "rope_parameters": YARN | {"truncate": False, "beta_fast": 24.0}}),
    "qwen3": ("Qwen3", {
        **SIZES, "head_dim": 12, "attention_bias": True, "use_sliding_window": True, "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    }),
    "phi3": ("Phi3", {
        **SIZES, "sliding_window": 9, "original_max_position_embeddings": 16,
        "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.6, **LONG},
    }),
    "phi3 short": ("Phi3", {
        **SIZES, "original_max_position_embeddings": 32, "num_key_value_heads": 4,
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.6, "attention_factor": 1.3, **LONG,
        },
    }),
    "gemma2": ("Gemma2", {
        **SIZES, "head_dim": 14, "sliding_window": 6, "query_pre_attn_scalar": 9, "attn_logit_softcapping": 1.5,
        "final_logit_softcapping": 2.5,
    }),
    "gemma2 without caps": ("Gemma2", {
        **SIZES, "head_dim": 14, "sliding_window": 6, "query_pre_attn_scalar": 9, "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }),
    "gemma3": ("Gemma3", {
        **SIZES, "head_dim": 14, "sliding_window": 6, "query_pre_attn_scalar": 20, "num_hidden_layers": 7,
        "final_logit_softcapping": 3.0,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        },
    }),
}  # fmt: skip


def theirs(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """The model of `transformers`, with large weights, so that every part of it has a say."""
    import transformers

    kind, sizes = FAMILIES[name]
    config = getattr(transformers, f"{kind}{'Text' if kind == 'Gemma3' else ''}Config")(**sizes)
    config._attn_implementation = "eager"
    tail = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    torch.manual_seed(11)
    model = getattr(transformers, kind + tail)(config)
    draw = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for key, param in model.named_parameters():
            if param.dim() == 2:
                param.normal_(
                    0.0,
                    0.3 if "emb" in key or "wte" in key else 1.2 / param.shape[-1] ** 0.5,
                    generator=draw,
                )
            else:
                param.add_(0.3 * torch.randn(param.shape, generator=draw))
    return model.to(dtype).eval()


def ours(model: ModelConfig, weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """Logits [b s v] of our layers with these weights, without an engine."""
    x: Tensor | None = None
    for layer in build(model, Slicing()).layers():
        for module in layer.modules():
            for key, param in module._parameters.items():
                if param is not None:
                    parts = [weights[piece.name].flatten() for piece in spec_of(param).pieces]
                    module._parameters[key] = nn.Parameter(torch.cat(parts).view(param.shape))
        with torch.no_grad():
            x = layer(x, MicroBatch(tokens=tokens, training=False))
    assert x is not None
    return x.transpose(0, 1)


def without_fp32(module: nn.Module) -> ExitStack:
    """In the block `module` computes norms and softmax in its own fp64, not in fp32; rotary angles stay as they are."""
    stack, softmax = ExitStack(), F.softmax

    def wide_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        return softmax(x, dim, dtype=x.dtype if x.dtype == torch.float64 else dtype)

    def wide_norm(norm: Any, x: Tensor) -> Tensor:
        weight = norm.weight + (1.0 if type(norm).__name__.startswith("Gemma") else 0.0)
        eps = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight

    stack.enter_context(mock.patch.object(F, "softmax", wide_softmax))
    for norm in module.modules():
        if type(norm).__name__.endswith("RMSNorm"):
            stack.enter_context(
                mock.patch.object(norm, "forward", functools.partial(wide_norm, norm))
            )
    return stack


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_weights_and_configuration_are_those_of_transformers(name: str) -> None:
    module = theirs(name)
    config = module.config.to_dict()
    model = model_of(config)
    state = {
        key: value
        for key, value in module.state_dict().items()
        if key != "lm_head.weight" or not model.tied
    }
    weights = hf_to_state_dict(module.state_dict(), model)  # a tied head, too
    back = state_dict_to_hf(weights, model)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[key], value) for key, value in state.items())
    with torch.no_grad():
        want = module(TOKENS).logits
    torch.testing.assert_close(ours(model, weights, TOKENS), want, rtol=0, atol=1e-5)
    module, wide = module.double(), {key: value.double() for key, value in weights.items()}
    with torch.no_grad(), without_fp32(module):
        want = module(TOKENS).logits
    torch.testing.assert_close(ours(model, wide, TOKENS), want, rtol=0, atol=1e-11)
    assert model_of(config_of(model)) == model
    again = type(module.config)(**config_of(model)).to_dict()
    assert model_of(again) == model


# ---------------------------------------------------------------------------------------------------------- training

STEPS, ROWS, LR, CLIP = 3, 4, 3e-3, 0.5
PRECISIONS = [("fp64", 1e-8, 1e-9), ("fp32", 1e-5, 1e-5)]  # eps: `tests/configs.py` says why
TRAINED = ["gpt2", "llama linear, biases", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3"]
Trained = tuple[list[float], list[float], dict[str, Tensor]]


def batch(step: int) -> dict[str, Tensor]:
    """A global batch, of which a few labels are not counted."""
    draw = torch.Generator().manual_seed(100 + step)
    ids = torch.randint(0, VOCAB, (ROWS, SEQ + 1), generator=draw)
    labels = ids[:, 1:].masked_fill(torch.rand(ROWS, SEQ, generator=draw) < 0.1, -100)
    return {"tokens": ids[:, :-1].contiguous(), "labels": labels}


def train_theirs(module: nn.Module, eps: float) -> Trained:
    """Losses, gradient norms and weights of torch's own AdamW on the module of `transformers`."""
    params = list(module.parameters())
    groups = [
        {"params": [p for p in params if (p.dim() > 1) == big], "weight_decay": 0.1 * big}
        for big in (0, 1)
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=eps)
    losses, norms = [], []
    for step in range(STEPS):
        full = batch(step)
        logits = module(full["tokens"]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), full["labels"].flatten(), ignore_index=-100)
        loss.backward()
        losses.append(float(loss.detach()))
        norms.append(float(nn.utils.clip_grad_norm_(params, CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, dict(module.state_dict())


def train_ours(cases: list[tuple[ModelConfig, Path, str, float]]) -> list[Trained]:
    """The same of our engine on 2 pipeline x 2 tensor ranks, from these folders."""
    found = []
    for model, folder, dtype, eps in cases:
        config = Config.model_validate({
            "parallel": {"pp": 2, "tp": 2},
            "precision": {"dtype": dtype},
            "model": dict(model) | {"seq": SEQ},
            "train": {"global_batch": ROWS, "micro_batch": 2, "steps": 10, "grad_clip": CLIP},
            "optim": {"warmup": 0, "schedule": "constant", "lr": LR, "eps": eps},
        })  # fmt: skip
        engine = engine_of(resolve(config, VOCAB, 4))
        engine.load(folder)
        metrics = [engine.step(share(batch(step), engine.topology)) for step in range(STEPS)]
        found.append(
            (
                [float(m.loss) for m in metrics],
                [float(m.grad_norm) for m in metrics],
                engine.full_state_dict(),
            )
        )
    return found


TRAININGS = list(itertools.product(TRAINED, PRECISIONS))
SOME = TRAININGS[::3]  # contain models of all kinds, and both precisions
OTHERS = [training for training in TRAININGS if training not in SOME]


@pytest.mark.parametrize(
    "trainings", [SOME, pytest.param(OTHERS, marks=pytest.mark.grid)], ids=["some", "others"]
)
def test_training_from_their_folder_equals_training_their_module(
    trainings: list[tuple[str, tuple[str, float, float]]], tmp_path: Path
) -> None:
    cases, wants = [], []
    for name, (dtype, eps, _) in trainings:
        module = theirs(name, DTYPES[dtype])
        model = model_of(module.config.to_dict())
        state = {
            key: value
            for key, value in module.state_dict().items()
            if key != "lm_head.weight" or not model.tied
        }
        cases.append((model, tmp_path / f"{name} {dtype}", dtype, eps))
        module.save_pretrained(cases[-1][1])
        with without_fp32(module) if dtype == "fp64" else ExitStack():
            losses, norms, after = train_theirs(module, eps)
        wants.append((losses, norms, hf_to_state_dict({key: after[key] for key in state}, model)))
    found = run_ranks(4, train_ours, cases, timeout=600)[0]
    for (model, _, dtype, _), got, want in zip(cases, found, wants, strict=True):
        bound = {dtype: bound for dtype, _, bound in PRECISIONS}[dtype]
        where = f"{model.arch} {dtype}"
        off = [
            abs(a - b) / b for part in (0, 1) for a, b in zip(got[part], want[part], strict=True)
        ]
        assert max(off) < bound, where
        assert got[2].keys() == want[2].keys()
        most = max(float((got[2][key] - value).abs().max()) for key, value in want[2].items())
        assert most < bound, (where, most)


# ---------------------------------------------------------------------------------------------------- configurations

OLD = {
    "llama": (
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}},
    ),
    "mistral": ({"rope_parameters": YARN}, {"rope_theta": 500.0, "rope_scaling": {**YARN, "rope_theta": None}}),
    "phi3": (
        {
            "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.6, **LONG},
            "original_max_position_embeddings": 16,
        },
        {
            "rope_theta": 1e4, "rope_scaling": {"type": "su", **LONG}, "partial_rotary_factor": 0.6,
            "original_max_position_embeddings": 16,
        },
    ),
    "gemma3_text": (
        {
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        {
            "sliding_window_pattern": 2, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", OLD)
def test_old_and_new_spellings_are_one_model(kind: str) -> None:
    new, old = OLD[kind]
    assert model_of({"model_type": kind, **SIZES, **new}) == model_of(
        {"model_type": kind, **SIZES, **old}
    )


_7B = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
PUBLISHED: dict[str, tuple[int, dict[str, Any]]] = {
    "gpt2": (124_439_808, {
        "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
        "vocab_size": 50257, "resid_pdrop": 0.1, "attn_pdrop": 0.1, "embd_pdrop": 0.1,
        "activation_function": "gelu_new", "summary_type": "cls_index",
        "task_specific_params": {"text-generation": {"do_sample": True}},
    }),
    "Llama-3.1-8B": (8_030_261_248, {
        **_7B, "model_type": "llama", "intermediate_size": 14336, "vocab_size": 128256, "pretraining_tp": 1,
        "max_position_embeddings": 131072, "rope_theta": 500000.0, "attention_bias": False, "mlp_bias": False,
        "rope_scaling": {
            "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    }),
    "Mistral-7B-v0.1": (7_241_732_096, {
        **_7B, "model_type": "mistral", "intermediate_size": 14336, "vocab_size": 32000,
        "max_position_embeddings": 32768, "sliding_window": 4096, "rope_theta": 10000.0,
    }),
    "Qwen2.5-7B": (7_615_616_512, {
        "model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064, "max_position_embeddings": 131072,
        "max_window_layers": 28, "sliding_window": 131072, "use_sliding_window": False, "use_mrope": False,
        "rope_theta": 1000000.0,
    }),
    "Qwen3-8B": (8_190_735_360, {
        **_7B, "model_type": "qwen3", "num_hidden_layers": 36, "intermediate_size": 12288, "vocab_size": 151936,
        "head_dim": 128, "max_position_embeddings": 40960, "rope_theta": 1000000, "attention_bias": False,
        "max_window_layers": 36, "sliding_window": None, "use_sliding_window": False,
    }),
    "Phi-3-mini-4k": (3_821_079_552, {
        "model_type": "phi3", "hidden_size": 3072, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32, "intermediate_size": 8192, "vocab_size": 32064, "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096, "sliding_window": 2047, "rope_scaling": None, "rms_norm_eps": 1e-5,
        "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    }),
    "gemma-2-9b": (9_241_705_984, {
        "model_type": "gemma2", "hidden_size": 3584, "num_hidden_layers": 42, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 256, "intermediate_size": 14336, "vocab_size": 256000,
        "max_position_embeddings": 8192, "hidden_act": "gelu_pytorch_tanh", "cache_implementation": "hybrid",
        "hidden_activation": "gelu_pytorch_tanh", "sliding_window_size": 4096, "query_pre_attn_scalar": 256,
    }),
    "gemma-3-1b": (999_885_952, {
        "model_type": "gemma3_text", "hidden_size": 1152, "num_hidden_layers": 26, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 256, "intermediate_size": 6912, "vocab_size": 262144,
        "max_position_embeddings": 32768, "rope_local_base_freq": 10000, "rope_theta": 1000000, "rope_scaling": None,
        "sliding_window": 512, "sliding_window_pattern": 6, "attn_logit_softcapping": None,
    }),
    "Mixtral-8x7B-v0.1": (46_702_792_704, {
        **_7B, "model_type": "mixtral", "intermediate_size": 14336, "vocab_size": 32000, "num_local_experts": 8,
        "max_position_embeddings": 32768, "sliding_window": None, "rope_theta": 1000000.0, "num_experts_per_tok": 2,
        "output_router_logits": False, "router_aux_loss_coef": 0.02,
    }),
    "Qwen3-30B-A3B": (30_532_122_624, {
        "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "vocab_size": 151936,
        "max_position_embeddings": 40960, "rope_theta": 1000000.0, "attention_bias": False, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "norm_topk_prob": True, "max_window_layers": 48, "sliding_window": None, "use_sliding_window": False,
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_are_read_and_have_the_published_number_of_parameters(
    name: str,
) -> None:
    """As the models' own config.json have them, but for ids of tokens."""
    count, config = PUBLISHED[name]
    model = model_of(config)
    assert sum(math.prod(entry.shape) for entry in entries(model)) == count
    assert not list(find_problems(Config(model=model), 1))


def damaged(config: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """A configuration of which one value is something else."""
    strange = [
        None,
        -1,
        0,
        1e400,
        "x",
        [],
        {},
        [[]],
        True,
        10**30,
        {"full_attention": 3},
        {"rope_type": []},
        [1, None],
    ]
    config = copy.deepcopy(config)
    name = draw.choice([*config, "rope_parameters", "rope_scaling", "layer_types", "head_dim"])
    inner = config.get(name)
    if isinstance(inner, dict) and inner and draw.random() < 0.7:
        inner[draw.choice(sorted(inner))] = draw.choice(strange)
    elif draw.random() < 0.2:
        config.pop(name, None)
    else:
        config[name] = draw.choice(strange)
    return config


def test_damaged_configurations_are_refused_or_read_and_nothing_else() -> None:
    draw, refused = random.Random(0), 0
    whole = [config for _, config in PUBLISHED.values()] + [
        {"model_type": kind, **SIZES, **change} for kind, both in OLD.items() for change in both
    ]
    for _ in range(1500):
        try:
            model_of(damaged(draw.choice(whole), draw))
        except CheckpointError:
            refused += 1
    assert 500 < refused < 1400


@pytest.mark.parametrize(
    ("kind", "key", "name"),
    [("gpt2", "activation_function", "gelu_pytorch_tanh"), ("llama", "hidden_act", "swish"),
     ("gemma2", "hidden_activation", "gelu_new")],
)  # fmt: skip
def test_other_names_of_an_activation_are_the_same_model(kind: str, key: str, name: str) -> None:
    from transformers.activations import ACT2FN

    module = theirs(kind)
    config = module.config.to_dict()
    x = torch.linspace(-8, 8, 4001, dtype=torch.float64)
    torch.testing.assert_close(ACT2FN[name](x), ACT2FN[config[key]](x), rtol=1e-15, atol=1e-15)
    assert model_of({**config, key: name}) == model_of(config)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "olmoe"}, "model_type olmoe is not one of gpt2, llama, mistral"),
    ({"model_type": "qwen3_moe", "mlp_only_layers": [2]}, "mlp_only_layers [2]: only the first blocks can be"),
    ({"model_type": "qwen3_moe", "use_sliding_window": True}, "use_sliding_window True, not False"),
    ({"model_type": "mixtral", "num_local_experts": 1}, "--model.experts-per-token 2 with --model.experts 1: use at most 1"),
    ({"model_type": "mixtral", "router_jitter_noise": 0.1}, "router_jitter_noise 0.1, not 0.0"),
    ({"model_type": "gpt_oss", "num_local_experts": 4, "swiglu_limit": 5.0}, "swiglu_limit 5.0, not 7.0"),
    ({"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}},
     "weights in mxfp4 are not supported: load them with transformers (from_pretrained, quantization_config=Mxfp4Config"),
    ({"quantization_config": {"quant_method": "fp8"}}, "weights in fp8 are not supported"),
    ({"model_type": "deepseek_v2", "num_experts_per_tok": 2, "n_group": 4}, "topk_method greedy, not group_limited_greedy"),
    ({"model_type": "deepseek_v2", "num_experts_per_tok": 2, "norm_topk_prob": True},
     "--model.normalize-experts true"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type dynamic: supported are linear, llama3, yarn"),
    ({"rope_parameters": {"rope_type": "proportional"}}, "rope_type proportional"),
    ({"rope_parameters": {"rope_type": "linear"}}, "linear needs factor"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ({"num_local_experts": 8}, "num_local_experts 8 is not understood"),
    ({"attention_sinks": True}, "attention_sinks True is not understood"),
    ({"quantization_config": {"bits": 4}}, "quantization_config {'bits': 4} is not understood"),
    ({"hidden_act": "gelu"}, "hidden_act gelu, not silu"),
    ({"attention_dropout": 0.1}, "attention_dropout 0.1, not 0.0"),
    ({"hidden_size": None}, "hidden"),
    ({"num_key_value_heads": "many"}, 'num_key_value_heads "many" (kv_heads): must be a whole number'),
    ({"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["chunked_attention"] * 3}, "layer_types"),
    ({"model_type": "gemma2", "use_bidirectional_attention": True}, "use_bidirectional_attention True, not False"),
    ({"model_type": "gemma2", "layer_types": ["full_attention"]}, "one of sliding_attention and full_attention for"),
    ({"model_type": "gemma3_text", "rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
     "rotary scaling of layers with a sliding window"),
    ({"model_type": "phi3", "rope_scaling": {"type": "linear", "factor": 2.0}}, "-scaling linear, only longrope"),
    ({"model_type": "phi3", "rope_scaling": {"type": "longrope", **LONG}}, "a head turns 5 pairs; give 5 numbers"),
    ({"model_type": "phi3", "resid_pdrop": 0.1}, "embd_pdrop 0.0, but an equivalent key has 0.1"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "problem"), REFUSED, ids=[str(changes) for changes, _ in REFUSED]
)
def test_what_is_not_understood_is_refused_by_name(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(problem)):
        model_of({"model_type": "llama", **SIZES, **changes})


def test_values_out_of_range_are_told_in_plain_words_by_the_name_in_the_file() -> None:
    odd = {
        "hidden_size": -64, "num_attention_heads": 0, "rms_norm_eps": 0, "max_position_embeddings": None,
        "tie_word_embeddings": 1,
    }  # fmt: skip
    with pytest.raises(CheckpointError) as refused:
        model_of({"model_type": "llama", **SIZES, **odd})
    head, _, rest = str(refused.value).partition(": ")
    assert head == "the Hugging Face configuration"
    assert sorted(rest.split("; ")) == [
        "hidden_size -64 (hidden): must be greater than or equal to 1",
        "max_position_embeddings null: must be a whole number",
        "num_attention_heads 0 (heads): must be greater than or equal to 1",
        "rms_norm_eps 0 (norm_eps): must be greater than 0",
        "tie_word_embeddings 1 (tied): must be true or false",
    ]


def test_a_box_of_ours_is_found_in_theirs() -> None:
    for name in ("gpt2", "phi3"):
        module = theirs(name)
        model = model_of(module.config.to_dict())
        for entry in entries(model):
            theirs_whole = module.state_dict()[entry.name]
            for ours_name, part in entry.split(theirs_whole).items():
                start = tuple(size // 3 for size in part.shape)
                size = tuple(max(1, size // 2) for size in part.shape)
                box = read_box(
                    entry.native_part(ours_name, MemoryTensor(theirs_whole)), start, size
                )
                want = part[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))]
                assert torch.equal(box, want), (entry.name, ours_name)


# --------------------------------------------------------------------------------------------------------- attention


def plain_attention(q: Tensor, k: Tensor, v: Tensor, core: Causal) -> Tensor:
    """The formula: [s b a d] -> [s b (a d)]."""
    s, _, a, d = q.shape
    k, v = (x.repeat_interleave(a // k.shape[2], 2) for x in (k, v))
    scores = torch.einsum("sbad,tbad->bast", q, k) * (core.scale or d**-0.5)
    scores = torch.tanh(scores / core.softcap) * core.softcap if core.softcap else scores
    at = torch.arange(s)
    seen = (at <= at[:, None]) & (at > at[:, None] - (core.window or s))
    shares = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("bast,tbad->sbad", shares, v).flatten(2)


CORES = [
    Causal(5),
    Causal(scale=0.3),
    Causal(0, 0.7),
    Causal(3, 0.7, 0.9),
    Causal(99, 2.0),
    Causal(1, 1.0),
    Causal(11),
    Causal(8),
]


@pytest.mark.parametrize("core", CORES, ids=str)
def test_windows_and_bounds_are_the_formula_in_parts_of_any_size(core: Causal) -> None:
    """17 positions, 16 at a time; two key/value heads of four."""
    draw = torch.Generator().manual_seed(3)
    q, k, v = (
        torch.randn(17, 2, heads, 3, dtype=torch.float64, generator=draw).requires_grad_()
        for heads in (4, 2, 2)
    )
    want = plain_attention(q, k, v, core)
    with mock.patch.object(attention, "SCORES_ON_CPU", 1):
        torch.testing.assert_close(core(q, k, v), want, rtol=0, atol=1e-13)
        dy = torch.randn(want.shape, dtype=torch.float64, generator=draw)
        for got, right in zip(
            *(torch.autograd.grad(y, (q, k, v), dy) for y in (core(q, k, v), want)), strict=True
        ):
            torch.testing.assert_close(got, right, rtol=0, atol=1e-13)
        assert torch.autograd.gradcheck(core, (q[:5], k[:5], v[:5]))


def test_a_model_without_window_and_bound_has_the_attention_it_had() -> None:
    for arch in ("gpt", "llama", "mistral", "qwen2", "qwen3", "phi3"):
        block = build(ModelConfig(arch=arch, vocab=VOCAB), Slicing()).layers()[1]
        assert block.attention.core == Causal()
