"""The ZeRO optimizer (arXiv 1910.02054): a rank updates its slices and gathers all other slices.

    step(gradients, carry)   computes the global norm, the clip factor and the skip flag. Then, per
                             bucket: applies the rule (AdamW, SGD, Lion) to this rank's slice,
                             copies the new weights to the parameters, and begins to gather them
    validate()               validates an optimistic update, which did not wait for the norm
                             (`optimistic.py`)
    wait()                   waits for the last update; states can then be read by
                             `staged(state, parts)`
    overwriting(everything)  context in which a caller may set values of states, as a load does

`Synchronous` runs the plan of a step, waits for the gradients, and runs the update.

States are read and written through staged buffers (`threed.memory.tiers`): while one bucket is
updated, the next one is read and the previous one is written. Norm, clip factor, skip flag, loss
scale and learning rate stay tensors on the device. The host waits for their values only to validate
an optimistic update, or if states are offloaded (`offload.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from threed.distributed import collectives
from threed.distributed.topology import Axis
from threed.layers import MicroBatch
from threed.memory.tiers import InMemory, StagedBuffer
from threed.ops.precision import LossScale
from threed.ops.update import StepScalars
from threed.schedules import Plan
from threed.zero.early_updates import Early
from threed.zero.gather import Gatherer
from threed.zero.layout import Bucket, Layout
from threed.zero.optimistic import Optimistic
from threed.zero.rates import Rates
from threed.zero.reducer import Reducer
from threed.zero.reductions import Gradient
from threed.zero.state import (
    GRADIENT,
    PARAMETER,
    WEIGHT,
    Consistency,
    Readers,
    State,
    drop_all,
    fetched_in_turn,
    new_state,
    store_all,
)
from threed.zero.unused import Stretch, Unused, update_stretches
from threed.zero.update import BadSteps, Outcome, Scaler, Update, sum_of_squares
from threed.zero.versions import Versions

Run = Callable[[Plan, Sequence[MicroBatch]], list[Tensor]]  # runs a plan, as `Executor.run` does


class Optimizer:
    """Applies the update rules of a layout's groups to their buckets.

    Args:
        layout: parameters and their buckets.
        gatherer: gathers the parameters after an update.
        everyone: axis of all ranks, for the norm.
        rates: learning rates of the parameter groups.
        device: device of the layers.
        grad_clip: gradients with a larger norm than `grad_clip` are scaled down to this norm; 0 for
            no clipping.
        loss_scale: the rule by which the loss scale changes. The gradients that this class gets are
            multiplied by the loss scale, and are divided by it in the update.
        optimistic: whether updates run before the norm is known and are validated later (arXiv
            2401.10241).
        max_spike: a step is skipped if its gradient norm is larger than `max_spike` times the
            running mean of norms; 0 for no limit.
        dynamic: whether parameters may be unused, as in a wrapped module.

    Attributes:
        states: optimizer state of each bucket, in the order of `Layout.buckets`.
        frozen: states of the frozen buckets; they contain only the parameters.
        earlier: states with the parameters as they were before the last update, for checkpoints.
            Empty unless gradients are computed with these parameters (2BW, delayed updates).
        updates: number of updates applied so far, without skipped steps; fp64 scalar tensor.
        consistency: tracks whether all states belong to the same step.
        readers: asynchronous saves that still read the states.
        early: object that runs updates during the backward; None if all updates run after it.
    """

    early: Early | None = None

    def __init__(
        self, layout: Layout, gatherer: Gatherer, everyone: Axis, rates: Rates, *,
        device: torch.device, grad_clip: float, loss_scale: LossScale, optimistic: bool = False,
        max_spike: float = 0.0, dynamic: bool = False,
    ) -> None:  # fmt: skip
        self.layout, self.gatherer, self.everyone = layout, gatherer, everyone
        self.rates, self.grad_clip = rates, grad_clip
        policy = layout.policy
        self.states = [new_state(bucket, policy) for bucket in layout.buckets]
        self.frozen = [State(bucket, {WEIGHT: bucket.storage}) for bucket in layout.frozen]
        self.consistency, self.readers = Consistency(), Readers()
        self.updates = torch.zeros((), dtype=torch.float64, device=device)
        self.scaler = Scaler(loss_scale, device)
        self._divisor = 1
        self.bad = BadSteps(device, max_spike, loss_scale)
        self.optimistic = Optimistic(
            self.states, gatherer, everyone, self.consistency,
            (self.updates, self.bad.skips, *self.scaler.tensors),
            outcome=self._outcome, apply=self._apply,
            observe=self.bad.observe if max_spike else None,
        ) if optimistic else None  # fmt: skip
        self.versions = Versions(layout, gatherer) if policy.versions > 1 else None
        self.earlier = self.versions.earlier if self.versions else []
        self.unused = Unused(layout, self.updates) if dynamic else None
        self._stretches: dict[Bucket, list[Stretch]] = {}

    def step(self, gradients: Sequence[Gradient], carry: Tensor) -> Callable[[], Update]:
        """Updates the weights. Collective.

        Args:
            gradients: per bucket, in the order of `Layout.buckets`: the summed gradients of this
                rank's portion.
            carry: fp64 [1 + k], this rank's loss and k flags of invalid data. They are summed over
                all ranks in the same all-reduce as the norm. If the sum of a flag is not 0, the
                step is skipped.

        Returns:
            A function that returns the results of the step. After an optimistic update, it first
            waits for the all-reduce.
        """
        if self.optimistic is not None:
            return self.optimistic.step(gradients, self._own_sums(gradients, carry))
        update = self.start_step(gradients, carry)()
        return lambda: update

    def start_step(
        self, gradients: Sequence[Gradient], carry: Tensor, rates: Tensor | None = None
    ) -> Callable[[], Update]:
        """Starts the all-reduce of the gradient norm, loss and flags. Collective.

        Args:
            gradients: see `step`.
            carry: see `step`.
            rates: learning rate per parameter group, fp64 [groups]; None for the current rates.

        Returns:
            A function that waits for the all-reduce, updates the weights, and returns the results
            of the step.
        """
        own = self._own_sums(gradients, carry)
        outcome = self._outcome(rates)
        pending = collectives.start_sum_of_scalars(own, self.everyone)

        def end() -> Update:
            update = outcome(pending.wait())
            self._apply(gradients, update)
            return update

        return end

    @property
    def pending(self) -> bool:
        """Whether the last update may have to be undone."""
        return self.optimistic is not None and self.optimistic.pending

    def validate(self) -> bool:
        """Validates the last update. If it was wrong, undoes it and applies the right update.

        If updates are not optimistic, the call has no effect. All ranks get the same result. If the
        update was wrong, the call is collective and releases sharded parameters.

        Returns:
            Whether the update was right. If False, the caller must restart the step in progress.
        """
        return self.optimistic is None or self.optimistic.validate()

    def wait(self) -> None:
        """Waits for the last update and for gathers in flight, so that states can be read.

        The new weights of a delayed update are not copied to the parameters by this call.
        """
        self._wait_for_update()
        self.gatherer.wait_all()

    def close(self) -> None:
        """Hook for subclasses: releases threads and files; the object cannot be used afterwards."""

    @contextmanager
    def staged(
        self, state: State, parts: Iterable[str], write: bool = False, publish: bool = True
    ) -> Iterator[dict[str, Tensor]]:
        """Context manager that reads parts of a state; yields a dict from part name to values [n].

        A part is the weight or a tensor of the update rule, such as a moment.

        Args:
            state: state of a bucket.
            parts: names of the parts to read.
            write: whether the block may change the values. If True, the values are stored when the
                block ends.
            publish: whether changed weights are also copied to the parameters. Ignored unless
                `write` is True and "weight" is among the parts.
        """
        if write:
            self.consistency.mark_changed()
            self.readers.wait(state)
        buffers = state.fetch(parts)
        try:
            yield {part: staged.wait() for part, staged in buffers.items()}
            if write and publish and WEIGHT in buffers:
                self._publish(state, buffers[WEIGHT].wait())
            if write:
                store_all(buffers)
        finally:
            drop_all(buffers)

    @contextmanager
    def overwriting(self, everything: bool) -> Iterator[None]:
        """Context for setting values of states with `staged`. Collective.

        When the block ends, the parameters are gathered.

        Args:
            everything: whether the block sets all values. If True, an update that has not finished
                is discarded. If False, the update is finished first, and the weights of a delayed
                update are copied to the parameters.
        """
        self._before_overwriting(everything)
        with self.consistency.changing():
            self.gatherer.wait_all()  # a gather in flight may still read the slices
            self.gatherer.release_all()  # the block makes gathered parameters stale
            yield
            self._after_overwriting(everything)
            self.gatherer.complete()
            self.gatherer.wait_all()
            if self.versions is not None:
                self.versions.restore(both=everything)

    def _before_overwriting(self, everything: bool) -> None:
        """Finishes the last update, or discards it if all values will be overwritten."""
        if not everything:
            self.wait()
        elif self.optimistic is not None:
            self.optimistic.discard()

    def _after_overwriting(self, everything: bool) -> None:
        """Hook for subclasses: called when an `overwriting` block ends, before the gathers."""

    # -------------------------------------------------------------------------------- scalars of an update

    def _own_sums(self, gradients: Sequence[Gradient], carry: Tensor) -> Tensor:
        """Returns this rank's terms of the sums that an update depends on, fp64 [3 + k].

        The sums are the squared norm, the number of ranks with non-finite gradients, the loss and
        the k flags of invalid data; see `BadSteps.outcome`.
        """
        self._wait_for_update()
        self._stretches = {} if self.unused is None else self.unused.stretches
        found = [gradient.squares for gradient in gradients]
        return torch.cat((sum_of_squares(found, self.layout.buckets, carry.device), carry))

    def _outcome(self, rates: Tensor | None = None) -> Outcome:
        """Returns a function that computes the next `Update`; see `BadSteps.outcome`.

        The argument of the function is the result of `_own_sums`, summed over all ranks.

        Args:
            rates: learning rate per parameter group, [groups]; None for the rates of the next
                update.
        """
        rates = self.rates(self.updates) if rates is None else rates
        return self.bad.outcome(rates, self.scaler.scale * self._divisor, self.grad_clip)

    def divide_by(self, divisor: int) -> None:
        """Sets a number by which the following updates divide gradients, besides the loss scale."""
        self._divisor = divisor

    def _wait_for_update(self) -> None:
        """Waits for the last update, and validates it if it was optimistic."""
        self.validate()
        self.consistency.check()

    # ----------------------------------------------------------------------------------------------- update

    def _apply(self, gradients: Sequence[Gradient], update: Update, guessed: bool = False) -> None:
        """Updates the counters and the loss scale, then starts the update of the weights.

        Args:
            gradients: per bucket, the summed gradients of this rank's portion.
            update: the results of the step, such as skip flag, clip factor and learning rates.
            guessed: whether `update` is a guess, because the norm is not known yet.
        """
        if self.versions is not None:
            for state in self.earlier:
                self.readers.wait(state)
            self.versions.rotate()
        self.updates += 1 - update.skip
        self.bad.count(update)
        if self.bad.max_spike and not guessed:
            self.bad.observe(update)
        self.scaler.update(update.overflow)
        self._start_update(gradients, scalars_of(update, self.updates))

    def _start_update(self, gradients: Sequence[Gradient], now: StepScalars) -> None:
        """Runs the update; `OffloadedOptimizer` may run it in a thread."""
        self._update_all(gradients, now)

    def _update_all(
        self, gradients: Sequence[Gradient], now: StepScalars, publish: bool = True,
        done: Set[State] = frozenset(),
    ) -> None:  # fmt: skip
        """Updates all states except those in `done`, from the first layers to the last."""
        pairs = zip(reversed(self.states), reversed(gradients), strict=True)
        reads = (
            (state, state.fetch_for_update(gradient.storage))
            for state, gradient in pairs
            if state not in done
        )
        with self.consistency.changing():
            for state, buffers in fetched_in_turn(reads):
                try:
                    self._update(state, buffers, now, publish)
                finally:
                    drop_all(buffers)
            if publish:
                self.gatherer.complete()

    def _update(
        self, state: State, buffers: dict[str, StagedBuffer], now: StepScalars, publish: bool
    ) -> None:
        """Updates the weights of one bucket; copies them to the parameters if `publish` is True."""
        same_device = state.bucket.portion.device == state.weight.device
        fused = publish and not state.shared and same_device
        weight = self._apply_rule(state, buffers, now, fused)
        if fused:
            buffers.pop(PARAMETER).store()
            self.gatherer.publish(state.bucket)
        elif publish:
            self._publish(state, weight)
        store_all(buffers)

    def _apply_rule(
        self, state: State, buffers: dict[str, StagedBuffer], now: StepScalars, fused: bool
    ) -> Tensor:
        """Applies the update rule to the staged values of a state; returns the weights.

        Args:
            state: the state to update.
            buffers: staged buffers of all parts of the state, and of the gradient, by name. The
                rule may overwrite the gradient. Afterwards the gradient's buffer is released and
                removed from `buffers`.
            now: scalars of the update, with the learning rates of all groups.
            fused: whether the rule also writes the new parameters, to a staged buffer that is added
                to `buffers` as "parameter".
        """
        self.readers.wait(state)
        weight, *moments = (buffers[part].wait() for part in state.storages)
        gradient, out = buffers[GRADIENT].wait(), None
        if fused:
            buffers[PARAMETER] = state.bucket.portion.empty()
            out = buffers[PARAMETER].values
        options = state.bucket.group.key.options
        now = now._replace(lr=now.lr[options.rate])
        if state.bucket in self._stretches:
            stretches, values = self._stretches[state.bucket], (weight, gradient, *moments)
            update_stretches(options, stretches, values, now, out)
        else:
            options.rule.update(weight, gradient, moments, now, options.decay, out)
        buffers.pop(GRADIENT).drop()
        return weight

    def _publish(self, state: State, weight: Tensor) -> None:
        """Copies a bucket's weights to this rank's slice of the parameters.

        Then begins to gather the parameters, unless they are sharded.
        """
        if not state.shared:
            params = state.bucket.portion
            parameter = params.empty()
            stay = isinstance(state.weight, InMemory) and isinstance(params, InMemory)
            # `store` on a drive reads or reuses the staged buffer immediately, so the copy must
            # have ended
            parameter.values.copy_(weight, non_blocking=stay)
            parameter.store()
        self.gatherer.publish(state.bucket)


class Synchronous:
    """Runs the plan of each step, and updates the weights at its end.

    `Asynchronous` has the same methods.

    Args:
        plan_of: `plan_of(count)` returns the plan of a step with `count` micro-batches, including
            communication.
        reducer: sums the gradients over ranks.
        optimizer: updates the weights.

    Attributes:
        seconds: (s1, s2), host seconds in the last step: s1 for waiting for reductions after the
            last backward, s2 for the update.
    """

    def __init__(
        self, plan_of: Callable[..., Plan], reducer: Reducer, optimizer: Optimizer
    ) -> None:
        self.plan_of, self.reducer, self.optimizer = plan_of, reducer, optimizer
        self.seconds = (0.0, 0.0)

    @property
    def pending(self) -> bool:
        """Whether the last update is optimistic and may have to be undone.

        If True, a read of the update's results waits for other ranks.
        """
        return self.optimizer.pending

    def begin(self, microbatches: int) -> None:
        """Begins to accumulate the gradients of a step of `microbatches` micro-batches."""
        self.reducer.begin(microbatches)

    def run(self, run: Run, micros: Sequence[MicroBatch]) -> list[Tensor]:
        """Runs all forwards and backwards of a step; returns the losses on the last stage."""
        return run(self.plan_of(len(micros)), micros)

    def all_passes_ended(self, chunk: int | None = None) -> None:
        """Ends the accumulation of gradients, after all backwards of the step or of one chunk."""
        self.reducer.all_passes_ended(chunk)

    def update(self, carry: Tensor) -> Callable[[], Update]:
        """Waits for the summed gradients and updates the weights. Collective.

        Arguments and result are as for `Optimizer.step`.
        """
        began = time.perf_counter()
        gradients = self.reducer.finish()
        reduced = time.perf_counter()
        results = self.optimizer.step(gradients, carry)
        self.seconds = (reduced - began, time.perf_counter() - reduced)
        return results

    def drop(self) -> None:
        """Discards the gradients of the step in progress."""
        self.reducer.drop()

    def finish(self, run: Run) -> None:
        """Validates the last update (`Optimizer.validate`). Collective.

        The training result does not depend on when this method is called.

        Args:
            run: not used.
        """
        self.optimizer.validate()

    def state(self) -> dict[str, Any]:
        """Returns an empty dict, because there is no additional state to save in a checkpoint."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Does nothing, because `state` returns an empty dict."""


def scalars_of(update: Update, updates: Tensor) -> StepScalars:
    """Returns the scalars that update rules need, with the learning rates of all groups as `lr`.

    Args:
        update: the results of the step, such as skip flag, clip factor and learning rates.
        updates: number of updates applied so far, including this one unless it is skipped.
    """
    scale = torch.where(update.skip == 0, update.clip / update.loss_scale, 1.0)
    return StepScalars(update.rates, updates.clamp(min=1), scale, update.skip)
