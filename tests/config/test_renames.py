"""Renamed and removed keys: old spellings work with a warning, or are refused with the replacement."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.configs import Case, config_of, engine_of
from tests.harness import run_ranks
from threed.checkpoint.manifest import MANIFEST, read_manifest
from threed.checkpoint.sections import digest
from threed.config.arguments import GROUPS, Options, load, to_toml
from threed.config.groups import Config, ConfigError, RunConfig, key_name
from threed.config.program import program_config
from threed.config.renames import REMOVED, RENAMES, Rename, Renames

SOME = Renames(
    (
        Rename("train.batch", "train.global-batch"),
        Rename("zero.casting", "precision.cast-inputs", {"on": "true", "off": "false"}),
    ),
    {"zero.contiguous": "leave it out, buffers are always contiguous"},
)


def read(line: str, renames: Renames = SOME) -> tuple[Config, Options]:
    return load(line.split(), world_size=1, renames=renames)


def problems(line: str, renames: Renames = SOME) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(line, renames)
    return caught.value.problems


def test_the_table_names_keys_that_exist() -> None:
    keys = {
        f"{group}.{key_name(key)}" for group, kind in GROUPS.items() for key in kind.model_fields
    }
    assert {rename.new for rename in RENAMES} <= keys
    assert not keys & set(Renames().old_keys)
    assert not {rename.old for rename in RENAMES} & set(REMOVED)


def test_an_old_flag_sets_the_new_key_with_a_warning() -> None:
    config, options = read("--train.batch 8 --zero.casting on")
    assert (config.train.global_batch, config.precision.cast_inputs) == (8, True)
    assert options.notes == (
        "--train.batch is now --train.global-batch",
        "--zero.casting on is now --precision.cast-inputs true",
    )
    assert {"train.global_batch", "precision.cast_inputs"} <= options.flags
    assert read("--train.global-batch 8")[1].notes == ()


def test_an_old_key_of_a_file_sets_the_new_one_and_a_flag_overrides_it(tmp_path: Path) -> None:
    file = tmp_path / "old.toml"
    file.write_text("[train]\nbatch = 8\nsteps = 5\n[zero]\ncasting = true\n")
    config, options = read(f"--config {file}")
    assert (config.train.global_batch, config.precision.cast_inputs) == (8, True)
    assert options.notes[0] == f"--train.batch is now --train.global-batch (in {file})"
    assert read(f"--config {file} --train.global-batch 4")[0].train.global_batch == 4


def test_both_spellings_with_different_values_are_refused(tmp_path: Path) -> None:
    assert read("--train.batch 8 --train.global-batch 8")[0].train.global_batch == 8
    for line in (
        "--train.batch 8 --train.global-batch 4",
        "--train.global-batch 4 --train.batch 8",
    ):
        (text,) = problems(line)
        assert all(
            part in text for part in ("--train.batch 8", "--train.global-batch 4", "keep one")
        )
    file = tmp_path / "both.toml"
    file.write_text("[train]\nbatch = 8\nglobal-batch = 4\n")
    assert f"(in {file})" in problems(f"--config {file}")[0]


def test_a_removed_key_is_refused_with_what_to_do_instead(tmp_path: Path) -> None:
    expected = "was removed; leave it out, buffers are always contiguous"
    assert problems("--zero.contiguous") == [f"--zero.contiguous: {expected}"]
    assert problems("--zero.contiguous true") == [f"--zero.contiguous: {expected}"]
    file = tmp_path / "old.toml"
    file.write_text("[zero]\ncontiguous = true\n")
    assert problems(f"--config {file}") == [f"--zero.contiguous (in {file}): {expected}"]


def test_an_invalid_value_of_an_old_key_names_the_new_key() -> None:
    assert problems("--train.batch x") == ["--train.global-batch x: must be a whole number"]
    assert problems("--train.batch")[0].startswith("--train.batch: its value is missing")


def test_the_old_value_of_replicate(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    line = ["--run.replicate", "neighbour"]
    config = program_config(line, prog="mine.py", about="", defaults={}, world_size=1)
    assert config.run.replicate == "neighbor"
    warning = "--run.replicate neighbour is now --run.replicate neighbor"
    assert capsys.readouterr().err == f"threed: warning: {warning}\n"
    file = tmp_path / "config.toml"
    file.write_text(to_toml(config).replace('"neighbor"', '"neighbour"'))
    saved, options = load(["--config", str(file)])
    assert (saved, options.notes) == (config, (f"{warning} (in {file})",))


def test_other_ranks_do_not_warn(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    line = ["--run.replicate", "neighbour"]
    program_config(line, prog="mine.py", about="", defaults={}, world_size=1)
    assert capsys.readouterr().err == ""


def test_python_code_with_an_old_value_warns() -> None:
    with pytest.warns(FutureWarning, match="--run.replicate neighbour is now") as caught:
        assert RunConfig.model_validate({"replicate": "neighbour"}).replicate == "neighbor"
    assert len(caught) == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: RunConfig.model_validate({"replicate": "neighbour"}),
        lambda: RunConfig(replicate="neighbour"),  # type: ignore[arg-type]
        lambda: Config(run={"replicate": "neighbour"}),  # type: ignore[arg-type]
    ],
)
def test_a_warning_names_the_line_that_creates_the_configuration(
    make: Callable[[], object],
) -> None:
    with pytest.warns(FutureWarning) as caught:
        make()
    assert [warning.filename for warning in caught] == [__file__]


def test_a_saved_configuration_gets_the_current_keys() -> None:
    saved = {"train": {"batch": 8, "steps": 5}, "zero": {"casting": True, "contiguous": True}}
    now = {"train": {"global_batch": 8, "steps": 5}, "zero": {}, "precision": {"cast_inputs": True}}
    assert SOME.update(saved) == now
    both = {"train": {"global_batch": 4, "batch": 8}}
    assert SOME.update(both) == {"train": {"global_batch": 4}}


def save_checkpoint(path: Path) -> None:
    engine_of(config_of(Case(model="llama", dtype="fp32"))).save(path)


def test_the_manifest_of_an_old_run_is_read_with_current_keys(tmp_path: Path) -> None:
    run_ranks(1, save_checkpoint, tmp_path / "step-0")
    file = tmp_path / "step-0" / MANIFEST
    manifest = json.loads(file.read_text())
    manifest["config"]["run"]["replicate"] = "neighbour"
    file.write_text(json.dumps(manifest | {"sha256": digest(manifest)}))
    assert read_manifest(file.parent)["config"]["run"]["replicate"] == "neighbor"
