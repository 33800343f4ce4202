"""The loop: batches in, steps, validation, checkpoints, and at the end pictures, an export and a few lines of text.

    Trainer(engine, data, command).run()

Phases of a run: resume -> steps (log, evaluate, save on their intervals) -> the end. Every rank walks the same loop;
only rank 0 writes what people read.
"""

from __future__ import annotations

import os
import shlex
import threading
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from threed import collectives, final_report, preemption
from threed.arguments import to_toml
from threed.bad_numbers import Guard
from threed.batches import Batch
from threed.checkpoint.files import CheckpointError
from threed.checkpoint.resuming import compare, resuming_flags
from threed.checkpoint.retention import Retention, candidates, job_name
from threed.checkpoint.run_folder import owned, probe
from threed.clocks import on_one_clock
from threed.data import Data, Prefetcher
from threed.device import name as device_name
from threed.device import peak_bytes
from threed.elastic import Memory, resume
from threed.engine import Engine, StepMetrics
from threed.footprint import measuring
from threed.forecast import Forecast
from threed.interop.huggingface.folder import is_hf_folder
from threed.monitor import Monitor, Throughput, Traffic, process
from threed.preemption import Preempted, Stop
from threed.provenance import provenance, tags
from threed.saves import Saves
from threed.schedules import Action, idle_shares
from threed.supervision import Supervision
from threed.validation import Validation
from threed.zero.setup import describe_rate

GIB = 2**30
BEFORE_EXIT_S = 5.0  # for copies in memory that are written when another rank has failed


class Trainer:
    """Trains an engine on data as its configuration says.

    command: the command line, for the hint how to resume. forecast: by default rank 0 makes it; others need none.
    interrupted: set when Ctrl-C has ended the run.
    """

    def __init__(
        self, engine: Engine, data: Data, command: list[str], forecast: Forecast | None = None,
        interrupted: threading.Event | None = None,
    ) -> None:  # fmt: skip
        self.interrupted = interrupted
        self.engine, self.data, self.command = engine, data, command
        self.config, self.topology = engine.config, engine.topology
        self.validation = Validation(engine, data)
        self.world = self.topology.axis("world")
        self.main = self.topology.rank == 0
        self.folder = Path(self.config.run.dir or "runs")
        self.forecast = (forecast or self._forecast()) if self.main else None
        asked = self.config.checkpoint
        self.retention = Retention(self.folder, asked.keep, self.world, asked.keep_every)
        self.saves = Saves(
            engine,
            self.retention,
            lambda text: self.monitor.note(text),
            lambda: self.monitor.sync(),
        )
        self.saving_s = 0.0
        self.spans: list[Any] = []
        self.traffic = Traffic()
        self.peak = self.weighed = 0  # the most bytes of tensors in a step, and which step that was
        self.profiler: torch.profiler.profile | None = None

    def _forecast(self) -> Forecast:
        return Forecast.of(
            self.config, self.topology.world, division=self.engine.blueprint.division
        )

    def run(self) -> None:
        """The whole run. RunFolderError where another run has the folder, or some rank cannot use it; Preempted where
        it was asked to end before its last step."""
        probe(self.folder, self.world)
        with owned(self.folder, self.world, job_name()) as self.owner:
            preemption.begin(self.folder, job_name(), self.world)
            if self.main:
                self.retention.sweep()
            with Supervision(
                self.folder, self.topology, self.config, self.interrupted
            ) as supervision:
                self.supervision = supervision
                self.heartbeat, self.watchdog = supervision.heart, supervision.watchdog
                self.stop = Stop(self.world, self.topology.device, supervision.asked)
                self.engine.saver.hurries = lambda: bool(self.stop or supervision.asked())
                self._run()

    def _run(self) -> None:
        self.memory = Memory(self.engine, self.folder, lambda text: self.monitor.note(text))
        extra = resume(self.engine, self.folder, self.retention, self.memory)
        self.changes = compare(extra.pop("manifest", None), self.config, self.data).accepted()
        if extra.get("saved"):
            self.saves.last_saved = self.engine.steps
        self.begun_step, self.begun_samples = self.engine.steps, self.engine.consumed
        self.begun_tokens = extra.get("tokens", self.begun_samples * self.config.model.seq)
        train = self.config.train
        self.last = last = min(train.steps, train.stop_after or train.steps)
        steps = self.engine.steps
        writes = (
            steps < last or steps != self.saves.last_saved
        )  # else it only looks at what is there
        aside = self.retention.set_aside(extra.get("path"), self.engine.steps) if writes else ""
        with self._monitor(extra, writes) as self.monitor:
            self.guard = Guard(self.engine, self.monitor.note)
            self._log_header(aside)
            self.memory.begin()
            self.supervision.before_exit = lambda: self.memory.finish(BEFORE_EXIT_S)
            with self.engine.saver.ending(), self.memory.ending(), self.supervision.failing():
                self._loop(last)
                if self.profiler is not None:
                    self._end_profile(self.profiler)
                self.heartbeat.beat(self.engine.steps, "save")
                self.saves.end()
            if self.engine.steps != self.saves.last_saved:
                self._save_at_the_end()
            self.memory.remove()
            if self.stop and self.engine.steps < last:
                self._preempted()
            self._end()

    def _loop(self, last: int) -> None:
        self.stop.now()
        with Prefetcher(self._fetch, self.engine.steps) as batches:
            while self.engine.steps < last and not self.stop:
                self._one_step(batches)

    def _save_at_the_end(self) -> None:
        """The last save; where it fails in a run that was asked to end, the run is marked all the same."""
        try:
            self._save()
        except CheckpointError:
            if self.stop and self.engine.steps < self.last:
                self._mark()
            raise

    def _preempted(self) -> None:
        """Leaves word in the run folder that the run was asked to end; raises Preempted."""
        self._mark()
        raise Preempted(
            f"preempted by {self.stop.reason} after step {self.engine.steps}, which is saved"
        )

    def _mark(self) -> None:
        """Writes that the run was asked to end, before any rank leaves."""
        if self.main:
            newest = next(candidates(self.folder, "auto"), None)
            preemption.mark(
                self.folder,
                self.engine.steps,
                self.stop.reason,
                newest,
                job_name(),
                self.world.size,
            )
        collectives.barrier(self.world)

    # ---------------------------------------------------------------------------------------------------- beginning

    def _monitor(self, extra: dict[str, Any], writes: bool) -> Monitor:
        log, saved = self.config.log, extra.get("wandb")
        run_id = saved if isinstance(saved, str) else None
        self.extra = extra
        return Monitor(
            self.folder, self.config.train.steps, self.engine.steps, self.main, wandb=log.wandb, project=log.project,
            name=self.config.run.name, run_id=run_id, drop_later=writes,
            config={**self.config.model_dump(mode="json"), "data_sha256": self.data.sha256, **self._provenance()},
            tags=tags(self.config, self.topology),
        )  # fmt: skip

    def _provenance(self) -> dict[str, Any]:
        return {} if self.forecast is None else provenance(self.topology, self.forecast.parameters)

    def _log_header(self, aside: str) -> None:
        """Says what is about to happen, and keeps the configuration; `aside`: the checkpoints that were set aside."""
        device = self.topology.device
        self.meter = Throughput(
            0.0 if self.forecast is None else self.forecast.flops_per_token, self.topology.world,
            device_name(device), self.config.precision.dtype,
        )  # fmt: skip
        note = self.monitor.note
        text = "" if self.forecast is None else self.forecast.text()
        rate = f"rate       {describe_rate(self.config.optim, self.config.train.steps)}"
        few = self.validation.notice and f"validation {self.validation.notice}"
        for line in (self.data.notice, f"data       {self.data.description}", few, rate, text):
            if line:
                note(line)
        for problem in self.extra.get("problems", ()):
            note(f"skipped a checkpoint: {problem}")
        if "resumed" in self.extra:
            note(f"resumed    {self.extra['resumed']}")
        elif "path" in self.extra:
            begun = is_hf_folder(self.extra["path"])
            note(
                f"{'begun from' if begun else 'resumed   '} {self.extra['path']}{', with moments of zero' * begun}"
            )
        if aside:
            note(f"set aside  {aside}: this run starts at step {self.engine.steps}")
        for line in self.changes:
            note(f"changed    {line}")
        if self.engine.steps >= self.config.train.steps:
            note(
                f"all {self.config.train.steps} steps are done; --train.steps trains on, --checkpoint.resume none anew"
            )
        if self.main:
            toml = f"# data: {self.data.description}\n# sha256 of the data: {self.data.sha256}\n{to_toml(self.config)}"
            (self.folder / "config.toml").write_text(toml)

    # -------------------------------------------------------------------------------------------------------- steps

    def _fetch(self, step: int) -> dict[str, torch.Tensor]:
        """This data rank's share of a step's batch: a pure function of the samples consumed before it."""
        size, axis = self.config.train.global_batch, self.topology.axis("dp")
        share = size // axis.size
        first = (
            self.begun_samples + (step - self.begun_step) * size
        )  # the batch may have been another before a resume
        return self.data.train.batch(first + axis.index * share, share)

    def _one_step(self, batches: Prefetcher[dict[str, torch.Tensor]]) -> None:
        step, begin = self.engine.steps + 1, time.perf_counter()
        logged = step % self.config.log.every == 0 or step in (1, self.last)
        self.heartbeat.beat(step, "data")
        batch = batches.get(step - 1)
        data_s = time.perf_counter() - begin
        self.heartbeat.beat(step, "step")
        if logged:
            self.engine.record()
        self._profile(step)
        self.topology.traffic.clear()  # only steps count: not the start, evaluation and saves
        metrics = self._step(step, batch)
        loss = (
            metrics.loss if logged else None
        )  # reading it waits for the device, so only where it is told
        self.traffic.add(self.topology.traffic)
        # Saving counts with the step after it: a checkpoint is written once the step's line is, or a crash between
        # the two would lose the line for good.
        spent = time.perf_counter() - begin + self.saving_s
        self.meter.add(
            metrics.tokens, spent, data_s=data_s, ckpt_s=self.saving_s, **metrics.seconds
        )
        row = self._row(metrics, loss) if loss is not None else {}
        self.guard.compare()
        self.stop.check()
        row.update(self._evaluate_if_due(step))
        if row:
            self.monitor.log(step, row)
        else:
            self.monitor.advance(step)
        self.saving_s = self._save_if_due(step)

    def _step(self, step: int, batch: Batch) -> StepMetrics:
        """A step; the second one, or the only one, is looked at for the memory it takes."""
        device = self.topology.device
        hidden = (
            self.config.run.compile and device.type == "cpu"
        )  # kernels of a compiler are no operations to look at
        if hidden or step != min(self.begun_step + 2, self.last):
            return self.guard.step(batch)
        engine, self.weighed = self.engine, step
        with measuring(engine.layout, engine.optimizer.states, device) as peak:
            metrics = self.guard.step(batch)
            engine.optimizer.settle()
        self.peak = peak()
        return metrics

    def _row(self, metrics: StepMetrics, loss: float) -> dict[str, float]:
        """Everything that is logged of a step. Collective: traffic and memory come from all ranks."""
        self.guard.tell(metrics)
        self.spans = self._all_spans()
        mine = {
            "traffic": self.traffic.take(),
            "rss": process.peak_rss_bytes(),
            "alloc": peak_bytes(self.topology.device),
        }
        everyone = collectives.exchange({**mine, "asked": self.stop.asked()}, self.world)
        self.stop.take([rank["asked"] for rank in everyone])
        row: dict[str, float] = {
            "train/loss": loss,
            "train/lr": metrics.lr,
            "train/grad_norm": metrics.grad_norm,
            "train/tokens": self._tokens(),
            "train/skipped_steps": metrics.skipped,
            "train/loss_scale": metrics.loss_scale,
            **self.meter.take(),
            "mem/peak_rss_gib": max(rank["rss"] for rank in everyone) / GIB,
            "run/restarts": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        }
        if self.topology.device.type == "cuda":
            row["mem/peak_alloc_gib"] = max(rank["alloc"] for rank in everyone) / GIB
        for axis in ("tp", "pp", "dp", "cp"):
            row[f"comm/{axis}_gib"] = sum(rank["traffic"].get(axis, 0) for rank in everyone) / GIB
        if self.topology.pp > 1 and self.forecast is not None:
            idle = idle_shares(self.spans)
            row["pp/bubble_measured"] = fmean(idle)
            row["pp/slowest_stage"] = idle.index(min(idle))
            row["pp/bubble_predicted"] = self.forecast.idle
            row["pp/bubble_ideal"] = self.forecast.bubble
        return row

    def _tokens(self) -> int:
        """Returns the tokens of all steps so far; sequences may have had another length before a resume."""
        return int(
            self.begun_tokens + (self.engine.consumed - self.begun_samples) * self.config.model.seq
        )

    def _all_spans(self) -> list[Any]:
        """What ran when on every stage of this rank's column, in seconds of this rank's clock."""
        mine = [(str(action), begin, end) for action, begin, end in self.engine.record(on=False)]
        rows = on_one_clock(mine, self.topology.axis("pp"))
        return [[(Action.parse(text), begin, end) for text, begin, end in row] for row in rows]

    def _evaluate_if_due(self, step: int) -> dict[str, float]:
        every = self.config.train.eval_every
        if self.stop or (step != self.last and (every == 0 or step % every)):
            return {}
        self.heartbeat.beat(step, "evaluate")
        loss = self.evaluate()
        return (
            {}
            if loss is None
            else {"val/loss": loss, "val/bits_per_byte": self.validation.bits_per_byte(loss)}
        )

    def evaluate(self) -> float | None:
        """The mean token loss over the validation windows; None if the run is to stop meanwhile. Collective."""
        return self.validation.loss(self._evaluated_batch)

    def _evaluated_batch(self) -> bool:
        self.heartbeat.beat(self.engine.steps, "evaluate")
        return self.stop.check()

    def _profile(self, step: int) -> None:
        """Records the configured steps with torch's profiler, a trace file a rank."""
        asked = self.config.log.profile_steps
        if asked is None:
            return
        if step == asked[0]:
            self.profiler = torch.profiler.profile()
            self.profiler.start()
        elif step == asked[1] + 1 and self.profiler is not None:
            self._end_profile(self.profiler)

    def _end_profile(self, profiler: torch.profiler.profile) -> None:
        profiler.stop()
        path = self.folder / "profile" / f"rank-{self.topology.rank}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(path))
        self.profiler = None

    # ------------------------------------------------------------------------------------------------------ saving

    def _save_if_due(self, step: int) -> float:
        every, begin = self.config.checkpoint.every, time.perf_counter()
        self.saves.look()
        if step == self.begun_step + 2:
            self.saves.make_room(step, self.last)
        due = self.guard.owed or (every and step % every == 0)
        if due and not self.stop and not self.guard.puts_off():
            self._save(beside=step < self.last)
            self.stop.now()  # else a run that was asked meanwhile would save twice
        if step < self.last and not self.stop:
            self.memory.save_if_due(step, self._beside)
        return time.perf_counter() - begin

    def _save(self, beside: bool = False) -> None:
        """A checkpoint of this step. beside: it may be written while training goes on."""
        step = self.engine.steps
        self.guard.compare(saving=True)
        self.heartbeat.beat(step, "save")
        self.saves.end()
        self.heartbeat.beat(step, "save")  # a phase is as long as one save
        self.owner.check()
        may_fail = step < self.last and not self.stop
        extra = {**self._beside(), **self.guard.take_put_off()}
        self.saves.save(self.checkpoint(step), extra, beside=beside, may_fail=may_fail)

    def _beside(self) -> dict[str, Any]:
        """What a checkpoint keeps for the next run and for exports, beside the engine's state."""
        tokenizer = self.data.tokenizer
        known: dict[str, Any] = {
            "wandb": self.monitor.run_id,
            "data_sha256": self.data.sha256,
            "job": job_name(),
        }
        known |= {
            "tokenizer": tokenizer.files,
            "fingerprint": tokenizer.fingerprint,
            "hf": self.extra.get("hf"),
        }
        return {**known, "eot": tokenizer.eot, "tokens": self._tokens()}

    def checkpoint(self, step: int) -> Path:
        """The folder of a step's checkpoint."""
        return self.folder / "checkpoints" / f"step-{step}"

    # --------------------------------------------------------------------------------------------------------- end

    def _end(self) -> None:
        """Text, pictures, export, and where it all is."""
        note, count = self.monitor.note, self.config.train.sample_tokens
        self.heartbeat.beat(self.engine.steps, "end")
        peaks = collectives.exchange(self.peak, self.world)
        text = (
            final_report.sample_text(self.engine, self.data, count)
            if count and not self.stop.now()
            else ""
        )
        self.watchdog.stop()  # from here on ranks wait for the first one's pictures and export
        if self.forecast is None:
            return
        memory = final_report.memory_rows(self.forecast, peaks, self.weighed) if any(peaks) else []
        plan = self.engine.blueprint.plan
        drawn = final_report.draw(
            self.folder, self.data, self.forecast, plan, self.spans, memory, note
        )
        made = [("figures", path) for path in drawn]
        made += [
            ("metrics", self.folder / "metrics.jsonl"),
            ("checkpoint", self.checkpoint(self.saves.last_saved)),
        ]
        if self.config.checkpoint.export_hf:
            made += final_report.export(made[-1][1], self.folder / "hf", self.data.tokenizer, note)
        if text:
            note(f"the model writes:\n{text}\n")
        for what, path in made:
            note(f"{what:<10} {path}")
        note(f"resume     {self._resume_command()}")

    def _resume_command(self) -> str:
        """What to type to train on."""
        ranks = f"--standalone --nproc-per-node {self.topology.world}"
        return f"torchrun {ranks} {shlex.join([*self.command, *resuming_flags(self.config)])}"
