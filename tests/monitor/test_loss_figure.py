"""loss.svg: panels, limits of the axes, unusual runs; the style of the figures of a run."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.pictures import check_style
from threed.monitor import figures

pytest.importorskip("matplotlib")
MIB = 2**20
Drawn = Callable[..., Any]


def row(step: int, loss: float | None = None, **more: float) -> dict[str, Any]:
    usual = {
        "train/loss": 2.5 + 8 * math.exp(-step / 20) if loss is None else loss,
        "train/lr": 3e-4 * min(1, step / 4),
        "train/grad_norm": 1 + 5 * math.exp(-step / 20),
        "perf/tokens_per_s": 1.2e6 + step % 7,
        "train/skipped_steps": 0,
    }
    return {"step": step} | usual | more


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Drawn:
    """Returns a function that draws a loss figure and returns matplotlib's figure."""
    from matplotlib.figure import Figure

    made: list[Any] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: made.append(self))

    def draw(rows: list[dict[str, Any]], *levels: float, title: str = "") -> Any:
        assert figures.loss_figure(rows, tmp_path / "loss.svg", *levels, title=title)
        return made[-1]

    return draw


def labels(figure: Any) -> list[str]:
    return [axes.get_ylabel().replace("\n", " ") for axes in figure.axes]


def legend(figure: Any) -> list[str]:
    return [text.get_text() for text in figure.axes[0].get_legend().get_texts()]


def limits(figure: Any, panel: int = 0) -> tuple[float, float]:
    return figure.axes[panel].get_ylim()


def test_panels_share_the_axis_of_steps_and_name_their_units(drawn: Drawn) -> None:
    figure = drawn([row(step) for step in range(1, 61)], 10.8, 7.0, title="llama")
    small = ["learning rate", "gradient norm", "throughput (tokens/s)"]
    assert labels(figure) == ["cross entropy (nats/token)", *small]
    assert figure.get_suptitle() == "llama"
    assert len({axes.get_xlim() for axes in figure.axes}) == 1
    assert [axes.get_xlabel() for axes in figure.axes] == ["", "", "", "step"]


def test_missing_series_have_no_panel_and_other_losses_no_unit(drawn: Drawn) -> None:
    rows = [{"step": step, "train/loss": 1.0 / step, "train/lr": 0.1} for step in (1, 2, 3)]
    figure = drawn(rows)
    assert labels(figure) == ["loss", "learning rate"]
    assert legend(figure) == ["train"]


def test_a_spike_does_not_flatten_the_curve(drawn: Drawn) -> None:
    rows = [row(step) for step in range(1, 301)]
    rows[20] |= {"train/loss": 180.0, "train/grad_norm": 4000.0}
    figure = drawn(rows)
    assert limits(figure)[1] < 20
    assert limits(figure)[0] < 2.5
    assert limits(figure, 2)[1] < 20
    notes = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert notes == ["above the axis: up to 180 (step 21)", "above the axis: up to 4000 (step 21)"]


def test_without_a_spike_every_value_is_inside(drawn: Drawn) -> None:
    figure = drawn([row(step) for step in range(1, 61)])
    assert not [text for axes in figure.axes for text in axes.texts]
    for axes in figure.axes:
        low, high = axes.get_ylim()
        assert all(low < value < high for line in axes.lines for value in line.get_ydata())


def test_a_short_warm_up_of_a_constant_rate_is_inside(drawn: Drawn) -> None:
    assert limits(drawn([row(step) for step in range(1, 301)]), 1)[0] < 3e-4 / 4


@pytest.mark.parametrize(
    ("losses", "scale"),
    [
        ([10 ** (-step / 10) for step in range(50)], "log"),
        ([10.8 - step / 6 for step in range(50)], "linear"),
        ([5.0 - step for step in range(50)], "linear"),  # negative values
        ([0.0, *(10 ** (-step / 10) for step in range(50))], "linear"),
        ([2.0] * 50, "linear"),
    ],
)
def test_the_range_selects_the_scale(drawn: Drawn, losses: list[float], scale: str) -> None:
    figure = drawn([{"step": step, "train/loss": loss} for step, loss in enumerate(losses, 1)])
    assert figure.axes[0].get_yscale() == scale
    low, high = limits(figure)
    assert low < min(losses)
    assert max(losses) < high


@pytest.mark.parametrize("decay", [15, 23, 100])
def test_every_panel_has_two_ticks(drawn: Drawn, decay: int) -> None:
    rows = [row(step) for step in range(1, 61)]
    for late in rows:
        late["train/grad_norm"] = 7 * 10 ** (-late["step"] / decay)
        late["train/lr"] = 3e-3 * math.sin(late["step"] / 20)
    for axes in drawn(rows, 10.8, 3.4).axes:
        low, high = axes.get_ylim()
        assert sum(low <= tick <= high for tick in axes.get_yticks()) >= 2


def test_one_step_is_a_point(drawn: Drawn) -> None:
    figure = drawn([row(7)], 10.8, 3.4)
    assert all(axes.lines[0].get_marker() == "." for axes in figure.axes)
    assert figure.axes[0].get_xlim() == (6, 8)
    assert legend(figure) == [
        "train",
        "uniform entropy 10.80 (above)",
        "unigram entropy 3.40 (below)",
    ]


def test_losses_that_are_not_finite_and_skipped_steps_are_marked(drawn: Drawn) -> None:
    rows = [row(step) for step in range(1, 31)]
    rows[9] |= {"train/loss": math.nan, "train/grad_norm": math.inf}
    rows[10] |= {"train/loss": math.inf, "train/grad_norm": math.nan}
    for late in rows[9:]:
        late["train/skipped_steps"] = 1
    for late in rows[10:]:
        late["train/skipped_steps"] = 3
    figure = drawn(rows)
    assert legend(figure) == ["train", "not finite: 2", "skipped steps: 3"]
    marks = {line.get_label(): list(line.get_xdata()) for line in figure.axes[0].lines}
    assert marks["not finite: 2"] == marks["skipped steps: 3"] == [10, 11]
    assert all(math.isfinite(limit) for panel in range(4) for limit in limits(figure, panel))


def test_skipped_steps_are_counted_if_a_resumed_run_counts_from_0(drawn: Drawn) -> None:
    counts = [0, 2, 2, 0, 0, 1]
    rows = [row(step, **{"train/skipped_steps": count}) for step, count in enumerate(counts, 1)]
    assert "skipped steps: 3" in legend(drawn(rows))


def test_of_repeated_steps_the_last_row_is_drawn_in_order(drawn: Drawn) -> None:
    """A resumed run repeats the steps after its checkpoint, and need not begin at step 1."""
    rows = [row(step, 9.0) for step in (101, 102, 103)] + [
        row(step, 8.0) for step in (102, 103, 104)
    ]
    line = drawn(rows).axes[0].lines[0]
    assert list(line.get_xdata()) == [101, 102, 103, 104]
    assert list(line.get_ydata()) == [9, 8, 8, 8]


def test_validation_without_training_loss_is_drawn(drawn: Drawn) -> None:
    figure = drawn([{"step": 5, "val/loss": 2.0}, {"step": 10, "val/loss": 1.9}])
    assert legend(figure) == ["validation"]


@pytest.mark.seldom("40")
@pytest.mark.parametrize("count", [1, 12, 40])
def test_figures_of_a_run_have_the_style(tmp_path: Path, count: int) -> None:
    rows = [row(step) for step in range(1, count + 1)]
    rows[0]["train/loss"] = math.nan if count > 1 else 2.0
    rows[-1] |= {"val/loss": 2.0, "train/skipped_steps": 1}
    assert figures.loss_figure(rows, tmp_path / "loss.svg", 10.8, 3.4, title="a & b")
    check_style((tmp_path / "loss.svg").read_text())
    predicted = {part: (1 + i) * MIB for i, part in enumerate(figures.PARTS)} | {"offloaded": MIB}
    base = {"predicted": predicted, "measured": 12 * MIB, "step": 2}
    ranks = [
        base | {"rank": r, "label": f"pp{r // 8} dp{r // 2 % 4} tp{r % 2}"} for r in range(count)
    ]
    assert figures.memory_figure(ranks, tmp_path / "memory.svg", title="a & b")
    check_style((tmp_path / "memory.svg").read_text())


def test_a_logarithmic_axis_has_the_style(tmp_path: Path) -> None:
    """Its labels are numbers: powers of ten would have small exponents."""
    rows = [{"step": step, "train/loss": 10 ** (-step / 100)} for step in range(500)]
    assert figures.loss_figure(rows, tmp_path / "loss.svg")
    check_style((tmp_path / "loss.svg").read_text())


def test_other_formats_are_written_by_their_suffix(tmp_path: Path) -> None:
    assert figures.loss_figure([row(1)], tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
