"""Contributions to gradients: whose backward they come from, how many there are, and when they are
added.

A gradient is complete when it has the expected number of contributions in a round, and a bucket is
ready when its gradients are complete. `Reducer` says what a round is.

A backward of another engine may reach this engine's parameters, as a generator's loss does the
discriminator's. Such gradients add up in `.grad`. As in plain PyTorch they count in the next step,
unless `zero_grad` drops them before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from threed.zero.layout import Slot

# What adds a contribution, and with what.
Contribution = tuple[Callable[..., None], tuple[Any, ...]]


class Contributions:
    """Counts the contributions to the gradient of one parameter.

    Args:
        uses: the places in the model that use the parameter, and so contribute in a micro-batch.
        known: whether that number can be expected. If not, the gradient is complete when the round
            ends.

    Attributes:
        per_pass: the number expected in the backward of a micro-batch, None if it is unknown.
        remaining: expected contributions of the round that were not added yet.
        added: contributions of the round in the gradient's buffer.
        late: contributions of the round that came after the launch of a bucket of the gradient.
        used: whether there was a contribution in any step.
        positions: of the gradient's buckets in their `LaunchQueue`, in ascending order.
    """

    def __init__(self, uses: int = 1, known: bool = True) -> None:
        self._uses = uses
        self.per_pass = uses if known else None
        self.remaining = self.added = self.late = 0
        self.used = False
        self.positions: list[int] = []

    @property
    def counted(self) -> int | None:
        """The expected number, if it was counted, and is not that of the places."""
        return None if self.per_pass == self._uses else self.per_pass

    def restore(self, counted: int | None) -> None:
        """Restores `counted` of an earlier run, and forgets whether there was a contribution."""
        if self.per_pass is not None:
            self.per_pass = self._uses if counted is None else counted
        self.used = False

    def begin_round(self, passes: int) -> bool:
        """Begins a round of `passes` micro-batches; returns whether contributions are expected."""
        self.remaining, self.added, self.late = (self.per_pass or 0) * passes, 0, 0
        return self.per_pass is None or self.remaining > 0

    def add(self) -> bool:
        """Counts a contribution in the buffer; returns whether the gradient is complete now."""
        self.used = True
        self.added += 1
        self.remaining -= 1
        return self.remaining == 0

    def add_late(self) -> None:
        """Counts a contribution that came too late."""
        self.used = True
        self.late += 1

    def learn(self, passes: int, dynamic: bool) -> None:
        """Sets the expected number after a round; it decreases only if `dynamic`."""
        if self.per_pass is not None:
            counted = -(-(self.added + self.late) // passes)
            self.per_pass = counted if dynamic else max(self.per_pass, counted)


class LaunchQueue:
    """The buckets of one chunk of the model, or of parameters that several chunks share.

    They are launched in one order, the same on every rank, and every bucket once in a round.

    Args:
        chunks: the chunks of the model that use the parameters.
        parameters: the counts of all their gradients.
        buckets: for each bucket, by its number and in launch order, the counts of its gradients.

    Attributes:
        backwards: backwards of the chunks that have not ended in this step.
        rounds: rounds of this step that have ended.
        launched: buckets launched in this round.
    """

    def __init__(
        self,
        chunks: tuple[int, ...],
        parameters: Sequence[Contributions],
        buckets: Mapping[int, Sequence[Contributions]],
    ) -> None:
        self.chunks, self._parameters, self._buckets = chunks, parameters, list(buckets)
        for position, counts in enumerate(buckets.values()):
            for count in counts:
                count.positions.append(position)
        self._incomplete = [0] * len(buckets)  # gradients of each bucket
        self.backwards, self.rounds, self.launched = 1, 0, 0

    @property
    def next(self) -> int:
        """The number of the bucket to launch next, unless `is_done`."""
        return self._buckets[self.launched]

    @property
    def is_done(self) -> bool:
        """Whether all buckets were launched in this round."""
        return self.launched == len(self._buckets)

    @property
    def is_ready(self) -> bool:
        """Whether all gradients of the next bucket are complete."""
        return not self.is_done and self._incomplete[self.launched] == 0

    @property
    def is_untouched(self) -> bool:
        """Whether no bucket was launched in this step."""
        return self.rounds == self.launched == 0

    def begin(self, backwards: int) -> None:
        """Begins a step of so many backwards; `restart` begins its first round."""
        self.backwards = backwards

    def take(self) -> int:
        """Returns the number of the next bucket, and marks it as launched."""
        self.launched += 1
        return self._buckets[self.launched - 1]

    def restart(self, passes: int) -> None:
        """Begins the first round of a step, of `passes` micro-batches."""
        self.rounds = 0
        self._begin_round(passes)

    def next_round(self, passes: int) -> None:
        """Begins the next round, of `passes` micro-batches, after a backward has ended."""
        self.rounds += 1
        self.backwards -= 1
        self._begin_round(passes)

    def _begin_round(self, passes: int) -> None:
        self.launched = 0
        self._incomplete = [0] * len(self._buckets)
        for count in self._parameters:
            if count.begin_round(passes):
                for position in count.positions:
                    self._incomplete[position] += 1

    def learn(self, passes: int, dynamic: bool) -> None:
        """Sets the expected numbers of contributions; see `Contributions.learn`."""
        for count in self._parameters:
            count.learn(passes, dynamic)

    def mark_complete(self, count: Contributions) -> None:
        """Marks a gradient as complete in its buckets."""
        for position in count.positions:
            self._incomplete[position] -= 1

    def is_late(self, count: Contributions) -> bool:
        """Returns whether a bucket of the gradient was launched in this round."""
        return bool(count.positions) and count.positions[0] < self.launched


class Deferral:
    """Defers contributions to weight gradients, for split backwards (arXiv 2401.10241, section 2).

    with deferral.defer() as waiting: ...   # I: the input's gradient
    deferral.add_deferred(waiting)          # W: the weights' gradients
    """

    def __init__(self) -> None:
        self.waiting: list[Contribution] | None = None

    @contextmanager
    def defer(self) -> Iterator[list[Contribution]]:
        """Yields a list to which sinks append contributions in the block, instead of adding them.

        Of a product only the factors are kept. A round of reductions is that of the micro-batch
        whose contributions are added, so the schedule decides how long they wait.
        """
        self.waiting = waiting = list[Contribution]()
        try:
            yield waiting
        finally:
            self.waiting = None

    @torch.no_grad()
    def add_deferred(self, waiting: list[Contribution]) -> None:
        """Adds the contributions of the list, in order, and removes each from it."""
        waiting.reverse()
        while waiting:
            add, arguments = waiting.pop()
            add(*arguments)


class Owner(Protocol):
    """The part of `Reducer` that `own_backward` uses."""

    def give_up(self) -> None: ...


# owners of the running backwards, the innermost last; global, as autograd's engine is
_running: list[object] = []


@contextmanager
def own_backward(owner: Owner) -> Iterator[None]:
    """Marks the backwards in the block as the owner's. If the block raises, the owner's step is discarded."""
    _running.append(owner)
    try:
        yield
    except BaseException:
        owner.give_up()
        raise
    finally:
        _running.pop()


def is_own(owner: object, slot: Slot) -> bool:
    """Returns whether the backward that computes this gradient is the owner's.

    Raises:
        RuntimeError: it is no engine's.
    """
    if not _running:
        slot.param.grad = None
        raise RuntimeError(
            f"{slot.spec.name}: a gradient came in a backward that is no engine's: call engine.backward(loss) in place"
            " of loss.backward(), or torch.autograd.grad for gradients of inputs"
        )
    return _running[-1] is owner
