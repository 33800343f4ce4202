"""experts.jsonl: its size, quantiles, a resumed run, a full disk; and the heat maps that are drawn from it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.monitor.test_monitor_figures import _needs_matplotlib, _texts
from threed.monitor import figures, loads
from threed.monitor.metrics import MetricsFile


def record(folder: Path, steps: range, layers: int, experts: int, start: int = 0) -> list[str]:
    """Records loads that grow with the expert, of all steps; returns the notes."""
    notes: list[str] = []
    file = loads.LoadFile(folder, start, notes.append)
    mean = (experts + 1) / 2
    row = [[(expert + 1) / mean for expert in range(experts)]] * layers
    for step in steps:
        file.append(step, range(1, 1 + layers), row, last=step == steps[-1])
    file.close()
    return notes


@pytest.mark.seldom("58-256", "200-512")
@pytest.mark.parametrize(("layers", "experts"), [(58, 256), (48, 128), (200, 512)])
def test_the_file_has_a_bounded_size(tmp_path: Path, layers: int, experts: int) -> None:
    record(tmp_path, range(1, 2001), layers, experts)
    rows, size = loads.read(tmp_path), (tmp_path / loads.FILE).stat().st_size
    longest = max(map(len, (tmp_path / loads.FILE).read_bytes().splitlines()))
    assert size <= 2000 * loads.BYTES_PER_STEP + 2 * longest  # the first and the last row
    assert size > 1000 * loads.BYTES_PER_STEP  # as many rows as fit
    assert rows[0]["step"] == 1
    assert rows[-1]["step"] == 2000  # the last step of a run, in any case
    assert rows[0]["sorted"]
    (first, *_), mean = rows[0]["loads"], (experts + 1) / 2
    assert len(first) == loads.COLUMNS
    assert first == sorted(first)
    assert (first[0], first[-1]) == (round(100 / mean), round(100 * experts / mean))


def test_few_experts_are_recorded_one_by_one(tmp_path: Path) -> None:
    record(tmp_path, range(1, 4), 2, 3)
    rows = loads.read(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[1] == {"step": 2, "sorted": False, "layers": [1, 2], "loads": [[50, 100, 150]] * 2}


def test_a_resumed_run_repeats_its_steps(tmp_path: Path) -> None:
    record(tmp_path, range(1, 9), 2, 4)
    record(tmp_path, range(5, 7), 2, 4, start=4)
    assert [row["step"] for row in loads.read(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert loads.read(tmp_path / "elsewhere") == []


def test_a_full_disk_is_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(MetricsFile, "append", fail)
    (note,) = record(tmp_path, range(1, 9), 2, 4)
    assert "loads of experts are not recorded: " in note


@pytest.mark.parametrize("experts", [8, 256])
def test_heat_maps(tmp_path: Path, experts: int) -> None:
    _needs_matplotlib()
    record(tmp_path, range(1, 31), 3, experts)
    MetricsFile(tmp_path / "metrics.jsonl").close()
    first, *more = figures.report(tmp_path)
    assert (first, more) == (tmp_path / "figures" / "experts.svg", [])
    texts = " ".join(_texts(first))
    assert "loads in step 30" in texts
    assert ("(64 quantiles)" in texts) == (experts > 64)
    assert "\N{GREATER-THAN OR EQUAL TO} 2" in texts
    again = tmp_path / "again"
    shutil.copytree(tmp_path / "figures", again)
    figures.report(tmp_path)
    assert (again / "experts.svg").read_bytes() == first.read_bytes()


def test_colors_of_a_heat_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The upper map has the largest load of each layer and step, the lower map the last loads."""
    _needs_matplotlib()
    from matplotlib.figure import Figure

    drawn: list[Any] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: drawn.append(self))
    rows = [
        {"step": step, "sorted": False, "layers": [3, 5], "loads": [[100, 100], [50, 150 + step]]}
        for step in (1, 2, 4)
    ]
    assert figures.load_figure(rows, tmp_path / "experts.svg")
    above, below, _ = drawn[0].axes
    values = [axes.collections[0].get_array().tolist() for axes in (above, below)]
    assert values == [[[1, 1, 1], [1.51, 1.52, 1.54]], [[1, 1], [0.5, 1.54]]]
    norm = above.collections[0].norm
    assert (norm.vmin, norm(1.0), norm.vmax) == (0.5, 0.5, 2)
    assert [label.get_text() for label in above.get_yticklabels()] == ["3", "5"]
    notes: list[str] = []
    assert not figures.load_figure([], tmp_path / "none.svg", notes.append)
    assert notes == ["figure of experts: no loads were recorded"]
