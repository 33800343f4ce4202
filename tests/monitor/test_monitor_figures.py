"""Figures: what is drawn, byte-for-byte reproducibility, the report from a run folder, life without matplotlib."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from threed.monitor import figures
from threed.monitor.metrics import MetricsFile

ROOT = Path(__file__).resolve().parents[2]
MIB = 2**20


def _rows(steps: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [
        {"step": s, "train/loss": 2 + 3.5 * math.exp(-s / 40)} for s in range(1, steps + 1)
    ]
    return [
        row | ({"val/loss": row["train/loss"] + 0.1} if row["step"] % 20 == 0 else {})
        for row in rows
    ]


def _ranks(count: int) -> list[dict[str, Any]]:
    predicted = {
        part: size * MIB for part, size in zip(figures.PARTS, (4, 4, 8, 20, 1), strict=True)
    }
    base = {"predicted": predicted, "measured": 40 * MIB, "step": 2}
    return [
        base | {"rank": r, "label": f"pp{r // 4} dp{r // 2 % 2} tp{r % 2}"} for r in range(count)
    ]


def _texts(path: Path) -> list[str]:
    return [
        "".join(node.itertext())
        for node in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")
    ]


def _needs_matplotlib() -> None:
    pytest.importorskip("matplotlib")


def test_loss_figure_names_its_curves_and_levels(tmp_path: Path) -> None:
    _needs_matplotlib()
    out = tmp_path / "figures" / "loss.svg"
    assert figures.loss_figure(_rows(60), out, math.log(258), 3.2414)
    texts = set(_texts(out))
    assert {"train", "validation", "step", "cross entropy (nats/token)"} <= texts
    assert {"uniform entropy 5.55", "unigram entropy 3.24"} <= texts


def test_loss_figure_survives_non_finite_and_missing_losses(tmp_path: Path) -> None:
    _needs_matplotlib()
    rows = [
        *_rows(10),
        {"step": 11, "train/loss": math.nan},
        {"step": 12, "train/loss": math.inf},
        {"step": 13},
    ]
    assert figures.loss_figure(rows, tmp_path / "loss.svg", None, None)
    assert not any("entropy" in text for text in _texts(tmp_path / "loss.svg"))
    said: list[str] = []
    nothing = [{"step": 1, "train/loss": math.nan}]
    assert not figures.loss_figure(nothing, tmp_path / "none.svg", None, None, said.append)
    assert said == ["loss figure: no loss in metrics.jsonl yet"]
    assert not (tmp_path / "none.svg").exists()


def test_memory_figure_names_every_rank_and_part(tmp_path: Path) -> None:
    _needs_matplotlib()
    assert figures.memory_figure(_ranks(4), tmp_path / "memory.svg")
    texts = _texts(tmp_path / "memory.svg")
    assert {*figures.PARTS, "measured", "MiB per rank"} <= set(texts)
    joined = " ".join(texts)
    assert all(f"rank {r}" in joined for r in range(4))
    assert "pp0 dp1 tp1" in joined
    assert "the peak of live tensors in step 2" in joined


def test_memory_figure_says_what_is_offloaded(tmp_path: Path) -> None:
    _needs_matplotlib()
    ranks = _ranks(2)
    assert figures.memory_figure(ranks, tmp_path / "memory.svg")
    assert "offloaded" not in " ".join(_texts(tmp_path / "memory.svg"))
    for rank, size in zip(ranks, (90, 120), strict=True):
        rank["predicted"] = rank["predicted"] | {"offloaded": size * MIB}
    assert figures.memory_figure(ranks, tmp_path / "memory.svg")
    assert "predicted, without up to 120.0 MiB offloaded" in " ".join(
        _texts(tmp_path / "memory.svg")
    )


def test_memory_bars_are_as_high_as_the_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _needs_matplotlib()
    from matplotlib.figure import Figure

    drawn: list[Any] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: drawn.append(self))
    assert figures.memory_figure(_ranks(3), tmp_path / "memory.svg")
    groups = drawn[0].axes[0].containers
    bars = {
        group.get_label(): [(bar.get_y(), bar.get_height()) for bar in group] for group in groups
    }
    stacked = zip(figures.PARTS, ((0, 4), (4, 4), (8, 8), (16, 20), (36, 1)), strict=True)
    assert bars == {part: [place] * 3 for part, place in stacked} | {"measured": [(0, 40)] * 3}


@pytest.mark.parametrize("count", [1, 8, 64])
def test_memory_figure_thins_its_labels(tmp_path: Path, count: int) -> None:
    _needs_matplotlib()
    assert figures.memory_figure(_ranks(count), tmp_path / "memory.svg")
    named = sum(text.startswith("rank ") for text in _texts(tmp_path / "memory.svg"))
    assert named == min(count, 32)
    assert not figures.memory_figure([], tmp_path / "none.svg", lambda text: None)


def test_the_same_data_give_the_same_bytes(tmp_path: Path) -> None:
    _needs_matplotlib()
    first, second = tmp_path / "a", tmp_path / "b"
    for folder in (first, second):
        figures.loss_figure(_rows(40), folder / "loss.svg", 5.5, 3.2)
        figures.memory_figure(_ranks(4), folder / "memory.svg")
    for name in ("loss.svg", "memory.svg"):
        assert (first / name).read_bytes() == (second / name).read_bytes()
        assert b"<dc:date>" not in (first / name).read_bytes()


def test_report_draws_what_the_run_folder_has(tmp_path: Path) -> None:
    _needs_matplotlib()
    with pytest.raises(FileNotFoundError, match="not a run folder"):
        figures.report(tmp_path)
    with MetricsFile(tmp_path / "metrics.jsonl") as file:
        for row in _rows(20):
            file.append(row)
    assert figures.report(tmp_path) == [tmp_path / "figures" / "loss.svg"]
    figures.save_figure_data(tmp_path, uniform_entropy=5.55)
    figures.save_figure_data(tmp_path, unigram_entropy=3.24, memory=_ranks(2))
    assert figures.load_figure_data(tmp_path) == {
        "uniform_entropy": 5.55,
        "unigram_entropy": 3.24,
        "memory": _ranks(2),
    }
    assert figures.report(tmp_path) == [
        tmp_path / "figures" / "loss.svg",
        tmp_path / "figures" / "memory.svg",
    ]
    assert "unigram entropy 3.24" in _texts(tmp_path / "figures" / "loss.svg")
    assert sorted(entry.name for entry in (tmp_path / "figures").iterdir()) == [
        "data.json",
        "loss.svg",
        "memory.svg",
    ]


def test_without_matplotlib_it_says_what_to_install(tmp_path: Path) -> None:
    program = f"""
import sys
sys.modules["matplotlib"] = None  # makes the import fail
from threed.monitor.figures import loss_figure
print(loss_figure([{{"step": 1, "train/loss": 2.0}}], {str(tmp_path / "loss.svg")!r}, None, None))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    note, result = done.stdout.splitlines()
    assert "pip install matplotlib" in note
    assert "loss.svg" in note
    assert result == "False"
