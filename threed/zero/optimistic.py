"""Updates that do not wait for the global gradient norm: done on a guess, validated later, undone if it was wrong.

    update = optimistic.step(gradients, mine)     begins the sum over all ranks, guesses it, updates
    optimistic.validate()                         is it as guessed? if not: restore, update with what it is

The sum makes every rank wait for the last one; a pipeline whose ranks end their steps at different times gets back at
the step what its plan has saved (post-update validation, arXiv 2401.10241, section 4). The guess is that nothing is
clipped and nothing skipped. What an update changes is copied before, and copied back: so the result is the same, bit
for bit, as if it had waited. All ranks learn from the same sum, and at the same place of the next step's plan
(`threed.schedules.validation`), whether they begin that step again. After a wrong guess updates wait, until one would
have been right: where every step is clipped nothing is undone twice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from threed import collectives
from threed.collectives import Pending
from threed.device import beside, copy_stream, current_stream, is_accelerator
from threed.memory.tiers import InMemory, start_copy
from threed.topology import Axis
from threed.zero.gather import Gatherer
from threed.zero.reductions import Gradient
from threed.zero.state import Consistency, State
from threed.zero.update import Outcome, Update

HOST = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class Attempt:
    """An update that was not validated yet. results: waits for the sums, and gives what they make of it. wrong: whether
    that is not what was guessed, a scalar on the host. guessed: it was done on a guess."""

    gradients: Sequence[Gradient]
    results: Callable[[], Update]
    wrong: Pending
    guessed: bool


class Unspent(InMemory):
    """Gradients of which a rule, which may use them up, gets a copy."""

    def fetch(self) -> InMemory:
        return InMemory(self.tensor.clone())


class Optimistic:
    """Does the updates of an optimizer whose states are in the device's memory.

    Args:
        states: of the optimizer.
        gatherer: of their parameters.
        everyone: the axis of all ranks.
        consistency: of the states.
        counters: scalar tensors that an update changes.
        outcome: returns a function from the sums to the results of the next update.
        apply: does an update; its third argument is whether it is done on a guess.
        observe: if not None, called with the results of an update that was done on a guess, once they are known.

    Attributes:
        restarts: how many updates were undone.
    """

    def __init__(
        self, states: Sequence[State], gatherer: Gatherer, everyone: Axis, consistency: Consistency,
        counters: Sequence[Tensor], *, outcome: Callable[[], Outcome],
        apply: Callable[[Sequence[Gradient], Update, bool], None],
        observe: Callable[[Update], None] | None,
    ) -> None:  # fmt: skip
        self.states, self.gatherer, self.everyone = states, gatherer, everyone
        self.consistency, self.counters = consistency, counters
        self.outcome, self.apply, self.observe = outcome, apply, observe
        self.restarts = 0
        self._hopeful = True  # the last guess would have been right; the same on all ranks
        self._attempt: Attempt | None = None
        self._copies: list[Tensor] = []  # of what an update changes

    @property
    def pending(self) -> bool:
        """Whether an update may have to be undone."""
        return self._attempt is not None and self._attempt.guessed

    def step(self, gradients: Sequence[Gradient], mine: Tensor) -> Callable[[], Update]:
        """Updates, without waiting for others if that may be right; returns what gives the results.

        mine: this rank's share of the sums that an update depends on, fp64 [k].
        """
        outcome = self.outcome()
        guess, guessed = outcome(torch.zeros_like(mine)), self._hopeful
        attempt = self._begin(gradients, outcome, guess, mine)
        if guessed:
            self._copy()
            copies = [Gradient(Unspent(g.storage.fetch().wait()), g.squares) for g in gradients]
            self.apply(copies, guess, True)
        else:
            self.apply(gradients, attempt.results(), False)
        self._attempt = attempt
        return attempt.results

    def _begin(
        self, gradients: Sequence[Gradient], outcome: Outcome, guess: Update, mine: Tensor
    ) -> Attempt:
        """Begins the sum; on a GPU what it says goes to the host as soon as it is there, beside the update."""
        pending, device = collectives.start_sum_of_scalars(mine, self.everyone), mine.device

        def is_wrong() -> Tensor:
            found = outcome(pending.wait())
            return ~((found.skip == guess.skip) & (found.clip == guess.clip))

        wrong = Pending(is_wrong)
        if is_accelerator(device):
            with beside(copy_stream(device, "out")):
                wrong = start_copy(is_wrong(), HOST)

        @functools.cache
        def results() -> Update:
            sums = pending.wait()
            if is_accelerator(device):
                current_stream(device).wait_stream(copy_stream(device, "out"))
            return outcome(sums.clone())

        return Attempt(gradients, results, wrong, self._hopeful)

    def validate(self) -> bool:
        """Whether the last update was right; one that was not is undone, and done again as it should have been.

        Collective where it was not: what is gathered is released, and changed parameters are gathered again.
        """
        attempt, self._attempt = self._attempt, None
        if attempt is None:
            return True
        self._hopeful = not bool(attempt.wrong.wait())
        if self._hopeful and attempt.guessed and self.observe is not None:
            self.observe(attempt.results())
        if self._hopeful or not attempt.guessed:
            return True
        self.restarts += 1
        self._restore()
        self.apply(attempt.gradients, attempt.results(), False)
        return False

    def discard(self) -> None:
        """Forgets the last update, before everything is overwritten; waits for its sum."""
        if self._attempt is not None:
            self._attempt.results()
        self._attempt = None

    # --------------------------------------------------------------------------------------------------------- copies

    def _changed(self) -> list[Tensor]:
        """Returns what an update changes: counters, and the slices of every bucket."""
        slices = [storage.fetch().wait() for state in self.states for storage in state.changed]
        return [*self.counters, *slices]

    def _copy(self) -> None:
        changed = self._changed()
        self._copies = self._copies or [torch.empty_like(tensor) for tensor in changed]
        for copy, tensor in zip(self._copies, changed, strict=True):
            copy.copy_(tensor)

    def _restore(self) -> None:
        self.gatherer.wait_all()  # gathers in flight still read the slices
        self.gatherer.release_all()
        with self.consistency.changing():
            for copy, tensor in zip(self._copies, self._changed(), strict=True):
                tensor.copy_(copy)


def copied_bytes(states: Sequence[State]) -> int:
    """The bytes of the copies of what an update changes, counters aside."""
    return sum(
        state.bucket.updates * storage.dtype.itemsize
        for state in states
        for storage in state.changed
    )
