"""Details of DeepSpeed's API that its own unit tests check: tags, dtypes of buffers, refusals, random numbers."""

from __future__ import annotations

import copy
import itertools
import pickle
import types
import unittest
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import threed
from tests.harness import run_ranks
from threed.config import ConfigError
from threed.interop.deepspeed.api.accelerator import get_accelerator
from threed.interop.deepspeed.api.init import Init
from threed.interop.deepspeed.api.marks import ZeroParamStatus, is_zero_param
from threed.interop.deepspeed.api.zero import GatheredParameters
from threed.interop.deepspeed.api.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict
from threed.interop.deepspeed.engine import DeepSpeedEngine
from threed.interop.deepspeed.pipeline_layers import pack, unpack

DS: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
}


class Scaled(nn.Module):
    """Two layers with one weight, and an fp32 buffer whose value bf16 cannot represent."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.last.weight = self.first.weight
        self.register_buffer("scale", torch.tensor(1.0009765625))

    def forward(self, x: Tensor) -> Tensor:
        return (self.last(self.first(x)) * self.scale).square().mean()


def engine_of(**more: Any) -> DeepSpeedEngine:
    return threed.initialize(model=Scaled(), config={**DS, **more})[0]


# --------------------------------------------------------------------------------------------------------- checkpoints


def saved_with_different_tags(folder: str) -> None:
    engine = engine_of()
    with pytest.warns(UserWarning, match=r"different tags: tag0, tag1; rank 0's tag tag0 is used"):
        engine.save_checkpoint(folder, tag=f"tag{engine.global_rank}")
    assert engine.load_checkpoint(folder)[0] == f"{folder}/tag0/manifest.json"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine_of(checkpoint={"tag_validation": "IGNORE"}).save_checkpoint(
            folder, tag=f"other{engine.global_rank}"
        )
    assert sorted(path.name for path in Path(folder).iterdir() if path.is_dir()) == [
        "other0",
        "tag0",
    ]
    with pytest.raises(AssertionError, match="different tags: tag0, tag1: pass the same tag"):
        engine_of(checkpoint={"tag_validation": "Fail"}).save_checkpoint(
            folder, tag=f"tag{engine.global_rank}"
        )


def test_tags_that_differ_between_ranks(tmp_path: Path) -> None:
    run_ranks(2, saved_with_different_tags, str(tmp_path))


def test_an_unknown_tag_validation_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'checkpoint.tag_validation: "foo" is not known: use'):
        engine_of(checkpoint={"tag_validation": "foo"})


def test_an_engine_that_only_evaluates_saves_no_checkpoint(tmp_path: Path) -> None:
    engine = threed.initialize(model=Scaled(), config={"train_batch_size": 1})[0]
    with pytest.raises(NotImplementedError, match="does not offer save_checkpoint of an engine"):
        engine.save_checkpoint(tmp_path)
    trained = engine_of()
    trained.save_checkpoint(tmp_path)
    assert engine.load_checkpoint(tmp_path)[0] == f"{tmp_path}/global_step0/manifest.json"
    for name, value in trained.full_state_dict().items():
        assert torch.equal(engine.full_state_dict()[name], value)


def test_tied_weights_share_a_tensor_in_files(tmp_path: Path) -> None:
    engine_of(zero_optimization={"stage": 3}).save_checkpoint(tmp_path)
    with ThreadPoolExecutor(2) as pool:  # as the ranks of a program that all convert
        for _ in pool.map(
            convert_zero_checkpoint_to_fp32_state_dict, [tmp_path] * 2, [tmp_path / "full"] * 2
        ):
            pass
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["pytorch_model.bin"]
    found = torch.load(tmp_path / "full/pytorch_model.bin")
    assert found["first.weight"] is found["last.weight"]


# -------------------------------------------------------------------------------------------------------------- dtypes


@pytest.mark.parametrize("stage", [0, 3])
def test_buffers_keep_their_dtype(stage: int) -> None:
    """As in DeepSpeed since 0.19. A buffer in bf16 would be rounded to 1."""
    engine = engine_of(bf16={"enabled": True}, zero_optimization={"stage": stage})
    assert engine.module.scale.dtype == torch.float32
    assert engine.get_data_types()[0] == torch.bfloat16
    x = torch.ones(1, 3, dtype=torch.bfloat16)
    plain = Scaled()
    plain.load_state_dict(engine.full_state_dict())
    plain.first.bfloat16()
    assert float(engine(x).detach()) == float(plain(x).detach())
    assert float(engine.full_state_dict()["scale"]) == 1.0009765625
    with pytest.raises(
        ConfigError, match=r"buffer_dtype.*not supported: buffers keep their dtypes"
    ):
        engine_of(data_types={"buffer_dtype": "bf16"})


# ---------------------------------------------------------------------------------------------------------------- init


def test_parameters_of_init_are_recognized(tmp_path: Path) -> None:
    with Init(folder=tmp_path):
        with Init(folder=tmp_path):
            model = Scaled()
        weight: Any = model.first.weight
        assert is_zero_param(weight)
    assert (weight.ds_id, weight.ds_shape, weight.ds_numel) == (0, (3, 3), 9)
    assert is_zero_param(weight)
    assert weight.ds_status is ZeroParamStatus.NOT_AVAILABLE
    with GatheredParameters(weight):
        assert weight.ds_status is ZeroParamStatus.AVAILABLE
    with pytest.raises(
        NotImplementedError, match=r"offer partition of a parameter: use .*Gathered"
    ):
        pickle.loads(pickle.dumps(weight)).partition()
    engine = threed.initialize(model=model, config=DS)[0]
    assert not is_zero_param(weight)
    engine.destroy()
    assert not hasattr(weight, "partition")


# ------------------------------------------------------------------------------------------------------------ training


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_the_module_of_an_engine_can_be_run(stage: int) -> None:
    """Two engines with one loss, as programs with several engines train them."""
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    x = torch.arange(3.0).view(1, 3)
    torch.manual_seed(0)
    engines = [engine_of(zero_optimization=zero) for _ in range(2)]
    torch.manual_seed(0)
    others = [engine_of(zero_optimization=zero) for _ in range(2)]
    for _ in range(2):
        sum(engine.module(x) * (number + 1) for number, engine in enumerate(engines)).backward()
        for engine in engines:
            engine._backward_epilogue()
            engine.step()
            engine.optimizer.zero_grad()
        for number, engine in enumerate(others):
            engine.backward(engine(x) * (number + 1))
            engine.step()
    for engine, other in zip(engines, others, strict=True):
        want = other.full_state_dict()
        for name, value in engine.full_state_dict().items():
            torch.testing.assert_close(value, want[name])
    module = copy.deepcopy(engines[0].module) if stage == 0 else engines[0].module
    for engine in engines:
        engine.destroy()
    module(x).backward()
    assert module.first.weight.grad is not None


def test_losses_are_fp32() -> None:
    """So that a program can compare them with losses of the model."""
    engine = engine_of()
    x = torch.ones(1, 3)
    torch.testing.assert_close(engine.eval_batch(iter([x])), engine.module(x).detach())
    assert engine.train_batch(iter([x])).dtype == torch.float32


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize("stage", [1, 2])
def test_the_flat_buffers_hold_the_parameters(stage: int) -> None:
    with unittest.TestCase().assertLogs("DeepSpeed", "INFO") as logs:
        engine = engine_of(zero_optimization={"stage": stage})
    (flat,) = engine.optimizer.bit16_groups_flat
    assert "Flattening param group 0: " in "\n".join(logs.output)
    assert flat.dtype == torch.float32
    assert flat.grad_fn is None
    storage = flat.untyped_storage().data_ptr()
    parameters = list(engine.module.parameters())
    assert {x.untyped_storage().data_ptr() for x in parameters} == {storage}
    before = flat.clone()
    engine.backward(engine(torch.ones(1, 3)))
    engine.step()
    assert not torch.equal(flat, before)


def test_private_attributes_of_the_optimizer_are_refused() -> None:
    engine = engine_of(zero_optimization={"stage": 3})
    for name in ("loss_scaler", "bit16_groups_flat"):
        with pytest.raises(AttributeError, match=rf"does not offer engine.optimizer.{name}: use"):
            getattr(engine.optimizer, name)
    assert not hasattr(engine.optimizer, "optimizer")
    with pytest.raises(AttributeError, match=r"does not offer engine.sparse_tensor_module_names"):
        _ = engine.sparse_tensor_module_names


# ------------------------------------------------------------------------------------------------------------- devices


def test_random_numbers_of_the_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    device = get_accelerator()
    device.manual_seed(7)
    state = device.get_rng_state()
    first = torch.rand(2)
    assert device.initial_seed() == 7
    device.set_rng_state(state)
    assert torch.equal(torch.rand(2), first)
    monkeypatch.setenv("LOCAL_SIZE", "5")
    assert device.device_count() == 5


def test_numbers_in_micro_batches_of_a_pipeline() -> None:
    batch = pack([(torch.ones(2), 3), (torch.ones(2), (0.5, True))])
    assert unpack({"labels": batch["0/labels"]}, "labels") == torch.tensor(3)
    assert [float(batch[f"1/labels/{index}"]) for index in range(2)] == [0.5, 1.0]


# ---------------------------------------------------------------------------------------------------- unusual modules


class Delegating(nn.Module):
    """A module that looks up the attributes that it does not have in the module that it wraps."""

    def __init__(self, wrapped: nn.Module) -> None:
        super().__init__()
        self.wrapped = wrapped

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("wrapped"), name)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.wrapped(x)
        return found


class Returning(nn.Linear):
    """A module that also returns its bias, as megatron's layers do, in an object."""

    def forward(self, x: Tensor) -> Any:
        return types.SimpleNamespace(out=x @ self.weight.T, bias=self.bias)


class UsesReturned(nn.Module):
    """A module that uses the bias of a module in it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Returning(4, 4), Returning(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        last = self.last(torch.relu(first.out + first.bias))
        found: Tensor = last.out + last.bias + first.bias
        return found


def delegating() -> nn.Module:
    last = Delegating(Delegating(nn.Linear(4, 4)))
    return Delegating(nn.Sequential(nn.Linear(4, 4), last))


def trained_as_plain_modules() -> None:
    rows = torch.linspace(-1, 1, 8, dtype=torch.float64).view(2, 4)
    for build, stage in itertools.product((delegating, UsesReturned), (0, 2, 3)):
        torch.manual_seed(0)
        plain = build().double()
        zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
        engine = threed.initialize(
            model=copy.deepcopy(plain), config={**DS, "zero_optimization": zero}
        )[0]
        adamw = torch.optim.AdamW(plain.parameters(), lr=0.1, weight_decay=0.0)
        for _ in range(3):
            want = plain(rows).square().mean()
            want.backward()
            adamw.step()
            adamw.zero_grad()
            loss = engine(rows[engine.global_rank : engine.global_rank + 1]).square().mean()
            engine.backward(loss)
            engine.step()
            assert engine.metrics is not None
            assert engine.metrics.loss == pytest.approx(float(want.detach()), rel=1e-12)
        engine.destroy()
        for name, param in engine.module.named_parameters():
            # fp64, and the gradients of two ranks are summed in another order
            want = plain.get_parameter(name)
            torch.testing.assert_close(param, want, rtol=1e-9, atol=1e-12, msg=name)


def test_modules_that_delegate_attributes_or_return_parameters() -> None:
    """Equal to plain PyTorch: a module's hooks act on it alone, and parameters may be used anywhere."""
    run_ranks(2, trained_as_plain_modules)
