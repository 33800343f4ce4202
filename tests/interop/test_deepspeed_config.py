"""A ds_config.json as threed reads it: every key is acted on, named as without effect, or refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from threed.config import ConfigError
from threed.interop.deepspeed.config import keys
from threed.interop.deepspeed.config.translate import ModelFacts, Translation, translate
from threed.ops.precision import LossScale

ADAMW: dict[str, Any] = {"type": "AdamW", "params": {"lr": 1e-3}}
BASE: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "optimizer": ADAMW}
ZERO_3 = {"stage": 3, "stage3_param_persistence_threshold": 7}


def config(**more: Any) -> dict[str, Any]:
    return {**BASE, **more}


def problems(ds: dict[str, Any], world: int = 4, **more: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        translate(ds, world, **more)
    return caught.value.problems


def problem(**more: Any) -> str:
    (only,) = problems(config(**more))
    return only


def notes(translation: Translation, key: str) -> list[str]:
    return [note.partition(": ")[2] for note in translation.notes if note.partition(": ")[0] == key]


# --------------------------------------------------------------------------------------------------------------- batch


@pytest.mark.parametrize(
    ("total", "micro", "steps", "want"),
    [
        (48, 3, 4, (48, 3, 4)), (48, 3, None, (48, 3, 4)), (48, None, 4, (48, 3, 4)), (None, 3, 4, (48, 3, 4)),
        (48, None, None, (48, 12, 1)), (None, 3, None, (12, 3, 1)), ("auto", 3, 4, (48, 3, 4)),
        (48, "auto", 4, (48, 3, 4)), (48, 3, "auto", (48, 3, 4)), ("auto", 3, "auto", (12, 3, 1)),
    ],
)  # fmt: skip
def test_the_batch_triple(total: Any, micro: Any, steps: Any, want: tuple[int, int, int]) -> None:
    ds = {
        "train_batch_size": total, "train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": steps,
        "optimizer": ADAMW,
    }  # fmt: skip
    t = translate(ds, 4)
    assert (t.train_batch_size, t.micro_batch, t.accumulation) == want
    assert (t.config.train.global_batch, t.config.train.micro_batch) == want[:2]


@pytest.mark.parametrize(
    ("ds", "text"),
    [
        ({}, "train_micro_batch_size_per_gpu: not given"),
        ({"gradient_accumulation_steps": 2}, "train_micro_batch_size_per_gpu: not given"),
        (
            {"train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto"},
            "train_micro_batch_size_per_gpu",
        ),
        ({"train_batch_size": 10}, "train_batch_size: 10 does not fit"),
        ({"train_batch_size": 20, "train_micro_batch_size_per_gpu": 2}, "use 16"),
        ({"train_batch_size": 2, "gradient_accumulation_steps": 2}, "use 8"),
        (  # Accelerate counts one rank on a CPU
            {
                "train_batch_size": 2,
                "train_micro_batch_size_per_gpu": 2,
                "gradient_accumulation_steps": 1,
            },
            "use 8. It fits one rank: on CPUs, pass use_cpu=True to TrainingArguments",
        ),
        (
            {
                "train_batch_size": 16,
                "train_micro_batch_size_per_gpu": 2,
                "gradient_accumulation_steps": 4,
            },
            "train_micro_batch_size_per_gpu 2 × gradient_accumulation_steps 4 × 4 data-parallel ranks = 32: use 32",
        ),
        ({"train_micro_batch_size_per_gpu": 0}, "0 must be greater than or equal to 1"),
        ({"train_micro_batch_size_per_gpu": 1.5}, "1.5 must be a whole number"),
        ({"train_micro_batch_size_per_gpu": True}, "true must be a number"),
        ({"train_micro_batch_size_per_gpu": "2"}, '"2" must be a whole number'),
    ],
)
def test_a_batch_that_does_not_add_up(ds: dict[str, Any], text: str) -> None:
    found = problems({**ds, "optimizer": ADAMW})
    assert text in found[0]


# ----------------------------------------------------------------------------------------------------------- optimizer


def test_defaults_of_the_optimizer_apply() -> None:
    t = translate(config(optimizer={"type": "Adam"}), 4)
    optim = t.config.optim
    assert (optim.name, optim.lr, optim.betas, optim.eps, optim.weight_decay) == (
        "adamw",
        1e-3,
        (0.9, 0.999),
        1e-8,
        0,
    )
    assert (optim.schedule, optim.warmup, t.learning_rate) == ("constant", 0, None)


def test_given_values_of_the_optimizer() -> None:
    params = {
        "lr": 3e-4,
        "betas": [0.8, 0.99],
        "eps": 1e-6,
        "weight_decay": 0.1,
        "torch_adam": True,
    }
    t = translate(config(optimizer={"type": "adamw", "params": params}), 4)
    optim = t.config.optim
    assert (optim.lr, optim.betas, optim.eps, optim.weight_decay) == (3e-4, (0.8, 0.99), 1e-6, 0.1)
    # norms and biases too
    assert [(g.match, g.lr, g.weight_decay) for g in optim.groups] == [("*", None, 0.1)]
    assert "no effect" in notes(t, "optimizer.params.torch_adam")[0]


def test_sgd_and_lion() -> None:
    sgd = translate(
        config(optimizer={"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}), 4
    ).config.optim
    assert (sgd.name, sgd.lr, sgd.momentum) == ("sgd", 0.1, 0.9)
    lion = translate(config(optimizer={"type": "Lion", "params": {"lr": 1e-4}}), 4).config.optim
    assert (lion.name, lion.lr, lion.betas) == ("lion", 1e-4, (0.9, 0.999))


@pytest.mark.parametrize(
    "name", ["Lamb", "OneBitAdam", "ZeroOneAdam", "OneBitLamb", "Muon", "Adagrad", "MuSGD"]
)
def test_other_optimizers_are_refused_by_name(name: str) -> None:
    assert (
        problem(optimizer={"type": name})
        == f'optimizer.type: "{name}" is not supported: use AdamW, Adam, SGD or Lion'
    )


@pytest.mark.parametrize(
    ("optimizer", "text"),
    [
        ({"type": "AdanW"}, 'optimizer.type: "AdanW" is not known: use AdamW, Adam, SGD or Lion'),
        ({"params": {}}, "optimizer.type: not given"),
        (
            {"type": "AdamW", "params": {"lr": "auto"}},
            'optimizer.params.lr: "auto" needs Hugging Face\'s Trainer',
        ),
        ({"type": "AdamW", "params": {"lr": 0}}, "optimizer.params.lr: 0 must be greater than 0"),
        (
            {"type": "AdamW", "params": {"betas": [0.9]}},
            "optimizer.params.betas: [0.9] must be two numbers",
        ),
        (
            {"type": "AdamW", "params": {"betas": [0.9, 1.0]}},
            "betas: [0.9, 1.0] must be two numbers, such as 0.9,0.95, each at least 0 and less than 1",
        ),
        (
            {"type": "AdamW", "params": {"amsgrad": True}},
            "optimizer.params.amsgrad: true is not supported (only false)",
        ),
        (
            {"type": "AdamW", "params": {"bias_correction": False}},
            "optimizer.params.bias_correction",
        ),
        (
            {"type": "AdamW", "params": {"weight_decy": 0.1}},
            "did you mean optimizer.params.weight_decay?",
        ),
        (
            {"type": "AdamW", "params": {"max_grad_norm": 1.0}},
            "use the top-level gradient_clipping",
        ),
        (
            {"type": "AdamW", "param": {}},
            "optimizer.param: no such key (did you mean optimizer.params?)",
        ),
        (
            {"type": "Adam", "params": {"adam_w_mode": False, "weight_decay": 0.1}},
            "use true, or weight_decay 0",
        ),
        ({"type": "SGD", "params": {"nesterov": True}}, "optimizer.params.nesterov"),
        ({"type": "SGD", "params": {"dampening": 0.1}}, "optimizer.params.dampening"),
        ({"type": "SGD", "params": {"betas": [0.9, 0.99]}}, "optimizer.params.betas: no such key"),
        ("AdamW", 'optimizer: "AdamW" must be an object of keys'),
    ],
)
def test_what_an_optimizer_cannot_have(optimizer: Any, text: str) -> None:
    assert text in problems(config(optimizer=optimizer))[0]


def test_adam_without_decay_is_the_same_in_both_modes() -> None:
    optimizer = {"type": "Adam", "params": {"adam_w_mode": False}}
    assert translate(config(optimizer=optimizer), 4).config.optim.name == "adamw"


def test_no_optimizer() -> None:
    assert problems({"train_batch_size": 4}) == [
        "optimizer.type: not given: use AdamW, Adam, SGD or Lion, or pass a torch optimizer"
    ]


# ----------------------------------------------------------------------------------------------------------- precision


def test_clipping() -> None:
    t = translate(BASE, 4)
    assert t.config.train.grad_clip == 1.0
    assert translate(config(gradient_clipping=0.3), 4).config.train.grad_clip == 0.3
    assert translate(config(gradient_clipping=0), 4).config.train.grad_clip == 0
    assert translate(config(gradient_clipping="auto"), 4).config.train.grad_clip == 1.0
    assert "must be greater than or equal to 0" in problem(gradient_clipping=-1)


def test_formats() -> None:
    p = translate(BASE, 4).config.precision
    assert (p.dtype, p.grad_dtype, p.reduce_dtype) == ("fp32", "fp32", "fp32")
    t = translate(config(bf16={"enabled": True}), 4)
    assert (t.config.precision.dtype, t.config.precision.grad_dtype, t.loss_scale) == (
        "bf16",
        "fp32",
        None,
    )
    ds = config(
        bfloat16={"enabled": True},
        data_types={"grad_accum_dtype": "bf16"},
        communication_data_type="bf16",
    )
    p = translate(ds, 4).config.precision
    assert (p.dtype, p.grad_dtype, p.reduce_dtype) == ("bf16", "bf16", "bf16")
    assert (
        translate(config(communication_data_type=torch.bfloat16), 4).config.precision.reduce_dtype
        == "bf16"
    )
    p = translate(BASE, 4, ModelFacts(dtype="fp64")).config.precision
    assert (p.dtype, p.grad_dtype, p.reduce_dtype) == ("fp64", "fp64", "fp64")


def test_fp16_and_its_loss_scale() -> None:
    t = translate(config(fp16={"enabled": True}), 4)
    assert (t.config.precision.dtype, t.config.precision.loss_scale) == ("fp16", "dynamic")
    assert t.loss_scale == LossScale(2.0**16, 1000, 2, False, 1.0, True)
    fp16 = {
        "enabled": True, "loss_scale": 0, "initial_scale_power": 8, "loss_scale_window": 50, "hysteresis": 3,
        "consecutive_hysteresis": True, "min_loss_scale": 4,
    }  # fmt: skip
    assert translate(config(fp16=fp16), 4).loss_scale == LossScale(256.0, 50, 3, True, 4.0, True)
    t = translate(config(fp16={"enabled": True, "loss_scale": 128}), 4)
    assert t.loss_scale is not None
    assert (t.loss_scale.initial, t.loss_scale.dynamic, t.config.precision.loss_scale) == (
        128.0,
        False,
        128.0,
    )
    assert translate(config(fp16={"enabled": False, "loss_scale": 128}), 4).loss_scale is None


def test_auto_formats_are_the_models() -> None:
    ds = config(fp16={"enabled": "auto"}, bf16={"enabled": "auto"})
    for dtype in ("bf16", "fp16", "fp32"):
        assert translate(ds, 4, ModelFacts(dtype=dtype)).config.precision.dtype == dtype
    assert [text.split(":")[0] for text in problems(ds)] == ["fp16.enabled", "bf16.enabled"]
    t = translate(BASE, 4, ModelFacts(dtype="bf16"))
    assert notes(t, "bf16") == ["not enabled: the model's bf16 weights are trained in fp32"]


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "both enabled"),
        ({"fp16": {"enabled": True, "auto_cast": 1}}, "fp16.auto_cast: 1 must be true or false"),
        ({"fp16": {"enable": True}}, "fp16.enable: no such key (did you mean fp16.enabled?)"),
        (
            {"zero_optimization": {"aio": {}}},
            "zero_optimization.aio: no such key, which belongs at the top level of the config",
        ),
        ({"fp16": {"enabled": 1}}, "fp16.enabled: 1 must be true or false"),
        ({"fp16": {"hysteresis": 0}}, "fp16.hysteresis: 0 must be greater than or equal to 1"),
        ({"fp16": {"loss_scale": -1}}, "fp16.loss_scale: -1 must be greater than or equal to 0"),
        ({"bf16": {"bf16_optimizer_states": True}}, "bf16.bf16_optimizer_states"),
        (
            {"data_types": {"grad_accum_dtype": "fp8"}},
            'data_types.grad_accum_dtype: "fp8" is not known',
        ),
        (
            {"data_types": {"param_dtype": "bf16"}},
            "data_types.param_dtype: bf16, but weights are fp32",
        ),
        ({"communication_data_type": "int8"}, "communication_data_type"),
        (
            {"amp": {"enabled": True}},
            'amp: {"enabled": true} is not supported (only false): use bf16 or fp16',
        ),
        (
            {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
            'torch_autocast: {"enabled": true, "dtype": "bfloat16"} is not supported (only false): use "bf16"',
        ),
    ],
)
def test_formats_that_are_refused(more: dict[str, Any], text: str) -> None:
    assert text in problem(**more)


# ---------------------------------------------------------------------------------------------------------------- zero


def test_zero() -> None:
    t = translate(BASE, 4)
    assert t.config.zero.stage == 0
    zero = {"stage": 2, "reduce_bucket_size": 5e8, "mics_shard_size": -1}
    z = translate(config(zero_optimization=zero), 4).config.zero
    assert (z.stage, z.bucket_mib, z.shard_size, z.resident) == (2, 5e8 * 4 / 2**20, "all", 0)
    z = translate(config(zero_optimization={**zero, "mics_shard_size": 2}), 4).config.zero
    assert z.shard_size == 2
    t = translate(config(zero_optimization={"stage": 0, "mics_shard_size": 2}), 4)
    assert t.config.zero.shard_size == "all"
    assert notes(t, "zero_optimization.mics_shard_size") == ["no effect: stage 0 does not shard"]
    ds = config(
        zero_optimization=zero, bf16={"enabled": True}, data_types={"grad_accum_dtype": "bf16"}
    )
    assert translate(ds, 4).config.zero.bucket_mib == 5e8 * 2 / 2**20


def test_parameters_that_stay_whole() -> None:
    t = translate(config(zero_optimization={"stage": 3}), 4)
    assert t.config.zero.resident == 100_001  # up to the threshold, itself included
    key = "zero_optimization.stage3_param_persistence_threshold"
    assert translate(config(zero_optimization=ZERO_3), 4).config.zero.resident == 8
    t = translate(config(zero_optimization={**ZERO_3, "stage": 2}), 4)
    assert t.config.zero.resident == 0
    assert notes(t, key) == ["no effect: parameters are not sharded below stage 3"]


def test_auto_sizes_come_from_the_hidden_size() -> None:
    zero = {
        "stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    }  # fmt: skip
    z = translate(config(zero_optimization=zero), 4, ModelFacts(hidden=64)).config.zero
    assert (z.bucket_mib, z.resident) == (64 * 64 * 4 / 2**20, 641)
    assert [text.split(":")[0] for text in problems(config(zero_optimization=zero))] == [
        "zero_optimization.reduce_bucket_size",
        "zero_optimization.stage3_param_persistence_threshold",
    ]


@pytest.mark.parametrize(
    ("zero", "text"),
    [
        ({"stage": 4}, "zero_optimization.stage: 4 must be less than 4"),
        ({"stage": "2"}, "must be a whole number"),
        ({"stage": {"x": 1}}, 'zero_optimization.stage: {"x": 1} must be a whole number'),
        (
            {"stage": 3, "mics_shard_size": 3},
            "mics_shard_size: 3 does not divide 4 data-parallel ranks",
        ),
        ({"reduce_bucket_size": 0}, "must be greater than or equal to 1"),
        (
            {"stage3_param_persistance_threshold": 5},
            "mean zero_optimization.stage3_param_persistence_threshold?",
        ),
        (True, 'zero_optimization: true must be an object of keys, such as {"stage": 1}'),
        ({"zenflow": {"topk_ratio": 0.1}}, "every update uses all gradients of its step"),
        ({"zero_hpz_partition_size": 8}, "use mics_shard_size"),
    ],
)
def test_zero_that_is_refused(zero: Any, text: str) -> None:
    assert text in problem(zero_optimization=zero)


# ------------------------------------------------------------------------------------------------------------ all keys


def at(key: str, value: Any) -> dict[str, Any]:
    nested: Any = value
    for name in reversed(key.split(".")):
        nested = {name: nested}
    return config(**nested)


TABLES = (
    "optimizer",
    "zero_optimization.offload_optimizer",
    "zero_optimization.offload_param",
)


@pytest.mark.parametrize("key", [key for key in keys.NO_EFFECT if not key.startswith(TABLES)])
def test_every_key_without_effect_is_named(key: str) -> None:
    assert notes(translate(at(key, 1), 4), key) == [f"no effect: {keys.NO_EFFECT[key]}"]


@pytest.mark.parametrize(
    "key", [key for key in keys.REFUSED if not key.startswith((*TABLES, "scheduler"))]
)
def test_every_refused_key_is_named(key: str) -> None:
    works, why = keys.REFUSED[key]
    (text,) = problems(at(key, "something"))
    assert text.startswith(f'{key}: "something" is not supported')
    assert text.endswith(f": {why}")
    for value in works:
        assert notes(translate(at(key, value), 4), key) == [
            f"{json.dumps(value)}, the only supported value"
        ]
    if works == (False,):
        assert key in problems(at(key, {"enabled": True}))[0]
        for off in ({"enabled": False}, {"other": 1}):  # as in DeepSpeed, not enabled by default
            assert notes(translate(at(key, off), 4), key) == ["false, the only supported value"]


@pytest.mark.parametrize("key", [key for key in keys.NO_EFFECT if key.startswith("optimizer")])
def test_every_key_of_the_optimizer_without_effect_is_named(key: str) -> None:
    name = key.rpartition(".")[2]
    optimizer = {"params": {name: 1}} if "params" in key else {name: 1}
    t = translate(config(optimizer={"type": "AdamW", **optimizer}), 4)
    assert notes(t, key) == [f"no effect: {keys.NO_EFFECT[key]}"]


def misspelled(ds: dict[str, Any]) -> bool:
    try:
        translate(ds, 4)
    except ConfigError as error:
        return "no such key" in str(error)
    return False


def test_deepspeeds_own_keys_are_all_known() -> None:
    """What DeepSpeed's classes know is acted on, ignored or refused here, but never a misspelling."""
    zero = pytest.importorskip("deepspeed.runtime.zero.config").DeepSpeedZeroConfig
    precision = pytest.importorskip("deepspeed.runtime.precision_config")
    offload = pytest.importorskip("deepspeed.runtime.zero.offload_config")
    models = {
        ("zero_optimization",): zero,
        ("fp16",): precision.DeepSpeedFP16Config,
        ("bf16",): precision.DeepSpeedBF16Config,
        ("zero_optimization", "offload_param"): offload.DeepSpeedZeroOffloadParamConfig,
        ("zero_optimization", "offload_optimizer"): offload.DeepSpeedZeroOffloadOptimizerConfig,
    }  # fmt: skip
    for place, model in models.items():
        for key, field in model.model_fields.items():
            assert not misspelled(at(".".join((*place, field.alias or key)), "?")), (place, key)


def test_deepspeeds_top_level_keys_are_all_known() -> None:
    constants = pytest.importorskip("deepspeed.runtime.constants")
    names = (
        "TRAIN_BATCH_SIZE OPTIMIZER SCHEDULER ZERO_ALLOW_UNTESTED_OPTIMIZER ZERO_FORCE_DS_CPU_OPTIMIZER STEPS_PER_PRINT"
        " TRAIN_MICRO_BATCH_SIZE_PER_GPU GRADIENT_ACCUMULATION_STEPS MANAGED_GRADIENT_ACCUMULATION TORCH_AUTOCAST"
        " GRADIENT_CLIPPING COMMUNICATION_DATA_TYPE SEQ_PARALLEL_COMMUNICATION_DATA_TYPE PRESCALE_GRADIENTS"
        " GRADIENT_PREDIVIDE_FACTOR GRADIENT_ALLREDUCE_OP DISABLE_ALLGATHER DUMP_STATE DISABLE_PYTHON_GC"
        " VOCABULARY_SIZE WALL_CLOCK_BREAKDOWN MEMORY_BREAKDOWN CHECKPOINT DATA_TYPES DATALOADER_DROP_LAST LOG_LEVEL"
        " USE_DATA_BEFORE_EXPERT_PARALLEL"
    )
    for name in names.split():
        assert not misspelled(config(**{getattr(constants, name): "?"})), name


def test_all_problems_at_once() -> None:
    found = problems({
        "train_batch_sise": 8, "optimizer": {"type": "Lamb"}, "scheduler": {"type": "OneCycle"},
        "zero_optimization": {"stage": 9, "offload_param": {"device": "gpu"}}, "fp16": {"enabled": "yes"},
        "activation_checkpointing": {"partition_activations": True},
    })  # fmt: skip
    assert sorted(text.split(":")[0] for text in found) == sorted((
        "train_micro_batch_size_per_gpu", "fp16.enabled", "zero_optimization.stage",
        "zero_optimization.offload_param.device", "optimizer.type", "scheduler.type", "train_batch_sise",
    ))  # fmt: skip
    assert found[0] == "train_batch_sise: no such key (did you mean train_batch_size?)"


def test_a_configuration_in_the_wild() -> None:
    """The shape of the ZeRO-3 file that Hugging Face's documentation shows."""
    ds = {
        "bf16": {"enabled": "auto"},
        "optimizer": {
            "type": "AdamW", "params": {"lr": 2e-5, "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": 100, "total_num_steps": 1000,
            },
        },
        "zero_optimization": {
            "stage": 3, "offload_optimizer": {"device": "none", "pin_memory": True}, "overlap_comm": True,
            "offload_param": {"device": "none", "pin_memory": True}, "contiguous_gradients": True,
            "sub_group_size": 1e9, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": True,
        },
        "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "steps_per_print": 2000,
        "train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "wall_clock_breakdown": False,
    }  # fmt: skip
    t = translate(ds, 8, ModelFacts(hidden=1024, dtype="bf16"))
    assert (t.accumulation, t.config.precision.dtype, t.config.zero.stage) == (2, "bf16", 3)
    acted = (
        "type",
        "lr",
        "warmup_num_steps",
        "total_num_steps",
        "stage",
        "device",
        "sub_group_size",
        "stage3_gather_16bit_weights_on_model_save",
    )
    for key in json.dumps(ds).split('"')[1::2]:
        known = (
            key in acted
            or key.startswith("train_")
            or key in ("params", "AdamW", "WarmupDecayLR", "auto", "none")
        )
        groups = (
            "bf16",
            "optimizer",
            "scheduler",
            "zero_optimization",
            "offload_optimizer",
            "offload_param",
        )
        known = known or key in groups or key == "gradient_accumulation_steps"
        assert known or any(note.split(":")[0].endswith(key) for note in t.notes), key


def test_both_names_of_a_key_are_refused() -> None:
    long, short = "stage3_param_persistence_threshold", "param_persistence_threshold"
    zero = {"stage": 3, short: 7}
    assert translate(config(zero_optimization=zero), 4).config.zero.resident == 8
    assert "is given twice" in problem(zero_optimization={**zero, long: 8})
    assert "is given twice" in problem(bf16={"enabled": True}, bfloat16={"enabled": True})
    t = translate(config(bf16=None, bfloat16={"enabled": True}), 4)
    assert t.config.precision.dtype == "bf16"


def test_zero_plus_plus_sends_int8_blocks() -> None:
    zero = {"stage": 3, "zero_quantized_weights": True, "zero_quantized_gradients": True}
    found = translate(config(zero_optimization=zero), 2).config.zero
    assert (found.compress_weights, found.compress_gradients) == ("int8", "int8")
    with pytest.raises(
        ConfigError, match=r"zero_quantized_weights.*true with stage 2: use stage 3"
    ):
        translate(config(zero_optimization={**zero, "stage": 2}), 2)
