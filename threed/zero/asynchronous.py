"""Asynchronous steps, which overlap with the next step (PipeDream-2BW, arXiv 2006.09503).

    runner  = Asynchronous(plan_of, reducer, optimizer)
    losses  = runner.run(executor.run, micros)
    results = runner.update(carry)    # results() waits for the sums over all ranks
    runner.finish(executor.run)       # completes the last step; call it before states are read

The last backwards of a batch run between the first forwards of the next batch. The update for batch
k is applied while batch k + 1 runs. All passes of batch k + 1 use the weights from before this
update, and all passes of batch k + 2 use the weights from after it. So gradients are computed with
weights that are one update older than the weights to which they are applied (section 3.1).

A call of `finish` applies the update for batch k before batch k + 1 begins. Batch k + 1 still uses
the weights from before this update, so calls of `finish` do not change the training result.

The gradient norm covers all pipeline stages. The all-reduce of the norm starts when the last stage
has its gradients, and is waited for at the end of the step. Until then this rank's slices of the
summed gradients are kept in separate memory, because gradients of the next batch already accumulate
in the usual memory.
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

from threed.distributed import collectives
from threed.layers import MicroBatch
from threed.schedules import Plan
from threed.schedules.double_buffered import drain, first
from threed.zero.optimizer import Optimizer, Run
from threed.zero.reducer import Reducer
from threed.zero.reductions import Gradient
from threed.zero.update import Update


class Asynchronous:
    """Runs asynchronous plans. The plan determines when the update of each step is applied.

    It has the methods of `threed.zero.optimizer.Synchronous`. In addition, it has methods that the
    executor calls during a plan: `use`, `start_update` and `end_update`.

    Args:
        plan_of: `plan_of(count, part=...)` returns the plan of a step with `count` micro-batches,
            including communication. `part` selects the actions: None returns the full plan, which
            also runs the outstanding backwards of the previous step; `double_buffered.first` leaves
            these backwards out; `double_buffered.drain` returns only these backwards.
        reducer: sums the gradients over ranks.
        optimizer: updates the weights, and keeps two versions of them (`Policy.versions` is 2).

    Attributes:
        pending: whether a read of the results of `update` waits for other ranks. Always True.
        open: number of micro-batches of the last step if its last backwards and its update are
            still outstanding, else 0.
        seconds: [s1, s2], host seconds that the last plan spent in `all_passes_ended` (s1), and in
            `start_update` and `end_update` together (s2).
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
        self._running = 0  # number of micro-batches of the running step
        # whether the update for the previous batch has been applied; if so, the running batch uses
        # the older of the two versions of the weights
        self._updated = True
        self._gradients: Callable[[], list[Gradient]] = list
        self._rates: Tensor | None = None  # learning rates for the update of the last step
        self._end: Callable[[], Update]
        zero, one = torch.zeros_like(optimizer.updates), torch.ones_like(optimizer.updates)
        self._none = Update(zero, one, zero[None], one, zero, zero, zero[None], zero, zero)
        self.restore({})

    def state(self) -> dict[str, list[float | None]]:
        """Returns the state for a checkpoint.

        Returns:
            A dict with one entry. "last_update": [gradient norm, learning rate] of the newest
            update; a number that is not finite is stored as None.
        """
        numbers = float(self._last.grad_norm), float(self._last.lr)
        return {"last_update": [number if math.isfinite(number) else None for number in numbers]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores the gradient norm and learning rate that the metrics of the next step report.

        Both are 0 if `state` does not contain them.

        Args:
            state: the dict that `state()` returned.
        """
        numbers = [
            math.nan if number is None else float(number)
            for number in state.get("last_update", (0.0, 0.0))
        ]
        norm, rate = (torch.full_like(self.optimizer.updates, number) for number in numbers)
        self._last = replace(self._none, grad_norm=norm, rates=rate[None])
        # the argument `carry` of the last call of `update`
        self._carry = torch.zeros_like(norm)[None]

    def begin(self, microbatches: int) -> None:
        """Does nothing, because `run` and `all_passes_ended` begin to accumulate gradients."""

    def run(self, run: Run, micros: Sequence[MicroBatch]) -> list[Tensor]:
        """Runs the outstanding backwards of the previous step, and this step's micro-batches.

        The last backwards of this step are left outstanding: the next step, or `finish`, runs them.

        Args:
            run: function that runs a plan on micro-batches: `Executor.run`.
            micros: the micro-batches of this step.

        Returns:
            The losses of this step's micro-batches, on the last stage.
        """
        count = len(micros)
        if self.open not in (0, count):
            self.finish(run)
        if not self.open:
            self.reducer.begin(count)
        return self._run(run, self.plan_of(count, part=None if self.open else first), micros)

    def drop(self) -> None:
        """Does nothing, because no step is in progress between two calls of `Engine.step`."""

    def finish(self, run: Run) -> None:
        """Runs the outstanding backwards of the last step and applies its update. Collective.

        Afterwards the layers use the newest version of the weights.

        Args:
            run: function that runs a plan on micro-batches: `Executor.run`.
        """
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
            # the gradients of this step are lost, and so are the gradients of the previous step if
            # its update was outstanding
            self.optimizer.consistency.invalidate()
            raise
        self.open = len(micros)
        return losses

    def update(self, carry: Tensor) -> Callable[[], Update]:
        """Starts the all-reduce of a step's loss and flags. Collective.

        Args:
            carry: fp64 [1 + k], this rank's loss and k flags of invalid data; see `Optimizer.step`.

        Returns:
            A function that waits for the sums of `carry` and returns an `Update`. Its `sums` are
            the sums of this step; its other fields are the results of the newest applied update,
            which is the update for the previous step.
        """
        self._carry = carry
        # stored now, because the program may set other rates before the step's update runs
        self._rates = self.optimizer.rates(self.optimizer.updates)
        sums = collectives.start_sum_of_scalars(carry, self.optimizer.everyone)
        last = replace(self._last, skips=self.optimizer.bad.skips.clone())
        return lambda: replace(last, sums=sums.wait())

    # ------------------------------------------------------------------------------ called by the executor

    def use(self, before: bool) -> None:
        """Points the layers at the version of the weights that the next pass uses.

        Args:
            before: whether the pass is an outstanding backward of the previous step.
        """
        self.versions.show(newest=not (before or self._updated))

    def all_passes_ended(self, chunk: int | None = None) -> None:
        """Ends the accumulation of a batch's gradients, after its last backward on this rank.

        Gradients that are added later belong to the next batch.

        Args:
            chunk: ignored; `Synchronous.all_passes_ended` has the same argument.
        """
        with timed(self.seconds, 0):
            self._gradients = self.reducer.close()
            if self._running:
                self.reducer.begin(self._running)

    def start_update(self) -> None:
        """Starts the all-reduce of the gradient norm, which the update of the last step needs."""
        with timed(self.seconds, 1):
            # this object keeps no reference, so that the gradients are freed after the update
            gradients, self._gradients = self._gradients, list
            self._end = self.optimizer.start_step(gradients(), self._carry, self._rates)

    def end_update(self) -> None:
        """Waits for the gradient norm and updates the weights."""
        with timed(self.seconds, 1):
            self._last, self._updated = self._end(), True


@contextmanager
def timed(seconds: list[float], phase: int) -> Iterator[None]:
    """Context manager that adds the host time of the block, in seconds, to `seconds[phase]`."""
    began = time.perf_counter()
    yield
    seconds[phase] += time.perf_counter() - began
