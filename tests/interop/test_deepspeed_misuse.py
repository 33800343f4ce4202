"""Errors of a program with an engine of DeepSpeed's API: all ranks fail together and can go on."""

from __future__ import annotations

import copy
import io
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

import threed
from tests.harness import run_ranks
from threed.checkpoint.files import CheckpointError
from threed.config import ConfigError
from threed.distributed import collectives
from threed.interop.deepspeed import initialization, training
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
    # safetensors cannot write this dtype, which only rank 0 notices: nothing is published
    state = {"values": torch.ones(2).to(torch.complex32)}
    with pytest.raises(CheckpointError, match=f"could not finish {folder / 'c'}"):
        engine.save_checkpoint(folder, "c", state)
    assert not list(folder.glob("c*"))
    (folder / "b" / "latest").mkdir(parents=True, exist_ok=True)
    fails(lambda: engine.save_checkpoint(folder / "b", "a"), OSError, rank == 0)
    (folder / "b" / "pytorch_model.bin").mkdir(exist_ok=True)
    unsharded = made(0)
    fails(lambda: unsharded.save_16bit_model(folder / "b"), OSError, rank == 0)
    engine.save_checkpoint(folder, "a")
    with pytest.raises(CheckpointError, match=r"different checkpoints of .*: a, b: pass the same"):
        engine.load_checkpoint(folder, "ab"[rank])
    with pytest.raises(CheckpointError, match=r"different checkpoints of .*: None, a: pass"):
        engine.load_checkpoint(folder if rank else folder / "none")
    place = folder if rank else folder / "none"
    fails(
        lambda: engine.load_checkpoint(place, "a", load_module_only=True), CheckpointError, not rank
    )
    assert engine.load_checkpoint(folder) == (f"{folder}/a/manifest.json", {})
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


# ------------------------------------------------------------------------------------------- a second call of initialize


def trained(engine: DeepSpeedEngine) -> list[float]:
    """Returns the losses of two steps."""
    losses, rows = [], torch.ones(2, 3)
    for _ in range(2):
        if isinstance(engine.module, PipelineModule):
            loss = engine.train_batch(iter([(rows, torch.ones(2, 2))]))
        else:
            loss = nn.functional.mse_loss(engine(rows), torch.ones(2, 2))
            engine.backward(loss)
            engine.step()
        losses.append(float(loss.detach()))
    return losses


def plain_module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def staged_module() -> nn.Module:
    torch.manual_seed(0)
    return PipelineModule([nn.Linear(3, 2)], num_stages=1, loss_fn=nn.functional.mse_loss)


STAGES = [(plain_module, 0), (plain_module, 3), (staged_module, 0), (staged_module, 1)]


@pytest.mark.parametrize(("build", "stage"), STAGES)
def test_a_destroyed_engine_stands_for_its_module(
    build: Callable[[], nn.Module], stage: int
) -> None:
    first = made(stage, build())
    before = trained(first)
    with pytest.raises(ConfigError, match=r"model: it is an engine: pass engine\.module"):
        made(stage, first)
    first.destroy()
    second = made(stage, first)
    assert second.module is first.module
    assert trained(second)[0] < before[1] < before[0]  # continues with the trained weights


@pytest.mark.parametrize(("build", "stage"), STAGES)
@pytest.mark.parametrize("passes", [False, True])
@pytest.mark.parametrize("fails_in", ["EngineOptimizer", "mark_parameters", "_set_scheduler"])
def test_initialize_can_be_called_again_after_an_error(
    monkeypatch: pytest.MonkeyPatch, build: Callable[[], nn.Module], stage: int, passes: bool,
    fails_in: str,
) -> None:  # fmt: skip
    """An error after the parameters belong to the engine, also with a passed optimizer."""

    def start() -> DeepSpeedEngine:
        given = {"optimizer": optimizer} if passes else {}
        zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
        config = {"train_batch_size": 2, "zero_optimization": zero}
        config |= {} if passes else {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
        return threed.initialize(model=module, config=config, **given)[0]

    def fail(*_: Any) -> None:
        raise MemoryError

    losses = []
    for fails in (False, True):
        module = build()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        if fails:
            with monkeypatch.context() as patched:
                owner = initialization if fails_in == "_set_scheduler" else training
                patched.setattr(owner, fails_in, fail)
                with pytest.raises(MemoryError):
                    start()
        losses.append(trained(start()))
    assert losses[0] == losses[1]


class Stream(IterableDataset[Tensor]):
    """A dataset that is not split over data ranks, so that `initialize` refuses it."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(())


def refused_data() -> None:
    for build in (plain_module, staged_module):
        module = build()
        config = {"train_batch_size": 4, "optimizer": {"type": "SGD"}}
        with pytest.raises(ConfigError, match="training_data: a Stream is iterable, without"):
            threed.initialize(model=module, config=config, training_data=Stream())
        first, second = trained(threed.initialize(model=module, config=config)[0])
        assert second < first


def test_initialize_can_be_called_again_after_refused_data() -> None:
    run_ranks(2, refused_data)


class Searching:
    """A `Trainer` of transformers, as far as it matters, in a trial of a search."""

    hp_search_backend: str | None = "optuna"
    callback_handler: Any = None

    def train(self) -> DeepSpeedEngine:
        return made(0)


def search() -> None:
    with pytest.MonkeyPatch.context() as patched:
        module = types.SimpleNamespace(Trainer=Searching)
        patched.setitem(sys.modules, "transformers.trainer", module)
        trainer = Searching()
        with pytest.raises(
            NotImplementedError, match=r"not offer Trainer\.hyperparameter_search on"
        ):
            trainer.train()
        trainer.hp_search_backend = None
        assert trained(trainer.train())


def test_a_search_on_several_ranks_is_refused() -> None:
    """Because only rank 0 would destroy the engine of a trial."""
    run_ranks(2, search)


@pytest.mark.parametrize("passed", [True, False])
def test_an_optimizer_that_the_trainer_replaces_is_reported(passed: bool) -> None:
    """transformers sets `Trainer.optimizer` to None; the callback handler keeps the passed one."""
    trainer, module = Searching(), types.SimpleNamespace(Trainer=Searching)
    trainer.hp_search_backend = None
    given = torch.optim.RMSprop([torch.zeros(1, requires_grad=True)]) if passed else None
    trainer.callback_handler = types.SimpleNamespace(optimizer=given, lr_scheduler=None)
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, "transformers.trainer", module)
        notes = trainer.train().notes
    found = [
        note for note in notes if note.startswith("Trainer(optimizers=...): no effect (RMSprop)")
    ]
    assert len(found) == passed
