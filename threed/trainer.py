"""The trainer: claims the run folder, resumes, trains an engine on data, writes the final report.

    Trainer(engine, data).run()
    Trainer.from_command_line(MyModel).run()        # its flags are the configuration keys

Every rank runs the same loop. Logging, evaluation, checkpoints and profiles are callbacks around
each step (`threed.training`). Only rank 0 writes metrics, figures and notes.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from threed.checkpoint.files import CheckpointError
from threed.checkpoint.resuming import changes
from threed.checkpoint.run_folder import Retention, candidates, refusals
from threed.config import Config, ConfigError
from threed.config.arguments import format_problems, to_toml
from threed.config.checks import find_problems
from threed.config.program import program_config
from threed.config.resolution import resolve
from threed.core import process
from threed.core.source import is_foreign, name_of, names_model
from threed.data import Data, open_data
from threed.data.prefetch import Prefetcher
from threed.distributed import collectives
from threed.distributed.launcher import world_size
from threed.distributed.topology import TIMEOUT, Topology
from threed.engine import Engine, StepMetrics
from threed.interop.huggingface.folder import is_hf_folder
from threed.layers import Slicing
from threed.models import Decoder, Wrapped
from threed.models.custom import build
from threed.monitor import Monitor
from threed.planner.forecast import Forecast
from threed.reliability import preemption
from threed.reliability.elastic import Memory, resume
from threed.reliability.failure import refuse
from threed.reliability.ownership import Owner, owned, probe
from threed.reliability.preemption import Preempted, Stop
from threed.reliability.supervision import Supervision
from threed.training import final_report
from threed.training.bad_steps import BadSteps
from threed.training.callback import Callback, Run, Start
from threed.training.checkpoints import Checkpoints
from threed.training.evaluation import Evaluation
from threed.training.expert_log import ExpertLog
from threed.training.multi_token_log import MultiTokenLog
from threed.training.profiling import PeakMemory, Profile
from threed.training.provenance import provenance, tags
from threed.training.step_log import StepLog
from threed.zero.rates import describe_rate

# After another rank has failed, a rank waits at most this many seconds for its in-memory checkpoint
# to complete, and then exits.
BEFORE_EXIT_S = 5.0
# Process groups time out this many seconds later than the watchdog, so that the watchdog can report
# a hang first.
GRACE_S = 60


class Trainer:
    """Trains a model on text, with run folder, metrics, evaluation, checkpoints and final report.

    For a custom model, one of the two class methods below creates the trainer, from a command line
    or from a configuration. Each of them also opens the data, and builds topology, model and
    engine. The model is a class or function as for `threed train FILE.py:MODEL`
    (docs/guide/own_models.md):

        trainer = threed.Trainer.from_command_line(MyModel)             # reads the flags
        trainer = threed.Trainer.from_config(config, MyModel)
        trainer.run()

    `run` resumes from the newest checkpoint in the run folder, trains up to `train.steps`, and, as
    configured, writes metrics (to metrics.jsonl and wandb), checkpoints, figures and the final
    report.

    Args:
        engine: the engine; its configuration names the run folder and the number of steps.
        data: training and validation data, such as `threed.data.open_data` returns.
        command: words of the command line after torchrun, for the hint on how to resume; by
            default `sys.argv`.
        forecast: memory and time forecast of the run, used on rank 0. By default, rank 0 computes
            it for the model in the engine's configuration.
        interrupted: event that is set when the user interrupts the run.
        callbacks: additional callbacks (`threed.training.Callback`). In each step they are called
            before the step's metrics are written, so that they can add metrics.

    Attributes:
        engine: the engine that trains the model.
        data: training and validation data.
        config: the resolved configuration of the engine.
        topology: the ranks of the engine.
        folder: the run folder.

    Raises:
        ConfigError: if the engine's configuration names another model than the engine has.
    """

    def __init__(
        self,
        engine: Engine,
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
        _check_model(engine)
        if self.topology.rank != 0:
            forecast = None
        elif forecast is None:
            division = engine.blueprint.pipeline.division
            forecast = Forecast.of(self.config, self.topology.world, division=division)
        self.forecast = forecast

    @classmethod
    def from_config(
        cls, config: Config, model: Callable[..., Any] | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> Trainer:  # fmt: skip
        """Opens the data, and builds topology, model and engine of a configuration. Collective.

        Args:
            config: the configuration; derived keys may be missing.
            model: class or function at the top level of a file. It is called as
                `model(config, slicing)`, `model(config)` or `model()`, with a `ModelConfig` and a
                `Slicing`. By default, the model of `config.model.arch` is built.
            callbacks: additional callbacks.

        Returns:
            The trainer.

        Raises:
            ConfigError: if the configuration is invalid, the data cannot be read, or no forecast of
                the model can be made.

        Example:

            config = threed.Config(train={"steps": 100}, data={"path": "text.txt"})
            threed.Trainer.from_config(config, MyModel).run()
        """
        world = world_size()
        if model is not None:
            try:
                arch = {"arch": name_of(model)}
            except ValueError as error:
                raise ConfigError([str(error)]) from None
            config = config.model_copy(update={"model": config.model.model_copy(update=arch)})
        if problems := find_problems(config, world):
            raise ConfigError(problems)
        data = open_configured(config)
        engine = start_engine(resolve(config, data.vocab, world))
        try:
            return cls(engine, data, callbacks=callbacks)
        except ValueError as error:
            if isinstance(error, ConfigError) or is_foreign(error, Path(__file__).parent):
                raise
            # computing the model's forecast failed
            raise ConfigError([str(error)]) from None

    @classmethod
    def from_command_line(
        cls, model: Callable[..., Any] | None = None,
        defaults: Mapping[str, Mapping[str, Any]] = MappingProxyType({}), *,
        about: str | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> Trainer:  # fmt: skip
        """Creates a trainer from the flags of this program. Collective.

        The program accepts every configuration key as a flag, as `threed train` does, and
        `--config`. It has no presets and no dry run. With `--help` it prints `about` and all flags,
        and exits with code 0. If flags, data or model are invalid, it prints all problems once per
        machine, and exits with code 2.

        Args:
            model: class or function that builds the model, see `from_config`.
            defaults: defaults of this program, {group: {key: value}}. Flags override them.
            about: description of the program for `--help`.
            callbacks: additional callbacks.

        Returns:
            The trainer.

        Raises:
            SystemExit: after `--help`, or if flags, data or model are invalid.

        Example:

            if __name__ == "__main__":
                threed.Trainer.from_command_line(MyModel, {"model": {"layers": 4}}).run()
        """
        groups = {group: dict(keys) for group, keys in defaults.items()}
        try:
            if model is not None:
                groups.setdefault("model", {})["arch"] = name_of(model)
            config = program_config(
                sys.argv[1:],
                prog=sys.argv[0],
                about=about or "",
                defaults=groups,
                world_size=world_size(),
            )
            return cls.from_config(config, model, callbacks)
        except ConfigError as error:
            raise SystemExit(refuse(format_problems(error.problems))) from None

    def run(self) -> None:
        """Trains up to the last step. Collective.

        Raises:
            RunFolderError: if another run uses the folder, or if a rank cannot use it.
            Preempted: if the run was stopped before its last step, after a checkpoint was saved.
        """
        probe(self.folder, self.world)
        with owned(self.folder, self.world, process.job_name()) as owner:
            preemption.begin(self.folder, process.job_name(), self.world)
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
        # If False, all steps are done, and only figures and export are written.
        writes = start.step < last or not start.saved
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
        """Returns the step and the counters from which the run starts.

        Args:
            extra: result of `elastic.resume`. Its key `manifest` is replaced by `changes`: lines
                about changed configuration keys.

        Raises:
            CheckpointError: if the run may not resume from the checkpoint.
        """
        manifest, extra["changes"] = extra.pop("manifest", None), []
        if manifest is not None:
            if refused := refusals(manifest, self.config, self.data):
                raise CheckpointError("; ".join(refused))
            extra["changes"] = changes(manifest, self.config, self.data)
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
            run: the run: its engine, data, folder and other objects.
            validation: a note on the validation data, or an empty string.
            aside: names and new folder of the checkpoints that were moved away because the run does
                not continue from them (`Retention.set_aside`), or an empty string.
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


def open_configured(config: Config) -> Data:
    """Opens the data of a configuration.

    Raises:
        ConfigError: if the data cannot be read.
    """
    d = config.data
    try:
        return open_data(
            d.path, d.tokenizer, d.split, config.model.seq, config.train.seed,
            bos=d.bos, special_tokens=d.special_tokens, packing=d.packing,
        )  # fmt: skip
    except (ValueError, OSError) as error:
        raise ConfigError([str(error)]) from None


def start_engine(config: Config) -> Engine:
    """Creates the process groups, model and engine of a resolved configuration. Collective.

    If the model is a plain `nn.Module`, this function also seeds torch's random generator, with a
    different seed on each rank.
    """
    p, watched = config.parallel, timedelta(seconds=config.run.hang_timeout + GRACE_S)
    # The timeout is at least TIMEOUT, because the watchdog is not active while a run loads a
    # checkpoint or ends.
    topology = Topology(pp=p.pp, tp=p.tp, cp=p.cp, dp=p.dp, timeout=max(TIMEOUT, watched))
    engine = Engine(build(config.model, Slicing.of(topology, config)), topology, config)
    if engine.wraps_module:
        # The module's dropout uses torch's generator, and dropout masks must differ between ranks.
        torch.manual_seed(config.train.seed + topology.rank)
    return engine


def _check_model(engine: Engine) -> None:
    """Raises ConfigError if an engine has a custom model that its configuration does not name."""
    arch, model = engine.config.model.arch, engine.model
    if not names_model(arch) and not isinstance(model, Decoder):
        fix = "create the trainer by Trainer.from_config(config, MODEL)"
        name = type(model.module if isinstance(model, Wrapped) else model).__name__
        raise ConfigError([f"the model is a {name}, but model.arch is {arch}: {fix}"])


class Loop:
    """Runs the steps of a run, and calls callbacks before and after each step."""

    def __init__(
        self,
        run: Run,
        retention: Retention,
        memory: Memory,
        owner: Owner,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.run, self.engine, self.memory = run, run.engine, memory
        self.bad_steps = BadSteps(run)
        self.peak = PeakMemory(run)
        self.evaluation = Evaluation(run.engine, run.data)
        self.checkpoints = Checkpoints(run, retention, memory, owner, self.bad_steps)
        self.step_log = StepLog(run, self.checkpoints.take_seconds)
        self.callbacks = [
            Profile(run), self.peak, self.step_log, ExpertLog(run.engine.blueprint),
            MultiTokenLog(run.engine.blueprint), self.bad_steps, *callbacks, self.evaluation, WriteRow(), self.checkpoints,
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
        resuming do not change the batches.
        """
        start, axis = self.run.start, self.engine.topology.axis("dp")
        # The batch size may have changed when the run was resumed. So the samples before the start
        # step are counted by `start.samples`, and only the samples after it by the current size.
        size = self.engine.config.train.global_batch
        share = size // axis.size
        first = start.samples + (step - start.step) * size
        return self.run.data.train.batch(first + axis.index * share, share)

    def _mark_preempted(self) -> None:
        """Records the preemption in the run folder before any rank exits. Collective."""
        folder, world = self.run.folder, self.engine.topology.axis("world")
        if world.index == 0:
            newest = next(candidates(folder, "auto"), None)
            reason = self.run.stop.reason
            preemption.mark(
                folder, self.engine.steps, reason, newest, process.job_name(), world.size
            )
        collectives.barrier(world)


class WriteRow(Callback):
    """Callback that writes a step's metrics to metrics.jsonl and wandb.

    On steps without metrics it only advances the progress bar.
    """

    def after_step(self, run: Run, metrics: StepMetrics, row: dict[str, float]) -> None:
        if row:
            run.monitor.log(metrics.step, row)
        else:
            run.monitor.advance(metrics.step)
