"""The command line as an impatient user types it: help, misspelled words, missing values, contradictions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from threed.cli.commands import main
from threed.cli.parser import TOOLS, TRAINING
from threed.config.arguments import GROUPS, load
from threed.config.flags import help_text
from threed.config.groups import Config

SMALL = "--model.layers 2 --model.hidden 32 --model.heads 2 --model.seq 16 --train.sample-tokens 0".split()


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The message of a command that is refused with exit code 2."""
    assert main(list(words)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# Help


@pytest.mark.parametrize("tool", [tool for tool in TOOLS if tool not in TRAINING])
def test_help_of_a_tool_has_usage_and_examples(
    tool: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([tool, "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: threed {tool} [-h]")
    assert f"\nexamples:\n  threed {tool}" in out
    described = out.partition("\n\n")[2]
    assert described[0].isupper()
    assert f"{tool.upper()}\n" not in out  # every argument has a description


@pytest.mark.parametrize("tool", TRAINING)
def test_help_of_train_and_plan(tool: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--help"], ["-h"], ["--world-size", "4", "--help"]):
        assert main([tool, *words]) == 0
        out, err = capsys.readouterr()
        assert " ".join(out.split()).startswith(
            f"usage: threed {tool} [ARCH | FILE.py:MODEL] [--preset NAME | --config FILE.toml] ["
        )
        assert f"\n  threed {tool} mine.py:Model " in out
        assert err == ""
    assert ("[--dry-run]" in out.partition("\n\n")[0]) == (tool == "train")
    assert main([tool, "llama", "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: threed {tool} llama [")


def test_help_imports_no_torch() -> None:
    code = "import sys; from threed.cli.commands import main; main({}); assert 'torch' not in sys.modules"
    for words in ([], ["train", "--help"], ["plan", "gpt", "--help"]):
        subprocess.run(
            [sys.executable, "-c", code.format(words)], check=True, capture_output=True
        )  # raises on failure


def test_help_distinguishes_none_from_unset() -> None:
    text = " ".join(help_text(Config(), "pretrain/gpt.py").split())
    assert (
        "where optimizer states are stored: on the device (none), in host memory (cpu), or on a drive (nvme) (default none)"
        in text
    )
    assert "heads, at most 10000; if not set, as many as heads --model" in text
    assert "required if something is offloaded to nvme (not set by default)" in text
    assert "The value none unsets a key" in text
    for group, kind in GROUPS.items():
        for key, info in kind.model_fields.items():
            assert "if none" not in str(info.description), (group, key)


def test_times_have_a_unit() -> None:
    text = " ".join(help_text(Config(), "pretrain/gpt.py").split())
    assert "(default 600s)" in text
    assert load(["--run.hang-timeout", "600s"])[0].run.hang_timeout == 600


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("threed")


# Misspelled words and missing values


def test_an_unknown_tool(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "pln") == (
        "threed pln: no such tool (did you mean plan?); there are train, plan, schedule, tokenize,"
        " convert, inspect, report, verify\n"
    )


def test_a_tool_of_other_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert "threed eval: no such tool; a run validates" in refused(capsys, "eval", "runs/a")
    assert "`threed convert` writes a Hugging Face folder" in refused(capsys, "generate", "runs/a")
    assert "--checkpoint.resume FOLDER" in refused(capsys, "finetune")


def test_an_unknown_architecture(capsys: pytest.CaptureFixture[str]) -> None:
    assert "(did you mean llama?)" in refused(capsys, "train", "lama")
    assert "name the model in the file, too: x.py:MODEL" in refused(capsys, "plan", "x.py")


def test_a_plan_of_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert "give a model (ARCH or FILE.py:MODEL), a --preset or a --config" in refused(
        capsys, "plan"
    )


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("--world-size 0", "--world-size 0: must be a whole number from 1 to 1000000"),
        ("--world-size -4", "--world-size -4: "),
        ("--world-size abc", "--world-size abc: must be a whole number from 1 to 1000000"),
        ("--world-size", "--world-size: its value is missing; write --world-size N"),
        ("--train.steps", "--train.steps: its value is missing; write --train.steps N"),
        (
            "--train.stepz 4",
            "--train.stepz: no such key (did you mean --train.steps?); --help lists all",
        ),
        ("tiny", "tiny: not a flag; write --group.key value"),
    ],
)
def test_a_bad_flag_of_a_plan(line: str, part: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "plan", "gpt", *line.split())
    assert said.startswith("threed: 1 problem in the configuration; nothing was started")
    assert part in said


# Contradictions


def test_another_architecture_as_a_flag_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "mine.py").write_text("def Model(config, slicing): ...\n")
    for words in (
        ["mine.py:Model", "--model.arch", "gpt"],
        ["gpt", "--model.arch", "mine.py:Model"],
    ):
        said = refused(capsys, "train", *words, "--dry-run")
        assert f"threed train {words[0]} contradicts --model.arch {words[2]}: leave one" in said
    assert "contradicts --model.arch llama" in refused(
        capsys, "plan", "gpt", "--model.arch", "llama"
    )
    for words in (["plan", "gpt", "--model.arch", "gpt"], ["plan", "llama", "--model.arch=llama"]):
        assert main([*words, *SMALL]) == 0


def test_a_missing_checkpoint_is_an_error_of_a_dry_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "empty").mkdir()
    for path in ("no/such/step-1", "empty"):
        for words in (["plan", "gpt"], ["train", "gpt", "--dry-run"]):
            said = refused(capsys, *words, *SMALL, "--checkpoint.resume", path)
            assert f"--checkpoint.resume {path}: there is no checkpoint" in said
    assert main(["plan", "gpt", *SMALL, "--checkpoint.resume", "auto"]) == 0


# Paths


def test_a_tilde_is_expanded_in_every_path(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(folder))
    keys = {
        "model.arch": "x.py:M",
        "parallel.schedule": "plan.csv",
        "zero.nvme-path": "drive",
        "data.path": "texts",
        "data.tokenizer": "tokenizer.json",
        "checkpoint.resume": "step-1",
        "run.dir": "run",
    }
    (folder / "x.py").write_text("def M(config, slicing): ...\n")
    flags = [f"--{key}=~/{value}" for key, value in keys.items()]
    lines = [f"{key} = '~/{value}'" for key, value in keys.items()]
    (folder / "all.toml").write_text("\n".join(lines))
    for words in (flags, ["--config=~/all.toml"]):
        config, _ = load(words)
        for key, value in keys.items():
            group, name = key.replace("-", "_").split(".")
            assert getattr(getattr(config, group), name) == f"{folder}/{value}"
    assert (
        load(["--checkpoint.resume", "auto", "--data.tokenizer", "bytes"])[0].data.tokenizer
        == "bytes"
    )
    assert f"{folder}/none" in refused(capsys, "report", "~/none")
    assert f"{folder}/none" in refused(capsys, "inspect", "~/none")
    assert f"{folder}/none.py: no such file" in refused(capsys, "verify", "~/none.py:M")
    assert f"{folder}/none.py: no such file" in refused(capsys, "train", "~/none.py:M")
