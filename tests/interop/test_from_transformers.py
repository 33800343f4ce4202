"""`threed.from_transformers` against plain PyTorch with the unmodified model of transformers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import threed
from tests.harness import run_ranks
from tests.hf_decoders import (
    PLANNED,
    REBUILT,
    Trained,
    batch,
    casts,
    config_of,
    difference,
    engine_of,
    make,
    planned,
    train,
    train_plainly,
)
from threed.config import ConfigError
from threed.distributed.sharding import spec_of
from threed.distributed.topology import Axis
from threed.interop.huggingface.live_weights import random_values
from threed.interop.huggingface.plan import Plan
from threed.interop.huggingface.plan_arguments import LayerArguments
from threed.interop.huggingface.plan_layers import SharedInput, Skeleton, sliced
from threed.layers.context import Context
from threed.zero.step_metrics import DataError

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
# qwen3: norms of queries and keys, tied. granite: scaled embedding and logits. gpt_neox: other names, packed queries,
# keys and values, biases, attention parallel to the MLP. olmo2: styles that are replicated.
Kinds = list[tuple[str, bool]]  # families, and whether the plan of transformers is used
FEW: Kinds = [("qwen3", True), ("llama", False)]
MORE: Kinds = [("gpt_neox", True), ("olmo2", True), ("granite", True), ("gpt2", False)]


class Two(hf.LlamaModel):
    """A base model that runs its layers twice, so that it is not a chain of its layers."""

    def forward(self, inputs_embeds: Tensor, **keywords: Any) -> Any:
        once = super().forward(inputs_embeds=inputs_embeds, **keywords)
        return super().forward(inputs_embeds=once.last_hidden_state, **keywords)


# ------------------------------------------------------------------------------------------------------- equivalence


def run_few(folder: Path, kinds: Kinds, truths: dict[str, Trained]) -> dict[str, float]:
    """Trains families on 4 ranks. Returns the differences from `truths`, by case."""
    out, topology = {}, threed.Topology(tp=2, pp=2)
    flat = threed.Topology(tp=2)
    for kind, plan in kinds:
        engine = engine_of(kind, plan, torch.float64, topology)
        out[f"{kind}, tp 2, pp 2"] = difference(train(engine, torch.float64), truths[kind])
        engine.model.save_pretrained(folder / kind, engine.full_state_dict())
        _check_slices(engine, kind, plan)
    first = kinds[0][0]
    engine = engine_of(first, True, torch.float64, flat, zero={"stage": 3, "resident": 0})
    out[f"{first}, tp 2, ZeRO-3"] = difference(train(engine, torch.float64), truths[first])
    if first != "qwen3":
        return out
    recomputed = {"recompute": {"mode": "full"}, "parallel": {"schedule": "zb-h1"}}
    engine = engine_of("qwen3", True, torch.float64, topology, **recomputed)
    out["recomputed, zero bubble"] = difference(train(engine, torch.float64), truths["qwen3"])
    out["loaded"] = _reload(engine, flat, folder)
    out["random"] = _random(topology)
    return out


def _check_slices(engine: Any, kind: str, plan: bool) -> None:
    """Checks that linear layers are sharded, and norms of queries and keys are partial."""
    if not plan:
        return
    sizes = {}
    for layer in engine.model.layers():
        for param in layer.parameters():
            spec = spec_of(param)
            sizes[spec.name] = param.numel() / math.prod(spec.pieces[0].shape)
            assert (spec.partial == "tp") == (
                "q_norm" in spec.name or "k_norm" in spec.name
            ) or kind == "olmo2"
    halved = {name for name, share in sizes.items() if share == 0.5}
    gathered = kind == "olmo2"
    assert any("mlp" in name for name in halved)
    assert any("attn" in name or "attention" in name for name in halved) != gathered


def _reload(engine: Any, topology: threed.Topology, folder: Path) -> float:
    """Returns the difference of the evaluation loss after a checkpoint is loaded elsewhere."""
    data = batch(7)
    with casts(torch.float64):
        expected = float(engine.evaluate(data))
        engine.save(folder / "saved")
        other = engine_of("qwen3", True, torch.float64, topology)
        other.load(folder / "saved")
        halves = {k: v.chunk(2)[topology.axis("dp").index] for k, v in data.items()}
        return abs(float(other.evaluate(halves)) - expected)


def _random(topology: threed.Topology) -> float:
    """Returns the difference of the initial weights of a model on the meta device, on rank 0."""
    with torch.device("meta"):
        module = make("qwen3", torch.float32)
    model = threed.from_transformers(module, threed.Slicing(topology.axis("tp")), plan=True)
    engine = threed.Engine(model, topology, config_of(model, torch.float32, topology))
    weights = engine.full_state_dict()
    worst = [
        float((value - random_values(module, name, engine.config.train.seed)).abs().max())
        for name, value in weights.items()
    ]
    assert torch.isfinite(engine.evaluate(batch(0)))
    return max(worst, default=0.0)


@pytest.mark.parametrize(
    "kinds", [FEW, pytest.param(MORE, marks=pytest.mark.grid)], ids=["few", "more"]
)
def test_few_families_equal_one_process_on_four_ranks(kinds: Kinds, tmp_path: Path) -> None:
    truths = {kind: train_plainly(kind, torch.float64) for kind, _ in kinds}
    for rank in run_ranks(4, run_few, tmp_path, kinds, truths):
        assert max(rank.values()) < 1e-9, rank
    for kind, truth in truths.items():
        loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path / kind, dtype=torch.float64)
        assert loaded.state_dict().keys() == truth.weights.keys()
        for name, value in loaded.state_dict().items():
            torch.testing.assert_close(value, truth.weights[name], atol=1e-9, rtol=0)


PACKED = ("llama", "gemma2")  # gemma2: a window and soft caps


def run_rebuilt(truths: dict[str, Trained]) -> dict[str, float]:
    """Trains rebuilt models, split over context ranks and packed. Returns the differences."""
    out, topology = {}, threed.Topology(cp=2)
    for kind in PACKED:
        for heads in (1, 2):
            engine = engine_of(kind, False, torch.float64, topology, cp_heads=heads)
            name = f"{kind}, {heads} of 2 ranks exchange heads"
            out[name] = difference(train(engine, torch.float64, True), truths[kind])
    return out


def test_rebuilt_models_split_sequences_and_keep_documents_apart() -> None:
    """As transformers does by positions that begin at 0 in each document."""
    truths = {kind: train_plainly(kind, torch.float64, packed=True) for kind in PACKED}
    for rank in run_ranks(2, run_rebuilt, truths):
        assert max(rank.values()) < 1e-9, rank


def run_table(world: int, dtype: torch.dtype) -> dict[str, float]:
    """Trains all families on `world` ranks. Returns the differences from one process."""
    shapes = [{"tp": 2, "pp": 2}] if world == 4 else [{"tp": 2}, {"pp": 2}, {}]
    out = {}
    families = [(kind, True) for kind in planned(PLANNED)] + [(kind, False) for kind in REBUILT]
    for kind, plan in families:
        truth = train_plainly(kind, dtype)
        for sizes in shapes:
            topology = threed.Topology(**sizes)
            zero = {"stage": 1 if sizes else 3, "resident": 0}
            sequence = not plan and topology.tp > 1
            engine = engine_of(kind, plan, dtype, topology, sequence, zero=zero)
            out[f"{kind} {plan} {sizes}"] = difference(train(engine, dtype), truth)
    return out


@pytest.mark.grid
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("world", [2, 4])
def test_all_families_equal_one_process(world: int, dtype: torch.dtype) -> None:
    for rank in run_ranks(world, run_table, world, dtype):
        wrong = {name: value for name, value in rank.items() if not value < TOLERANCE[dtype]}
        assert not wrong
        print(max(rank.values()))


# ---------------------------------------------------------------------------------------------------------- choices


def test_known_architectures_are_rebuilt_unless_the_plan_is_chosen() -> None:
    assert type(threed.from_transformers(make("llama"))).__name__ == "RebuiltDecoder"
    assert type(threed.from_transformers(make("llama"), plan=True)).__name__ == "PlannedDecoder"
    assert type(threed.from_transformers(make("granite"))).__name__ == "PlannedDecoder"
    with pytest.raises(ConfigError, match="model_type granite is not one of"):
        threed.from_transformers(make("granite"), plan=False)


def test_frozen_parameters_stay_frozen() -> None:
    module = make("llama", torch.float32)
    module.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    model = threed.from_transformers(module)
    frozen = [
        spec_of(param).name
        for layer in model.layers()
        for param in layer.parameters()
        if not param.requires_grad
    ]
    assert frozen == ["model.layers.0.mlp.up_proj.weight"]


def test_the_module_is_unchanged_and_may_be_freed_after_the_start() -> None:
    topology = threed.Topology()
    engine = engine_of("granite", True, torch.float64, topology)
    before = {name: value.clone() for name, value in engine.model.module.state_dict().items()}
    train(engine, torch.float64)
    after = engine.model.module.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    engine.model.module.to("meta")
    assert engine.full_state_dict().keys() == before.keys()


def test_logits_of_batches_of_several_shapes() -> None:
    engine = engine_of("gemma2", True, torch.float64, threed.Topology())
    for rows, length in ((2, 12), (1, 5), (3, 9), (2, 12)):
        ids = torch.randint(0, 61, (rows, length))
        with torch.no_grad(), casts(torch.float64):
            logits, expected = engine.logits(ids), engine.model.module(input_ids=ids).logits
        torch.testing.assert_close(logits, expected, atol=1e-9, rtol=0)


def test_gradient_checkpointing_of_transformers_is_not_used() -> None:
    module = make("granite", torch.float32)
    module.gradient_checkpointing_enable()
    model = threed.from_transformers(module)
    flags = [
        getattr(m, "gradient_checkpointing", False) for x in model.layers() for m in x.modules()
    ]
    assert not any(flags)
    assert module.model.gradient_checkpointing


def test_token_ids_and_labels_beyond_the_vocabulary_are_found() -> None:
    engine = engine_of("granite", True, torch.float64, threed.Topology())
    data = batch(0)
    data["tokens"][0, 0] = 1000
    with pytest.raises(DataError, match="token ids beyond the 61"):
        _ = engine.step(data).loss


def test_the_gradient_of_an_input_of_several_layers_is_summed_once() -> None:
    module = make("granite", torch.float32)
    calls = list[Tensor]()

    class Counting(SharedInput):
        def _gather(self, x: Tensor) -> Tensor:
            calls.append(x)
            return x.clone()

    plan, shared = Plan.of(module), Counting(pair())
    block = sliced(module.model.layers[0], "layers.0", "model.", plan, pair(), shared)
    for name in ("q_proj", "k_proj", "v_proj"):
        linear = getattr(block.self_attn, name)
        linear.weight = nn.Parameter(torch.randn(linear.weight.shape))
    x = torch.randn(1, 2, 32)
    attention = block.self_attn
    keys = [part(x) for part in (attention.q_proj, attention.k_proj, attention.v_proj)]
    assert [key.shape[-1] for key in keys] == [16, 8, 8]
    assert len(calls) == 1
    shared.clear()
    attention.q_proj(x)
    assert len(calls) == 2


# --------------------------------------------------------------------------------------------------------- refusals


class Tensors:
    """A tensor axis of two ranks, without processes."""

    size, index, name = 2, 0, "tp"


def pair() -> threed.Slicing:
    axis: Any = Tensors()
    return threed.Slicing(axis)


def unlike_chain() -> Any:
    module = make("llama")
    module.model.__class__ = Two
    return module


def with_extra() -> Any:
    module = make("llama")
    module.model.extra = nn.Linear(2, 2)
    return module


def quantized() -> Any:
    module = make("llama")
    module.config.quantization_config = {"quant_method": "bitsandbytes"}
    return module


def without_a_norm_style() -> Any:
    module = make("qwen3")
    plan = module.config.base_model_tp_plan
    module.config.base_model_tp_plan = {k: v for k, v in plan.items() if "q_norm" not in k}
    return module


def experts() -> Any:
    module = make("llama")
    plan = module.config.base_model_tp_plan
    module.config.base_model_tp_plan = {**plan, "layers.*.mlp.up_proj": "moe_tp_experts"}
    return module


def encoder_decoder() -> Any:
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 9}
    return hf.T5ForConditionalGeneration(hf.T5Config(**sizes))


def with_images() -> Any:
    text = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 99}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    with torch.device("meta"):
        config = hf.Gemma3Config(text_config=text | heads, vision_config=vision)
        return hf.Gemma3ForConditionalGeneration(config)


def adapted() -> Any:
    module = make("llama")
    module._hf_peft_config_loaded = True
    return module


def with_lora() -> Any:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(make("llama"), peft.LoraConfig(target_modules=["q_proj"]))


def three_heads() -> Any:
    return make("llama", hidden_size=24, num_attention_heads=3, num_key_value_heads=3)


REFUSALS: list[tuple[str, Any]] = [
    ("StableLmForCausalLM: its configuration has no base_model_tp_plan", lambda: make("stablelm")),
    ("its 1 num_key_value_heads are not a multiple of tp 2", lambda: make("llama", num_key_value_heads=1)),
    ("its 3 attention heads are not a multiple of tp 2", three_heads),
    (r"its dropout \(model.layers.0.self_attn.attention_dropout", lambda: make("llama", attention_dropout=0.1)),
    ("its base model is not a chain of layers", unlike_chain),
    ("does not name the modules of model.extra.weight", with_extra),
    ("does not train quantized models", quantized),
    ("has no style for layers.0.self_attn.q_norm", without_a_norm_style),
    ("does not offer moe_tp_experts, in its base_model_tp_plan", experts),
    ("encoder-decoder", encoder_decoder),
    (r"other inputs than text \(vision_config\)", with_images),
    ("it has an adapter: merge it", adapted),
    ("^PeftModel: it has an adapter: merge it", with_lora),
    ("it has no language head", lambda: make("llama").model),
    ("buffers in their state dict", lambda: make("apertus")),
]  # fmt: skip


@pytest.mark.parametrize(("message", "build"), REFUSALS, ids=[text[:40] for text, _ in REFUSALS])
def test_what_cannot_be_sliced_is_refused(message: str, build: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        threed.from_transformers(build(), pair(), plan=True)


def test_sequence_and_context_parallelism_and_tiles_are_refused() -> None:
    axis: Any = Tensors()
    with pytest.raises(ConfigError, match="no sequence parallelism: use"):
        threed.from_transformers(make("llama"), threed.Slicing(axis, sequence=True), plan=True)
    context = Context(axis=Axis("cp", (0, 1), 0))
    with pytest.raises(ConfigError, match="no context parallelism, because its attention needs"):
        threed.from_transformers(make("llama"), threed.Slicing(context=context), plan=True)
    with pytest.raises(ConfigError, match="no tiles"):
        threed.from_transformers(make("llama"), threed.Slicing(tile=2), plan=True)


def test_both_reasons_are_given_if_a_model_can_be_neither_rebuilt_nor_sliced() -> None:
    with pytest.raises(ConfigError) as error:
        threed.from_transformers(make("stablelm"))
    assert "base_model_tp_plan" in str(error.value)
    assert "model_type stablelm" in str(error.value)
    with pytest.raises(TypeError, match="is not a model of transformers"):
        threed.from_transformers(nn.Linear(2, 2))


def test_a_chain_is_recognized() -> None:
    module = make("llama", torch.float32)
    assert LayerArguments.of(Skeleton(module, Plan.of(module)), 3) is not None
    module.model.__class__ = Two
    assert LayerArguments.of(Skeleton(module, Plan.of(module)), 3) is None
