"""The loads of experts over the steps of a run: experts.jsonl in the run folder, written by rank 0.

    loads = LoadFile(run_dir, start_step, note)
    loads.append(step, [1, 2], [[0.9, 1.1], [1.3, 0.7]])     # two layers of two experts
    rows = read(run_dir)                                     # for the figure experts.svg

A row has a step, the numbers of the layers, and for each layer the loads of its experts in percent
of their mean. Of more than 64 experts it has 64 quantiles, from the smallest to the largest load
(`"sorted": true`). A row follows the previous one after so many steps that the file has at most 1 KiB
per step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from threed.core.disk import why
from threed.monitor import metrics

FILE = "experts.jsonl"
COLUMNS = 64  # largest number of loads of a layer in a row
BYTES_PER_STEP = 1024  # of the file, at most


class LoadFile:
    """Writes experts.jsonl. A disk error is reported once, and ends the recording.

    Args:
        folder: run folder.
        start_step: number of completed steps; rows of later steps are deleted.
        note: function that prints a message.
    """

    def __init__(self, folder: Path, start_step: int, note: Callable[[str], None]) -> None:
        self._folder, self._note, self._next = folder, note, 0
        self._file: metrics.MetricsFile | None = None
        try:
            self._file = metrics.MetricsFile(folder / FILE)
            self._file.truncate_after(start_step)
        except OSError as error:
            self._stop(error)

    def append(
        self, step: int, layers: Sequence[int], loads: Sequence[Sequence[float]], last: bool = False
    ) -> None:
        """Records the loads of a step, unless the file would become too large.

        Args:
            step: number of the step.
            layers: numbers of the layers in the model.
            loads: for each layer, the tokens of each expert, divided by their mean.
            last: whether it is the last step of the run, which is always recorded.
        """
        if self._file is None or (step < self._next and not last):
            return
        most = max(map(len, loads))
        rows = [_row(each, min(most, COLUMNS)) if most > COLUMNS else each for each in loads]
        row = {
            "step": step, "sorted": most > COLUMNS, "layers": list(layers),
            "loads": [[round(100 * load) for load in each] for each in rows],
        }  # fmt: skip
        self._next = step + -(-len(metrics.encode(row)) // BYTES_PER_STEP)
        try:
            self._file.append(row)
        except OSError as error:
            self._stop(error)

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()

    def _stop(self, error: OSError) -> None:
        self._note(f"loads of experts are not recorded: {why(error, self._folder)}")
        self.close()
        self._file = None


def _row(loads: Sequence[float], count: int) -> list[float]:
    """Returns `count` of the sorted loads, the smallest and the largest included."""
    found = sorted(loads)
    return [found[round(i * (len(found) - 1) / (count - 1))] for i in range(count)]


def read(folder: str | Path) -> list[dict[str, Any]]:
    """Returns the rows of experts.jsonl; an empty list if there is no such file.

    Raises:
        ValueError: if the file is damaged.
    """
    path = Path(folder) / FILE
    return metrics.read(path) if path.exists() else []
