"""Output of a run on rank 0: metrics.jsonl, wandb, progress and notes.

    with Monitor(run_dir, total_steps=200, start_step=0, main=rank == 0, wandb="auto", config=config) as monitor:
        monitor.log(step, {"train/loss": 2.31, "train/lr": 1e-3})      # metrics.jsonl, wandb and the progress line
        monitor.note("checkpoint saved: runs/demo/checkpoints/step-40")
    figures.report(run_dir)

On other ranks the calls have no effect. The modules `meter` (`perf/` metrics and bytes sent) and
`figures` (loss.svg and memory.svg, on rank 0) compute further output. All values are plain Python
numbers, and the package does not import torch, the engine or the model. A failure to write or to
send is reported once and never stops a run. Rows that cannot be written, for example because the
disk is full, are kept and written later.

This package is internal.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from threed.core.disk import why
from threed.core.messages import counted
from threed.monitor.metrics import MetricsFile, encode
from threed.monitor.progress import Progress
from threed.monitor.wandb_log import WandbRun

__all__: list[str] = []

MOST_KEPT = 100_000  # maximum number of rows to keep while the file cannot be written


class Monitor:
    """Writes the metrics of one run to metrics.jsonl and wandb, and shows its progress.

    Args:
        run_dir: run folder.
        total_steps: number of steps of the run.
        start_step: number of completed steps; 0 for a new run.
        main: whether this rank writes output.
        wandb: mode of wandb: auto, off, offline or online.
        project: wandb project.
        name: name of the run; by default the folder's name.
        config: configuration of the run, for wandb.
        run_id: id of the wandb run to continue, as stored in the checkpoint; None for a new run.
        drop_later: whether to delete the rows of steps after `start_step` from an existing
            metrics.jsonl, because the run will repeat these steps.
        tags: wandb tags of the run, by which runs can be filtered.
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
        """The wandb run id to store in checkpoints, or None."""
        return self._wandb.run_id

    def advance(self, step: int) -> None:
        """Moves the progress bar to a step that is not logged."""
        self._progress.advance(step)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Logs the metrics of a step.

        Args:
            step: number of the step.
            metrics: plain numbers by name, such as `train/loss`.
        """
        self._append({"step": step, **metrics})
        self._wandb.log(step, metrics)
        self._progress.log(step, metrics)

    def note(self, text: str) -> None:
        """Prints a message above the progress bar."""
        self._progress.note(text)

    def close(self, failed: bool = False) -> None:
        """Uploads figures to wandb, ends the wandb run, and closes the file and bar. Idempotent.

        Args:
            failed: whether to mark the wandb run as failed.
        """
        self._wandb.close(figures=self._dir / "figures", failed=failed)
        if self._file is not None:
            self._write()
            if self._unwritten:
                self.note(
                    f"metrics: the last {counted(len(self._unwritten), 'row')} could not be written to {self._file.path}"
                )
                self._unwritten.clear()
            self._file.close()
        self._progress.close()

    def _append(self, row: Mapping[str, Any]) -> None:
        if self._file is not None:
            encode(row)  # raises TypeError for a bad row now, not later when kept rows are written
            self._unwritten.append(dict(row))
            self._write()

    def sync(self) -> None:
        """Flushes the rows to disk. Thread-safe.

        It is called before a checkpoint is published, so that a run that resumes from the
        checkpoint has all earlier rows. Disk errors are ignored, because saving the checkpoint
        reports them.
        """
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.sync()

    def _write(self) -> None:
        """Writes all pending rows. Prints a note at the first failure and after a recovery."""
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
                f"metrics: {self._file.path} is written again, with the {counted(count, 'kept row')}"
            )
        self._write_failed = False

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.close(failed=kind is not None)
