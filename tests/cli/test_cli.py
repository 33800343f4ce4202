"""The console tools, as a user calls them."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from tests.configs import Case, config_of, engine_of
from tests.disks import tmpfs
from tests.harness import run_ranks
from threed.cli import launch
from threed.cli.commands import main
from threed.memory.io import SwapError


def save_checkpoint(path: Path) -> None:
    """On a rank: a checkpoint of an untrained model."""
    engine_of(config_of(Case(model="llama", dtype="fp32"))).save(path)


def test_schedule_prints_the_facts_of_a_plan_as_json_and_draws_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "plan.svg"
    assert (
        main(
            [
                "schedule",
                "1f1b",
                "--stages",
                "4",
                "--microbatches",
                "8",
                "--json",
                "--svg",
                str(picture),
            ]
        )
        == 0
    )
    facts = json.loads(capsys.readouterr().out)
    assert facts["bubble"] == pytest.approx(3 / 11)
    assert facts["peak_activations"] == [4, 3, 2, 1]
    assert facts["messages"] == [8, 16, 16, 8]
    assert picture.read_text().startswith("<svg")


def test_a_flag_is_not_abbreviated(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["schedule", "1f1b", "--stages", "4", "--microbatches", "8", "--chunk", "2"])
    assert "unrecognized arguments: --chunk 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("train --help", -signal.SIGPIPE),
        ("schedule 1f1b --stages 2 --microbatches 2", -signal.SIGPIPE),
        ("schedule --help", 0),  # some versions of argparse drop the error
        (
            "train --model.layers 1 --model.hidden 32 --model.heads 2 --model.seq 32 --train.steps 2 --log.wandb off",
            -signal.SIGPIPE,
        ),
    ],
)
def test_a_closed_pipe_ends_a_tool_quietly(line: str, code: int, tmp_path: Path) -> None:
    """As `| head -1` does."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "threed", *line.split()],
        stdout=write, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    os.close(write)
    assert done.stderr == ""
    assert done.returncode in (code, -signal.SIGPIPE)


def test_a_closed_standard_output_is_no_error() -> None:
    """The shell closes it with `>&-`."""
    line = f"{sys.executable} -m threed schedule 1f1b --stages 2 --microbatches 2 >&-"
    done = subprocess.run(
        ["sh", "-c", line], stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_a_schedule_that_is_not_there_is_refused_by_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["schedule", "3bw", "--stages", "4", "--microbatches", "8"]) == 2
    assert "there is no schedule '3bw': did you mean '2bw'?" in capsys.readouterr().err
    assert main(["schedule", "2bw", "--stages", "4", "--microbatches", "3"]) == 2
    assert "schedule 2bw: 3 micro-batches; 4 stages need at least 4" in capsys.readouterr().err


def test_plan_is_the_dry_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        main(
            [
                "plan",
                "--preset",
                "tiny",
                "--world-size",
                "4",
                "--parallel.tp",
                "2",
                "--parallel.pp",
                "2",
            ]
        )
        == 0
    )
    assert "rank 3" in capsys.readouterr().out


def test_train_takes_the_flags_of_training_and_an_architecture(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    dry = ["--dry-run", "--world-size", "2", "--model.layers", "2"]
    for words, arch in (
        (["gpt"], "gpt"),
        (["llama"], "llama"),
        ([], "gpt"),
        (["--preset", "llama-tiny"], "llama"),
    ):
        assert main(["train", *words, *dry]) == 0
        assert f"model      {arch}," in capsys.readouterr().out
    assert main(["train", "llama", "--help"]) == 0
    assert "usage: threed train llama [--preset NAME |" in capsys.readouterr().out
    assert main(["train", "bert", *dry]) == 2
    assert (
        "threed train bert: no such architecture; there are gpt, llama, mistral"
        in capsys.readouterr().err
    )
    for tool in ("train", "plan"):  # the preset has another
        assert main([tool, "llama", "--preset", "tiny", *dry]) == 2
        said = capsys.readouterr().err
        assert "trains llama, and the preset, file or folder has model.arch gpt: use" in said
        assert "use `threed train gpt`, or add --model.arch llama" in said
    assert main(["train", "llama", "--preset", "tiny", "--model.arch=llama", *dry]) == 0
    assert "model      llama," in capsys.readouterr().out


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is where nothing can be saved")
def test_a_plan_for_other_machines_says_nothing_about_the_disks_of_this_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ["--preset", "tiny", "--run.dir", "/proc/none"]
    nowhere = [
        "--zero.offload-params",
        "nvme",
        "--zero.stage",
        "3",
        "--zero.nvme-path",
        "/proc/self/mem",
    ]
    for more in ([], nowhere):
        assert main(["plan", *flags, *more, "--world-size", "16", "--parallel.tp", "2"]) == 0
        *_, last = capsys.readouterr().out.splitlines()
        assert last.startswith("  rank 0 – rank 15  dp0 tp0 – dp7 tp1")
        assert launch.main([*flags, *more], prog="pretrain/gpt.py") == 2
        problems = capsys.readouterr().err
        assert "/proc" in problems
        assert ("--zero.nvme-path /proc/self/mem" in problems) == bool(more)


def test_a_file_or_a_dangling_link_in_place_of_a_folder_is_refused_at_the_start(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for run in ("file", "link", "saves-file", "saves-link"):
        place = tmp_path / run
        if run.startswith("saves"):
            place.mkdir()
            place /= "checkpoints"
        if run.endswith("file"):
            place.touch()
        else:
            place.symlink_to("nowhere")
        what = (
            f"checkpoints cannot be saved in {run}"
            if run.startswith("saves")
            else f"the run folder {run} cannot be created"
        )
        kind = "a file" if run.endswith("file") else "a broken link"
        said = f"{what}: {place} is {kind}; choose another with --run.dir"
        flags = ["--preset", "tiny", "--run.dir", run]
        assert main(["plan", *flags, "--world-size", "1"]) == 0
        assert f"here       {said}" in capsys.readouterr().out
        assert launch.main(flags, prog="pretrain/gpt.py") == 2
        assert said in capsys.readouterr().err
    assert launch.main(["--preset", "tiny", "--run.dir", "x" * 300], prog="pretrain/gpt.py") == 2
    assert (
        "cannot be created: File name too long; choose another with --run.dir"
        in capsys.readouterr().err
    )


def test_tokenize_writes_a_pair_that_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("some text " * 200)
    assert main(["tokenize", str(tmp_path / "a.txt"), str(tmp_path / "out")]) == 0
    assert "1 document, 2,001 tokens" in capsys.readouterr().out
    assert (tmp_path / "out.bin").exists()
    assert (tmp_path / "out.idx").exists()
    assert main(["tokenize", str(tmp_path / "missing.txt"), str(tmp_path / "other")]) == 2


def test_a_full_disk_is_an_error_with_path_and_advice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "a.txt"
    text.write_text("some text " * 20000)
    small = tmp_path / "small"
    plan = ["schedule", "1f1b", "--stages", "16", "--microbatches", "128"]
    with tmpfs(small, "20k"):
        (small / "old.svg").write_text("old")
        for name, line in {
            "new.svg": [*plan, "--svg"],
            "old.svg": [*plan, "--svg"],
            "new.csv": [*plan, "--csv"],
            "tokens": ["tokenize", str(text)],
        }.items():
            assert main([*line, str(small / name)]) == 2
            said = capsys.readouterr().err
            assert f"could not write {small / name}: No space left on device" in said
            assert "free some space, or choose another path" in said
        assert [path.name for path in small.iterdir()] == ["old.svg"]
        assert (small / "old.svg").read_text() == "old"


def test_inspect_shows_versions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect"]) == 0
    out = capsys.readouterr().out
    assert "torch" in out
    assert "gloo" in out


def test_inspect_verifies_and_convert_exports_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "step-0"
    run_ranks(1, save_checkpoint, saved)
    assert main(["inspect", str(saved)]) == 0
    out = capsys.readouterr().out
    assert "every hash verified" in out
    assert "model llama, saved on one rank" in out
    assert main(["inspect", str(tmp_path / "nowhere")]) == 2
    assert "nowhere is not a checkpoint: it does not exist" in capsys.readouterr().err
    assert "blocks.2.mlp.gate.weight" in out
    assert main(["convert", str(saved), str(tmp_path / "hf"), "--tokenizer", "none"]) == 0
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["architectures"] == [
        "LlamaForCausalLM"
    ]
    file = saved / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert main(["inspect", str(saved)]) == 2
    assert "rank-00000.safetensors" in capsys.readouterr().err


def test_report_needs_a_run_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "metrics.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_drive_that_fails_is_one_line(
    number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It names what failed and where itself; an OSError of a run folder would be told of otherwise."""
    (tmp_path / "a.txt").write_text("some text " * 2000)
    flags = [
        "--preset",
        "tiny",
        "--data.path",
        str(tmp_path / "a.txt"),
        "--run.dir",
        str(tmp_path / "run"),
    ]
    error = SwapError(number, "rank 0: reading 4096 bytes of /swap/states.rank0: failed")
    with mock.patch.object(launch, "_train", side_effect=error):
        assert launch.main(flags, prog="pretrain/gpt.py", arch="gpt") == 2
    assert capsys.readouterr().err == f"threed: {error}\n"


def test_problems_of_keys_data_and_vocabulary_come_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before any corpus is tokenized."""
    flags = ["--preset", "tiny", "--model.vocab", "100", "--train.global-batch", "7"]
    flags += ["--data.path", str(tmp_path / "nowhere")]
    assert launch.main(flags, prog="pretrain/gpt.py", arch="gpt") == 2
    said = capsys.readouterr().err
    assert said.startswith("threed: 3 problems in the configuration")
    for part in ("use --model.vocab 257", "--train.global-batch 7 is not", "nowhere"):
        assert part in said
