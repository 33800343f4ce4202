"""`threed convert`: formats told apart by their files, and every wrong path refused with the fix."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tests.checkpoint.test_checkpoint_native import sealed
from tests.configs import engine_of
from tests.harness import run_ranks
from tests.interop.test_interop_hf import config_of, load_strictly
from threed.checkpoint.files import CheckpointError
from threed.cli import commands
from threed.data.tokenizer import ByteTokenizer, load_tokenizer
from threed.interop.convert import convert


def save(path: Path) -> None:
    """A checkpoint of a small Qwen3."""
    engine_of(config_of("qwen3", 1)).save(path)


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A native checkpoint."""
    path = tmp_path_factory.mktemp("saved") / "step-0"
    run_ranks(1, save, path)
    return path


def test_convert_exports_with_the_tokenizer_of_the_run(step: Path, tmp_path: Path) -> None:
    out = convert(step, tmp_path / "deep" / "out", dtype="bf16")
    assert out == tmp_path / "deep" / "out"
    assert (out / "tokenizer.json").is_file()
    assert load_strictly(out).dtype == torch.bfloat16
    without = convert(str(step), str(tmp_path / "without"), tokenizer="none")
    assert not (without / "tokenizer.json").exists()


def test_convert_copies_no_tokenizer_but_that_of_the_run(step: Path, tmp_path: Path) -> None:
    """A checkpoint may name any path of this machine: only files whose contents it was saved with are copied."""
    theirs, named = tmp_path / "tokenizer.json", tmp_path / "step"
    ByteTokenizer().save_hf(tmp_path)
    shutil.copytree(step, named)
    sealed(named, lambda body: body["config"]["data"].update(tokenizer=str(theirs)))
    for hashes in (None, {}, {"tokenizer.json": "0" * 64}, load_tokenizer(str(theirs)).files):
        sealed(named, lambda body, hashes=hashes: body["state"]["extra"].update(tokenizer=hashes))
        if hashes is None or len(hashes) < 3:
            with pytest.raises(
                CheckpointError,
                match=r"tokenizer it was trained with, .*give --tokenizer bytes, a path",
            ):
                convert(named, tmp_path / "out")
    assert (convert(named, tmp_path / "out") / "tokenizer.json").read_bytes() == theirs.read_bytes()
    (tmp_path / "tokenizer_config.json").write_text('{"a secret": 1}')
    with pytest.raises(CheckpointError, match="has other files now"):
        convert(named, tmp_path / "again")
    assert (
        convert(named, tmp_path / "again", tokenizer=str(theirs)) / "tokenizer_config.json"
    ).is_file()


def test_convert_refuses_with_the_fix(step: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(step, run / "checkpoints" / "step-2")
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for src, dst, options, problem in [
        (step, "back", {"to": "native"}, "is a native checkpoint already"),
        (step, "x", {"to": "safetensors", "tokenizer": "none"}, "leave it out"),
        (run / "checkpoints", "x", {}, "did you mean .*checkpoints/step-2"),
        (tmp_path / "empty", "x", {}, "neither manifest.json nor config.json"),
        (tmp_path / "nowhere", "x", {}, "nowhere does not exist"),
        (
            step / "manifest.json",
            "x",
            {},
            rf"is a file: a checkpoint is a folder, did you mean {step}\?",
        ),
        (tmp_path / "full" / "file", "x", {}, "is a file: a checkpoint is a folder, give that"),
        (step, "full", {}, "full exists already: give DST"),
        (step, "full/file", {}, "exists already"),
        (step, "x", {"dtype": "int3"}, "dtype int3 is not one of fp32, bf16"),
        (step, "x", {"tokenizer": "missing.json"}, "--tokenizer bytes"),
    ]:
        with pytest.raises(CheckpointError, match=problem):
            convert(src, tmp_path / dst, **options)
    assert not (tmp_path / "x").exists()
    assert (
        convert(run, tmp_path / "empty") / "config.json"
    ).is_file()  # the run's newest checkpoint


def test_all_that_take_a_checkpoint_say_which_one_was_meant(
    step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "run" / "checkpoints"
    for name in ("step-10", "step-4", "step-12.tmp"):
        shutil.copytree(step, place / name)
    for path, meant in (
        (place.parent, "step-10"),
        (place, "step-10"),
        (place / "step-4" / "manifest.json", "step-4"),
    ):
        hint = f"did you mean {place / meant}?"
        assert commands.main(["inspect", str(path)]) == 2
        assert capsys.readouterr().err.rstrip().endswith(hint)
        resume = ["--checkpoint.resume", str(path), "--preset", "tiny", "--world-size", "1"]
        assert commands.main(["plan", *resume]) == 2
        assert capsys.readouterr().err.rstrip().endswith(hint)
    assert commands.main(["inspect", str(tmp_path)]) == 2
    assert capsys.readouterr().err.rstrip().endswith("is not a checkpoint: it has no manifest.json")
