"""The ZeRO optimizer (arXiv 1910.02054): each rank updates the slices it owns and gathers the rest.

    step(gradients, carry)   global norm -> clip factor and skip flag -> bucket by bucket: apply the rule
                             (AdamW, SGD, Lion) to the slice, copy it to the parameters, begin to
                             gather them (some updates are already done: `early.py`)
    validate()               of an optimistic update, which did not wait for the norm (`optimistic.py`)
    wait()                   then states can be read: `staged(state, parts)`
    overwriting(everything)  around values that are set from outside

Slices are staged from their storages: while one bucket is updated, the next is read and the
previous one written. While the state is on the device, nothing here reads a tensor's value on the
host: norm, clip factor, skip flag, loss scale and learning rate stay tensors. Offloaded state is
updated by the host, which has to read them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from threed import collectives
from threed.collectives import Pending, done
from threed.device import is_accelerator, synchronize
from threed.memory.tiers import InMemory, StagedBuffer, start_copy
from threed.ops.update import StepScalars
from threed.precision import LossScale, Scaler
from threed.topology import Axis
from threed.zero.early import Early, most_waiting
from threed.zero.gather import Gatherer
from threed.zero.layout import Bucket, Layout
from threed.zero.optimistic import Optimistic
from threed.zero.reductions import Gradient
from threed.zero.state import (
    GRADIENT,
    PARAMETER,
    PREVIOUS,
    WEIGHT,
    Consistency,
    Readers,
    State,
    drop_all,
    fetched_in_turn,
    new_state,
    store_all,
)
from threed.zero.unused import Stretch, Unused
from threed.zero.update import BadSteps, Outcome, Update, sum_of_squares
from threed.zero.versions import Versions

HOST = torch.device("cpu")


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
    """

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
            outcome=self._outcome, apply=self._apply, observe=self.bad.observe,
        ) if optimistic else None  # fmt: skip
        self.early = Early(
            self.states, most_waiting(layout), grad_clip > 0,
            guess=self._guess, apply=self._update_buffers,
        ) if policy.early else None  # fmt: skip
        self.versions = Versions(layout, gatherer) if policy.versions > 1 else None
        self.earlier = self.versions.earlier if self.versions else []
        if policy.delayed:
            self.earlier = [State(bucket, {PREVIOUS: bucket.portion}) for bucket in layout.buckets]
        self.unused = Unused(layout, self.updates) if dynamic else None
        self._stretches: dict[Bucket, list[Stretch]] = {}
        self._on_host = not (policy.optimizer_tier is None and policy.params_tier is None)
        self._thread = ThreadPoolExecutor(1, "delayed-update") if policy.delayed else None
        self._delayed: Future[None] | None = None  # the update that the thread runs, or has run
        self._unpublished = False  # the parameters do not have a delayed update's weights yet

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
        if self.early is not None:
            self.early.drop()  # what a step has updated that an error broke off
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
        if everything:
            self._discard_update()
        else:
            self._publish_delayed()
            self.wait()
        self._let_device_read()
        with self.consistency.changing():
            self.gatherer.settle()  # a gather in flight may still read what is written here
            self.gatherer.release_all()  # what is gathered now would be stale
            yield
            if everything and self.layout.policy.delayed:
                for state in reversed(self.earlier):
                    self.gatherer.publish(state.bucket)
                self._unpublished = True
            self.gatherer.complete()
            self.gatherer.settle()
            if self.versions is not None:
                self.versions.restore(whole=everything)

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

    def _guess(self) -> StepScalars:
        """Returns the next update's scalars on the host, if nothing is clipped and nothing
        skipped."""
        sums = torch.zeros(3, dtype=torch.float64, device=self.updates.device)
        return _on_host(_scalars(self._outcome()(sums), self.updates + 1))

    # ----------------------------------------------------------------------------------------------- an update

    def _apply(self, gradients: Sequence[Gradient], update: Update, guessed: bool = False) -> None:
        """Counts an update, and begins to do it. guessed: its norm is not known yet."""
        if self.versions is not None:
            for state in self.earlier:
                self.readers.wait(state)
            self.versions.turn()
        self.updates += 1 - update.skip
        self.bad.count(update)
        if not guessed:
            self.bad.observe(update)
        self.scaler.update(update.overflow)
        self._update_all(gradients, _scalars(update, self.updates))

    def _update_all(self, gradients: Sequence[Gradient], now: StepScalars) -> None:
        self._publish_delayed()
        done: Set[State] = frozenset()
        if self._on_host:
            read = _on_host(now)
            now = now if self.layout.policy.optimizer_tier is None else read
            self._let_device_read()
            if self.early is not None:
                with self.consistency.changing():
                    done = self.early.end(now)
            if bool(read.skip):
                return
        if self._thread is not None:
            kept = _copies_on_host(gradients)
            self._unpublished = True
            self._delayed = self._thread.submit(self._update_in_turn, kept, now, False)
        else:
            self._update_in_turn(gradients, now, True, done)

    def _update_in_turn(
        self, gradients: Sequence[Gradient], now: StepScalars, publish: bool,
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
        weight = self._update_buffers(state, buffers, now, fused)
        if fused:
            buffers.pop(PARAMETER).store()
            self.gatherer.publish(state.bucket)
        elif publish:
            self._publish(state, weight)
        store_all(buffers)

    def _update_buffers(
        self, state: State, buffers: dict[str, StagedBuffer], now: StepScalars, fused: bool
    ) -> Tensor:
        """Updates what buffers hold of a state; returns the weights.

        Args:
            buffers: of all parts and the gradient, which is dropped.
            now: the scalars of the update.
            fused: also write the new parameters, to one more buffer.
        """
        self.readers.wait(state)
        gradient, weight, *moments = (buffers[part].wait() for part in (GRADIENT, *state.storages))
        if fused:
            buffers[PARAMETER] = state.bucket.portion.empty()
        out = buffers[PARAMETER].values if fused else None
        self._apply_rule(state, (weight, gradient, *moments), now, out)
        buffers.pop(GRADIENT).drop()
        return weight

    def _apply_rule(
        self, state: State, values: Sequence[Tensor], now: StepScalars, out: Tensor | None
    ) -> None:
        """Updates weights, gradient (used up) and moments, all [n]; out [n] gets the new weights.
        In parts if some parameters are unused so far, or count their updates apart."""
        options = state.bucket.group.key.options
        if options.factor != 1.0:
            now = replace(now, lr=now.lr * options.factor)
        if state.bucket not in self._stretches:
            options.rule.update(values[0], values[1], values[2:], now, options.decay, out)
        for first, last, since in self._stretches.get(state.bucket, ()):
            weight, gradient, *moments = (tensor[first:last] for tensor in values)
            new = None if out is None else out[first:last]
            if since is not None:
                step = (now.step - since.to(now.step.device)).clamp(min=1)
                own = replace(now, step=step)
                options.rule.update(weight, gradient, moments, own, options.decay, new)
            elif new is not None:
                new.copy_(weight)

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

    # --------------------------------------------------------------------------------- updates in the background

    def _wait_for_update(self) -> None:
        """Waits for a delayed update, whose weights the parameters do not have yet. Validates an
        optimistic one."""
        self.validate()
        if self._delayed is not None:
            self._delayed.result()
        self.consistency.check()

    def _publish_delayed(self) -> None:
        """Waits for a delayed update, and copies its weights to the parameters.

        Only the next update may do this, and whoever sets weights: the next step would not be
        delayed.
        """
        self._wait_for_update()
        self._delayed = None
        if self._unpublished:
            self._let_device_read()
            for state, earlier in zip(reversed(self.states), reversed(self.earlier), strict=True):
                self.readers.wait(earlier)
                with self.staged(state, (WEIGHT,), write=True):
                    pass
            self._unpublished = False

    def _discard_update(self) -> None:
        """Drops the last update, as far as it is not done, before everything is overwritten."""
        if self.early is not None:
            self.early.drop()
        if self.optimistic is not None:
            self.optimistic.discard()
        if self._delayed is not None:
            wait((self._delayed,))
        self._delayed, self._unpublished = None, False

    def _let_device_read(self) -> None:
        """Waits until the GPU has finished its reads of host memory, which is about to change."""
        if self._on_host and is_accelerator(self.updates.device):
            synchronize(self.updates.device)


def _scalars(update: Update, updates: Tensor) -> StepScalars:
    """Returns the scalars of an update; updates: how many it makes."""
    scale = torch.where(update.skip == 0, update.clip / update.loss_scale, 1.0)
    return StepScalars(update.lr, updates.clamp(min=1), scale, update.skip)


def _on_host(now: StepScalars) -> StepScalars:
    """Returns a step's scalars on the host, by one copy."""
    together = torch.stack((now.lr, now.step, now.scale, now.skip))
    return StepScalars(*start_copy(together, HOST).wait().unbind())


def _copies_on_host(gradients: Sequence[Gradient]) -> list[Gradient]:
    """Returns gradients that the next step does not overwrite; from a device they are copied all at
    once."""
    copies = [_start_host_copy(gradient.storage.fetch().wait()) for gradient in gradients]
    return [
        Gradient(InMemory(copy.wait()), g.squares)
        for copy, g in zip(copies, gradients, strict=True)
    ]


def _start_host_copy(values: Tensor) -> Pending:
    on_gpu = is_accelerator(values.device)
    return start_copy(values, HOST) if on_gpu else done(values.to(HOST, copy=True))
