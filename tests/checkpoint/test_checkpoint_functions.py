"""`threed.checkpoint`: save, load, inspect and convert, as a program calls them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import threed
from tests.configs import Case, batch, config_of, engine_of, share
from tests.harness import run_ranks
from threed import checkpoint
from threed.cli.commands import main

CASE = Case()


def save_and_load(folder: Path) -> tuple[dict[str, object], float, float]:
    engine = engine_of(config_of(CASE))
    engine.step(share(batch(0, CASE.rows), engine.topology))
    path = checkpoint.save(engine, folder / "step-1", {"note": "first"})
    again = checkpoint.load(path, threed.Topology())
    losses = [float(e.evaluate(share(batch(9, CASE.rows), e.topology))) for e in (engine, again)]
    return again.load(path), losses[0], losses[1]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    ((extra, before, after),) = run_ranks(1, save_and_load, folder)
    assert extra == {"note": "first"}
    assert after == pytest.approx(before, rel=1e-12), "in fp64"
    return folder / "step-1"


def test_inspect_returns_the_contents(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    info = checkpoint.inspect(saved)
    model = config_of(CASE).model
    assert (info.arch, info.steps, info.consumed) == (model.arch, 1, CASE.rows)
    assert info.weights["embedding.word.weight"] == (model.vocab, model.hidden)
    assert info.parameters == sum(torch.Size(shape).numel() for shape in info.weights.values())
    assert info.files == 1
    assert info.nbytes is not None
    assert info.nbytes > 3 * 8 * info.parameters, "weights and two moments in fp64"
    assert main(["inspect", str(saved)]) == 0
    assert capsys.readouterr().out == f"{info}\n"


def test_convert_writes_a_folder_that_inspect_reads(saved: Path, tmp_path: Path) -> None:
    folder = checkpoint.convert(saved, tmp_path / "hf", dtype="bf16", tokenizer="none")
    info = checkpoint.inspect(str(folder))
    assert info.dtypes == ("bfloat16",)
    assert (info.files, info.nbytes, info.steps, info.topology) == (None, None, None, None)
    assert info.parameters == checkpoint.inspect(saved).parameters
    assert "a Hugging Face folder" in str(info)


def test_a_damaged_checkpoint_is_refused(saved: Path, tmp_path: Path) -> None:
    copy = tmp_path / "step-1"
    copy.mkdir()
    for file in saved.iterdir():
        data = bytearray(file.read_bytes())
        if file.suffix == ".safetensors":
            data[-1] ^= 1
        (copy / file.name).write_bytes(data)
    with pytest.raises(checkpoint.CheckpointError, match="rank-00000"):
        checkpoint.inspect(copy)
    with pytest.raises(checkpoint.CheckpointError, match="nowhere"):
        checkpoint.inspect(tmp_path / "nowhere")
