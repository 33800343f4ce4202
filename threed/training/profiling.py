"""Profiles steps: torch's profiler, and the peak memory of one step."""

from __future__ import annotations

from contextlib import ExitStack

import torch

from threed.engine import StepMetrics
from threed.planner.memory_estimate import measuring
from threed.training.callback import Callback, Run


class Profile(Callback):
    """Records the range of steps `log.profile_steps` with torch's profiler, in a file per rank."""

    def __init__(self, run: Run) -> None:
        self._steps = run.config.log.profile_steps or (0, 0)
        self._profiler: torch.profiler.profile | None = None

    def before_step(self, run: Run, step: int) -> None:
        first, last = self._steps
        if step == last + 1:
            self.end(run)
        if step == first:
            self._profiler = torch.profiler.profile()
            self._profiler.start()

    def end(self, run: Run) -> None:
        if self._profiler is None:
            return
        self._profiler.stop()
        path = run.folder / "profile" / f"rank-{run.engine.topology.rank}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._profiler.export_chrome_trace(str(path))
        self._profiler = None


class PeakMemory(Callback):
    """Measures the peak bytes of tensors in the second step of this process, or in its only step.

    On a GPU the peak is read from the allocator's statistics. On a CPU every operation is inspected
    instead. Operations inside compiled kernels cannot be inspected, so on a CPU with `run.compile`
    the peak is not measured.

    Attributes:
        step: number of the measured step; 0 if no step was measured.
        nbytes: peak of that step, in bytes; 0 if no step was measured.
    """

    def __init__(self, run: Run) -> None:
        self.step = self.nbytes = 0
        compiled = run.config.run.compile and run.engine.topology.device.type == "cpu"
        self._due = 0 if compiled else min(run.start.step + 2, run.last)
        self._open = ExitStack()

    def before_step(self, run: Run, step: int) -> None:
        if step == self._due:
            engine = run.engine
            around = measuring(engine.layout, engine.optimizer.states, engine.topology.device)
            self._peak = self._open.enter_context(around)

    def after_step(self, run: Run, metrics: StepMetrics, row: dict[str, float]) -> None:
        if metrics.step == self._due:
            run.engine.optimizer.wait()
            self._open.close()
            self.step, self.nbytes = metrics.step, self._peak()
