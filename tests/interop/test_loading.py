"""`threed.load`: an engine of a run, a checkpoint or a Hugging Face folder is the one that was saved, in any topology."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import threed
from tests.configs import Case, batch, config_of, engine_of, share
from tests.harness import run_ranks
from tests.runs import configuration, open_text
from tests.users_models import MODELS as USERS
from threed.checkpoint.files import CheckpointError
from threed.config import ConfigError
from threed.distributed.topology import Topology
from threed.interop.convert import convert
from threed.layers import Slicing
from threed.trainer import Trainer

SAVED = Case(dp=2, zero=1)


def save(folder: Path) -> tuple[float, float]:
    """Saves after two steps; returns the loss of an evaluation, and of the next step."""
    engine = engine_of(config_of(SAVED))
    for step in range(2):
        engine.step(share(batch(step, SAVED.rows), engine.topology))
    engine.save(folder / "step-2")
    evaluated = float(engine.evaluate(share(batch(9, SAVED.rows), engine.topology)))
    loss: float = engine.step(share(batch(2, SAVED.rows), engine.topology)).loss
    return evaluated, loss


def loaded(path: Path, sizes: dict[str, int], changes: dict[str, Any]) -> tuple[int, float, float]:
    engine = threed.load(path, Topology(**sizes) if sizes else None, **changes)
    evaluated = float(engine.evaluate(share(batch(9, SAVED.rows), engine.topology)))
    loss = engine.step(share(batch(2, SAVED.rows), engine.topology)).loss
    return engine.steps, evaluated, loss


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float, float]:
    folder = tmp_path_factory.mktemp("saved")
    evaluated, loss = run_ranks(2, save, folder)[0]
    return folder / "step-2", evaluated, loss


@pytest.mark.parametrize(
    ("world", "sizes", "changes"),
    [
        (1, {}, {}),
        (2, {"tp": 2}, {"zero": {"stage": 3}}),
        (2, {"pp": 2}, {"parallel": {"schedule": "zb-h1"}, "recompute": {"mode": "full"}}),
    ],
)
def test_a_checkpoint_is_loaded_in_any_topology(
    saved: tuple[Path, float, float], world: int, sizes: dict[str, int], changes: dict[str, Any]
) -> None:
    path, evaluated, loss = saved
    for of_rank in run_ranks(world, loaded, path, sizes, changes):
        assert of_rank == (3, pytest.approx(evaluated, rel=1e-9), pytest.approx(loss, rel=1e-9))


def test_a_hugging_face_folder_has_the_weights(
    saved: tuple[Path, float, float], tmp_path: Path
) -> None:
    path, evaluated, _ = saved
    convert(path, tmp_path / "hf", tokenizer="none")
    changes = {"train": {"global_batch": SAVED.rows}, "model": {"seq": config_of(SAVED).model.seq}}
    ((steps, found, _),) = run_ranks(1, loaded, tmp_path / "hf", {}, changes)
    assert steps == 1, "no step was made before"
    assert found == pytest.approx(evaluated, rel=1e-5), "the folder has fp32 weights"


def run_and_load(folder: Path) -> tuple[int, float, float]:
    """A run of four steps, and what its folder gives."""
    data = open_text(folder)
    engine = engine_of(configuration(folder, data, 1, train={"steps": 4}, checkpoint={"every": 2}))
    Trainer(engine, data, ["gpt"]).run()
    again = threed.load(folder / "run")
    rows = data.valid.batch(0, engine.config.train.global_batch)
    return again.steps, float(engine.evaluate(rows)), float(again.evaluate(rows))


def test_a_run_folder_gives_its_newest_checkpoint(tmp_path: Path) -> None:
    ((steps, before, after),) = run_ranks(1, run_and_load, tmp_path)
    assert (steps, after) == (4, pytest.approx(before, rel=1e-12))


def own_model(folder: Path) -> tuple[float, float, str]:
    config = config_of(Case())
    topology = Topology()
    build = USERS["two-ties"]
    model: Any = build(config.model, Slicing(topology.axis("tp"), False, config.train.seed))
    engine = threed.Engine(model, topology, config)
    engine.step(batch(0, 8))
    engine.save(folder / "own")
    again = threed.load(folder / "own", build=build)
    with pytest.raises(CheckpointError) as refused:
        threed.load(folder / "own")
    return (
        float(engine.evaluate(batch(1, 8))),
        float(again.evaluate(batch(1, 8))),
        str(refused.value),
    )


def test_a_custom_model_is_built_by_its_class(tmp_path: Path) -> None:
    ((before, after, refused),) = run_ranks(1, own_model, tmp_path)
    assert after == pytest.approx(before, rel=1e-12)
    assert "another model" in refused


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.linear(x).square().mean()
        return loss


def module_of_a_loop(folder: Path) -> tuple[float, float, int, str]:
    config = threed.Config.model_validate({"train": {"global_batch": 4, "micro_batch": 2}})
    engine = threed.Engine(Mean(), Topology(), config)
    data = {"x": torch.arange(12.0).view(4, 3)}
    engine.step(data)
    engine.save(folder / "loop")
    again = threed.load(folder / "loop", build=Mean)
    with pytest.raises(ConfigError) as refused:
        threed.load(folder / "loop")
    steps = again.steps
    return engine.step(data).loss, again.step(data).loss, steps, str(refused.value)


def test_a_module_of_a_custom_loop_is_built_by_its_class(tmp_path: Path) -> None:
    ((before, after, steps, refused),) = run_ranks(1, module_of_a_loop, tmp_path)
    assert (steps, after) == (1, before)
    assert "its model is a custom nn.Module: pass build=CLASS" in refused


def test_what_is_not_there_and_what_does_not_fit_is_refused(
    saved: tuple[Path, float, float], tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match="no run, checkpoint or Hugging Face folder"):
        threed.load(tmp_path)
    with pytest.raises(ConfigError, match=r"train\.global-batch 3"):
        threed.load(saved[0], train={"global_batch": 3})
