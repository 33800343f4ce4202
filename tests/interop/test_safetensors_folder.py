"""Exports of any model under its own names: shards, scalars, buffers, dtypes; and reading them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import threed
from tests.harness import run_ranks
from threed.checkpoint.files import CheckpointError
from threed.config import Config, ConfigError
from threed.interop import pretrained
from threed.interop.convert import convert
from threed.interop.safetensors_folder import (
    SafetensorsFolder,
    export_safetensors,
    is_safetensors_folder,
)


class Scaled(nn.Module):
    """A module with a scalar parameter, an integer buffer, and a buffer that is not saved."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.linear, self.scale = nn.Linear(width, width), nn.Parameter(torch.tensor(2.0))
        self.register_buffer("calls", torch.tensor([5, 7]))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("table", torch.ones(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.scale * self.linear(x)).square().mean()


def save(folder: Path) -> dict[str, Tensor]:
    config = Config.model_validate({"train": {"global_batch": 4, "micro_batch": 2}})
    engine = threed.Engine(Scaled(), threed.Topology(), config)
    engine.step({"x": torch.ones(4, 6)})
    engine.save(folder / "step-1")
    return engine.full_state_dict()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    folder = tmp_path_factory.mktemp("saved")
    (weights,) = run_ranks(1, save, folder)
    return folder / "step-1", weights


def test_an_export_loads_into_the_module(
    saved: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    checkpoint, weights = saved
    out = convert(checkpoint, tmp_path / "out")  # a module in a loop of one's own
    found = load_file(out / "model.safetensors")
    assert (
        found.keys() == weights.keys() == {"linear.weight", "linear.bias", "scale", "calls", "mask"}
    )
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    assert found["calls"].dtype == torch.int64
    assert Scaled().load_state_dict(found)
    half = convert(checkpoint, tmp_path / "half", to="safetensors", dtype="bf16")
    dtypes = {name: tensor.dtype for name, tensor in SafetensorsFolder(half).items()}
    buffers = {"calls": torch.int64, "mask": torch.bool}
    assert dtypes == {**dict.fromkeys(weights, torch.bfloat16), **buffers}


def test_a_large_export_has_shards_and_an_index(
    saved: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    checkpoint, weights = saved
    out = export_safetensors(checkpoint, tmp_path / "out", shard_bytes=100)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": sum(tensor.nbytes for tensor in weights.values())}
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(files) > 1
    assert sorted(set(index["weight_map"].values())) == files
    assert is_safetensors_folder(out)
    folder = SafetensorsFolder(out)
    assert folder.keys() == weights.keys()
    assert all(torch.equal(folder[name], weights[name]) for name in weights)


def test_what_cannot_be_exported_or_read_is_refused(
    saved: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    checkpoint, _ = saved
    with pytest.raises(CheckpointError, match="dtype int3 is not one of"):
        convert(checkpoint, tmp_path / "out", to="safetensors", dtype="int3")
    assert not (tmp_path / "out").exists()
    out = export_safetensors(checkpoint, tmp_path / "out")
    with pytest.raises(
        CheckpointError, match=r"threed.load\(PATH, build=MODEL\) loads its weights"
    ):
        convert(out, tmp_path / "back")
    with pytest.raises(ConfigError, match="from which no run starts: resume from the checkpoints"):
        pretrained.find(Config.model_validate({"checkpoint": {"resume": str(out)}}))
    (out / "model.safetensors").write_bytes(b"no header")
    with pytest.raises(CheckpointError, match="cannot be read"):
        SafetensorsFolder(out)
    (out / "model.safetensors").unlink()
    (out / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="cannot be read"):
        SafetensorsFolder(out)
