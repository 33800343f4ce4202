"""Steps that overlap, and end with the update of the step before (PipeDream-2BW).

    runner  = Asynchronous(plan_of, reducer, optimizer)
    losses  = runner.run(executor.run, micros)
    results = runner.update(carry)    # results() waits for the sums over all ranks
    runner.finish(executor.run)       # ends the last step, before states are read

A batch's last backwards run between the next one's first forwards. A batch runs with one version of
the weights: the newest one when it begins. The update of the batch before comes while it runs, and
makes the version that the next one begins with.
So an update's gradients are of weights that are one update older than those it changes (arXiv
2006.09503, section 3.1); nothing changes in that where steps are drained in between. The gradient
norm is that of all stages: its sum begins where the last of them has its gradients, and is waited
for at the end of the step. Until then a copy of the gradients is kept.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from threed import collectives
from threed.layers import MicroBatch
from threed.schedules import Plan, drain, first
from threed.zero.optimizer import Optimizer, Run
from threed.zero.reducer import Reducer
from threed.zero.reductions import Gradient
from threed.zero.update import Update


class Asynchronous:
    """Runs asynchronous plans, and makes their updates when the executor comes to them.

    Args:
        plan_of: `plan_of(count, part=)` returns a part of the plan of a step of so many
            micro-batches, with its communication.
        reducer: sums the gradients.
        optimizer: updates the weights, of which it has two versions.

    Attributes:
        open: the micro-batches of the last step, while its update is not made; else 0.
        seconds: host time of the last plan's reductions, and of its update.
    """

    pending = True

    def __init__(
        self, plan_of: Callable[..., Plan], reducer: Reducer, optimizer: Optimizer
    ) -> None:
        assert optimizer.versions is not None
        self.plan_of, self.reducer, self.optimizer = plan_of, reducer, optimizer
        self.versions = optimizer.versions
        self.open = 0
        self.seconds = [0.0, 0.0]
        self._running = 0  # micro-batches of the step that runs
        # the newest weights are newer than those that this step's batch runs with
        self._updated = True
        self._gradients: Callable[[], list[Gradient]] = list
        self._end: Callable[[], Update]
        zero, one = torch.zeros_like(optimizer.updates), torch.ones_like(optimizer.updates)
        self._none = Update(zero, one, zero, one, zero, zero, zero[None], zero, zero)
        self.restore({})

    def state(self) -> dict[str, list[float | None]]:
        """Returns the state for a checkpoint: norm and learning rate of the newest update, None if
        not finite."""
        numbers = float(self._last.grad_norm), float(self._last.lr)
        return {"last_update": [number if math.isfinite(number) else None for number in numbers]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores norm and rate of the newest update for the next metrics; 0 for a state without
        them."""
        numbers = [
            math.nan if number is None else float(number)
            for number in state.get("last_update", (0.0, 0.0))
        ]
        norm, rate = (torch.full_like(self.optimizer.updates, number) for number in numbers)
        self._last = replace(self._none, grad_norm=norm, lr=rate)
        # this rank's numbers of the last step, not summed yet
        self._carry = torch.zeros_like(norm)[None]

    def begin(self, microbatches: int) -> None:
        """Does nothing: the gradients of a step begin when those of the step before have ended."""

    def run(self, run: Run, micros: Sequence[MicroBatch]) -> list[Tensor]:
        """Runs a step: what the last one has left, and the micro-batches as far as they are not
        left to the next. Returns their losses on the last stage."""
        count = len(micros)
        if self.open not in (0, count):
            self.finish(run)
        if not self.open:
            self.reducer.begin(count)
        return self._run(run, self.plan_of(count, part=None if self.open else first), micros)

    def drop(self) -> None:
        """Does nothing: the gradients are those of a step that was returned."""

    def finish(self, run: Run) -> None:
        """Runs what the last step has left, and makes its update; layers read the newest weights
        then. Collective."""
        if self.open:
            with torch.inference_mode(False):
                self._run(run, self.plan_of(self.open, part=drain), ())
        self.versions.show(newest=True)

    def _run(self, run: Run, plan: Plan, micros: Sequence[MicroBatch]) -> list[Tensor]:
        self.optimizer.consistency.check()
        before, self.open, self._running = self.open, 0, len(micros)
        self._updated, self.seconds = not before, [0.0, 0.0]
        try:
            losses = run(plan, micros)
        except BaseException:
            self.optimizer.consistency.invalidate()  # gradients of two batches are lost
            raise
        self.open = len(micros)
        return losses

    def update(self, carry: Tensor) -> Callable[[], Update]:
        """Begins the sum of a step's numbers, fp64 [k], over all ranks (see `Optimizer.step`);
        returns a function that waits for it and returns the results of the newest update with these
        sums. Collective."""
        self._carry = carry
        sums = collectives.start_sum_of_scalars(carry, self.optimizer.everyone)
        last = replace(self._last, skips=self.optimizer.bad.skips.clone())
        return lambda: replace(last, sums=sums.wait())

    # ------------------------------------------------------------------------------------ what the executor comes to

    def use(self, before: bool) -> None:
        """Shows the layers the weights that the next pass runs with; before: it is of the step
        before."""
        self.versions.show(newest=not (before or self._updated))

    def all_passes_ended(self, chunk: int | None = None) -> None:
        """Ends a batch's backwards on this rank; those of the next one come now."""
        with timed(self.seconds, 0):
            self._gradients = self.reducer.close()
            if self._running:
                self.reducer.begin(self._running)

    def start_update(self) -> None:
        """Begins the sum of the gradients' norm."""
        with timed(self.seconds, 1):
            # else their sums would stay in memory
            gradients, self._gradients = self._gradients, list
            self._end = self.optimizer.start_step(gradients(), self._carry)

    def end_update(self) -> None:
        """Waits for it, and updates the weights."""
        with timed(self.seconds, 1):
            self._last, self._updated = self._end(), True


@contextmanager
def timed(seconds: list[float], phase: int) -> Iterator[None]:
    """Adds the host time of the block to `seconds[phase]`."""
    began = time.perf_counter()
    yield
    seconds[phase] += time.perf_counter() - began
