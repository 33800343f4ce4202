"""The ZeRO optimizer (arXiv 1910.02054): each rank updates the slices it owns and gathers the rest.

    step(gradients, carry) :  global norm -> clip factor and skip flag -> bucket by bucket: apply the rule (AdamW, SGD,
                              Lion) to the slice, copy it to the parameters, begin to gather them
                              (of some the update is done by then: `early.py`)
    validate()             :  of an optimistic update, which did not wait for the global norm (`optimistic.py`)

Slices are staged from their storages: while one bucket is updated, the next is read and the previous one written.
While the state is on the device, nothing here reads a tensor's value on the host: norm, clip factor, skip flag, loss
scale and learning rate stay tensors. Offloaded state is updated by the host, which has to read them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager

import torch
from torch import Tensor

from threed import collectives
from threed.collectives import done
from threed.device import is_accelerator, synchronize
from threed.memory.tiers import InMemory, StagedBuffer, start_copy
from threed.ops.update import Rule, StepScalars
from threed.precision import LossScale, Scaler
from threed.sharding import Piece
from threed.topology import Axis
from threed.zero.bad_steps import BadSteps
from threed.zero.early import Early, most_waiting
from threed.zero.gather import Gatherer
from threed.zero.layout import Bucket, Layout
from threed.zero.norm import sum_of_squares
from threed.zero.optimistic import Optimistic
from threed.zero.reductions import Gradient
from threed.zero.state import (
    GRADIENT,
    PARAMETER,
    PREVIOUS,
    WEIGHT,
    State,
    drop_all,
    fetched_in_turn,
    new_state,
    store_all,
)
from threed.zero.unused import Stretch, Unused
from threed.zero.update import Before, Update
from threed.zero.versions import Versions

HOST = torch.device("cpu")


class Optimizer:
    """Applies a rule to the buckets of a layout.

    learning_rate: maps the number of updates done (a tensor) to a learning rate (a tensor). grad_clip: the largest
    norm a step may have, 0 for no clipping. everyone: the axis of all ranks, for the norm. loss_scale: the factor in
    the gradients. optimistic: the update does not wait for the norm, and is validated later. max_spike: see `BadSteps`.
    dynamic: parameters may be unused, as those of a wrapped module. device: where the layers run.

    earlier: for checkpoints, states of the parameters that are one update older than the weights.
    """

    def __init__(
        self, layout: Layout, gatherer: Gatherer, everyone: Axis, rule: Rule,
        learning_rate: Callable[[Tensor], Tensor], *, device: torch.device, grad_clip: float, loss_scale: LossScale,
        optimistic: bool = False, max_spike: float = 0.0, dynamic: bool = False,
    ) -> None:  # fmt: skip
        self.layout, self.gatherer, self.everyone, self.rule = layout, gatherer, everyone, rule
        self.learning_rate, self.grad_clip = learning_rate, grad_clip
        self.states = [
            new_state(bucket, rule.state_names, layout.policy) for bucket in layout.buckets
        ]
        self.frozen = [State(bucket, {WEIGHT: bucket.storage}) for bucket in layout.frozen]
        self.on_host = not (
            layout.policy.optimizer_tier is None and layout.policy.params_tier is None
        )
        self.delayed = ThreadPoolExecutor(1, "delayed-update") if layout.policy.delayed else None
        self._under_way: Future[None] | None = None
        self._unpublished = (
            False  # the weights of a delayed update were not copied to the parameters yet
        )
        self.torn = False  # a change of states began and did not end
        # What gives the initial weights, while all states are as they were initialised and it can do so again.
        self.initial: Callable[[Piece], Tensor] | None = None
        self.updates = torch.zeros(
            (), dtype=torch.float64, device=device
        )  # done so far; a skipped step is none
        self.scaler = Scaler(loss_scale, device)
        self.bad = BadSteps(device, max_spike, loss_scale)
        self.optimistic = Optimistic(self) if optimistic else None
        self.early = Early(self, most_waiting(layout)) if layout.policy.early else None
        self.versions = Versions(layout, gatherer) if layout.policy.versions > 1 else None
        self.earlier = self.versions.earlier if self.versions else []
        if layout.policy.delayed:
            self.earlier = [State(bucket, {PREVIOUS: bucket.portion}) for bucket in layout.buckets]
        self.unused = Unused(layout, self.updates) if dynamic else None
        self.before_change: Callable[[State], None] = lambda state: (
            None
        )  # a save may still read what it is called with
        self._stretches: dict[Bucket, list[Stretch]] = {}

    def step(self, gradients: Sequence[Gradient], carry: Tensor) -> Callable[[], Update]:
        """Updates the weights from every bucket's slice of the summed gradients; returns what gives the results.

        carry: fp64 [1 + k], numbers of this rank, summed over all ranks in the same all-reduce as the norm: its loss,
        and flags of invalid data, for which the step is skipped. An optimistic update does not wait for this sum; the
        returned function does.
        """
        mine = self._share(gradients, carry)
        if self.optimistic is not None:
            return self.optimistic.step(gradients, mine)
        update = self.before().with_sums(collectives.sum_of_scalars(mine, self.everyone))
        self.apply(gradients, update)
        return lambda: update

    def begin(self, gradients: Sequence[Gradient], carry: Tensor) -> Callable[[], Update]:
        """Begins the sum over all ranks, with `carry` as in `step`; returns a function that waits for it, updates, and
        returns the results."""
        mine = self._share(gradients, carry)
        before, pending = self.before(), collectives.start_sum_of_scalars(mine, self.everyone)

        def end() -> Update:
            update = before.with_sums(pending.wait())
            self.apply(gradients, update)
            return update

        return end

    def _share(self, gradients: Sequence[Gradient], carry: Tensor) -> Tensor:
        """This rank's share of the sums that an update depends on, fp64 [2 + k]."""
        self.finish_delayed()
        self._stretches = {} if self.unused is None else self.unused.stretches
        found = [gradient.squares for gradient in gradients]
        return torch.cat((sum_of_squares(found, self.layout.buckets, carry.device), carry))

    def before(self) -> Before:
        """Returns what an update begins with."""
        return self.bad.before(
            self.learning_rate(self.updates), self.scaler.scale.clone(), self.grad_clip
        )

    def apply(self, gradients: Sequence[Gradient], update: Update, guessed: bool = False) -> None:
        """Counts an update, and begins to do it. guessed: its norm is not known yet; call `bad.observe` when it is."""
        if self.versions is not None:
            for state in self.earlier:
                self.before_change(state)
            self.versions.turn()
        self.updates += 1 - update.skip
        self.bad.count(update)
        if not guessed:
            self.bad.observe(update)
        self.scaler.update(update.overflow)
        self._update_all(gradients, _scalars(update, self.updates))

    def guess(self) -> StepScalars:
        """Returns the next update's scalars on the host, if nothing is clipped and nothing skipped."""
        update = self.before().with_sums(
            torch.zeros(3, dtype=torch.float64, device=self.updates.device)
        )
        return _on_host(_scalars(update, self.updates + 1))

    @property
    def skips(self) -> Tensor:
        """Steps skipped so far."""
        return self.bad.skips

    @property
    def pending(self) -> bool:
        """Whether the last update may have to be undone."""
        return self.optimistic is not None and self.optimistic.pending

    def validate(self) -> bool:
        """Whether the last update was right; if it was not, it was undone, and done again. Parameters are not gathered
        then. Collective where it was wrong."""
        return self.optimistic is None or self.optimistic.validate()

    def _update_all(self, gradients: Sequence[Gradient], now: StepScalars) -> None:
        self.publish_delayed()
        if self.on_host:
            read = _on_host(now)
            now = now if self.layout.policy.optimizer_tier is None else read
            if self.early is not None:
                self._end_early(self.early, gradients, now)
                return
            if bool(read.skip):
                return
        self.let_device_read()
        if self.delayed is not None:
            kept = _copies_on_host(gradients)
            self._unpublished = True
            self._under_way = self.delayed.submit(self._update_in_turn, kept, now, False)
        else:
            self._update_in_turn(gradients, now, True)

    def _end_early(self, early: Early, gradients: Sequence[Gradient], now: StepScalars) -> None:
        self.let_device_read()
        with self.changing():
            done = early.end(now)
            if not bool(now.skip):
                self._update_in_turn(gradients, now, True, done)

    def _update_in_turn(
        self,
        gradients: Sequence[Gradient],
        now: StepScalars,
        publish: bool,
        done: Set[State] = frozenset(),
    ) -> None:
        """Updates all states but those `done`, from the last layers to the first."""
        pairs = zip(reversed(self.states), reversed(gradients), strict=True)
        work = [(state, gradient.storage) for state, gradient in pairs if state not in done]
        with self.changing():
            for state, buffers in fetched_in_turn(
                (state, state.fetch_for_update(storage)) for state, storage in work
            ):
                try:
                    self._update(state, buffers, now, publish)
                except BaseException:
                    drop_all(buffers)
                    raise
            if publish:
                self.gatherer.complete()

    def _update(
        self,
        state: State,
        buffers: dict[str, StagedBuffer],
        now: StepScalars,
        publish: bool,
    ) -> None:
        """Updates one bucket; parameters on the same device are written in the same pass."""
        self.before_change(state)
        gradient, weight, *moments = (buffers[part].wait() for part in (GRADIENT, *state.storages))
        storage = state.bucket.portion
        beside = publish and not state.shared and storage.device == weight.device
        if beside:
            buffers[PARAMETER] = storage.empty()
        out = buffers[PARAMETER].values if beside else None
        self.apply_rule(state, (weight, gradient, *moments), now, out)
        buffers.pop(GRADIENT).drop()
        if beside:
            buffers.pop(PARAMETER).store()
            self.gatherer.publish(state.bucket)
        elif publish:
            self._publish(state, weight)
        store_all(buffers)

    def apply_rule(
        self, state: State, values: Sequence[Tensor], now: StepScalars, out: Tensor | None
    ) -> None:
        """Updates weights, gradient (used up) and moments, all [n]; out [n] gets the new weights. In parts if some
        parameters are unused so far, or count their updates apart."""
        options = state.bucket.group.key.options
        decay = options.decay
        if options.factor != 1.0:
            now = StepScalars(now.lr * options.factor, now.step, now.scale, now.skip)
        if state.bucket not in self._stretches:
            self.rule.update(values[0], values[1], values[2:], now, decay, out)
        for first, last, since in self._stretches.get(state.bucket, ()):
            weight, gradient, *moments = (tensor[first:last] for tensor in values)
            new = None if out is None else out[first:last]
            if since is not None:
                step = (now.step - since.to(now.step.device)).clamp(min=1)
                self.rule.update(
                    weight,
                    gradient,
                    moments,
                    StepScalars(now.lr, step, now.scale, now.skip),
                    decay,
                    new,
                )
            elif new is not None:
                new.copy_(weight)

    def _publish(self, state: State, weight: Tensor) -> None:
        """Copies a bucket's weights to the parameters, and begins to gather those that stay whole."""
        if not state.shared:
            params = state.bucket.portion
            parameter = params.empty()
            stay = isinstance(state.weight, InMemory) and isinstance(params, InMemory)
            parameter.values.copy_(
                weight, non_blocking=stay
            )  # else one of the buffers is reused, or written, at once
            parameter.store()
        self.gatherer.publish(state.bucket)

    @contextmanager
    def held(
        self, state: State, parts: Iterable[str], write: bool = False, publish: bool = True
    ) -> Iterator[dict[str, Tensor]]:
        """Yields some parts of a bucket's state to read. With `write` they may be changed, and are stored after the
        block; with `publish` too, changed weights are published."""
        if write:
            self.initial = None
            self.before_change(state)
        buffers = state.fetch(parts)
        try:
            yield {part: staged.wait() for part, staged in buffers.items()}
        except BaseException:
            drop_all(buffers)
            raise
        if write and publish and WEIGHT in buffers:
            self._publish(state, buffers[WEIGHT].wait())
        store_all(buffers) if write else drop_all(buffers)

    def finish_delayed(self) -> None:
        """Waits for a delayed update, if one is running: then the states are new, the parameters not yet. Validates an
        optimistic one."""
        self.validate()
        if self._under_way is not None:
            self._under_way.result()
        self.check_whole()

    def flush(self) -> None:
        """Waits for a delayed update, and drops the buffers of early updates: the storages have the states."""
        if self.early is not None:
            self.early.drop()
        self.finish_delayed()

    def publish_delayed(self) -> None:
        """Waits for a delayed update, if there is one, and copies its weights to the parameters.

        Called by the next update, and before weights are set from outside. A call at any other time would change the
        training: the next step would not be delayed.
        """
        self.finish_delayed()
        self._under_way = None
        if self._unpublished:
            self.let_device_read()
            for state, earlier in zip(reversed(self.states), reversed(self.earlier), strict=True):
                self.before_change(earlier)
                with self.held(state, (WEIGHT,), write=True):
                    pass
            self._unpublished = False

    def restore_delayed(self) -> None:
        """Begins to gather the parameters that were loaded from a checkpoint; the next update publishes the weights."""
        for state in reversed(self.earlier):
            self.gatherer.publish(state.bucket)
        self._unpublished = True

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Marks the states as inconsistent while the block changes them; they stay so, until a load, if it raises."""
        self.torn, self.initial = True, None
        yield
        self.torn = False

    def tear(self) -> None:
        """Marks the states as inconsistent, until a load."""
        self.torn = True

    def mend(self) -> None:
        """Takes that back."""
        self.torn = False

    def check_whole(self) -> None:
        """Raises RuntimeError when a change of the states was interrupted."""
        if self.torn:
            raise RuntimeError(
                "an update, or a load, broke off (see the first error): some values are a step older than others, and"
                " training on, or saving, would mix them; load a checkpoint"
            )

    def discard(self) -> None:
        """Drops a delayed update, before everything is overwritten."""
        if self.early is not None:
            self.early.drop()
        if self.optimistic is not None:
            self.optimistic.discard()
        if self._under_way is not None:
            wait((self._under_way,))
        self._under_way, self._unpublished = None, False
        self.let_device_read()

    def let_device_read(self) -> None:
        """Waits until the GPU has finished its reads of host memory, which is about to change."""
        if self.on_host and is_accelerator(self.updates.device):
            synchronize(self.updates.device)

    def settle(self) -> None:
        """Waits until updates are done and all parameters that are not sliced are gathered. Does not publish a delayed
        update."""
        self.finish_delayed()
        self.gatherer.settle()


def _scalars(update: Update, updates: Tensor) -> StepScalars:
    """Returns the scalars of an update; updates: how many it makes."""
    scale = torch.where(update.skip == 0, update.clip / update.loss_scale, 1.0)
    return StepScalars(update.lr, updates.clamp(min=1), scale, update.skip)


def _on_host(now: StepScalars) -> StepScalars:
    """Returns a step's scalars on the host, by one copy."""
    together = torch.stack((now.lr, now.step, now.scale, now.skip))
    return StepScalars(*start_copy(together, HOST).wait().unbind())


def _copies_on_host(gradients: Sequence[Gradient]) -> list[Gradient]:
    """Returns gradients that the next step does not overwrite; from a device they are copied all at once."""
    values = [gradient.storage.fetch().wait() for gradient in gradients]
    copies = [
        start_copy(v, HOST) if is_accelerator(v.device) else done(v.to(HOST, copy=True))
        for v in values
    ]
    return [
        Gradient(InMemory(copy.wait()), g.squares)
        for copy, g in zip(copies, gradients, strict=True)
    ]
