"""The modules of DeepSpeed's API without gradients: schedules, optimizers, the device, files, helpers."""

from __future__ import annotations

import argparse
import json
import os
import unittest
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import threed
from tests import programs
from tests.harness import run_ranks
from tests.interop.test_deepspeed_schedulers import SCHEDULES, ours
from threed.config import ConfigError
from threed.interop.deepspeed.api import (
    accelerator,
    checkpointing,
    comm,
    config,
    lr_schedules,
    optimizers,
    utils,
    zero_to_fp32,
)
from threed.interop.deepspeed.namespace import modules

ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(threed.__file__).parents[1])}
DS = {"train_batch_size": 2, "zero_optimization": {"stage": 1}}


# ----------------------------------------------------------------------------------------------------------- schedules


@pytest.mark.parametrize(("name", "params"), SCHEDULES)
def test_schedulers_of_an_optimizer(name: str, params: dict[str, Any]) -> None:
    """They give the learning rates that the ds_config's scheduler gives, which are DeepSpeed's."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.5e-3)
    scheduler, rates = getattr(lr_schedules, name)(optimizer, **params), []
    assert name in lr_schedules.VALID_LR_SCHEDULES
    for _ in range(30):
        rates.append(optimizer.param_groups[0]["lr"])
        assert scheduler.get_last_lr() == rates[-1:]
        scheduler.step()
    assert rates == pytest.approx(ours(name, params, 30), rel=1e-12, abs=1e-18)


def test_schedulers_of_groups() -> None:
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (1.0, 2.0)]
    optimizer = torch.optim.SGD(groups)
    scheduler = lr_schedules.WarmupLR(
        optimizer, [0.5, 0.0], warmup_num_steps=4, warmup_type="linear"
    )
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.0]
    scheduler.step(2)
    assert [group["lr"] for group in optimizer.param_groups] == [0.75, 1.0]
    other = lr_schedules.WarmupLR(optimizer, 0.0, [1.0, 2.0], 4, "linear")
    other.load_state_dict(scheduler.state_dict())
    assert (other.get_last_lr(), other.last_batch_iteration) == ([0.5, 1.0], 2)
    with pytest.raises(ValueError, match="warmup_num_steps 0: give a positive integer"):
        lr_schedules.WarmupLR(optimizer, warmup_num_steps=0)
    with pytest.raises(ValueError, match="warmup_type 'cubic': use log or linear"):
        lr_schedules.WarmupCosineLR(optimizer, 10, warmup_type="cubic")
    with pytest.raises(ValueError, match="3 learning rates for 2 parameter groups"):
        lr_schedules.WarmupLR(optimizer, [0.0] * 3)


def test_arguments() -> None:
    parser = utils.add_config_arguments(argparse.ArgumentParser())
    lr_schedules.add_tuning_arguments(parser)
    found = parser.parse_args("--deepspeed --deepspeed_config a.json --cycle_max_lr 0.5".split())
    assert (found.deepspeed, found.deepspeed_config, found.deepscale) == (True, "a.json", False)
    assert (found.cycle_max_lr, found.warmup_type, found.lr_range_test_staircase) == (
        0.5,
        "log",
        False,
    )


# ---------------------------------------------------------------------------------------------------------- optimizers


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((3,), 2.0))


class Tied(nn.Module):
    """A module with a tied weight, and with a buffer that has two names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 3)
        self.last = nn.Linear(3, 3, bias=False)
        self.last.weight = self.first.weight
        self.scales = nn.ModuleList([Scale()] * 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x) * self.scales[1].scale).square().mean()


def step_of(optimizer: Any) -> dict[str, torch.Tensor]:
    """Returns the weights after one step with an optimizer: a section of a ds_config, or a class."""
    model = Tied()
    section = isinstance(optimizer, dict)
    passed = None if section else optimizer(model.parameters())
    ds = DS | {"optimizer": optimizer} if section else DS
    engine, *_ = threed.initialize(model=model, config=ds, optimizer=passed)
    engine.backward(engine(torch.arange(6.0).view(2, 3)))
    engine.step()
    return dict(engine.full_state_dict())


def named_optimizers() -> None:
    values = {"lr": 0.1, "betas": (0.5, 0.6), "weight_decay": 0.2}
    for kind, section in (
        (optimizers.DeepSpeedCPUAdam, {"type": "AdamW", "params": values}),
        (optimizers.FusedAdam, {"type": "AdamW", "params": values}),
        (optimizers.DeepSpeedCPULion, {"type": "Lion", "params": values}),
        (optimizers.FusedLion, {"type": "Lion", "params": values}),
    ):
        got = step_of(lambda params, kind=kind: kind(params, **values))
        want = step_of(section)
        for name, weight in want.items():
            assert torch.equal(got[name], weight), (kind, name)


def test_named_optimizers() -> None:
    run_ranks(1, named_optimizers)
    params = [nn.Parameter(torch.ones(1))]
    section = optimizers.DeepSpeedCPUAdam(params, adamw_mode=False).deepspeed_section()
    assert (section["type"], section["params"]["adam_w_mode"]) == ("Adam", False)
    with pytest.raises(NotImplementedError, match=r"FusedAdam\(amsgrad=True\): use amsgrad=False"):
        optimizers.FusedAdam(params, amsgrad=True)
    with pytest.raises(NotImplementedError, match=r"does not offer DeepSpeedCPULion.step\(\)"):
        optimizers.DeepSpeedCPULion(params).step()
    assert optimizers.COMPATIBLE["cpu_adam"]
    assert not optimizers.COMPATIBLE["sparse_attn"]


# --------------------------------------------------------------------------------------------------------- checkpoints


def saved(folder: str) -> None:
    model = Tied()
    optimizer = {"type": "AdamW", "params": {"lr": 0.1}}
    engine, *_ = threed.initialize(model=model, config=DS | {"optimizer": optimizer})
    engine.backward(engine(torch.arange(6.0).view(2, 3)))
    engine.step()
    engine.save_checkpoint(folder, tag="one")
    want = engine.full_state_dict()
    found = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder)
    assert found.keys() == Tied().state_dict().keys() == want.keys()
    assert all(torch.equal(found[name], value) for name, value in want.items())
    lazy = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder, "one", lazy_mode=True)
    assert torch.equal(lazy["last.weight"], want["first.weight"])
    with pytest.raises(
        RuntimeError, match=r"this Tied belongs to an engine: call engine\.destroy\(\)"
    ):
        zero_to_fp32.load_state_dict_from_zero_checkpoint(model, folder)
    loaded = zero_to_fp32.load_state_dict_from_zero_checkpoint(Tied(), folder)
    assert torch.equal(loaded.last.weight, want["first.weight"])
    check_files(Path(folder), want)


def check_files(folder: Path, want: dict[str, torch.Tensor]) -> None:
    zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(folder, folder / "a")
    got = torch.load(folder / "a/pytorch_model.bin")
    assert all(torch.equal(got[name], value) for name, value in want.items())
    zero_to_fp32.convert_zero_checkpoint_to_state_dict(
        folder, folder / "b", torch.bfloat16, "40B", True
    )
    index = json.loads((folder / "b/model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == want.keys()
    assert {path.name for path in (folder / "b").glob("model-*")} == set(index.values())
    for name, file in index.items():
        assert torch.equal(load_file(folder / "b" / file)[name], want[name].bfloat16())


def test_zero_to_fp32(tmp_path: Path) -> None:
    run_ranks(1, saved, str(tmp_path))
    read = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint
    with pytest.raises(ValueError, match="has no file latest: pass a tag"):
        read(tmp_path / "a")
    with pytest.raises(NotImplementedError, match="does not offer exclude_frozen_parameters"):
        read(tmp_path, exclude_frozen_parameters=True)
    with pytest.raises(ValueError, match="max_shard_size 'big': give a number of bytes"):
        zero_to_fp32.convert_zero_checkpoint_to_state_dict(tmp_path, tmp_path, None, "big")
    words = [".", "out", "--tag", "one", "--safe_serialization", "--max_shard_size", "1GB"]
    # as DeepSpeed's users call its script
    done = programs.run(["zero_to_fp32.py", *words], tmp_path, ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    written = load_file(tmp_path / "out/model.safetensors")
    source = read(tmp_path, "one")
    assert written
    assert all(torch.equal(written[name], source[name]) for name in written)
    with pytest.raises(SystemExit, match=r"zero_to_fp32\.py: .*two"):
        zero_to_fp32.main([str(tmp_path), "out", "--tag", "two"])
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/mp_rank_00_model_states.pt").touch()
    with pytest.raises(NotImplementedError, match="theirs, which DeepSpeed has written: use"):
        read(tmp_path, "theirs")


def test_activation_checkpointing() -> None:
    assert not checkpointing.is_configured()
    with pytest.raises(NotImplementedError, match=r"configure\(partition_activations=True\): use"):
        checkpointing.configure(None, partition_activations=True)
    section = {"activation_checkpointing": {"cpu_checkpointing": True}}
    with pytest.raises(NotImplementedError, match=r"configure\(checkpoint_in_cpu=True\): use"):
        checkpointing.configure(None, deepspeed_config=section)
    x = torch.ones(2, 3, requires_grad=True)
    layer, calls = nn.Linear(3, 3), []

    def run(values: torch.Tensor, *, factor: float) -> torch.Tensor:
        calls.append(1)
        result: torch.Tensor = layer(values).tanh() * factor
        return result

    checkpointing.checkpoint(run, x, factor=2.0).sum().backward()
    got, x.grad = x.grad, None
    assert len(calls) == 2
    run(x, factor=2.0).sum().backward()
    assert torch.equal(got, x.grad)
    checkpointing.model_parallel_cuda_manual_seed(3)
    run_ranks(1, configured)


def configured() -> None:
    checkpointing.configure(None, partition_activations=False, num_checkpoints=3)
    modules()["deepspeed.checkpointing"].reset()
    assert checkpointing.is_configured()


# ------------------------------------------------------------------------------------------------------------- helpers


def test_the_device() -> None:
    device = accelerator.get_accelerator()
    assert device is accelerator.get_accelerator()
    if torch.cuda.is_available():
        assert device.current_device_name() == f"cuda:{device.current_device()}"
        return
    assert (device.device_name(), device.device_name(1), device.device_count()) == ("cpu", "cpu", 1)
    assert (device.current_device_name(), device.communication_backend_name()) == ("cpu", "gloo")
    assert device.memory_allocated() == 0
    device.empty_cache()
    device.synchronize()
    with device.device(0):
        assert device.on_accelerator(torch.zeros(1))
    assert torch.float32 in device.supported_dtypes()
    with pytest.raises(AttributeError, match=r"does not offer get_accelerator\(\).op_builder_dir"):
        _ = device.op_builder_dir


def test_the_configuration() -> None:
    found = config.DeepSpeedConfig(
        DS | {"gradient_accumulation_steps": 2, "gradient_clipping": 0.5}
    )
    assert (found.train_batch_size, found.train_micro_batch_size_per_gpu) == (2, 1)
    assert (found.zero_optimization_stage, found.zero_enabled, found.gradient_clipping) == (
        1,
        True,
        0.5,
    )
    with pytest.raises(config.DeepSpeedConfigError, match=r"zero_optimization\.stage"):
        config.DeepSpeedConfig(DS | {"zero_optimization": {"stage": 7}})
    assert config.DeepSpeedConfigError is ConfigError
    assert config.ZeroStageEnum(3) is config.ZeroStageEnum.max_stage
    assert json.dumps(config.OffloadDeviceEnum.cpu) == '"cpu"'


def test_leaf_modules() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    assert utils.get_z3_leaf_modules(model) == []
    assert utils.set_z3_leaf_modules(model, [nn.Linear]) == [model[0]]
    assert utils.get_z3_leaf_modules(model) == [model[0]]
    assert utils.z3_leaf_module(model[0]) is model[0]._z3_leaf is True
    assert utils.z3_leaf_module(model[1]) is False
    assert utils.unset_z3_leaf_modules(model, [nn.Linear]) == [model[0]]
    assert utils.get_z3_leaf_modules(model) == []
    assert utils.set_z3_leaf_modules(model, ["ReLU", "torch.nn.modules.linear.Linear"]) == [*model]
    assert utils.set_z3_leaf_modules_by_name(model, ["1", "7"], True, False) == ([model[1]], ["7"])
    assert utils.get_z3_leaf_modules(model) == [*model]
    assert utils.set_z3_leaf_modules_by_suffix(model, ["0"], flag=False) == ([model[0]], [])
    assert utils.get_z3_leaf_modules(model) == [model[1]]
    for find, names in (
        (utils.set_z3_leaf_modules, ["GELU"]),
        (utils.set_z3_leaf_modules_by_name, ["7"]),
        (utils.set_z3_leaf_modules_by_suffix, ["7"]),
    ):
        with pytest.raises(ValueError, match=r"no modules? .* in a Sequential"):
            find(model, names)


def test_small_functions() -> None:
    loader = utils.RepeatingLoader([1, 2])
    assert [next(loader) for _ in range(5)] == [1, 2, 1, 2, 1]
    assert len(loader) == 2
    with utils.OnDevice(torch.bfloat16, "meta"):
        layer = nn.Linear(2, 2)
    assert (layer.weight.is_meta, layer.weight.dtype) == (True, torch.bfloat16)
    assert torch.zeros(1).dtype == torch.float32
    row = torch.arange(100.0).view(10, 10)[3]
    copied = utils.clone_tensors_for_torch_save({"a": [row, 1], "b": (row,)})
    assert copied["a"][0].untyped_storage().nbytes() == 40
    assert torch.equal(copied["b"][0], row)
    assert utils.move_to_device([row, {"x": row}], "meta")[1]["x"].is_meta
    with unittest.TestCase().assertLogs("DeepSpeed", "INFO") as logs:
        utils.log_dist("here", [0])
        utils.log_dist("not here", [5])
        utils.see_memory_usage("silent")
        utils.see_memory_usage("memory", force=True)
    assert [one.getMessage() for one in logs.records] == ["[Rank 0] here", "[Rank 0] memory"]
    assert utils.required_torch_version(2.0)
    assert not utils.required_torch_version("99.1")
    assert not utils.required_torch_version(max_version=1.13)
    assert utils.split_params_into_different_moe_groups_for_optimizer({"params": []}) == [
        {"params": []}
    ]


def alone() -> None:
    with pytest.raises(RuntimeError, match="there is no process group"):
        comm.init_distributed(dist_init_required=False)
    assert not comm.is_initialized()
    comm.init_distributed()
    comm.init_distributed(dist_init_required=True)
    assert comm.is_initialized()
    values = torch.ones(1)
    torch.distributed.all_reduce(values)
    torch.distributed.barrier()
    assert (comm.get_rank(), comm.get_world_size(), float(values)) == (0, 1, 1.0)
    assert step_of({"type": "AdamW"})
    torch.distributed.destroy_process_group()


def test_a_process_group_of_one_rank() -> None:
    run_ranks(1, alone)


def initialized_alone() -> None:
    assert not comm.is_initialized()
    assert step_of({"type": "AdamW"})
    assert (torch.distributed.get_rank(), torch.distributed.get_world_size()) == (0, 1)
    values = [torch.zeros(2)]
    torch.distributed.all_gather(values, torch.ones(2))  # as the Trainer does at its end
    assert values[0].tolist() == [1.0, 1.0]
    torch.distributed.destroy_process_group()


def test_initialize_creates_a_process_group_of_one_rank() -> None:
    run_ranks(1, initialized_alone)
