"""Errors of a program with an engine of DeepSpeed's API: all ranks fail together and can go on."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import threed
from tests.harness import run_ranks
from threed.checkpoint.files import CheckpointError
from threed.config import ConfigError
from threed.distributed import collectives
from threed.interop.deepspeed.api.zero import GatheredParameters, safe_get_full_fp32_param
from threed.interop.deepspeed.engine import DeepSpeedEngine
from threed.interop.deepspeed.pipeline_module import PipelineModule


def made(stage: int, model: nn.Module | None = None) -> DeepSpeedEngine:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    return threed.initialize(model=model or nn.Linear(3, 2), config=config)[0]


def fill(param: nn.Parameter, rank: int, failing: list[int]) -> None:
    """Rank 0 sets a parameter to 7; then the ranks in `failing` raise an error in the block."""
    with GatheredParameters(param, modifier_rank=0):
        if rank == 0:
            param.data.fill_(7.0)
        if rank in failing:
            raise KeyError(rank)


def fails(call: Callable[[], Any], own: type[Exception], on: bool) -> None:
    """Checks that `call` raises `own` on the ranks where the cause is, and RuntimeError elsewhere."""
    with pytest.raises(own if on else RuntimeError):
        call()


def on_two_ranks(folder: Path) -> None:
    for stage, failing in ((0, [1]), (2, [0]), (3, [0, 1])):
        engine = made(stage)
        weight, rank = engine.module.weight, engine.global_rank
        fails(lambda: fill(weight, rank, failing), KeyError, rank in failing)  # noqa: B023
        master = safe_get_full_fp32_param(weight)
        with GatheredParameters(weight):
            everyone = collectives.exchange(weight.tolist(), engine.topology.axis("world"))
        assert everyone[0] == everyone[1] == [[7.0] * 3] * 2, stage
        assert master is not None
        assert master.tolist() == everyone[0], stage
    plain = nn.Linear(3, 2)
    fails(lambda: fill(plain.weight, rank, [1]), KeyError, rank == 1)
    assert plain.weight.tolist() == everyone[0]

    bad: dict[str, Any] = {"seen": {1, 2}}
    for wrong in (0, 1):
        state = bad if rank == wrong else {}
        fails(lambda: engine.save_checkpoint(folder, "a", state), TypeError, rank == wrong)  # noqa: B023
    engine.save_checkpoint(folder, "a")
    with pytest.raises(CheckpointError, match=r"different checkpoints of .*: a, b: pass the same"):
        engine.load_checkpoint(folder, "ab"[rank])
    with pytest.raises(CheckpointError, match=r"different checkpoints of .*: None, a: pass"):
        engine.load_checkpoint(folder if rank else folder / "none")
    place = folder if rank else folder / "none"
    fails(
        lambda: engine.load_checkpoint(place, "a", load_module_only=True), CheckpointError, not rank
    )
    assert engine.load_checkpoint(folder) == (str(folder / "a"), {})
    engine.backward(engine(torch.ones(2, 3)).sum())
    engine.step()
    assert engine.global_steps == 1


@pytest.mark.filterwarnings("ignore:.*has no file latest")
def test_errors_on_some_ranks(tmp_path: Path) -> None:
    run_ranks(2, on_two_ranks, tmp_path)


def test_a_checkpoint_of_another_model(tmp_path: Path) -> None:
    made(0).save_checkpoint(tmp_path, "a")
    engine = made(0, nn.Sequential(nn.Linear(3, 2)))
    with pytest.raises(CheckpointError) as found:
        engine.load_checkpoint(tmp_path, "a", load_module_strict=False)
    assert "load_module_only=True" in found.value.__notes__[0]


def test_values_of_groups_can_be_set_back() -> None:
    engine = made(0)
    assert engine.optimizer is not None
    engine.optimizer.param_groups[0]["weight_decay"] = 0.5
    with pytest.raises(RuntimeError, match="another weight_decay than at the start: only lr may"):
        engine(torch.ones(2, 3))
    engine.optimizer.param_groups[0].update(weight_decay=0.0, lr=0.5)
    engine.backward(engine(torch.ones(2, 3)).sum())
    engine.step()
    assert engine.get_lr() == [0.5]


def test_a_destroyed_pipeline_engine() -> None:
    model = PipelineModule([nn.Linear(3, 2)], num_stages=1, loss_fn=nn.functional.mse_loss)
    config = {"train_batch_size": 2, "optimizer": {"type": "SGD"}}
    with pytest.raises(ConfigError, match="topology: pass num_stages or topology to Pipeline"):
        threed.initialize(model=model, config=config, topology=threed.Topology())
    engine = threed.initialize(model=model, config=config)[0]
    engine.destroy()
    rows = iter([(torch.ones(2, 3), torch.ones(2, 2))])
    for call in (engine.train_batch, engine.eval_batch):
        with pytest.raises(RuntimeError, match=r"was destroyed: call deepspeed.initialize again"):
            call(rows)


def test_states_of_numpy(tmp_path: Path) -> None:
    state = {"generator": np.random.RandomState(3).get_state(), "best": np.bool_(True), "x": np.float32(0.5)}  # fmt: skip
    engine = made(0)
    engine.save_checkpoint(tmp_path, client_state=state)
    got = engine.load_checkpoint(tmp_path)[1]
    assert (got["best"], got["x"]) == (True, 0.5)
    restored, want = np.random.RandomState(), np.random.RandomState(3)
    restored.set_state(got["generator"])
    assert restored.randint(100, size=9).tolist() == want.randint(100, size=9).tolist()
    for value in (np.array(["a"]), np.array([{}]), np.complex64(1)):
        with pytest.raises(TypeError, match="cannot be saved: use numbers, strings, tensors"):
            engine.save_checkpoint(tmp_path, client_state={"x": value})


@pytest.mark.parametrize("stage", [0, 3])
def test_a_copy_of_an_engines_module_gets_another_engine(stage: int) -> None:
    engine = made(stage)
    file = io.BytesIO()
    with GatheredParameters(engine.module.parameters()):
        torch.save(engine.module, file)
        copied = copy.deepcopy(engine.module)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    rows, losses = torch.ones(2, 3), list[list[float]]()
    for one in (engine, made(stage, copied), made(stage, loaded)):
        losses.append([])
        for _ in range(2):
            loss = one(rows).pow(2).sum()
            one.backward(loss)
            one.step()
            losses[-1].append(float(loss.detach()))
    assert losses[0] == losses[1] == losses[2]
    assert losses[0][1] < losses[0][0]
    with pytest.raises(ValueError, match="belongs to an engine already"):
        threed.ModuleEngine(copied, threed.Topology(), engine.engine.config)
