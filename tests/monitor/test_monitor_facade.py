"""Monitor: one object, every rank; resume; a disk that fails."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from threed.monitor import Monitor
from threed.monitor.metrics import read

ROOT = Path(__file__).resolve().parents[2]


def _session(folder: Path, start: int, steps: range) -> None:
    with Monitor(folder, total_steps=10, start_step=start, main=True, wandb="off") as monitor:
        for step in steps:
            monitor.advance(step)
            monitor.log(step, {"train/loss": 1.0 / step, "run/restarts": int(start > 0)})


def test_resume_drops_the_steps_it_will_do_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _session(tmp_path, 0, range(1, 8))
    _session(tmp_path, 5, range(6, 11))
    rows = read(tmp_path / "metrics.jsonl")
    assert rows == [
        {"step": s, "train/loss": 1.0 / s, "run/restarts": int(s > 5)} for s in range(1, 11)
    ]
    assert capsys.readouterr().out.splitlines()[-1] == "step    10/10 | loss 0.1000"
    _session(tmp_path, 0, range(1, 2))
    assert [row["step"] for row in read(tmp_path / "metrics.jsonl")] == [1]


def test_other_ranks_make_the_same_calls_and_leave_no_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monitor = Monitor(
        tmp_path / "run", total_steps=10, start_step=0, main=False, wandb="auto", run_id="abc"
    )
    monitor.advance(1)
    monitor.log(1, {"train/loss": 1.0})
    monitor.note("hello")
    monitor.close()
    monitor.close(failed=True)
    assert monitor.run_id == "abc"
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr().out == ""


def test_an_exception_passes_through_and_the_file_is_whole(tmp_path: Path) -> None:
    def train() -> None:
        with Monitor(tmp_path, 10, 0, True, wandb="off") as monitor:
            monitor.log(1, {"train/loss": 1.0})
            monitor.log(2, {"train/loss": 1 / 0})

    with pytest.raises(ZeroDivisionError):
        train()
    assert read(tmp_path / "metrics.jsonl") == [{"step": 1, "train/loss": 1.0}]


def test_a_full_disk_is_said_once_and_training_goes_on(tmp_path: Path) -> None:
    program = f"""
import resource
from threed.monitor import Monitor
with Monitor({str(tmp_path)!r}, 9, 0, True, wandb="off") as monitor:
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, resource.RLIM_INFINITY))
    for step in range(1, 5):
        monitor.log(step, {{"train/loss": 0.5}})
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    assert [line[:4] for line in lines] == ["step", "metr", "step", "step", "step", "metr"]
    assert "cannot be written" in lines[1]
    assert "the last 3 rows could not be written" in lines[5]
    assert read(tmp_path / "metrics.jsonl") == [{"step": 1, "train/loss": 0.5}]


def test_rows_that_a_disk_did_not_take_are_written_when_it_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Monitor(tmp_path, 9, 0, True, wandb="off") as monitor:
        monitor.log(1, {"train/loss": 1.0})
        with mock.patch("os.write", side_effect=OSError(errno.ENOSPC, "No space left on device")):
            for step in (2, 3):
                monitor.log(step, {"train/loss": 1.0})
            with pytest.raises(TypeError):
                monitor.log(4, {"train/loss": object()})
            assert [row["step"] for row in read(tmp_path / "metrics.jsonl")] == [1]
        monitor.log(4, {"train/loss": 1.0})
        monitor.sync()
    assert [row["step"] for row in read(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("metrics: ")]
    assert "No space left on device: " in said[0]
    assert " are free at " in said[0]
    assert said[1].endswith("is written again, with the 3 kept rows")
    assert len(said) == 2


def test_the_room_imports_nothing_heavy() -> None:
    program = """
import sys, threed
before = set(sys.modules)
import threed.monitor, threed.monitor.figures, threed.core.process
heavy = {"torch", "numpy", "wandb", "matplotlib", "tqdm"}
print(sorted(heavy & (set(sys.modules) - before)))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
