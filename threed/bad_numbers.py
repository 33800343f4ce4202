"""What a run does about steps that were skipped: says so, puts off checkpoints, computes them twice, compares copies.

    guard = Guard(engine, note)
    metrics = guard.step(batch)            `Engine.step`; where asked for, a skipped step is computed twice
    guard.tell(metrics)                    a line where steps were skipped since it was last called
    guard.puts_off()                       whether a checkpoint that is due waits until a step is not skipped
    guard.take_put_off()                   the steps whose checkpoints waited, for the one that is written
    guard.compare(saving)                  every `run.check-replicas` steps, and before a save: are copies the same?

A step that is skipped leaves weights and moments as they were. So a checkpoint in the middle of a row of such steps
would only push out an older one, and perhaps the last from which training can go on: it is put off. At the end of a run
it is written, and pushes none out.
"""

from __future__ import annotations

from collections.abc import Callable

from threed.batches import Batch
from threed.engine import Engine, StepMetrics
from threed.recheck import Recheck
from threed.zero import replicas

MIB = 2**20


class Guard:
    """Watches the steps of an engine. note: takes a line for people. owed: a checkpoint was put off; those of which
    steps, `take_put_off` says."""

    def __init__(self, engine: Engine, note: Callable[[str], None]) -> None:
        self.engine, self.note = engine, note
        self.owed = False
        self._put_off: list[int] = []
        self._told = int(engine.optimizer.skips)
        self._compared = engine.steps
        self._recheck = Recheck(engine, note) if engine.config.run.recheck_bad_steps else None
        if engine.config.run.check_replicas:
            copies, alone = (
                nbytes / MIB for nbytes in replicas.compared(engine.optimizer, engine.topology)
            )
            note(
                f"replicas   of {copies + alone:.1f} MiB on rank 0, {copies:.1f} have copies to be compared with"
            )

    def step(self, batch: Batch) -> StepMetrics:
        """An optimizer step."""
        return self.engine.step(batch) if self._recheck is None else self._recheck.step(batch)

    def tell(self, metrics: StepMetrics) -> None:
        """Says how many steps were skipped since this was last asked; not while a loss scale finds its way."""
        more, self._told = metrics.skipped - self._told, metrics.skipped
        if more and (metrics.bad_steps or not self.engine.optimizer.scaler.rule.dynamic):
            what = f"loss {metrics.loss:g}, gradient norm {metrics.grad_norm:g}"
            row = f", {metrics.bad_steps} in a row so far" if metrics.bad_steps else ""
            self.note(
                f"step {metrics.step}: {more} step{'s' * (more > 1)} skipped{row} ({what}); see train.max-bad-steps"
            )

    def compare(self, saving: bool = False) -> None:
        """Compares what several ranks hold copies of, where that is due. ReplicaError on every rank. Collective."""
        every, step = self.engine.config.run.check_replicas, self.engine.steps
        if every and step > self._compared and (saving or step % every == 0):
            self.engine.compare_replicas()
            self._compared = step

    def puts_off(self) -> bool:
        """Whether a checkpoint waits, because the newest steps were skipped. Collective."""
        row, said = self.engine.bad_steps(), self.owed
        self.owed = row > 0
        every, step = self.engine.config.checkpoint.every, self.engine.steps
        if self.owed and every and step % every == 0:
            self._put_off.append(step)
        if self.owed and not said:
            self.note(
                f"no checkpoint of step {self.engine.steps}: {row} step{'s' * (row > 1)} in a row skipped; put off"
            )
        return self.owed

    def take_put_off(self) -> dict[str, list[int]]:
        """Returns what the checkpoint that is written now says of those for which it comes, if there are any."""
        steps, self._put_off = self._put_off, []
        return {"put_off": steps} if steps else {}
