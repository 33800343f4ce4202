"""Updates during the backward: a bucket is updated as soon as its gradient is complete.

    early.begin()                   before a step: discards updates of an interrupted step
    early.take(bucket, gradient)    called with the complete gradient of each bucket; returns
                                    whether the bucket will be updated during the backward
    early.progress()                called between backwards: starts to read states for the next
                                    updates, and updates the buckets whose states have been read
    done = early.end(now)           ends the step; returns the states that were updated during the
                                    backward. `now` contains the step's true scalars: learning
                                    rates, number of the update, clip factor, skip flag

In layer order (`--zero.order layer`) every layer runs all micro-batches before the next layer. So a
gradient is complete when the backwards of its layer have ended. The optimizer state of that layer
can then be read, updated and written while the backwards of other layers run. At that time it is
unknown whether the step will be skipped or its gradients clipped. The update guesses that neither
will happen, and writes the new state to a second region of the drive. If the guess was right, the
second region replaces the first one at the end of the step. If the guess was wrong, or if the step
is interrupted, the first region still has the old state. If the gradients must be clipped, the
update runs again at the end of the step, from gradients that were also written to the drive. After
a wrong guess, updates run at the end of each step, up to and including the first step for which the
guess would have been right. The number and size of buffers in memory are constant.

GreedySnake (arXiv 2512.17570) instead runs a part of the update during the next forward. Layers
therefore receive the parameters that this part updates one step late.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from threed.memory.tiers import DriveBuffer, StagedBuffer
from threed.ops.update import StepScalars
from threed.zero.layout import Bucket, Layout
from threed.zero.state import GRADIENT, State, drop_all, early_storages, fetched_in_turn


class Early:
    """Updates buckets during the backward, if their states and parameters are on a drive.

    Args:
        states: states of the optimizer. Gradients must be completed layer by layer, in the order of
            these states. Within a layer they may be completed in any order: the gradients of
            experts have a launch queue of their own.
        max_pending: largest number of gradients that may wait in the queue: the number of buckets
            of the layer that has most. If more gradients wait, `take` updates the buckets that come
            first.
        clips: whether gradient clipping is enabled.
        guess: function that returns the scalars of the next update, on the host, under the
            assumption that the step is neither clipped nor skipped.
        apply: function that applies the update rule to the staged buffers of a state; see
            `Optimizer._apply_rule`.
    """

    def __init__(
        self, states: Sequence[State], max_pending: int, clips: bool, *,
        guess: Callable[[], StepScalars],
        apply: Callable[[State, dict[str, StagedBuffer], StepScalars, bool], Tensor],
    ) -> None:  # fmt: skip
        self.max_pending, self.clips, self.guess, self.apply = max_pending, clips, guess, apply
        self._states = {state.bucket: state for state in states if early_storages(state)}
        self._last_guess_right = True
        self._guess: StepScalars | None = None  # guessed scalars of this step; None between steps
        self._pending: dict[State, DriveBuffer] = {}  # gradients that wait for their update
        self._reads = fetched_in_turn(())
        # the state that is updated next, and its staged buffers
        self._next: tuple[State, dict[str, StagedBuffer]] | None = None
        self._done: list[State] = []

    def begin(self) -> None:
        """Begins a step; first discards the updates of an interrupted step."""
        self.drop()
        self._guess = self.guess()
        self._reads = fetched_in_turn((s, s.fetch(s.storages)) for s in self._states.values())

    def drop(self) -> None:
        """Discards all updates since the last `begin` or `end`, and releases all buffers.

        The states keep their old values, because only `end` makes updates permanent.
        """
        self._guess = None
        self._done.clear()
        while self._pending:
            self._pending.popitem()[1].drop()
        self._reads.close()
        if self._next is not None:
            drop_all(self._next[1])
        self._next = None

    def take(self, bucket: Bucket, gradient: StagedBuffer) -> bool:
        """Queues a complete gradient for an update during the backward.

        Args:
            bucket: the bucket that the gradient belongs to.
            gradient: staged buffer with this rank's slice of the bucket's gradient. If the gradient
                is queued, this object releases the buffer after the update.

        Returns:
            Whether the gradient was queued. If not, the caller keeps the buffer, and the bucket
            must be updated at the end of the step.
        """
        if bucket not in self._states or self._guess is None or not self._last_guess_right:
            return False
        assert isinstance(gradient, DriveBuffer)
        if self.clips:
            gradient.write()  # if the step is clipped, its update reads the gradient again
        self._pending[self._states[bucket]] = gradient
        self.progress()
        while len(self._pending) > self.max_pending:
            self._update()
        return True

    def progress(self) -> None:
        """Starts to read the next states, and updates queued buckets whose states were read."""
        if self._pending or self._done:
            self._read_ahead()
        while self._pending and self._arrived():
            self._update()

    def end(self, now: StepScalars) -> set[State]:
        """Ends a step; makes its updates permanent if the guess was right, else discards them.

        Args:
            now: the true scalars of the step's update, with which the guess is compared.

        Returns:
            The states that were updated during the backward; empty if the guess was wrong.

        Raises:
            RuntimeError: the learning rate or the loss scale was changed during the step.
        """
        guess, taken = self._guess, bool(self._pending or self._done)
        right = guess is not None and all(map(torch.equal, guess, now))
        if taken and not (right or bool(now.skip) or self.clips):
            raise RuntimeError("the learning rate or the loss scale was changed during a step")
        while right and self._pending:
            self._update()
        done = set(self._done) if right else set()
        self.drop()
        for state in done:
            for storage in early_storages(state):
                storage.swap()
        self._last_guess_right = right or guess is None
        return done

    def _read_ahead(self) -> None:
        """Starts the reads for the next two updates, unless they have already been started."""
        if self._next is None:
            self._next = next(self._reads, None)

    def _arrived(self) -> bool:
        """Returns whether the next update can run without waiting for the drive."""
        self._read_ahead()
        assert self._next is not None
        state, staged = self._next
        if state not in self._pending:
            return False
        buffers = (self._pending[state], *staged.values())
        return all(buffer.arrived() for buffer in buffers if isinstance(buffer, DriveBuffer))

    def _update(self) -> None:
        """Updates the bucket that comes next in the order of states.

        Its gradient must be queued. It is if the queue holds more than `max_pending` gradients, or
        all gradients of the step. The new values are written to the second regions of the state's
        storages. The first regions keep the old values, which are needed if the guess was wrong.
        """
        self._read_ahead()
        assert self._guess is not None
        assert self._next is not None
        (state, buffers), self._next = self._next, None
        buffers[GRADIENT] = self._pending.pop(state)
        try:
            self.apply(state, buffers, self._guess, not state.shared)
            while buffers:
                staged = buffers.popitem()[1]
                assert isinstance(staged, DriveBuffer)
                staged.store_second()
        finally:
            drop_all(buffers)
        self._done.append(state)


def max_pending_buckets(layout: Layout) -> int:
    """Returns the number of buckets in the layer that has the most buckets.

    All buckets of a layer may be complete, and wait for their update, at the same time.
    """
    groups = [group for group in layout.groups if group.key.units and group.key.trainable]
    layers = Counter(min(group.key.units or ()) for group in groups for _ in group.buckets)
    return max(layers.values(), default=0)
