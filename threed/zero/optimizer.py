"""The ZeRO optimizer (arXiv 1910.02054): each rank updates the slices it owns and gathers the rest.

    step(gradients, carry)   global norm -> clip factor and skip flag -> bucket by bucket: apply the rule
                             (AdamW, SGD, Lion) to the slice, copy it to the parameters, begin to
                             gather them
    validate()               of an optimistic update, which did not wait for the norm (`optimistic.py`)
    wait()                   then states can be read: `staged(state, parts)`
    overwriting(everything)  around values that are set from outside

`Synchronous` runs a step's plan, waits for its gradients, and does the update.

Slices are staged from their storages: while one bucket is updated, the next is read and the
previous one written. Nothing here reads a tensor's value on the host: norm, clip factor, skip flag,
loss scale and learning rate stay tensors. Offloaded states have an optimizer of their own
(`offload.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from threed import collectives
from threed.layers import MicroBatch
from threed.memory.tiers import InMemory, StagedBuffer
from threed.ops.update import StepScalars
from threed.precision import LossScale
from threed.schedules import Plan
from threed.topology import Axis
from threed.zero.early import Early
from threed.zero.gather import Gatherer
from threed.zero.layout import Bucket, Layout
from threed.zero.optimistic import Optimistic
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

Run = Callable[[Plan, Sequence[MicroBatch]], list[Tensor]]  # a plan, as `Executor.run`


class Optimizer:
    """Applies the rules of the groups of a layout to their buckets.

    Args:
        layout: the parameters and their buckets.
        gatherer: gathers the parameters after an update.
        everyone: the axis of all ranks, for the norm.
        learning_rate: maps the number of updates done (a tensor) to a learning rate (a tensor).
        device: of the layers.
        grad_clip: the largest norm that a step may have, 0 for no clipping.
        loss_scale: the factor in the gradients.
        optimistic: updates do not wait for the norm, and are validated later.
        max_spike: see `BadSteps`.
        dynamic: parameters may be unused, as those of a wrapped module.

    Attributes:
        earlier: for checkpoints, states of the parameters that are one update older than the
            weights.
        updates: the number of updates done, a scalar tensor; a skipped step is none.
        consistency: whether all states are of the same step.
        readers: the saves that still read the states.
        early: updates buckets while the backward runs.
    """

    early: Early | None = None

    def __init__(
        self, layout: Layout, gatherer: Gatherer, everyone: Axis,
        learning_rate: Callable[[Tensor], Tensor], *, device: torch.device, grad_clip: float,
        loss_scale: LossScale, optimistic: bool = False, max_spike: float = 0.0,
        dynamic: bool = False,
    ) -> None:  # fmt: skip
        self.layout, self.gatherer, self.everyone = layout, gatherer, everyone
        self.learning_rate, self.grad_clip = learning_rate, grad_clip
        policy = layout.policy
        self.states = [new_state(bucket, policy) for bucket in layout.buckets]
        self.frozen = [State(bucket, {WEIGHT: bucket.storage}) for bucket in layout.frozen]
        self.consistency, self.readers = Consistency(), Readers()
        self.updates = torch.zeros((), dtype=torch.float64, device=device)
        self.scaler = Scaler(loss_scale, device)
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
            gradients: every bucket's slice of the summed gradients.
            carry: fp64 [1 + k], numbers of this rank, summed over all ranks in the same all-reduce
                as the norm: its loss, and flags of invalid data, for which the step is skipped.

        Returns:
            A function that returns the results. Of an optimistic update it waits for the sum.
        """
        if self.optimistic is not None:
            return self.optimistic.step(gradients, self._own_sums(gradients, carry))
        update = self.start_step(gradients, carry)()
        return lambda: update

    def start_step(self, gradients: Sequence[Gradient], carry: Tensor) -> Callable[[], Update]:
        """Starts the sum over all ranks of an update, with arguments as in `step`. Collective.

        Returns:
            A function that waits for the sum, updates, and returns the results.
        """
        own = self._own_sums(gradients, carry)
        outcome, pending = self._outcome(), collectives.start_sum_of_scalars(own, self.everyone)

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
        """Returns whether the last update was right. If not, it was undone, and done again.
        Parameters are not gathered then. Collective if it was wrong."""
        return self.optimistic is None or self.optimistic.validate()

    def wait(self) -> None:
        """Waits for the last update and for gathers in flight: then the states can be read.

        Parameters do not get the weights of a delayed update by this.
        """
        self._wait_for_update()
        self.gatherer.settle()

    @contextmanager
    def staged(
        self, state: State, parts: Iterable[str], write: bool = False, publish: bool = True
    ) -> Iterator[dict[str, Tensor]]:
        """Yields the values of some parts of a state.

        Args:
            state: one of a bucket.
            parts: their names.
            write: the block may change the values; they are stored after it.
            publish: copy changed weights to the parameters, too.
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
        """Prepares the states for values that the block sets by `staged`; gathers parameters after
        it. Collective.

        Args:
            everything: all values are set. A delayed update is discarded then; else the parameters
                get its weights first.
        """
        self._before_overwriting(everything)
        with self.consistency.changing():
            self.gatherer.settle()  # a gather in flight may still read what is written here
            self.gatherer.release_all()  # what is gathered now would be stale
            yield
            self._after_overwriting(everything)
            self.gatherer.complete()
            self.gatherer.settle()
            if self.versions is not None:
                self.versions.restore(whole=everything)

    def _before_overwriting(self, everything: bool) -> None:
        """Ends the last update, or discards it if everything is overwritten."""
        if not everything:
            self.wait()
        elif self.optimistic is not None:
            self.optimistic.discard()

    def _after_overwriting(self, everything: bool) -> None:
        """Called when the values are set, before parameters are gathered."""

    # -------------------------------------------------------------------------------- the scalars of an update

    def _own_sums(self, gradients: Sequence[Gradient], carry: Tensor) -> Tensor:
        """Returns this rank's part of the sums that an update depends on, fp64 [2 + k]."""
        self._wait_for_update()
        self._stretches = {} if self.unused is None else self.unused.stretches
        found = [gradient.squares for gradient in gradients]
        return torch.cat((sum_of_squares(found, self.layout.buckets, carry.device), carry))

    def _outcome(self) -> Outcome:
        """Returns a function from the sums over all ranks to the results of the next update."""
        rate = self.learning_rate(self.updates)
        return self.bad.outcome(rate, self.scaler.scale.clone(), self.grad_clip)

    def _wait_for_update(self) -> None:
        """Ends the last update: validates an optimistic one."""
        self.validate()
        self.consistency.check()

    # ----------------------------------------------------------------------------------------------- an update

    def _apply(self, gradients: Sequence[Gradient], update: Update, guessed: bool = False) -> None:
        """Counts an update, and begins to do it. guessed: its norm is not known yet."""
        if self.versions is not None:
            for state in self.earlier:
                self.readers.wait(state)
            self.versions.turn()
        self.updates += 1 - update.skip
        self.bad.count(update)
        if self.bad.max_spike and not guessed:
            self.bad.observe(update)
        self.scaler.update(update.overflow)
        self._start_update(gradients, scalars_of(update, self.updates))

    def _start_update(self, gradients: Sequence[Gradient], now: StepScalars) -> None:
        """Does an update, or lets a thread do it."""
        self._update_all(gradients, now)

    def _update_all(
        self, gradients: Sequence[Gradient], now: StepScalars, publish: bool = True,
        done: Set[State] = frozenset(),
    ) -> None:  # fmt: skip
        """Updates all states but those `done`, from the last layers to the first."""
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
        """Updates one bucket; parameters on the same device are written in the same pass."""
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
        """Updates what buffers hold of a state; returns the weights.

        Args:
            buffers: of all parts and the gradient, which is used up, and dropped.
            now: the scalars of the update.
            fused: also write the new parameters, to one more buffer.
        """
        self.readers.wait(state)
        weight, *moments = (buffers[part].wait() for part in state.storages)
        gradient, out = buffers[GRADIENT].wait(), None
        if fused:
            buffers[PARAMETER] = state.bucket.portion.empty()
            out = buffers[PARAMETER].values
        options = state.bucket.group.key.options
        if options.factor != 1.0:
            now = now._replace(lr=now.lr * options.factor)
        if state.bucket in self._stretches:
            stretches, values = self._stretches[state.bucket], (weight, gradient, *moments)
            update_stretches(options, stretches, values, now, out)
        else:
            options.rule.update(weight, gradient, moments, now, options.decay, out)
        buffers.pop(GRADIENT).drop()
        return weight

    def _publish(self, state: State, weight: Tensor) -> None:
        """Copies a bucket's weights to the parameters, and begins to gather those that stay
        whole."""
        if not state.shared:
            params = state.bucket.portion
            parameter = params.empty()
            stay = isinstance(state.weight, InMemory) and isinstance(params, InMemory)
            # else one of the buffers is reused, or written, at once
            parameter.values.copy_(weight, non_blocking=stay)
            parameter.store()
        self.gatherer.publish(state.bucket)


class Synchronous:
    """Runs plans, and updates the weights at the end of each; `Asynchronous` has the same methods.

    Args:
        plan_of: `plan_of(count)` returns the plan of a step of so many micro-batches, with its
            communication.
        reducer: sums the gradients.
        optimizer: updates the weights.

    Attributes:
        seconds: host time of the last step's reductions that was not overlapped, and of its update.
    """

    def __init__(
        self, plan_of: Callable[..., Plan], reducer: Reducer, optimizer: Optimizer
    ) -> None:
        self.plan_of, self.reducer, self.optimizer = plan_of, reducer, optimizer
        self.seconds = (0.0, 0.0)

    @property
    def pending(self) -> bool:
        """Whether the results depend on other ranks' next step."""
        return self.optimizer.pending

    def begin(self, microbatches: int) -> None:
        """Begins a step."""
        self.reducer.begin(microbatches)

    def run(self, run: Run, micros: Sequence[MicroBatch]) -> list[Tensor]:
        """Runs forwards and backwards; returns the losses on the last stage."""
        return run(self.plan_of(len(micros)), micros)

    def all_passes_ended(self, chunk: int | None = None) -> None:
        """Ends the step's backwards on this rank, or those of one chunk."""
        self.reducer.all_passes_ended(chunk)

    def update(self, carry: Tensor) -> Callable[[], Update]:
        """Waits for the summed gradients, and updates the weights; see `Optimizer.step`. Collective."""
        began = time.perf_counter()
        gradients = self.reducer.finish()
        reduced = time.perf_counter()
        results = self.optimizer.step(gradients, carry)
        self.seconds = (reduced - began, time.perf_counter() - reduced)
        return results

    def drop(self) -> None:
        """Drops the gradients of the step in progress."""
        self.reducer.drop()

    def finish(self, run: Run) -> None:
        """Ends the last step. Does not change the training. Collective."""
        self.optimizer.validate()

    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores the state of a checkpoint."""


def scalars_of(update: Update, updates: Tensor) -> StepScalars:
    """Returns the scalars of an update; updates: how many it makes."""
    scale = torch.where(update.skip == 0, update.clip / update.loss_scale, 1.0)
    return StepScalars(update.lr, updates.clamp(min=1), scale, update.skip)
