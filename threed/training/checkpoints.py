"""Writes the checkpoints of a run, asynchronously if there is memory for a copy of the state.

If an asynchronous save fails, the failure is reported once, and training continues. At the end of
the run the final state is saved, unless it has been saved already.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from threed.checkpoint.files import CheckpointError
from threed.checkpoint.run_folder import Retention
from threed.checkpoint.saving import Save
from threed.core import process
from threed.engine import StepMetrics
from threed.reliability import heartbeat
from threed.reliability.elastic import Memory
from threed.reliability.ownership import Owner
from threed.training.bad_steps import BadSteps
from threed.training.callback import Callback, Run


class Checkpoints(Callback):
    """Saves checkpoints to the run folder every `checkpoint.every` steps, and to memory every
    `checkpoint.memory-every` steps.

    Attributes:
        last_saved: newest saved step, or -1.
    """

    def __init__(
        self, run: Run, retention: Retention, memory: Memory, owner: Owner, bad_steps: BadSteps
    ) -> None:
        self.run, self.engine = run, run.engine
        self.retention = retention
        self.memory = memory
        self.owner = owner
        self.bad_steps = bad_steps
        self.last_saved = run.start.step if run.start.saved else -1
        self._save: Save | None = None  # the asynchronous save in progress
        self._reported: set[Path] = set()
        self._seconds = 0.0

    def begin(self, run: Run) -> None:
        self.memory.begin(run.note)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Context manager for training: if the block raises, a save in progress is completed if
        possible."""
        with self.engine.saver.ending(self._is_gone), self.memory.ending():
            yield

    def _is_gone(self, rank: int) -> bool:
        """Returns whether the process of a rank on this machine has exited."""
        beat = heartbeat.read(self.run.supervision.heart.folder, rank)
        return beat is not None and heartbeat.process_state(beat) == "ended"

    def take_seconds(self) -> float:
        """Returns the seconds that saves took since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def after_step(self, run: Run, metrics: StepMetrics, row: dict[str, float]) -> None:
        step, every, began = metrics.step, run.config.checkpoint.every, time.perf_counter()
        self._report_failure()
        if step == run.start.step + 2:
            self._make_room(step)
        due = self.bad_steps.delays or (every and step % every == 0)
        if due and not run.stop and not self.bad_steps.delay_checkpoint():
            self.save(asynchronous=step < run.last)
            # If a stop was requested during the save, the run stops here. Otherwise it would run
            # and save one more step.
            run.stop.now()
        if step < run.last and not run.stop:
            self.memory.save_if_due(step, self._extra)
        self._seconds = time.perf_counter() - began

    def end(self, run: Run) -> None:
        run.beat("save")
        self.wait()

    def save(self, asynchronous: bool = False) -> None:
        """Saves the current step. Collective.

        Args:
            asynchronous: whether to write the files while training continues, if memory allows.

        Raises:
            CheckpointError: if the last step of the run cannot be saved; on every rank.
        """
        run, step = self.run, self.engine.steps
        self.bad_steps.compare(saving=True)
        run.beat("save")
        self.wait()
        run.beat("save")  # a new phase, so that the watchdog's time limit applies to this save only
        self.owner.check()
        path = self.path(step)
        extra = {**self._extra(), **self.bad_steps.take_delayed()}
        try:
            if asynchronous and self._has_room:
                self._save = self.engine.start_save(
                    path, extra, before_publishing=run.monitor.sync, hurries=run.hurries
                )
            else:
                run.monitor.sync()
                self.engine.save(path, extra, hurries=run.hurries)
                self._count(path)
        except CheckpointError as error:
            if step == run.last or run.stop:
                raise
            self._report(path, error)

    def wait(self) -> None:
        """Waits for the asynchronous save in progress. Collective."""
        save, self._save = self._save, None
        if save is None:
            return
        try:
            save.wait()
        except CheckpointError as error:
            self._report(save.path, error)
        else:
            self._count(save.path)

    def path(self, step: int) -> Path:
        """Returns the folder of a step's checkpoint."""
        return self.run.folder / "checkpoints" / f"step-{step}"

    def _extra(self) -> Mapping[str, Any]:
        """Returns the `extra` values for a checkpoint's manifest: tokenizer, data, origin and job.

        A resumed run and exports read them.
        """
        run, text = self.run, self.run.data.tokenizer
        tokenizer = {"tokenizer": text.files, "fingerprint": text.fingerprint, "eot": text.eot}
        origin = {"data_sha256": run.data.sha256, "hf": run.start.extra.get("hf")}
        job = {"wandb": run.monitor.run_id, "job": process.job_name(), "tokens": run.tokens}
        return {**tokenizer, **origin, **job}

    @cached_property
    def _has_room(self) -> bool:
        """Whether saves are asynchronous.

        They are if the configuration allows it and enough memory is free for a copy of the state.
        """
        asked = self.run.config.checkpoint.async_ is not False
        room = asked and self.engine.saver.has_room()
        if asked and not room:
            what = "no memory for a copy of the state"
            self.run.note(f"{what}: training waits for each checkpoint")
        return room

    def _make_room(self, step: int) -> None:
        """Allocates the buffers of asynchronous saves, if such saves will follow.

        Called after the second step of the run, so that the memory of activations is allocated
        first.
        """
        every = self.run.config.checkpoint.every
        if every and (step // every + 1) * every < self.run.last and self._has_room:
            self.engine.saver.make_room()

    def _report_failure(self) -> None:
        """Reports a failure of this rank's part of the asynchronous save.

        The save may still be running on other ranks.
        """
        save = self._save
        if save is not None and save.done and save.problem is not None:
            self._report(save.path, f"{save.problem} (earlier checkpoints are intact)")

    def _report(self, path: Path, error: object) -> None:
        if path not in self._reported:
            self._reported.add(path)
            self.run.note(f"no checkpoint of step {path.name[5:]}: {error}; training goes on")

    def _count(self, path: Path) -> None:
        """Records a checkpoint as saved, and removes checkpoints beyond `checkpoint.keep`."""
        self.last_saved = int(path.name[5:])
        self.retention.trust(path)
        for problem in self.retention.prune() if not self.engine.bad_steps() else ():
            self.run.note(f"invalid checkpoint, not counted: {problem}")
