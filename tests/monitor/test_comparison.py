"""The comparison of runs: its table, its figure, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from threed.cli.commands import main
from threed.monitor.comparison import compare
from threed.monitor.metrics import MetricsFile


def run_of(folder: Path, lr: float, losses: list[float], **more: Any) -> Path:
    folder.mkdir()
    (folder / "config.toml").write_text(
        f'[optim]\nlr = {lr}\nname = "adamw"\n[train]\nsteps = 30\n'
    )
    with MetricsFile(folder / "metrics.jsonl") as file:
        for step, loss in enumerate(losses, 1):
            file.append({"step": step, "train/loss": loss, **more})
    return folder


def test_runs_are_compared_in_a_table_and_one_figure(tmp_path: Path) -> None:
    a = run_of(tmp_path / "a", 1e-3, [5.5, 4.25], **{"perf/tokens_per_s": 1500.0})
    b = run_of(tmp_path / "b", 2e-3, [5.5, 3.75, 3.5])
    text, drawn = compare([a, b])
    assert [line.split() for line in text.splitlines()] == [
        [str(a), str(b)],
        ["last", "step", "2", "3"],
        ["last", "train/loss", "4.25", "3.5"],
        ["last", "val/loss", "none", "none"],
        ["median", "tokens/s", "1500", "none"],
        ["--optim.lr", "0.001", "0.002"],  # and no line for the keys with equal values
    ]
    assert drawn == [a / "figures" / "comparison.svg"]
    picture = drawn[0].read_text()
    assert str(a) in picture
    assert str(b) in picture
    assert "throughput" in picture
    assert "learning rate" not in picture  # neither run has it


def test_a_folder_without_a_run_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = run_of(tmp_path / "a", 1e-3, [5.5])
    assert main(["report", str(a), str(tmp_path / "c")]) == 2
    assert f"{tmp_path / 'c'} is not a run folder: it does not exist" in capsys.readouterr().err
