"""The base class of callbacks of the training loop, and the objects of a run that they use."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from threed.config import Config
from threed.data import Data
from threed.engine import Engine, StepMetrics
from threed.monitor import Monitor
from threed.planner.forecast import Forecast
from threed.reliability.preemption import Stop
from threed.reliability.supervision import Supervision


@dataclass(frozen=True)
class Start:
    """The state in which this process starts training: new, or loaded from a checkpoint.

    Attributes:
        step: number of completed optimizer steps.
        samples: number of sequences consumed by these steps.
        tokens: number of tokens consumed by these steps. It is not always `samples` times
            `model.seq`, because an earlier run may have had a different sequence length.
        saved: whether a checkpoint of this step exists on disk.
        extra: entries of the checkpoint other than the engine's state; see `elastic.resume`.
    """

    step: int
    samples: int
    tokens: int
    saved: bool
    extra: dict[str, Any]


@dataclass(frozen=True)
class Run:
    """The objects of a run on this rank, for callbacks.

    Attributes:
        engine: the engine with model and optimizer.
        data: training and validation data.
        folder: run folder.
        forecast: forecast of memory and time; None except on rank 0.
        monitor: output of metrics and notes on rank 0.
        supervision: watchdog and signals of this rank.
        stop: request to end the run before its last step.
        start: state in which this process started training.
        last: number of the last step of this process.
    """

    engine: Engine
    data: Data
    folder: Path
    forecast: Forecast | None
    monitor: Monitor
    supervision: Supervision
    stop: Stop
    start: Start
    last: int

    @property
    def config(self) -> Config:
        """The resolved configuration."""
        return self.engine.config

    @property
    def tokens(self) -> int:
        """The number of tokens of all steps so far."""
        samples = self.engine.consumed - self.start.samples
        return self.start.tokens + samples * self.config.model.seq

    def note(self, text: str) -> None:
        """Prints the line `text` on rank 0, above the progress bar."""
        self.monitor.note(text)

    def beat(self, phase: str, step: int | None = None) -> None:
        """Records progress for the watchdog, which ends the run if a rank makes no progress.

        Args:
            phase: name of the current phase.
            step: current step; by default the number of completed steps.
        """
        self.supervision.heart.beat(self.engine.steps if step is None else step, phase)

    def hurries(self) -> bool:
        """Returns whether the run must end soon. Thread-safe.

        If so, saves do not limit their speed to `checkpoint.write-limit-mib`, so that they finish
        early.
        """
        return bool(self.stop or self.supervision.asked())

    def is_logged(self, step: int) -> bool:
        """Returns whether a step is logged: every `log.every` steps, the first and the last."""
        return step % self.config.log.every == 0 or step in (1, self.last)


class Callback:
    """Base class of extensions of the training loop.

    Every method is called on every rank, in the order of the list of callbacks, so it may call
    collectives. Whether it calls a collective must not depend on a value that differs between
    ranks: otherwise the run hangs.

    Example:

        class WeightNorm(threed.training.Callback):
            def after_step(self, run, metrics, row):
                if run.is_logged(metrics.step):
                    row["weights/norm"] = norm_of(run.engine)
    """

    def begin(self, run: Run) -> None:
        """Called before the first step, after a checkpoint has been loaded.

        Args:
            run: the run: its engine, data, folder and other objects.
        """

    def before_step(self, run: Run, step: int) -> None:
        """Called after the batch of a step has been fetched.

        Args:
            run: the run: its engine, data, folder and other objects.
            step: number of the step, counted from 1.
        """

    def after_step(self, run: Run, metrics: StepMetrics, row: dict[str, float]) -> None:
        """Called after the update.

        Args:
            run: the run: its engine, data, folder and other objects.
            metrics: metrics of the step; reading a value waits for the device.
            row: metrics to log for the step, by name. Callbacks add to it. An empty row is not
                logged.
        """

    def end(self, run: Run) -> None:
        """Called after the last step, before the final report. Not called if a step raised.

        Args:
            run: the run: its engine, data, folder and other objects.
        """
