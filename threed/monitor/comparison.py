"""Compares runs: their curves in one figure, and a table of their results and of the keys that differ.

text, drawn = compare(["runs/a", "runs/b"])     # draws runs/a/figures/comparison.svg
"""

from __future__ import annotations

import statistics
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from threed.monitor.figures import Note, Row, comparison_figure, rows_of

# Results in the table: the label, the metric, and how its values are summarized.
_RESULTS: Sequence[tuple[str, str, Callable[[list[float]], float]]] = (
    ("last train/loss", "train/loss", lambda values: values[-1]),
    ("last val/loss", "val/loss", lambda values: values[-1]),
    ("median tokens/s", "perf/tokens_per_s", statistics.median),
)


def compare(run_dirs: Sequence[str | Path], note: Note = print) -> tuple[str, list[Path]]:
    """Compares runs by the files in their folders.

    Args:
        run_dirs: run folders.
        note: function that prints a message.

    Returns:
        The table; and the path of the figure, in the first folder, if it was drawn.

    Raises:
        FileNotFoundError: if a folder has no metrics.jsonl or no config.toml.
        ValueError: if a file is damaged.
    """
    runs = {str(folder): rows_of(Path(folder)) for folder in run_dirs}
    keys = [_keys_of(Path(folder)) for folder in runs]
    steps = (max((row["step"] for row in rows), default=0) for rows in runs.values())
    table = [["", *runs], ["last step", *map(str, steps)]]
    for label, metric, summary in _RESULTS:
        table.append([label, *(_result(rows, metric, summary) for rows in runs.values())])
    for key in dict.fromkeys(key for own in keys for key in own):
        values = [str(own.get(key, "none")) for own in keys]
        if len(set(values)) > 1:
            table.append([f"--{key}", *values])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in table)
    out = Path(run_dirs[0]) / "figures" / "comparison.svg"
    return "\n".join(lines), [out] if comparison_figure(runs, out, note) else []


def _result(rows: Sequence[Row], metric: str, summary: Callable[[list[float]], float]) -> str:
    values = [row[metric] for row in rows if row.get(metric) is not None]
    return f"{summary(values):.6g}" if values else "none"


def _keys_of(folder: Path) -> Mapping[str, Any]:
    """Returns the values of a run's config.toml, by group.key."""
    groups = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
    return {
        f"{group}.{key}": value for group, keys in groups.items() for key, value in keys.items()
    }
