"""Offload in a ds_config.json: where state lives, what goes with it, and files that DeepSpeed and its users show."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.interop.test_deepspeed_config import config, notes, problem, problems
from threed.config import ZeroConfig
from threed.config.checks import find_problems
from threed.interop.deepspeed.config import keys
from threed.interop.deepspeed.config.translate import ModelFacts, Translation, translate

PLACES = ("offload_optimizer", "offload_param")
NVME = {"device": "nvme", "nvme_path": "/nvme"}


def zero(**more: Any) -> dict[str, Any]:
    return config(zero_optimization={"stage": 3, **more})


def places(z: ZeroConfig) -> tuple[str, str, str | None]:
    return z.offload_optimizer, z.offload_params, z.nvme_path


# --------------------------------------------------------------------------------------------------------------- places


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("optimizer", ["none", "cpu", "nvme"])
@pytest.mark.parametrize("params", ["none", "cpu", "nvme"])
def test_where_state_lives(stage: int, optimizer: str, params: str) -> None:
    ds = zero(
        stage=stage,
        offload_optimizer={**NVME, "device": optimizer},
        offload_param={**NVME, "device": params},
    )
    if stage < 3 and params != "none":
        (text,) = problems(ds)
        what = f"zero_optimization.offload_param: {params} with stage {stage}"
        assert text == f"{what}: only sharded parameters can be offloaded; use stage 3"
        return
    t = translate(ds, 4)
    assert places(t.config.zero) == (
        optimizer,
        params,
        "/nvme" if "nvme" in (optimizer, params) else None,
    )
    assert not find_problems(t.config, 4)  # what comes out is what threed itself takes
    for key, device in (("offload_optimizer", optimizer), ("offload_param", params)):
        want = [] if device == "nvme" else ["no effect: NVMe offload is not enabled"]
        assert notes(t, f"zero_optimization.{key}.nvme_path") == want


def test_a_device_that_is_not_given() -> None:
    t = translate(zero(offload_optimizer={"pin_memory": True}, offload_param={}), 4)
    assert places(t.config.zero) == ("none", "none", None)


def test_one_folder() -> None:
    home = {**NVME, "nvme_path": "~/swap"}
    told = translate(
        zero(offload_optimizer=home, offload_param={**NVME, "nvme_path": Path.home() / "swap"}), 4
    )
    assert told.config.zero.nvme_path == str(Path.home() / "swap")
    one = translate(
        zero(offload_optimizer=NVME, offload_param={**NVME, "nvme_path": Path("/nvme/")}), 4
    )
    assert places(one.config.zero) == ("nvme", "nvme", "/nvme")
    (text,) = problems(zero(offload_optimizer=NVME, offload_param={**NVME, "nvme_path": "/other"}))
    assert text.startswith(
        'zero_optimization.offload_param.nvme_path: "/other", but offload_optimizer.nvme_path is'
    )
    assert "set both to one folder" in text
    other = {"device": "cpu", "nvme_path": "/other"}  # a folder that is not used
    assert (
        places(translate(zero(offload_optimizer=NVME, offload_param=other), 4).config.zero)[2]
        == "/nvme"
    )


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"offload_optimizer": {"device": "nvme"}}, "offload_optimizer.nvme_path: not given: set it to a folder"),
        ({"offload_param": {**NVME, "nvme_path": None}}, "offload_param.nvme_path: not given: set it to a folder"),
        ({"offload_param": {**NVME, "nvme_path": 3}}, "offload_param.nvme_path: 3 is not a folder"),
        ({"offload_param": {**NVME, "nvme_path": ""}}, 'offload_param.nvme_path: "" is not a folder'),
        ({"offload_param": {**NVME, "nvme_path": "auto"}}, "set it to a folder"),
        ({"offload_param": {"device": "gpu"}}, 'offload_param.device: "gpu" is not known: use none, cpu or nvme'),
        ({"offload_param": {"device": "auto"}}, "set it to none, cpu or nvme"),
        ({"offload_param": {"devise": "cpu"}}, "mean zero_optimization.offload_param.device?"),
        ({"offload_param": "cpu"}, 'zero_optimization.offload_param: "cpu" must be an object of keys'),
        ({"stage": 0, "offload_optimizer": {"device": "cpu"}}, "offload_optimizer: cpu with stage 0: only sharded states"),
        ({"offload_optimizer": {"device": "cpu", "ratio": 0.3}}, "ratio: 0.3 is not supported (only 1): states are"),
        ({"offload_optimizer": {"device": "cpu", "buffer_cont": 1}}, "mean zero_optimization.offload_optimizer."),
        ({"cpu_offload": True, "offload_optimizer": {"device": "cpu"}}, "cpu_offload: is the old form of offload_opt"),
        ({"cpu_offload": 1}, "zero_optimization.cpu_offload: 1 must be true or false"),
        ({"stage": 2, "cpu_offload_params": True}, "offload_param: cpu with stage 2"),
        ({"sub_group_size": 0}, "zero_optimization.sub_group_size: 0 must be greater than or equal to 1"),
        ({"sub_group_size": "auto"}, "set the value"),
    ],
)  # fmt: skip
def test_what_is_wrong(values: dict[str, Any], text: str) -> None:
    assert text in problem(zero_optimization={"stage": 3, **values})


def test_the_old_switches() -> None:
    for stage, names, want in (
        (2, ("cpu_offload",), ("cpu", "none", None)),
        (3, ("cpu_offload_param",), ("none", "cpu", None)),
        (3, ("cpu_offload", "cpu_offload_params"), ("cpu", "cpu", None)),
    ):
        t = translate(zero(stage=stage, **dict.fromkeys(names, True)), 4)
        assert places(t.config.zero) == want
        for name in names:
            assert notes(t, f"zero_optimization.{name}")[0].startswith("the old form of")
    off = dict.fromkeys(("cpu_offload", "cpu_offload_param", "cpu_offload_params"), False)
    assert places(translate(zero(**off), 4).config.zero) == ("none", "none", None)


# ---------------------------------------------------------------------------------------------------- what goes with it


def table(rows: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The rows of a group, by the keys' short names."""
    return {
        name.rpartition(".")[2]: row
        for name, row in rows.items()
        if name.rpartition(".")[0] == path
    }


@pytest.mark.parametrize("key", PLACES)
def test_every_key_of_offload_is_named(key: str) -> None:
    path = f"zero_optimization.{key}"
    for name, why in table(keys.NO_EFFECT, path).items():
        for device, want in (("cpu", why), ("nvme", why), ("none", "offload is not enabled")):
            t = translate(zero(**{key: {**NVME, "device": device, name: 1}}), 4)
            assert notes(t, f"{path}.{name}") == [f"no effect: {want}"]
    for name, (works, _) in table(keys.REFUSED, path).items():
        assert "is not supported" in problem(
            zero_optimization={"stage": 3, key: {**NVME, name: 0.5}}
        )
        translate(zero(**{key: {**NVME, name: works[0]}}), 4)
        translate(zero(**{key: {name: 0.5}}), 4)  # nothing is offloaded


@pytest.mark.parametrize("key", ["aio", "activation_checkpointing"])
def test_groups_without_effect_are_named_as_one_key(key: str) -> None:
    for values in ({"block_size": 1}, {"partition_activations": True}, {}):
        t = translate({**zero(offload_param=NVME), key: values}, 4)
        assert notes(t, key) == [f"no effect: {keys.NO_EFFECT[key]}"]


def test_sub_groups_bound_what_is_updated_together() -> None:
    """In elements of one rank's slice; gradients are reduced for all ranks at once."""

    def mib(**more: Any) -> float:
        return translate(zero(**more), 4).config.zero.bucket_mib

    assert mib(reduce_bucket_size=2**20) == 4
    assert mib(reduce_bucket_size=2**20, sub_group_size=1e9) == 4
    assert mib(reduce_bucket_size=2**20, sub_group_size=2**16) == 1
    assert mib(reduce_bucket_size=2**20, sub_group_size=2**16, mics_shard_size=2) == 0.5
    assert mib() == mib(sub_group_size=1e9) == 64
    assert mib(sub_group_size=2**20) == 16
    t = translate(zero(stage=2, sub_group_size=2**16, reduce_bucket_size=2**20), 4)
    assert t.config.zero.bucket_mib == 4
    assert notes(t, "zero_optimization.sub_group_size")[0].startswith("no effect: below stage 3")


# ---------------------------------------------------------------------------------------------------- files in the wild


def named(ds: dict[str, Any], t: Translation, *acted: str) -> None:
    """Every key of the file is one of `acted`, or has a note."""
    noted = {note.partition(": ")[0] for note in t.notes}

    def walk(values: dict[str, Any], path: str) -> None:
        for key, value in values.items():
            name = f"{path}{key}"
            if isinstance(value, dict) and name not in noted:
                walk(value, f"{name}.")
            else:
                assert name in noted or key in acted or path == "optimizer.params.", name

    walk(ds, "")


ACTED = (
    "type", "stage", "device", "nvme_path", "enabled", "train_micro_batch_size_per_gpu", "train_batch_size",
    "gradient_accumulation_steps", "gradient_clipping", "reduce_bucket_size", "sub_group_size", "cpu_offload",
    "stage3_param_persistence_threshold", "loss_scale", "loss_scale_window", "hysteresis", "min_loss_scale",
    "initial_scale_power", "warmup_num_steps", "total_num_steps", "stage3_gather_16bit_weights_on_model_save",
)  # fmt: skip
FP16 = {
    "enabled": True,
    "loss_scale": 1024,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "min_loss_scale": 1,
}


def test_zero_infinity_of_deepspeeds_examples() -> None:
    """DeepSpeedExamples, Megatron-LM-v1.1.5-ZeRO3/examples/ds_zero_stage_infinity_config.json. It has a misspelled key
    that DeepSpeed passes over in silence, so that its threshold never applied; here it is found."""
    ds = {
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1, "steps_per_print": 1,
        "zero_optimization": {
            "stage": 3, "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e8,
            "stage3_param_persitance_threshold": 1e5, "stage3_prefetch_bucket_size": 5e7, "contiguous_gradients": True,
            "overlap_comm": True, "reduce_bucket_size": 90000000, "sub_group_size": 1e8,
            "offload_optimizer": {
                "device": "nvme", "nvme_path": "/nvme_data", "buffer_count": 4, "pipeline_read": False,
                "pipeline_write": False, "pin_memory": True,
            },
            "offload_param": {"device": "nvme", "nvme_path": "/nvme_data", "max_in_cpu": 1, "pin_memory": True},
        },
        "gradient_clipping": 1.0, "fp16": FP16, "wall_clock_breakdown": True, "zero_allow_untested_optimizer": False,
        "aio": {
            "block_size": 1048576, "queue_depth": 16, "single_submit": False, "overlap_events": True, "thread_count": 2,
        },
        "optimizer": {"type": "Adam"},  # the example passes one
    }  # fmt: skip
    threshold = ds["zero_optimization"].pop("stage3_param_persitance_threshold")  # type: ignore[attr-defined]
    t = translate(ds, 16)
    assert places(t.config.zero) == ("nvme", "nvme", "/nvme_data")
    assert t.config.zero.bucket_mib == 90000000 * 4 / 2**20
    named(ds, t, *ACTED)
    ds["zero_optimization"]["stage3_param_persitance_threshold"] = threshold  # type: ignore[index]
    (text,) = problems(ds)
    assert "did you mean zero_optimization.stage3_param_persistence_threshold?" in text


def test_zero_offload_as_it_once_was_written() -> None:
    """DeepSpeedExamples, Megatron-LM/scripts/ds_zero-offload_10B_config.json; again with a key that never was one."""
    ds = {
        "train_batch_size": 30, "gradient_accumulation_steps": 3, "steps_per_print": 1,
        "zero_optimization": {
            "stage": 2, "cpu_offload": True, "contiguous_gradients": True, "reduce_bucket_size": 50000000,
        },
        "optimizer": {"type": "Adam", "params": {"lr": 0.00015}}, "gradient_clipping": 1.0,
        "fp16": {**FP16, "loss_scale": 4096}, "wall_clock_breakdown": False,
        "activation_checkpointing": {
            "partition_activations": True, "contiguous_memory_optimization": True, "cpu_checkpointing": True,
        },
    }  # fmt: skip
    t = translate(ds, 1)
    assert places(t.config.zero) == ("cpu", "none", None)
    assert (t.micro_batch, t.config.zero.stage, t.config.optim.lr) == (10, 2, 0.00015)
    named(ds, t, *ACTED)
    ds["zero_optimization"]["comm_overlap"] = True  # type: ignore[index]
    assert problems(ds, 1) == ["zero_optimization.comm_overlap: no such key"]


def test_zero_3_offload_of_the_tutorial() -> None:
    """deepspeed.ai/tutorials/zero, "Offloading to CPU and NVMe with ZeRO-Infinity"."""
    ds = zero(
        contiguous_gradients=True, stage3_max_live_parameters=1e9, stage3_max_reuse_distance=1e9,
        stage3_prefetch_bucket_size=1e7, stage3_param_persistence_threshold=1e5, reduce_bucket_size=1e7,
        sub_group_size=1e9, offload_optimizer={"device": "cpu"}, offload_param={"device": "cpu"},
    )  # fmt: skip
    t = translate(ds, 4)
    assert places(t.config.zero) == ("cpu", "cpu", None)
    named(ds, t, *ACTED)


def test_nvme_of_hugging_faces_documentation() -> None:
    """huggingface.co/docs/transformers/deepspeed, ZeRO-3 with NVMe, with numbers for what its Trainer would fill in."""
    ds = {
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
        "scheduler": {
            "type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": 10},
        },
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {
                "device": "nvme", "nvme_path": "/local_nvme", "pin_memory": True, "buffer_count": 4, "fast_init": False,
            },
            "offload_param": {
                "device": "nvme", "nvme_path": "/local_nvme", "pin_memory": True, "buffer_count": 5, "buffer_size": 1e8,
                "max_in_cpu": 1e9,
            },
            "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9, "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
            "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "aio": {
            "block_size": 262144, "queue_depth": 32, "thread_count": 1, "single_submit": False, "overlap_events": True,
        },
        "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "steps_per_print": 2000,
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": 2, "wall_clock_breakdown": False,
    }  # fmt: skip
    t = translate(ds, 2, ModelFacts(hidden=1024, dtype="bf16"))
    z = t.config.zero
    assert (*places(z), z.bucket_mib, z.resident) == ("nvme", "nvme", "/local_nvme", 4.0, 10241)
    named(ds, t, *ACTED)
