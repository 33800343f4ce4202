"""The trainer: claims the run folder, resumes, trains an engine on data, writes the final report.

    Trainer(engine, data, command).run()

Every rank runs the same loop. Logging, evaluation, checkpoints and profiles are callbacks around
each step (`threed.training`). Only rank 0 writes metrics, figures and notes.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from threed.checkpoint.files import CheckpointError
from threed.checkpoint.resuming import compare
from threed.checkpoint.retention import Retention, candidates, job_name
from threed.config.arguments import to_toml
from threed.data import Data, Prefetcher
from threed.distributed import collectives
from threed.engine import LayeredEngine, StepMetrics
from threed.interop.huggingface.folder import is_hf_folder
from threed.monitor import Monitor
from threed.planner.forecast import Forecast
from threed.reliability import preemption
from threed.reliability.elastic import Memory, resume
from threed.reliability.ownership import Owner, owned, probe
from threed.reliability.preemption import Preempted, Stop
from threed.reliability.supervision import Supervision
from threed.training import final_report
from threed.training.bad_steps import BadSteps
from threed.training.callback import Callback, Run, Start
from threed.training.checkpoints import Checkpoints
from threed.training.evaluation import Evaluation
from threed.training.profiling import PeakMemory, Profile
from threed.training.provenance import provenance, tags
from threed.training.step_log import StepLog
from threed.zero.setup import describe_rate

# Seconds that a rank has to complete in-memory checkpoints after another rank has failed.
BEFORE_EXIT_S = 5.0


class Trainer:
    """Trains an engine on data as configured.

    Args:
        engine: the engine; its configuration names the run folder and the number of steps.
        data: training and validation data.
        command: words of the command line after torchrun, for the hint on how to resume; by
            default the arguments of this process.
        forecast: memory and time forecast of the run, used on rank 0; computed if None.
        interrupted: event that is set when the user interrupts the run.
        callbacks: additional callbacks. In each step they are called before the step's metrics are
            written, so that they can add metrics.
    """

    def __init__(
        self,
        engine: LayeredEngine,
        data: Data,
        command: Sequence[str] | None = None,
        forecast: Forecast | None = None,
        interrupted: threading.Event | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.engine, self.data = engine, data
        self.command = sys.argv if command is None else command
        self.config, self.topology = engine.config, engine.topology
        self.interrupted, self.callbacks = interrupted, callbacks
        self.world = self.topology.axis("world")
        self.folder = Path(self.config.run.dir or "runs")
        if self.topology.rank != 0:
            forecast = None
        elif forecast is None:
            division = engine.blueprint.pipeline.division
            forecast = Forecast.of(self.config, self.topology.world, division=division)
        self.forecast = forecast

    def run(self) -> None:
        """Trains up to the last step. Collective.

        Raises:
            RunFolderError: if another run uses the folder, or if a rank cannot use it.
            Preempted: if the run was stopped before its last step, after a checkpoint was saved.
        """
        probe(self.folder, self.world)
        with owned(self.folder, self.world, job_name()) as owner:
            preemption.begin(self.folder, job_name(), self.world)
            with Supervision(self.folder, self.topology, self.config, self.interrupted) as watch:
                self._run(owner, watch)

    def _run(self, owner: Owner, supervision: Supervision) -> None:
        checkpoint, train = self.config.checkpoint, self.config.train
        retention = Retention(self.folder, checkpoint.keep, self.world, checkpoint.keep_every)
        if self.topology.rank == 0:
            retention.sweep()
        stop = Stop(self.world, self.topology.device, supervision.asked)
        memory = Memory(self.engine, self.folder)
        start = self._start(resume(self.engine, self.folder, retention, memory))
        last = min(train.steps, train.stop_after or train.steps)
        writes = (
            start.step < last or not start.saved
        )  # otherwise only figures and the export are written
        aside = retention.set_aside(start.extra.get("path"), start.step) if writes else ""
        with self._monitor(start, writes) as monitor:
            run = Run(
                self.engine, self.data, self.folder, self.forecast, monitor, supervision, stop, start,
                last,
            )  # fmt: skip
            loop = Loop(run, retention, memory, owner, self.callbacks)
            self._log_header(run, loop.evaluation.notice, aside)
            supervision.before_exit(lambda: memory.finish(BEFORE_EXIT_S))
            loop.train()
            spans = loop.step_log.spans
            final_report.finish(run, loop.checkpoints, loop.peak, spans, self.command)

    def _start(self, extra: dict[str, Any]) -> Start:
        """Returns the state to start from; `extra` is the result of `elastic.resume`."""
        extra["changes"] = compare(extra.pop("manifest", None), self.config, self.data).accepted()
        step, samples = self.engine.steps, self.engine.consumed
        tokens = int(extra.get("tokens", samples * self.config.model.seq))
        return Start(step, samples, tokens, bool(extra.get("saved")), extra)

    # ---------------------------------------------------------------------------------------------------- beginning

    def _monitor(self, start: Start, writes: bool) -> Monitor:
        """Returns the writer of metrics; rank 0 records the configuration and the environment."""
        log, saved = self.config.log, start.extra.get("wandb")
        record = {**self.config.model_dump(mode="json"), "data_sha256": self.data.sha256}
        if self.forecast is not None:
            record |= provenance(self.topology, self.forecast.parameters)
        return Monitor(
            self.folder, self.config.train.steps, start.step, self.topology.rank == 0, wandb=log.wandb,
            project=log.project, name=self.config.run.name, config=record, drop_later=writes,
            run_id=saved if isinstance(saved, str) else None, tags=tags(self.config, self.topology),
        )  # fmt: skip

    def _log_header(self, run: Run, validation: str, aside: str) -> None:
        """Logs the settings of the run, and writes its configuration to the run folder.

        Args:
            validation: a note on the validation data, or an empty string.
            aside: a message about the checkpoints that were moved aside because the run does not
                continue from them, or an empty string.
        """
        lines = [self.data.notice, f"data       {self.data.description}"]
        lines += [f"validation {validation}" if validation else ""]
        lines += [f"rate       {describe_rate(self.config.optim, self.config.train.steps)}"]
        lines += ["" if self.forecast is None else self.forecast.text(), *self._resumed(run.start)]
        if aside:
            lines.append(f"set aside  {aside}: this run starts at step {run.start.step}")
        lines += [f"changed    {line}" for line in run.start.extra["changes"]]
        if run.start.step >= self.config.train.steps:
            lines.append(
                f"all steps are done ({self.config.train.steps}); a larger --train.steps continues,"
                " --checkpoint.resume none starts over"
            )
        for line in lines:
            if line:
                run.note(line)
        if self.topology.rank == 0:
            toml = f"# data: {self.data.description}\n# sha256 of the data: {self.data.sha256}\n{to_toml(self.config)}"
            (self.folder / "config.toml").write_text(toml)

    def _resumed(self, start: Start) -> list[str]:
        """Returns log lines about the checkpoint that the run was resumed from."""
        lines = [f"skipped a checkpoint: {problem}" for problem in start.extra.get("problems", ())]
        path = start.extra.get("path")
        if "resumed" not in start.extra and path is not None and is_hf_folder(path):
            return [*lines, f"started from the weights of {path}; optimizer moments are zero"]
        source = start.extra.get("resumed", path)
        return lines if source is None else [*lines, f"resumed    {source}"]


class Loop:
    """The loop over the steps of a run, with its callbacks."""

    def __init__(
        self,
        run: Run,
        retention: Retention,
        memory: Memory,
        owner: Owner,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.run, self.engine, self.memory = run, run.engine, memory
        self.bad_steps, self.peak, self.evaluation = (
            BadSteps(run),
            PeakMemory(run),
            Evaluation(run.engine, run.data),
        )
        self.checkpoints = Checkpoints(run, retention, memory, owner, self.bad_steps)
        self.step_log = StepLog(run, self.checkpoints.take_seconds)
        self.callbacks = [
            Profile(run), self.peak, self.step_log, self.bad_steps, *callbacks, self.evaluation,
            WriteRow(), self.checkpoints,
        ]  # fmt: skip

    def train(self) -> None:
        """Trains up to the last step or until a stop request, then saves a checkpoint. Collective.

        Raises:
            Preempted: if the run was stopped before its last step.
        """
        run = self.run
        for callback in self.callbacks:
            callback.begin(run)
        with self.checkpoints.saving(), run.supervision.failing():
            run.stop.now()
            with Prefetcher(self._share_of_batch, self.engine.steps) as batches:
                while self.engine.steps < run.last and not run.stop:
                    self._one_step(batches)
            for callback in self.callbacks:
                callback.end(run)
        stopped = bool(run.stop) and self.engine.steps < run.last
        if self.engine.steps != self.checkpoints.last_saved:
            try:
                self.checkpoints.save()
            except CheckpointError:
                if stopped:
                    self._mark_preempted()
                raise
        self.memory.remove()
        if stopped:
            self._mark_preempted()
            step, reason = self.engine.steps, run.stop.reason
            raise Preempted(f"preempted by {reason} after step {step}, which is saved")

    def _one_step(self, batches: Prefetcher[dict[str, Tensor]]) -> None:
        run, step = self.run, self.engine.steps + 1
        run.beat("data", step)
        self.step_log.before_batch()
        batch = batches.get(step - 1)
        run.beat("step", step)
        for callback in self.callbacks:
            callback.before_step(run, step)
        metrics = self.bad_steps.step(batch)
        run.stop.check()
        row: dict[str, float] = {}
        for callback in self.callbacks:
            callback.after_step(run, metrics, row)

    def _share_of_batch(self, step: int) -> dict[str, Tensor]:
        """Returns this data rank's share of the batch of a step.

        The share depends only on the number of samples consumed before the step. So prefetching and
        resuming give the same batches.
        """
        start, axis = self.run.start, self.engine.topology.axis("dp")
        # The batch size may have been changed on resume, so it applies from the start step on.
        size = self.engine.config.train.global_batch
        share = size // axis.size
        first = start.samples + (step - start.step) * size
        return self.run.data.train.batch(first + axis.index * share, share)

    def _mark_preempted(self) -> None:
        """Records the stop in the run folder before any rank exits. Collective."""
        folder, world = self.run.folder, self.engine.topology.axis("world")
        if world.index == 0:
            newest = next(candidates(folder, "auto"), None)
            reason = self.run.stop.reason
            preemption.mark(folder, self.engine.steps, reason, newest, job_name(), world.size)
        collectives.barrier(world)


class WriteRow(Callback):
    """Writes the metrics of a step to metrics.jsonl and wandb, and advances the progress bar."""

    def after_step(self, run: Run, metrics: StepMetrics, row: dict[str, float]) -> None:
        if row:
            run.monitor.log(metrics.step, row)
        else:
            run.monitor.advance(metrics.step)
