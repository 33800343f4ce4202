"""Reports and recomputes skipped steps, delays checkpoints after them, compares replicas.

A skipped step leaves weights and moments unchanged. So a checkpoint after a skipped step would only
cause the removal of an older checkpoint (`checkpoint.keep`), perhaps the last one from which
training can continue. Therefore the checkpoint is delayed until a step is not skipped. If the run
ends before that, the checkpoint is written at the end, but no older checkpoint is removed.
"""

from __future__ import annotations

from threed.core.messages import counted
from threed.engine import StepMetrics
from threed.pipeline.batches import Batch
from threed.reliability.recheck import Recheck
from threed.training.callback import Callback, Run
from threed.zero import replicas
from threed.zero.step_metrics import BadStepsError

MIB = 2**20


class BadSteps(Callback):
    """Reports skipped steps, delays checkpoints after them, and compares replicas.

    Replicas are compared every `run.check-replicas` steps, and before a checkpoint.

    Attributes:
        delays: whether a checkpoint is due but delayed until a step is not skipped.
    """

    def __init__(self, run: Run) -> None:
        engine = run.engine
        self.run, self.engine = run, engine
        self.delays = False
        self._delayed: list[int] = []
        self._reported = int(engine.optimizer.bad.skips)
        self._compared = engine.steps
        self._recheck = Recheck(engine, run.note) if run.config.run.recheck_bad_steps else None

    def begin(self, run: Run) -> None:
        if run.config.run.check_replicas:
            copies, alone = (n / MIB for n in replicas.compared(self.engine.optimizer))
            run.note(
                f"replicas   of {copies + alone:.1f} MiB on rank 0, {copies:.1f} are replicated and compared"
            )

    def step(self, batch: Batch) -> StepMetrics:
        """Runs an optimizer step. If the step is skipped and `run.recheck-bad-steps` is set,
        recomputes it to find out whether the data or a machine is faulty."""
        return self.engine.step(batch) if self._recheck is None else self._recheck.step(batch)

    def after_step(self, run: Run, metrics: StepMetrics, row: dict[str, float]) -> None:
        if run.is_logged(metrics.step):
            self._report(metrics)
        self.compare()

    def _report(self, metrics: StepMetrics) -> None:
        """Reports new skipped steps, except while a dynamic loss scale is being adjusted."""
        more, self._reported = metrics.skipped - self._reported, metrics.skipped
        if more and (metrics.bad_steps or not self.engine.optimizer.scaler.rule.dynamic):
            what = f"loss {metrics.loss:g}, gradient norm {metrics.grad_norm:g}"
            row = f", {metrics.bad_steps} in a row so far" if metrics.bad_steps else ""
            self.run.note(
                f"step {metrics.step}: {counted(more, 'step')} skipped{row} ({what}); see train.max-bad-steps"
            )

    def end(self, run: Run) -> None:
        """Raises BadStepsError if every step since step 0 was skipped; the weights are unchanged.

        Such a run may have fewer steps than `train.max-bad-steps`. Collective.
        """
        steps, limit = self.engine.steps, run.config.train.max_bad_steps
        if limit and not run.stop and 0 < steps <= self.engine.bad_steps():
            raise BadStepsError(
                f"all {counted(steps, 'step')} of the run were skipped, so the weights have not changed: use a lower"
                " --optim.lr (or a larger --experts.room, if it is set), or look for non-finite values in the data or the"
                " model; --train.max-bad-steps 0 removes the limit"
            )

    def compare(self, saving: bool = False) -> None:
        """Compares replicas if a comparison is due. Collective.

        Args:
            saving: whether a checkpoint follows. If so, a comparison is due if any step has run
                since the last comparison.

        Raises:
            ReplicaError: if replicas differ; on every rank.
        """
        every, step = self.run.config.run.check_replicas, self.engine.steps
        if every and step > self._compared and (saving or step % every == 0):
            self.engine.compare_replicas()
            self._compared = step

    def delay_checkpoint(self) -> bool:
        """Returns whether the last step was skipped, so that the due checkpoint must be delayed.

        Collective.
        """
        skipped, delayed = self.engine.bad_steps(), self.delays
        self.delays = skipped > 0
        every, step = self.run.config.checkpoint.every, self.engine.steps
        if self.delays and every and step % every == 0:
            self._delayed.append(step)
        if self.delays and not delayed:
            steps = counted(skipped, "step")
            self.run.note(f"no checkpoint of step {step}: {steps} in a row skipped; delayed")
        return self.delays

    def take_delayed(self) -> dict[str, list[int]]:
        """Returns the steps whose checkpoints were delayed, as an entry for the next checkpoint.

        Clears the list of these steps.
        """
        steps, self._delayed = self._delayed, []
        return {"put_off": steps} if steps else {}
