"""`threed.checkpoint.weights` and tied weights of modules: every name, in one process, from any checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import threed
from tests.configs import Case, config_of, engine_of, topology_of
from tests.harness import run_ranks
from threed import checkpoint


class Tied(nn.Module):
    """Input and output share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 6, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.last(self.middle(self.first(x)).tanh()).square().mean()
        return loss


def engine_at(stage: int) -> Any:
    torch.manual_seed(0)
    config = threed.Config.model_validate({
        "zero": {"stage": stage, "resident": 0}, "train": {"global_batch": 4, "micro_batch": 2},
        "optim": {"warmup": 0},
    })  # fmt: skip
    return threed.Engine(Tied(), topology_of(1, 1), config)


def save(path: Path) -> Any:
    engine = engine_at(3)
    engine.step({"x": torch.randn(2, 6, generator=torch.Generator().manual_seed(1))})
    engine.save(path)
    return engine.full_state_dict()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    path = tmp_path_factory.mktemp("weights") / "checkpoints" / "step-1"
    return path, run_ranks(2, save, path)[0]


def test_a_tied_weight_has_all_its_names(saved: tuple[Path, dict[str, Tensor]]) -> None:
    path, full = saved
    found = checkpoint.weights(path)
    assert set(found) == set(full) == set(Tied().state_dict())
    assert all(torch.equal(found[name], value) for name, value in full.items())
    module = Tied()
    module.load_state_dict(dict(found))
    assert torch.equal(module.last.weight, full["first.weight"])
    assert "nothing" not in found
    assert dict(checkpoint.weights(path.parents[1])).keys() == found.keys()  # the run's newest


def load(weights: dict[str, Tensor]) -> Any:
    engine = engine_at(3)
    engine.load_full_state_dict(weights)
    return engine.full_state_dict()


def test_a_tied_weight_is_loaded_by_any_of_its_names(
    saved: tuple[Path, dict[str, Tensor]],
) -> None:
    full = saved[1]
    for left_out in ("first.weight", "last.weight", ""):
        given = {name: value for name, value in full.items() if name != left_out}
        got = run_ranks(1, load, given)[0]
        assert all(torch.equal(got[name], value) for name, value in full.items())
    different = {**full, "last.weight": full["first.weight"] + 1}
    with pytest.raises(Exception, match=r"last\.weight and first\.weight are tied, but have diff"):
        run_ranks(1, load, different)


def test_a_damaged_checkpoint_is_refused(
    saved: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    path = tmp_path / "step-1"
    path.mkdir()
    for file in saved[0].iterdir():
        data = bytearray(file.read_bytes())
        if file.name == "rank-00001.safetensors":
            data[-1] ^= 1
        (path / file.name).write_bytes(data)
    with pytest.raises(checkpoint.CheckpointError, match=r"rank-00001\.safetensors"):
        checkpoint.weights(path)
    assert len(checkpoint.weights(path, check=False)) == len(saved[1])
    with pytest.raises(checkpoint.CheckpointError, match="there is no run, checkpoint or"):
        checkpoint.weights(tmp_path / "nothing")


def save_layered(path: Path) -> Any:
    engine = engine_of(config_of(Case(model="llama", dtype="fp32", pp=2)))
    engine.save(path)
    return engine.full_state_dict()


def test_exports_have_the_same_names_and_values(tmp_path: Path) -> None:
    full = run_ranks(2, save_layered, tmp_path / "step-0")[0]
    checkpoint.convert(tmp_path / "step-0", tmp_path / "hf", tokenizer="none")
    for folder in ("step-0", "hf"):
        found = checkpoint.weights(tmp_path / folder)
        assert set(found) == set(full)
        assert all(torch.equal(found[name], value) for name, value in full.items())
