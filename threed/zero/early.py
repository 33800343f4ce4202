"""Updates that begin in the backward: a bucket's as soon as its gradient is complete, beside the layers before it.

    early.begin()                    before a step: drops what one that broke off has left
    early.take(bucket, gradient)     a complete gradient, in the order of buckets; returns whether it was taken
    early.progress()                 between backwards: reads ahead, and updates what has arrived
    done = early.end(now)            the step's scalars are known: the states that are updated, and need no other update

Layer by layer (`--zero.order layer`) a gradient is complete when the backwards of its layer are over, so that its state
may pass between drive and memory while other layers run. Whether the step is skipped, or its gradients clipped, is not
known then. The guess is that neither happens. What an update writes goes to a second region of the drive, and takes the
place of the first one at the end of the step, if the guess was right. If it was wrong, or the step breaks off, nothing
has changed; a step that is clipped is updated as ever, from gradients that were written to the drive for that. After a
wrong guess updates wait, until one would have been right. Buffers are of constant size and number.

arXiv 2512.17570 (GreedySnake) overlaps a part of the update with the next forward instead, which is a step late for it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence

from torch import Tensor

from threed.memory.tiers import DriveBuffer, StagedBuffer
from threed.ops.update import StepScalars
from threed.zero.layout import Bucket, Layout
from threed.zero.state import GRADIENT, State, drop_all, early_storages, fetched_in_turn


class Early:
    """Updates buckets of an optimizer whose states are on a drive, with their parameters.

    Args:
        states: of the optimizer.
        most: gradients that wait at a time.
        clips: whether a step's gradients may be clipped.
        guess: returns the next update's scalars on the host, if nothing is clipped and nothing
            skipped.
        apply: updates what buffers hold of a state; see `Optimizer._apply_rule`.
    """

    def __init__(
        self, states: Sequence[State], most: int, clips: bool, *,
        guess: Callable[[], StepScalars],
        apply: Callable[[State, dict[str, StagedBuffer], StepScalars, bool], Tensor],
    ) -> None:  # fmt: skip
        self.most, self.clips, self.guess, self.apply = most, clips, guess, apply
        self._states = {state.bucket: state for state in states if early_storages(state)}
        self._hopeful = True  # the last guess would have been right
        self._guess: StepScalars | None = None  # while a step runs
        self._waiting = deque[tuple[State, DriveBuffer]]()  # gradients
        self._reads = fetched_in_turn(())
        self._next: tuple[State, dict[str, StagedBuffer]] | None = None  # of the first gradient
        self._done: list[State] = []

    def begin(self) -> None:
        """Begins a step."""
        self.drop()
        self._guess = self.guess()
        self._reads = fetched_in_turn((s, s.fetch(s.storages)) for s in self._states.values())

    def drop(self) -> None:
        """Forgets what a step has updated so far, and releases all buffers."""
        self._guess = None
        self._done.clear()
        while self._waiting:
            self._waiting.popleft()[1].drop()
        self._reads.close()
        if self._next is not None:
            drop_all(self._next[1])
        self._next = None

    def take(self, bucket: Bucket, gradient: StagedBuffer) -> bool:
        """Takes a complete gradient and its buffer, unless the bucket is one for the end of the step."""
        if bucket not in self._states or self._guess is None or not self._hopeful:
            return False
        assert isinstance(gradient, DriveBuffer)
        if self.clips:
            gradient.write()  # if it is clipped, it is read again
        self._waiting.append((self._states[bucket], gradient))
        self.progress()
        while len(self._waiting) > self.most:
            self._update()
        return True

    def progress(self) -> None:
        """Begins to read the next states, and updates what has arrived."""
        if self._waiting or self._done:
            self._read_ahead()
        while self._waiting and self._arrived():
            self._update()

    def end(self, now: StepScalars) -> set[State]:
        """Ends a step whose scalars are these. Returns the states that are updated; all others, and all of them where
        the guess was wrong, are as they were."""
        guess, taken = self._guess, bool(self._waiting or self._done)
        right = guess is not None and all(bool(a == b) for a, b in zip(guess, now, strict=True))
        if taken and not (right or bool(now.skip) or self.clips):
            raise RuntimeError("the learning rate, or the loss scale, was changed while a step ran")
        while right and self._waiting:
            self._update()
        done = set(self._done) if right else set()
        self.drop()
        for state in done:
            for storage in early_storages(state):
                storage.swap()
        self._hopeful = right or guess is None
        return done

    def _read_ahead(self) -> None:
        """Begins to read the next state, and those after it, unless that has begun."""
        if self._next is None:
            self._next = next(self._reads, None)

    def _arrived(self) -> bool:
        """Whether the next update has nothing to wait for."""
        self._read_ahead()
        assert self._next is not None
        buffers = (self._waiting[0][1], *self._next[1].values())
        return all(buffer.arrived() for buffer in buffers if isinstance(buffer, DriveBuffer))

    def _update(self) -> None:
        """Updates the bucket whose gradient came first; what that changes is written beside."""
        self._read_ahead()
        state, gradient = self._waiting.popleft()
        assert self._guess is not None
        assert self._next is not None
        assert self._next[0] is state  # reductions end in the order of buckets
        buffers, self._next = self._next[1], None
        buffers[GRADIENT] = gradient
        try:
            self.apply(state, buffers, self._guess, not state.shared)
            while buffers:
                staged = buffers.popitem()[1]
                assert isinstance(staged, DriveBuffer)
                staged.store_beside()
        finally:
            drop_all(buffers)
        self._done.append(state)


def most_waiting(layout: Layout) -> int:
    """Returns the most buckets whose gradients are complete at once: those of the largest layer."""
    groups = [group for group in layout.groups if group.key.units and group.key.trainable]
    layers = Counter(min(group.key.units or ()) for group in groups for _ in group.buckets)
    return max(layers.values(), default=0)
