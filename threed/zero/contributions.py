"""Contributions to gradients: their number, their order, and the backward that produced them.

A contribution is one gradient that a layer or autograd computes for a parameter. A parameter that
is used in two places of the model gets two contributions per micro-batch. A gradient is complete
when it has the expected number of contributions, and a bucket is ready when all its gradients are
complete. Contributions are counted per round. A round is the time between two reductions of the
same bucket: one micro-batch or one step (see `reducer`).

A backward of another engine may also compute gradients of this engine's parameters: in a GAN, the
generator's loss is differentiated through the discriminator. Such gradients accumulate in `.grad`
of the parameters. As in plain PyTorch, they become part of the gradients of the next step, unless
`zero_grad` drops them first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from threed.zero.layout import Slot

# A deferred contribution: the function that adds it, and the function's arguments.
Contribution = tuple[Callable[..., None], tuple[Any, ...]]


class Contributions:
    """Counts the contributions to the gradient of one parameter.

    Contributions are counted per round: per micro-batch or per step, depending on how often
    gradients are reduced.

    Args:
        uses: number of places in the model that use the parameter. Each place contributes once per
            micro-batch.
        known: whether every micro-batch makes `uses` contributions, all in the same round. If
            False, the gradient is only complete when the round ends.

    Attributes:
        per_pass: number of contributions expected per micro-batch; None if `known` is False.
        remaining: number of contributions that are still expected in this round.
        added: number of contributions of this round that were added to the gradient's buffer.
        late: number of contributions of this round that arrived too late for the buffer, because
            the reduction of a bucket with part of the gradient had already been launched.
        used: whether any contribution was counted since construction or the last `restore`.
        positions: indices, in the launch order of a `LaunchQueue`, of the buckets that contain the
            gradient or a part of it; ascending.
    """

    def __init__(self, uses: int = 1, known: bool = True) -> None:
        self._uses = uses
        self.per_pass = uses if known else None
        self.remaining = self.added = self.late = 0
        self.used = False
        self.positions: list[int] = []

    @property
    def counted(self) -> int | None:
        """`per_pass` for a checkpoint; None if it is unknown or equal to the number of uses."""
        return None if self.per_pass == self._uses else self.per_pass

    def restore(self, counted: int | None) -> None:
        """Restores `per_pass` from a saved state, and sets `used` to False.

        If `known` was False, `per_pass` remains None.

        Args:
            counted: value of the property `counted` when the state was saved; if it is None,
                `per_pass` becomes the number of uses.
        """
        if self.per_pass is not None:
            self.per_pass = self._uses if counted is None else counted
        self.used = False

    def begin_round(self, passes: int) -> bool:
        """Begins a round of `passes` micro-batches.

        Returns:
            Whether the gradient is incomplete. This is the case if contributions are expected in
            this round, or if their number is unknown.
        """
        self.remaining, self.added, self.late = (self.per_pass or 0) * passes, 0, 0
        return self.per_pass is None or self.remaining > 0

    def expect(self, passes: int) -> bool:
        """Increases `remaining` by the contributions of `passes` more micro-batches.

        Args:
            passes: number of additional micro-batches; negative if there are fewer.

        Returns:
            Whether the gradient is incomplete.
        """
        self.remaining += (self.per_pass or 0) * passes
        return self.per_pass is None or self.remaining > 0

    def add(self) -> bool:
        """Counts a contribution that was added to the buffer.

        Returns:
            Whether the gradient is now complete.
        """
        self.used = True
        self.added += 1
        self.remaining -= 1
        return self.remaining == 0

    def take_back(self) -> None:
        """Reverses the last call of `add`."""
        self.added -= 1
        self.remaining += 1

    def add_late(self) -> None:
        """Counts a contribution that arrived after the launch of its bucket."""
        self.used = True
        self.late += 1

    def learn(self, passes: int, dynamic: bool) -> None:
        """Sets `per_pass` to the number of contributions per micro-batch in the round that ended.

        The number is the mean over the micro-batches, rounded up. The method has no effect if
        `known` was False, so that `per_pass` is None.

        Args:
            passes: number of micro-batches in the round.
            dynamic: whether `per_pass` may decrease; if False, it only increases.
        """
        if self.per_pass is not None:
            counted = -(-(self.added + self.late) // passes)
            self.per_pass = counted if dynamic else max(self.per_pass, counted)


class LaunchQueue:
    """The order in which buckets are reduced, for parameters of one chunk of the model.

    Parameters that several chunks share have a separate queue. So have parameters that are sharded
    over other ranks (`ShardSpec.over`), such as experts: their reductions may include tensor ranks,
    whose other buckets differ if vocabulary shards differ in size. In a common queue, a tensor rank
    could wait for the reduction of an expert that another one launches only after a bucket which is
    not complete yet. The order is the same on every rank of a reduction, and each bucket's
    reduction is launched once per round (a micro-batch or a step).

    Args:
        chunks: indices of the chunks that use the parameters.
        parameters: `Contributions` of all parameters of the queue.
        buckets: index of each bucket in `Layout.buckets` -> `Contributions` of the parameters in
            the bucket; in launch order.

    Attributes:
        backwards: number of backwards of the chunks that are still to run in this step.
        rounds: number of rounds of this step that have ended.
        launched: number of buckets launched in this round.
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
        self._incomplete = [0] * len(buckets)  # number of incomplete gradients per bucket
        self.backwards, self.rounds, self.launched = 1, 0, 0

    @property
    def next(self) -> int:
        """The index of the bucket to launch next; requires that `is_done` is false."""
        return self._buckets[self.launched]

    @property
    def is_done(self) -> bool:
        """Whether all buckets were launched in this round."""
        return self.launched == len(self._buckets)

    @property
    def is_ready(self) -> bool:
        """Whether there is a next bucket to launch, and all gradients in it are complete."""
        return not self.is_done and self._incomplete[self.launched] == 0

    @property
    def is_untouched(self) -> bool:
        """Whether no reduction was launched in this step."""
        return self.rounds == self.launched == 0

    def begin(self, backwards: int) -> None:
        """Sets the number of backwards of a new step; `restart` then begins its first round."""
        self.backwards = backwards

    def take(self) -> int:
        """Returns the index of the next bucket and marks the bucket as launched."""
        self.launched += 1
        return self._buckets[self.launched - 1]

    def restart(self, passes: int) -> None:
        """Begins the first round of a step; a round has `passes` micro-batches."""
        self.rounds = 0
        self._begin_round(passes)

    def next_round(self, passes: int) -> None:
        """Begins the next round after a backward has ended; a round has `passes` micro-batches."""
        self.rounds += 1
        self.backwards -= 1
        self._begin_round(passes)

    def expect(self, passes: int) -> None:
        """Changes the expected number of micro-batches of the current round.

        It must be called before the first bucket of the round is launched.

        Args:
            passes: number of micro-batches to add; negative to remove micro-batches.
        """
        self._count_incomplete(count for count in self._parameters if count.expect(passes))

    def _begin_round(self, passes: int) -> None:
        self.launched = 0
        self._count_incomplete(c for c in self._parameters if c.begin_round(passes))

    def _count_incomplete(self, incomplete: Iterable[Contributions]) -> None:
        self._incomplete = [0] * len(self._buckets)
        for count in incomplete:
            for position in count.positions:
                self._incomplete[position] += 1

    def learn(self, passes: int, dynamic: bool) -> None:
        """Updates the expected numbers of contributions; see `Contributions.learn`."""
        for count in self._parameters:
            count.learn(passes, dynamic)

    def mark_complete(self, count: Contributions) -> None:
        """Marks a gradient as complete in its buckets."""
        for position in count.positions:
            self._incomplete[position] -= 1

    def is_late(self, count: Contributions) -> bool:
        """Returns whether a contribution to this gradient would be late.

        It is late if the reduction of a bucket with part of the gradient was launched in this
        round.
        """
        return bool(count.positions) and count.positions[0] < self.launched


class Deferral:
    """Defers contributions to weight gradients, for split backwards (arXiv 2401.10241, section 2).

        with deferral.defer() as waiting: ...   # input-gradient pass
        deferral.add_deferred(waiting)          # weight-gradient pass (W), later

    Attributes:
        waiting: the list that receives deferred contributions, or None outside of `defer`.
    """

    def __init__(self) -> None:
        self.waiting: list[Contribution] | None = None

    @contextmanager
    def defer(self) -> Iterator[list[Contribution]]:
        """Context manager that yields a list of the contributions computed in the block.

        Each parameter's `reducer.Sink` appends its contributions to the list instead of adding them
        to the gradient. If a contribution is a matrix product, the list contains its two factors,
        and `add_deferred` computes the product. A contribution is counted in the round in which
        `add_deferred` adds it to its gradient.
        """
        self.waiting = waiting = list[Contribution]()
        try:
            yield waiting
        finally:
            self.waiting = None

    @torch.no_grad()
    def add_deferred(self, waiting: list[Contribution]) -> None:
        """Adds deferred contributions to their gradients, in order, and empties the list.

        Args:
            waiting: the list that `defer` has yielded.
        """
        waiting.reverse()
        while waiting:
            add, arguments = waiting.pop()
            add(*arguments)


class Owner(Protocol):
    """Interface of an object to which backwards belong, such as `Reducer`; see `own_backward`."""

    def give_up(self) -> None: ...


class Plain(Protocol):
    """The part of `PlainBackwards` that `is_own` uses."""

    accepts: bool

    def enter(self) -> None: ...


# Owners of the running backwards, innermost last. The list is global, because autograd does not
# pass the owner of a backward to the hooks of parameters.
_running: list[object] = []


@contextmanager
def own_backward(owner: Owner) -> Iterator[None]:
    """Context manager in which backwards belong to `owner`; on an error, calls `owner.give_up`."""
    _running.append(owner)
    try:
        yield
    except BaseException:
        owner.give_up()
        raise
    finally:
        _running.pop()


def in_own_backward() -> bool:
    """Returns whether a backward that an engine has started is running."""
    return bool(_running)


def is_own(owner: object, slot: Slot, plain: Plain | None = None) -> bool:
    """Returns whether the running backward belongs to the owner.

    A backward that no engine has started belongs to all engines with a step in progress.

    Args:
        owner: the object that was passed to `own_backward`, such as the engine's `Reducer`.
        slot: the parameter for which the backward has computed a gradient.
        plain: the owner's plain backwards.

    Raises:
        RuntimeError: the program has started the backward, and the owner has no step in progress.
            The message names the parameter, and its gradient is dropped.
    """
    if _running:
        return _running[-1] is owner
    if plain is None or not plain.accepts:
        slot.param.grad = None
        raise RuntimeError(
            f"{slot.spec.name}: a gradient was computed in a backward outside any step of this parameter's engine:"
            " before the forward, call begin() of this engine, or run the forward by"
            " engine(...) of threed.initialize. For gradients of inputs only, use torch.autograd.grad, or"
            " requires_grad_(False) for the parameters"
        )
    plain.enter()
    return True
