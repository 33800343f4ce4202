"""Tools with wrong files, empty folders, unfinished runs and paths with spaces: one clear line, no traceback."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.configs import Case, config_of, engine_of
from tests.harness import run_ranks
from threed.cli.commands import main


def save_checkpoint(path: Path) -> None:
    """On a rank: a checkpoint of an untrained model."""
    engine_of(config_of(Case(model="llama", dtype="fp32"))).save(path)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, an empty folder, and other files."""
    folder = tmp_path_factory.mktemp("impatient")
    run = folder / "my run"
    run_ranks(1, save_checkpoint, run / "checkpoints" / "step-0")
    (run / "metrics.jsonl").write_text("")
    (run / "config.toml").write_text("")
    (run / "checkpoints" / "step-9.tmp").mkdir()
    (folder / "empty").mkdir()
    (folder / "text.txt").write_text("hello")
    (folder / "bad.jsonl").write_text('{"txt": 1}\n')
    (folder / "broken.py").write_text("import nothing_here\n")
    (folder / "mine.py").write_text("class Plain: ...\nx = 3\n")
    (folder / "plan.csv").write_text("a,b\n")
    return folder


SCHEDULE = ["schedule", "1f1b", "--stages", "2", "--microbatches", "2"]
REFUSED = [
    (["inspect", "none"], "none is not a checkpoint: it does not exist"),
    (["inspect", "empty"], "empty is not a checkpoint: it has no manifest.json"),
    (["inspect", "text.txt"], "it is a file, but a checkpoint is a folder"),
    (["inspect", "my run"], "did you mean my run/checkpoints/step-0?"),
    (["inspect", "my run/checkpoints/step-9.tmp"], "it is the unfinished save of a run that was"),
    (["inspect", "--drive", "none"], "--drive none: there is no such folder"),
    (["report", "none"], "none is not a run folder: it does not exist"),
    (["report", "empty"], "empty is not a run folder: it has no metrics.jsonl"),
    (["report", "my run/checkpoints/step-0"], "did you mean my run?"),
    (["report", "."], ". is not a run folder: it has no metrics.jsonl; did you mean my run?"),
    (["convert", "none", "out"], "none does not exist"),
    (["convert", "empty", "out"], "empty is not a checkpoint: it has neither manifest.json nor"),
    (["convert", "text.txt", "out"], "text.txt is a file: a checkpoint is a folder"),
    (["convert", "my run", "out"], "use the tokenizer that the model was trained with"),
    (["convert", "my run/checkpoints/step-0", "text.txt"], "text.txt exists already"),
    (["tokenize", "none", "out"], "threed tokenize: none does not exist\n"),
    (["tokenize", "empty", "out"], "empty: nothing to read here"),
    (["tokenize", "bad.jsonl", "out"], "bad.jsonl, line 1: no key 'text' among ['txt']"),
    (["tokenize", "text.txt", "out", "--tokenizer", "none"], "tokenizer 'none' does not exist"),
    ([*SCHEDULE, "--svg", "empty"], "threed schedule: empty: Is a directory\n"),
    (["schedule", "1f1b"], "1f1b: give --stages and --microbatches"),
    (["schedule", "none.csv"], "none.csv: No such file or directory"),
    (["schedule", "plan.csv"], "plan.csv: row 1, cell 1: 'a': not an action of"),
    (["schedule", "mine.py:f", "--stages", "2", "--microbatches", "2"], "mine.py"),
    (["verify", "none.py:M"], "none.py: no such file"),
    (["verify", "mine.py"], "mine.py: write FILE.py:NAME"),
    (["verify", "mine.py:Other"], "mine.py has no 'Other' to call; its classes are Plain"),
    (["verify", "broken.py:M"], "broken.py cannot be imported: ModuleNotFoundError"),
    (["verify", "mine.py:Plain", "--topologies", "bla"], "topology 'bla': 'bla' is not a word"),
    (["verify", "mine.py:Plain", "--timeout", "0"], "--timeout 0: must be more than 0 seconds"),
    (["train", "broken.py:M"], "broken.py cannot be imported: ModuleNotFoundError"),
    (["train", "mine.py:Other"], "mine.py has no 'Other' to call; its classes are Plain"),
    (["train", "gpt", "--config", "my run"], "did you mean my run/config.toml?"),
    (["train", "gpt", "--config", "none.toml"], "--config none.toml: no such file"),
    (["train", "gpt", "--data.path", "empty"], "empty: nothing to read here"),
    (["train", "gpt", "--run.dir", "text.txt"], "text.txt is a file; choose another"),
    (["train", "gpt", "--checkpoint.resume", "my run"], "did you mean my run/checkpoints/step-0?"),
    (["plan", "gpt", "--world-size", "7"], "--train.global-batch 16 is not divisible by"),
]


@pytest.mark.parametrize(("words", "part"), REFUSED, ids=[" ".join(words) for words, _ in REFUSED])
def test_a_mistake_is_one_clear_message(
    words: list[str],
    part: str,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(place)
    assert main(words) == 2
    said = capsys.readouterr().err
    assert part in said
    assert said.startswith(("threed:", f"threed {words[0]}: "))
    assert len(said.splitlines()) <= 2


def test_a_folder_with_a_space(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    assert main(["inspect", "my run/checkpoints/step-0"]) == 0
    assert "1 file, " in capsys.readouterr().out
    assert main(["convert", "my run/checkpoints/step-0", "my hf", "--tokenizer", "none"]) == 0
    assert main(["tokenize", "text.txt", "my data"]) == 0
    assert (place / "my data.idx").exists()
    assert main(["report", "my run"]) == 0  # a run that has not logged a step


def test_ctrl_c_of_a_tool_prints_no_traceback() -> None:
    words = ["schedule", "1f1b", "--stages", "3000", "--microbatches", "30000"]
    # again after ten seconds: on a busy machine the first one may hit an import, which ignores it
    alarm = "signal.setitimer(signal.ITIMER_REAL, 1, 10)"
    code = f"import signal; from threed.cli.commands import main; signal.alarm; main({words})"
    # A job that a shell started in the background ignores SIGINT, and so do its programs.
    default = "signal.signal(signal.SIGINT, signal.default_int_handler)"
    handler = "signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))"
    done = subprocess.run(
        [sys.executable, "-c", code.replace("signal.alarm", f"{default}; {handler}; {alarm}")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == -signal.SIGINT
    assert done.stderr == "threed schedule: interrupted\n"
