"""Draws the figures of a run: loss.svg (loss over steps) and memory.svg (bytes per rank).

    save_figure_data(run_dir, uniform_entropy=5.55, unigram_entropy=3.26, memory=ranks)     # once, by rank 0
    report(run_dir)                                                                         # draws all figures with data

`report` reads only metrics.jsonl and figures/data.json, so figures can be redrawn long after the
run. `loss_figure` and `memory_figure` can also be called directly; the suffix of `out` selects the
format (.svg, .png, .pdf). They need matplotlib: without it they print a note and return False.
Equal data give equal SVG files, byte for byte.

`memory` is a list with one record per rank. "measured" is the peak of live tensors in one step, and
"step" the number of that step; "measured" and all values in "predicted" are in bytes:

    {"rank": 1, "label": "pp0 dp0 tp1", "measured": …, "step": …,
     "predicted": {"parameters": …, "gradients": …, "optimizer": …, "activations": …, "buffers": …}}

"predicted" may also have "offloaded".
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from threed.core.atomic import building
from threed.core.disk import in_units
from threed.core.parse import read_json
from threed.monitor import metrics

PARTS = ("parameters", "gradients", "optimizer", "activations", "buffers")

# Okabe and Ito's palette, whose colors color-blind readers can distinguish, too
# (https://jfly.uni-koeln.de/color/).
_BLUE = "#0072B2"
_ORANGE = "#D55E00"
_GREEN = "#009E73"
_SKY = "#56B4E9"
_YELLOW = "#E69F00"
_GREY = "#777777"
_PART_COLORS = dict(zip(PARTS, (_BLUE, _SKY, _GREEN, _YELLOW, _ORANGE), strict=True))
_STYLE: dict[Any, Any] = {
    "svg.hashsalt": "threed",  # deterministic element ids
    "svg.fonttype": "none",  # text as text: smaller, searchable files
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
}

Row = Mapping[str, Any]
Note = Callable[[str], None]


def loss_figure(
    rows: Sequence[Row],
    out: str | Path,
    uniform_entropy: float | None = None,
    unigram_entropy: float | None = None,
    note: Note = print,
) -> bool:
    """Draws training and validation loss over steps, with two entropies as horizontal lines.

    Args:
        rows: rows of metrics.jsonl.
        out: file to write.
        uniform_entropy: loss of a uniform distribution over the vocabulary, in nats per token.
        unigram_entropy: loss of predicting every token with its frequency, in nats per token.
        note: function that prints a message.

    Returns:
        Whether the figure was drawn: False without matplotlib or without a finite loss.
    """
    train, val = _series(rows, "train/loss"), _series(rows, "val/loss")
    losses = [loss for _, loss in train + val if math.isfinite(loss)]
    if not losses:
        note("loss figure: no loss in metrics.jsonl yet")
        return False
    levels = [("uniform entropy", uniform_entropy), ("unigram entropy", unigram_entropy)]
    lines = [(text, value) for text, value in levels if value is not None]

    def draw(axes: Any) -> None:
        _line(axes, train, color=_BLUE, label="train", marker="." if len(train) < 20 else None)
        _line(axes, val, color=_ORANGE, label="validation", marker="o", markersize=4)
        _levels(axes, lines)
        axes.set(xlabel="step", ylabel="loss (nats per token)")
        axes.set_ylim(0, 1.06 * max(losses + [value for _, value in lines]))
        axes.margins(x=0.02)
        axes.locator_params(axis="x", integer=True)
        axes.legend(loc="lower left", frameon=False, ncols=2)

    return _figure(draw, out, (7.2, 4.0), note)


def _line(axes: Any, points: Sequence[tuple[int, float]], **style: Any) -> None:
    if points:
        axes.plot(*zip(*points, strict=True), linewidth=1.2, **style)


def _series(rows: Iterable[Row], key: str) -> list[tuple[int, float]]:
    return [(row["step"], row[key]) for row in rows if row.get(key) is not None and "step" in row]


def _levels(axes: Any, lines: Iterable[tuple[str, float]]) -> None:
    """Draws horizontal lines, each labeled with its name and value at the right."""
    for text, value in lines:
        axes.axhline(value, color=_GREY, linewidth=1, linestyle="--")
        at_right = {
            "xy": (1, value),
            "xycoords": axes.get_yaxis_transform(),
            "ha": "right",
            "color": _GREY,
        }
        axes.annotate(
            f"{text} {value:.2f}", **at_right, xytext=(0, 3), textcoords="offset points", fontsize=9
        )


def memory_figure(ranks: Sequence[Row], out: str | Path, note: Note = print) -> bool:
    """Draws the predicted bytes, stacked by category, and the measured bytes of each rank.

    Predicted and measured bytes count only tensors, not the memory of Python, torch and the
    communication libraries. The text below the axis states the largest number of offloaded bytes on
    a rank.

    Args:
        ranks: one record per rank; see `memory` in the module's docstring.
        out: file to write.
        note: function that prints a message.

    Returns:
        Whether the figure was drawn: False without matplotlib or without records.
    """
    if not ranks:
        note("memory figure: no ranks were recorded")
        return False
    unit, name = _unit(max(max(_predicted(rank), rank["measured"]) for rank in ranks))

    def draw(axes: Any) -> None:
        _stacks(axes, ranks, unit)
        right = [i + 0.2 for i in range(len(ranks))]
        measured = [rank["measured"] / unit for rank in ranks]
        axes.bar(
            right,
            measured,
            0.36,
            color="#bbbbbb",
            hatch="///",
            edgecolor="white",
            linewidth=0,
            label="measured",
        )
        _rank_ticks(axes, ranks)
        axes.set_ylabel(f"{name} per rank")
        away = max(rank["predicted"].get("offloaded", 0) for rank in ranks)
        offloaded = f", without up to {in_units(away)} offloaded\n" if away else "; "
        colors = f"colors: predicted{offloaded}"
        axes.set_xlabel(
            f"{colors}gray: the peak of live tensors in step {ranks[0]['step']}",
            color=_GREY,
            fontsize=9,
        )
        axes.grid(axis="y")
        axes.figure.legend(
            loc="outside upper left", frameon=False, ncols=6, fontsize=9, columnspacing=1.4
        )

    return _figure(draw, out, (min(max(7.2, 1.5 + 0.75 * len(ranks)), 20), 4.4), note)


def _stacks(axes: Any, ranks: Sequence[Row], unit: float) -> None:
    bottom = [0.0] * len(ranks)
    for part in PARTS:
        heights = [rank["predicted"].get(part, 0) / unit for rank in ranks]
        if any(heights):
            where = [i - 0.2 for i in range(len(ranks))]
            axes.bar(where, heights, 0.36, bottom=bottom, color=_PART_COLORS[part], label=part)
        bottom = [below + height for below, height in zip(bottom, heights, strict=True)]


def _rank_ticks(axes: Any, ranks: Sequence[Row]) -> None:
    every = math.ceil(len(ranks) / 32)  # at most 32 labels are legible
    shown = range(0, len(ranks), every)
    labels = [ranks[i].get("label", "") for i in shown]
    if 6 < len(ranks) <= 16:  # narrow columns: one axis per line
        labels = [label.replace(" ", "\n") for label in labels]
    names = [f"rank {ranks[i]['rank']}\n{label}" for i, label in zip(shown, labels, strict=True)]
    axes.set_xticks(list(shown), names, fontsize=8, rotation=90 if len(ranks) > 16 else 0)
    axes.set_xlim(-0.6, len(ranks) - 0.4)


def _predicted(rank: Row) -> float:
    return float(sum(rank["predicted"].get(part, 0) for part in PARTS))


def _unit(largest: float) -> tuple[float, str]:
    exponent = 3 if largest >= 10 * 2**30 else 2 if largest >= 2 * 2**20 else 1
    return 1024.0**exponent, ("KiB", "MiB", "GiB")[exponent - 1]


def _figure(
    draw: Callable[[Any], None], out: str | Path, size: tuple[float, float], note: Note
) -> bool:
    """Draws and saves a figure with one `Axes`, without pyplot and its global state.

    Returns False, after a note, if matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        note(
            f"{Path(out).name} was not drawn: it needs matplotlib. pip install matplotlib, then: threed report RUN"
        )
        return False
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure.subplots())
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        dateless = {"Date": None} if Path(out).suffix == ".svg" else None
        figure.savefig(out, dpi=150, metadata=dateless)
    return True


def save_figure_data(run_dir: str | Path, **data: Any) -> Path:
    """Saves figure data that metrics.jsonl does not contain to <run_dir>/figures/data.json.

    Args:
        run_dir: run folder.
        data: JSON values by name, which replace saved values of the same name. `report` reads
            uniform_entropy and unigram_entropy, in nats per token, and memory (see the module's
            docstring).

    Returns:
        The path of the file.
    """
    path = Path(run_dir) / "figures" / "data.json"
    text = json.dumps(load_figure_data(run_dir) | data, indent=1, allow_nan=False)
    with building(path) as (scratch,):
        scratch.write_text(text + "\n")
    return path


def load_figure_data(run_dir: str | Path) -> dict[str, Any]:
    """Returns the data saved by `save_figure_data`, or an empty dict."""
    path = Path(run_dir) / "figures" / "data.json"
    return read_json(path) if path.exists() else {}


def report(run_dir: str | Path, note: Note = print) -> list[Path]:
    """Draws the figures of a run from the files in its folder.

    Args:
        run_dir: run folder.
        note: function that prints a message.

    Returns:
        The paths of the drawn figures.

    Raises:
        FileNotFoundError: if the folder has no metrics.jsonl.
        ValueError: if metrics.jsonl is damaged.
    """
    folder = Path(run_dir)
    source = folder / "metrics.jsonl"
    if not source.exists():
        parents = [path for path in folder.parents if (path / "metrics.jsonl").exists()]
        hint = f"; did you mean {parents[0]}?" if parents else ""
        why = "it has no metrics.jsonl" if folder.exists() else "it does not exist"
        raise FileNotFoundError(f"{folder} is not a run folder: {why}{hint}")
    rows, data = metrics.read(source), load_figure_data(folder)
    loss, memory = folder / "figures" / "loss.svg", folder / "figures" / "memory.svg"
    drawn = []
    if loss_figure(rows, loss, data.get("uniform_entropy"), data.get("unigram_entropy"), note):
        drawn.append(loss)
    if data.get("memory") and memory_figure(data["memory"], memory, note):
        drawn.append(memory)
    return drawn
