"""Draws the figures of a run: loss.svg (loss, learning rate, gradient norm and throughput over steps),
memory.svg (bytes per rank) and experts.svg (loads of experts).

    save_figure_data(run_dir, uniform_entropy=5.55, unigram_entropy=3.26, memory=ranks)     # once, by rank 0
    report(run_dir)                                                                         # draws all figures with data

`report` reads only metrics.jsonl, experts.jsonl and figures/data.json, so figures can be redrawn long after the
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

import io
import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from threed.core import svg_style as style
from threed.core.atomic import building
from threed.core.disk import in_units
from threed.core.parse import read_json
from threed.monitor import loads, metrics

PARTS = ("parameters", "gradients", "optimizer", "activations", "buffers")

_PART_COLORS = (style.BLUE, style.TEAL, style.GREEN, style.YELLOW, style.ORANGE)
# Panels below the loss: (metric, label with the unit if any, color, format of the tick labels).
_PANELS = (
    ("train/lr", "learning rate", style.GREEN, "{x:g}"),
    ("train/grad_norm", "gradient norm", style.PURPLE, "{x:g}"),
    ("perf/tokens_per_s", "throughput\n(tokens/s)", style.YELLOW, "{x:,.0f}"),
)
_STYLE: dict[Any, Any] = {
    "svg.hashsalt": "threed",  # makes element ids deterministic
    "svg.fonttype": "none",  # keeps text as text, so that files are smaller and searchable
    "font.size": 11,
    "text.color": style.INK,
    "figure.facecolor": style.PAPER,
    "figure.constrained_layout.w_pad": 0.12,  # horizontal padding, in inches
    "figure.constrained_layout.h_pad": 0.1,
    "figure.constrained_layout.hspace": 0,
    "axes.facecolor": style.PAPER,
    "axes.edgecolor": style.FAINT,
    "axes.labelcolor": style.INK,
    "xtick.color": style.FAINT,
    "ytick.color": style.FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": style.RULE,
}
_MOST_BARS = 32  # for more ranks, two bars per rank and a label per rank would not be legible
# The 95th and the 5th percentile of the values (see `_most`) determine the scale of an axis:
_LOG_RATIO = 20  # the axis is logarithmic if the 95th is more than 20 times the 5th percentile
# Beyond each of the two percentiles, an axis extends by at most 3 times their difference.
_MARGIN = 3

Row = Mapping[str, Any]
Note = Callable[[str], None]
Points = Sequence[tuple[int, float]]


def loss_figure(
    rows: Sequence[Row],
    out: str | Path,
    uniform_entropy: float | None = None,
    unigram_entropy: float | None = None,
    note: Note = print,
    title: str = "",
) -> bool:
    """Draws training and validation loss over steps, and below them the learning rate, the
    gradient norm and the throughput.

    The loss is a cross entropy in nats per token if an entropy is given, and has no unit otherwise.
    The vertical axes cover most values. A few values far from the others, such as a spike, may be
    outside of an axis; in this case, a text states the largest of them. An axis is logarithmic if
    most values spread over more than a factor of 20. Crosses mark losses that are not finite, and
    triangles mark skipped steps.

    Args:
        rows: rows of metrics.jsonl. If steps occur twice, the later row is drawn.
        out: file to write.
        uniform_entropy: loss of a uniform distribution over the vocabulary, in nats per token.
        unigram_entropy: loss of predicting every token with its frequency, in nats per token.
        note: function that prints a message.
        title: title of the figure, such as the name of the run.

    Returns:
        Whether the figure was drawn. It is not drawn if matplotlib is not installed, or if no loss
        is finite.
    """
    losses = _series(rows, "train/loss") + _series(rows, "val/loss")
    if not _finite(losses):
        note("loss figure: no loss in metrics.jsonl yet")
        return False
    levels = [("uniform entropy", uniform_entropy), ("unigram entropy", unigram_entropy)]
    lines = [(text, value) for text, value in levels if value is not None]
    panels = [panel for panel in _PANELS if _finite(_series(rows, panel[0]))]

    def draw(figure: Any) -> None:
        heights = [2.6, *(1 for _ in panels)]
        grid = figure.subplots(len(heights), sharex=True, height_ratios=heights, squeeze=False)
        main, *others = grid[:, 0]
        _draw_losses(main, rows, lines)
        for axes, panel in zip(others, panels, strict=True):
            _draw_panel(axes, rows, *panel)
        _draw_steps([main, *others], [step for step, _ in losses])
        figure.align_ylabels()

    return _figure(draw, out, 300 + 115 * len(panels), title or "Loss", note)


def comparison_figure(
    runs: Mapping[str, Sequence[Row]], out: str | Path, note: Note = print
) -> bool:
    """Draws the curves of `loss_figure` for several runs, with a color per run.

    Args:
        runs: rows of metrics.jsonl by name of the run. Validation losses are drawn as dots.
        out: file to write.
        note: function that prints a message.

    Returns:
        Whether the figure was drawn. It is not drawn if matplotlib is not installed, or if no loss
        is finite.
    """
    panels = [("train/loss", "loss", "", "{x:g}"), *_PANELS]
    curves = [[_series(rows, panel[0]) for rows in runs.values()] for panel in panels]
    shown = [n for n, own in enumerate(curves) if _finite([point for one in own for point in one])]
    if 0 not in shown:
        note("comparison figure: no loss in metrics.jsonl yet")
        return False

    def draw(figure: Any) -> None:
        grid = figure.subplots(len(shown), sharex=True, height_ratios=[2.6, *[1] * len(shown[1:])])
        stack = list(grid) if len(shown) > 1 else [grid]
        for axes, number in zip(stack, shown, strict=True):
            for (name, rows), points, color in zip(
                runs.items(), curves[number], itertools.cycle(_PART_COLORS), strict=False
            ):
                _line(axes, points, color=color, label=name)
                if number == 0:
                    _line(axes, _series(rows, "val/loss"), color=color, marker="o", linewidth=0)
            _fit(axes, [point for one in curves[number] for point in one], panels[number][3])
            axes.set_ylabel(panels[number][1])
        _legend(stack[0], 4)
        _draw_steps(stack, [step for one in curves[0] for step, _ in one])
        figure.align_ylabels()

    return _figure(draw, out, 300 + 115 * len(shown[1:]), "Comparison", note)


def _draw_losses(axes: Any, rows: Sequence[Row], lines: Sequence[tuple[str, float]]) -> None:
    train, val = _series(rows, "train/loss"), _series(rows, "val/loss")
    _line(axes, train, color=style.BLUE, label="train")
    _line(axes, val, color=style.ORANGE, label="validation", marker="o", markersize=4)
    _fit(axes, train + val, "{x:g}", [value for _, value in lines])
    _levels(axes, lines)
    _marks(axes, rows, train + val)
    axes.set_ylabel("cross entropy (nats/token)" if lines else "loss")
    _legend(axes, 4)


def _draw_panel(
    axes: Any, rows: Sequence[Row], key: str, label: str, color: str, ticks: str
) -> None:
    points = _series(rows, key)
    _line(axes, points, color=color)
    _fit(axes, points, ticks)
    axes.set_ylabel(label)


def _draw_steps(stack: Sequence[Any], steps: Sequence[int]) -> None:
    """Sets limits and ticks of the horizontal axis that the panels share."""
    room = 0.02 * (max(steps) - min(steps)) or 1
    stack[0].set_xlim(min(steps) - room, max(steps) + room)
    stack[0].locator_params(axis="x", integer=True)
    stack[-1].set_xlabel("step")


def _series(rows: Iterable[Row], key: str) -> list[tuple[int, float]]:
    found = {row["step"]: row[key] for row in rows if row.get(key) is not None and "step" in row}
    return sorted(found.items())


def _finite(points: Points) -> list[float]:
    return [value for _, value in points if math.isfinite(value)]


def _line(axes: Any, points: Points, **look: Any) -> None:
    if points:
        marker = "." if len(points) < 20 else None
        axes.plot(*zip(*points, strict=True), **{"linewidth": 1.3, "marker": marker} | look)


def _fit(axes: Any, points: Points, ticks: str, levels: Iterable[float] = ()) -> None:
    """Sets scale, limits and ticks of a vertical axis for the finite values of points.

    A linear axis may become up to twice as long, so that it contains the horizontal lines `levels`.
    """
    values = sorted(_finite(points))
    logarithmic = values[0] > 0 and _most(values)[1] > _LOG_RATIO * _most(values)[0]
    if logarithmic:
        axes.set_yscale("log")
        low, high = (10**limit for limit in _limits([math.log10(value) for value in values]))
        axes.locator_params(axis="y", subs=(1, 3) if high < 1000 * low else (1,))
        axes.yaxis.set_minor_formatter("")
    else:
        low, high = _limits(values)
        near = [level for level in levels if abs(level - (low + high) / 2) < 1.5 * (high - low)]
        near = [level for level in near if not low < level < high]
        low, high = _limits(sorted([low, high, *near])) if near else (low, high)
        axes.locator_params(axis="y", min_n_ticks=3)
    axes.set_ylim(low, high)
    axes.yaxis.set_major_formatter(ticks)
    axes.grid(axis="y")
    if values[-1] > high:
        step = next(step for step, value in points if value == values[-1])
        text = f"above the axis: up to {values[-1]:.4g} (step {step})"
        place = {"transform": axes.transAxes, "ha": "right", "va": "top"}
        axes.text(0.995, 0.97, text, color=style.FAINT, **place)


def _most(values: Sequence[float]) -> tuple[float, float]:
    """Returns the 5th and 95th percentile of sorted values.

    For fewer than 10 values, returns the smallest and the largest value.
    """
    share = 0.05 * (len(values) - 1) if len(values) >= 10 else 0
    return values[math.ceil(share)], values[-1 - math.ceil(share)]


def _limits(values: Sequence[float]) -> tuple[float, float]:
    """Returns the limits of an axis for sorted values."""
    low, high = _most(values)
    spread = (high - low) or math.inf  # if most values are equal, the limits include all values
    low, high = max(values[0], low - _MARGIN * spread), min(values[-1], high + _MARGIN * spread)
    room = 0.08 * (high - low) or 0.1 * abs(high) or 1.0
    return low - room, high + room


def _levels(axes: Any, lines: Iterable[tuple[str, float]]) -> None:
    """Draws horizontal lines, with their values in the legend.

    A line outside the axis's limits appears only in the legend.
    """
    low, high = axes.get_ylim()
    for (text, value), dashes in zip(lines, ("--", ":"), strict=False):
        where = "" if low <= value <= high else " (above)" if value > high else " (below)"
        look = {"color": style.FAINT, "linewidth": 1.2, "linestyle": dashes}
        axes.plot([], [], label=f"{text} {value:.2f}{where}", **look)
        if not where:
            axes.axhline(value, **look)


def _marks(axes: Any, rows: Sequence[Row], losses: Points) -> None:
    """Marks losses that are not finite, and skipped steps.

    Skipped steps are marked at the next logged step, whose metrics contain the count.
    """
    counts = _series(rows, "train/skipped_steps")
    before = [0, *(count for _, count in counts)]
    more = [(step, count - old) for (step, count), old in zip(counts, before, strict=False)]
    skipped = {step: count for step, count in more if count > 0}
    bad = [step for step, loss in losses if not math.isfinite(loss)]
    for steps, label, marker, y in (
        (bad, f"not finite: {len(bad)}", "x", 0.04),
        ([*skipped], f"skipped steps: {sum(skipped.values())}", "^", 0.1),
    ):
        if steps:
            look = {"linestyle": "none", "marker": marker, "color": style.RED, "label": label}
            across = axes.get_xaxis_transform()
            axes.plot(steps, [y] * len(steps), markersize=5, transform=across, **look)


def _legend(axes: Any, columns: int) -> None:
    place = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0}
    axes.legend(**place, frameon=False, ncols=columns, columnspacing=1.4, handlelength=1.5)


def memory_figure(
    ranks: Sequence[Row], out: str | Path, note: Note = print, title: str = ""
) -> bool:
    """Draws the predicted bytes, stacked by category, and the measured bytes of each rank.

    Predicted and measured bytes count only tensors, not the memory of Python, torch and the
    communication libraries. The text below the axis states the largest number of offloaded bytes on
    a rank.

    Args:
        ranks: one record per rank; see `memory` in the module's docstring.
        out: file to write.
        note: function that prints a message.
        title: title of the figure, such as the name of the run.

    Returns:
        Whether the figure was drawn. It is not drawn if matplotlib is not installed, or if there
        are no records.
    """
    if not ranks:
        note("memory figure: no ranks were recorded")
        return False
    unit, name = _unit(max(max(_predicted(rank), rank["measured"]) for rank in ranks))

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        _stacks(axes, ranks, unit)
        color = _measured(axes, [rank["measured"] / unit for rank in ranks])
        _rank_ticks(axes, ranks)
        axes.set_ylabel(f"{name} per rank")
        away = max(rank["predicted"].get("offloaded", 0) for rank in ranks)
        offloaded = f", without up to {in_units(away)} offloaded\n" if away else "; "
        colors = f"colors: predicted{offloaded}"
        axes.set_xlabel(
            f"{colors}{color}: the peak of live tensors in step {ranks[0]['step']}",
            color=style.FAINT,
        )
        axes.grid(axis="y")
        _legend(axes, 6)

    return _figure(draw, out, 400, title or "Memory", note)


def _stacks(axes: Any, ranks: Sequence[Row], unit: float) -> None:
    bottom = [0.0] * len(ranks)
    left, width = (0.2, 0.36) if len(ranks) <= _MOST_BARS else (0.0, 1.0)
    for part, color in zip(PARTS, _PART_COLORS, strict=True):
        heights = [rank["predicted"].get(part, 0) / unit for rank in ranks]
        if any(heights):
            where = [i - left for i in range(len(ranks))]
            axes.bar(where, heights, width, bottom=bottom, color=color, label=part)
        bottom = [below + height for below, height in zip(bottom, heights, strict=True)]


def _measured(axes: Any, values: Sequence[float]) -> str:
    """Draws measured values as bars, or as a line for many ranks.

    Returns a word that identifies the bars or the line in the label of the horizontal axis.
    """
    if len(values) <= _MOST_BARS:
        where = [i + 0.2 for i in range(len(values))]
        axes.bar(where, values, 0.36, color=style.GRAY, label="measured")
        return "gray"
    where = [i - 0.5 for i in range(len(values) + 1)]
    axes.stairs(values, where, color=style.INK, label="measured", linewidth=1.3, baseline=None)
    return "line"


def _rank_ticks(axes: Any, ranks: Sequence[Row]) -> None:
    every = math.ceil(len(ranks) / _MOST_BARS)
    shown = range(0, len(ranks), every)
    labels = [ranks[i].get("label", "") for i in shown]
    # columns are narrow, so the axes of a label (pp0 dp0 tp1) are written one below the other
    if 6 < len(ranks) <= 16:
        labels = [label.replace(" ", "\n") for label in labels]
    names = [f"rank {ranks[i]['rank']}\n{label}" for i, label in zip(shown, labels, strict=True)]
    size = style.SMALLEST if len(ranks) > 6 else None
    axes.set_xticks(list(shown), names, fontsize=size, rotation=90 if len(ranks) > 16 else 0)
    axes.set_xlim(-0.6, len(ranks) - 0.4)


def _predicted(rank: Row) -> float:
    return float(sum(rank["predicted"].get(part, 0) for part in PARTS))


def _unit(largest: float) -> tuple[float, str]:
    exponent = 3 if largest >= 10 * 2**30 else 2 if largest >= 2 * 2**20 else 1
    return 1024.0**exponent, ("KiB", "MiB", "GiB")[exponent - 1]


def load_figure(rows: Sequence[Row], out: str | Path, note: Note = print, title: str = "") -> bool:
    """Draws the loads of experts as heat maps, with one row per layer that has experts.

    The upper map has the largest load of an expert over the steps, the lower map all experts in the
    last recorded step. A load is a number of tokens, divided by the mean of the layer.

    Args:
        rows: rows of experts.jsonl, see `monitor.loads`.
        out: file to write.
        note: function that prints a message.
        title: title of the figure, such as the name of the run.

    Returns:
        Whether the figure was drawn. It is not drawn if matplotlib is not installed, or if there
        are no rows.
    """
    if not rows:
        note("figure of experts: no loads were recorded")
        return False
    rows = sorted({row["step"]: row for row in rows}.values(), key=lambda row: row["step"])
    layers, last = rows[-1]["layers"], rows[-1]
    rows = [row for row in rows if row["layers"] == layers]
    steps, width = [row["step"] for row in rows], max(map(len, last["loads"]))
    most = [[max(row["loads"][i]) / 100 for row in rows] for i in range(len(layers))]
    now = [[x / 100 for x in each] + [math.nan] * (width - len(each)) for each in last["loads"]]
    # The colors reach up to the 95th percentile of the largest loads, and as far below 1.
    top = 2 ** min(4, max(1, math.ceil(math.log2(_most(sorted(itertools.chain(*most)))[1]))))

    def draw(figure: Any) -> None:
        above, below = figure.subplots(2, 1)
        following = 2 * steps[-1] - steps[-2] if len(steps) > 1 else steps[0] + 1
        _heat(above, most, layers, top, [*steps, following])
        where = "by layer of the model (the embedding is layer 0)"
        above.set_title(f"largest load of an expert, {where}", loc="left", fontsize=11)
        above.set_xlabel("step")
        image = _heat(below, now, layers, top, [at - 0.5 for at in range(width + 1)])
        below.set_title(f"loads in step {last['step']}", loc="left", fontsize=11)
        order = f"experts of a layer, from the smallest to the largest load ({width} quantiles)"
        below.set_xlabel(order if last["sorted"] else "expert")
        marks = [1 / top, 1.0, top]
        bar = figure.colorbar(image, ax=[above, below], ticks=marks, pad=0.02, aspect=40)
        bar.ax.minorticks_off()
        bar.ax.set_yticklabels(
            [f"\N{LESS-THAN OR EQUAL TO} 1/{top}", "1", f"\N{GREATER-THAN OR EQUAL TO} {top}"]
        )
        bar.set_label("tokens of an expert / mean of its layer")
        bar.outline.set_visible(False)

    height = min(24, max(8, len(layers))) * 12
    return _figure(draw, out, 180 + 2 * height, title or "Experts", note)


def _heat(
    axes: Any, values: Sequence[Sequence[float]], layers: Sequence[int], top: float, edges: Sequence[float]
) -> Any:  # fmt: skip
    """Draws a heat map of loads [layers, columns] on a logarithmic scale; returns its image.

    Args:
        axes: where to draw.
        values: loads.
        layers: number of the layer of each row.
        top: the load with the darkest color; 1/top has the darkest color below 1.
        edges: the borders of the columns on the horizontal axis.
    """
    from matplotlib.colors import LinearSegmentedColormap, LogNorm

    colors = [(0.0, style.BLUE), (0.5, style.SURFACE), (0.75, style.ORANGE), (1.0, style.WINE)]
    image = axes.pcolormesh(
        edges, range(len(layers) + 1), [[max(x, 1e-9) for x in row] for row in values],
        cmap=LinearSegmentedColormap.from_list("loads", colors), norm=LogNorm(1 / top, top, clip=True),
        rasterized=True,
    )  # fmt: skip
    shown = range(0, len(layers), math.ceil(len(layers) / 8))
    axes.set_yticks([at + 0.5 for at in shown], [str(layers[at]) for at in shown])
    axes.locator_params(axis="x", integer=True)
    axes.set_ylabel("layer")
    axes.invert_yaxis()
    return image


def _figure(
    draw: Callable[[Any], None], out: str | Path, height: int, title: str, note: Note
) -> bool:
    """Draws and saves a figure, `height` pixels high, without pyplot and its global state.

    Returns False, after a note, if matplotlib is not installed.
    """
    out = Path(out)
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        note(
            f"{out.name} was not drawn: it needs matplotlib. pip install matplotlib, then: threed report RUN"
        )
        return False
    with matplotlib.rc_context(_STYLE):
        # A point (1/72 inch) becomes a pixel of the SVG, because the unit pt is removed below.
        figure = Figure(figsize=(style.WIDTH / 72, height / 72), layout="constrained")
        figure.suptitle(title, x=0.01, ha="left", fontsize=16, weight="bold")
        draw(figure)
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.suffix != ".svg":
            figure.savefig(out, dpi=150)
            return True
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    text = drawn.getvalue().replace('pt"', '"', 2)  # removes the unit pt of width and height
    out.write_text(style.styled(text, title), encoding="utf-8")
    return True


def save_figure_data(run_dir: str | Path, **data: Any) -> Path:
    """Saves figure data that metrics.jsonl does not contain to <run_dir>/figures/data.json.

    Args:
        run_dir: run folder.
        data: JSON values by name. They replace saved values of the same name. `report` reads
            `uniform_entropy` and `unigram_entropy`, in nats per token, and `memory` (see the
            module's docstring).

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


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Returns the rows of a run's metrics.jsonl.

    Raises:
        FileNotFoundError: if the folder has no metrics.jsonl.
        ValueError: if metrics.jsonl is damaged.
    """
    source = folder / "metrics.jsonl"
    if not source.exists():
        runs = [path for path in folder.parents if (path / "metrics.jsonl").exists()][:1]
        runs += sorted(path.parent for path in folder.glob("*/metrics.jsonl"))
        more = ", ..." if len(runs) > 4 else ""
        hint = f"; did you mean {', '.join(map(str, runs[:4]))}{more}?" if runs else ""
        why = "it has no metrics.jsonl" if folder.exists() else "it does not exist"
        raise FileNotFoundError(f"{folder} is not a run folder: {why}{hint}")
    return metrics.read(source)


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
    rows, data = rows_of(folder), load_figure_data(folder)
    loss, memory = folder / "figures" / "loss.svg", folder / "figures" / "memory.svg"
    drawn, name, recorded = [], folder.resolve().name, loads.read(folder)
    entropies = data.get("uniform_entropy"), data.get("unigram_entropy")
    if loss_figure(rows, loss, *entropies, note, name):
        drawn.append(loss)
    if data.get("memory") and memory_figure(data["memory"], memory, note, f"{name}: memory"):
        drawn.append(memory)
    experts = folder / "figures" / "experts.svg"
    if recorded and load_figure(recorded, experts, note, f"{name}: load of experts"):
        drawn.append(experts)
    return drawn
