"""Monitor: all output of a run to its users, through one object on every rank that writes on rank 0 only.

    with Monitor(run_dir, total_steps=200, start_step=0, main=rank == 0, wandb="auto", config=config) as monitor:
        monitor.log(step, {"train/loss": 2.31, "train/lr": 1e-3})      # metrics.jsonl, wandb and the progress line
        monitor.note("checkpoint saved: runs/demo/checkpoints/step-40")
    figures.report(run_dir)

On other ranks the same calls do nothing. The package also has, for every rank: `Throughput`
(perf/ metrics), `process` (die with the launcher, peak memory) and, for rank 0, `figures` (loss.svg, memory.svg).
Values are plain Python numbers: nothing here imports torch, the engine or the model. A failure to write or to send is
reported once and never stops a run; rows that a full disk does not take are kept, and written when it does.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from threed.disk import why
from threed.monitor.meter import Throughput, Traffic
from threed.monitor.metrics import MetricsFile, encode
from threed.monitor.progress import Progress
from threed.monitor.wandb_log import WandbRun

__all__ = ["MetricsFile", "Monitor", "Progress", "Throughput", "Traffic", "WandbRun"]

MOST_KEPT = 100_000  # rows that wait for a disk


class Monitor:
    """metrics.jsonl, wandb and progress of one run; with `drop_later` the metrics after `start_step` are dropped first.

    `wandb` is auto, off, offline or online; `name` defaults to the folder's name; `run_id` is the wandb run to go on
    with, from the checkpoint; `tags` are words to filter wandb's runs by. `start_step` is the number of steps already
    done: 0 for a new run, which therefore clears an old metrics.jsonl.
    """

    def __init__(
        self,
        run_dir: str | Path,
        total_steps: int,
        start_step: int,
        main: bool,
        *,
        wandb: str = "auto",
        project: str = "threed",
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
        run_id: str | None = None,
        drop_later: bool = True,
        tags: Sequence[str] = (),
    ) -> None:
        self._dir = Path(run_dir)
        self._write_failed = False
        self._unwritten: deque[dict[str, Any]] = deque(maxlen=MOST_KEPT)
        self._file = MetricsFile(self._dir / "metrics.jsonl") if main else None
        if self._file is not None and drop_later:
            self._file.truncate_after(start_step)
        label = name or self._dir.resolve().name
        mode = wandb if main else "off"
        self._progress = Progress(total_steps, start_step, enabled=main)
        self._wandb = WandbRun(
            mode, project, label, self._dir, config or {}, run_id, self.note, tags
        )

    @property
    def run_id(self) -> str | None:
        """The wandb run id to keep in checkpoints; None if there was never one."""
        return self._wandb.run_id

    def advance(self, step: int) -> None:
        """Moves the progress bar; for the steps between two logged ones."""
        self._progress.advance(step)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Records one step's metrics, with keys such as `train/loss`; values are plain numbers."""
        self._append({"step": step, **metrics})
        self._wandb.log(step, metrics)
        self._progress.log(step, metrics)

    def note(self, text: str) -> None:
        """Prints a line for people, above the bar."""
        self._progress.note(text)

    def close(self, failed: bool = False) -> None:
        """Uploads figures, if drawn by now, end the wandb run, close the file and the bar; closing twice is allowed."""
        self._wandb.close(figures=self._dir / "figures", failed=failed)
        if self._file is not None:
            self._write()
            if self._unwritten:
                self.note(
                    f"metrics: the last {len(self._unwritten)} rows could not be written to {self._file.path}"
                )
                self._unwritten.clear()
            self._file.close()
        self._progress.close()

    def _append(self, row: Mapping[str, Any]) -> None:
        if self._file is not None:
            encode(row)  # TypeError for what JSON cannot hold, which must not wait with the others
            self._unwritten.append(dict(row))
            self._write()

    def sync(self) -> None:
        """Has the rows on the disk before a checkpoint is, in any thread: a run that resumes from one has those before
        it. A disk that fails will fail the checkpoint."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.sync()

    def _write(self) -> None:
        """Writes the rows that wait, the newest among them; says it when that begins to fail, and when it works
        again."""
        if self._file is None or not self._unwritten:
            return
        count = len(self._unwritten)
        try:
            self._file.append(*self._unwritten)
        except OSError as error:
            if not self._write_failed:
                text = why(error, self._dir)
                self.note(
                    f"metrics: {self._file.path} cannot be written: {text}; rows are kept, and training goes on"
                )
            self._write_failed = True
            return
        self._unwritten.clear()
        if self._write_failed:
            self.note(
                f"metrics: {self._file.path} is written again, with the {count} rows that were kept"
            )
        self._write_failed = False

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.close(failed=kind is not None)
