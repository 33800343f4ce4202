"""The interface of callbacks of the training loop, and the run that they belong to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from threed.config import Config
from threed.data import Data
from threed.engine import LayeredEngine, StepMetrics
from threed.forecast import Forecast
from threed.monitor import Monitor
from threed.reliability.preemption import Stop
from threed.reliability.supervision import Supervision


@dataclass(frozen=True)
class Start:
    """The state that this process begins with: new, or loaded from a checkpoint.

    Attributes:
        step: optimizer steps done.
        samples: sequences consumed by them.
        tokens: tokens consumed by them; sequences may have had another length.
        saved: whether a checkpoint of this step exists on the disk.
        extra: what the checkpoint contains besides the state of the engine; see `elastic.resume`.
    """

    step: int
    samples: int
    tokens: int
    saved: bool
    extra: dict[str, Any]


@dataclass(frozen=True)
class Run:
    """A run on this rank, as callbacks see it.

    Attributes:
        folder: the run folder.
        forecast: of memory and time; None except on rank 0.
        monitor: writes metrics and notes, on rank 0.
        stop: whether the run has been asked to end before its last step.
        last: the last step of this process.
    """

    engine: LayeredEngine
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
        """Prints a line on rank 0, above the progress bar."""
        self.monitor.note(text)

    def beat(self, phase: str, step: int | None = None) -> None:
        """Records progress for the watchdog, which ends a run that makes none."""
        self.supervision.heart.beat(self.engine.steps if step is None else step, phase)

    def hurries(self) -> bool:
        """Returns whether the run is to end soon, and its saves with it. For any thread."""
        return bool(self.stop or self.supervision.asked())

    def is_logged(self, step: int) -> bool:
        """Returns whether the metrics of a step are logged."""
        return step % self.config.log.every == 0 or step in (1, self.last)


class Callback:
    """Extends the training loop.

    Every method is called on every rank, in the order of the list of callbacks, so it may call collectives. It must not
    decide by a value that differs between ranks whether it calls one.

    Example::

        class WeightNorm(threed.training.Callback):
            def after_step(self, run, metrics, row):
                if run.is_logged(metrics.step):
                    row["weights/norm"] = norm_of(run.engine)
    """

    def begin(self, run: Run) -> None:
        """Called before the first step, after a checkpoint has been loaded."""

    def before_step(self, run: Run, step: int) -> None:
        """Called when the batch of a step is there; steps are counted from 1."""

    def after_step(self, run: Run, metrics: StepMetrics, row: dict[str, float]) -> None:
        """Called after the update.

        Args:
            metrics: of the step; reading a value waits for the device.
            row: metrics to log for the step by name; callbacks add to it. A row that stays empty is not logged.
        """

    def end(self, run: Run) -> None:
        """Called after the last step, before the final report; not if a step raised an exception."""
