"""Optimistic updates: applied before the global gradient norm is known, and undone if wrong.

    update = optimistic.step(gradients, own_sums)   starts the all-reduce, guesses its sum, updates
    optimistic.validate()                           if the guess was wrong: restores, updates again

This is post-update validation (arXiv 2401.10241, section 4). The all-reduce of the norm makes every
rank wait for the last one. A schedule that lets ranks end their steps at different times would lose
its gain there. The guess is that the step is neither clipped nor skipped. Everything that an update
changes is copied first, and restored if the guess was wrong. So the result is bit-identical to an
update that waits. All ranks read the same sum at the same point of the next step's plan
(`threed.schedules.validation`), and therefore agree on whether to begin that step again. After a
wrong guess, updates wait for the norm until a guess would have been right. So if every step is
clipped, only the first update is undone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from threed.core.device import copy_stream, current_stream, is_accelerator, on_stream
from threed.distributed import collectives
from threed.distributed.collectives import Pending
from threed.distributed.topology import Axis
from threed.memory.tiers import InMemory, start_copy
from threed.zero.gather import Gatherer
from threed.zero.reductions import Gradient
from threed.zero.state import Consistency, State
from threed.zero.update import Outcome, Update

HOST = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class Attempt:
    """An update that has not been validated yet.

    Attributes:
        gradients: portions of the summed gradients, per bucket.
        results: waits for the sums, and returns the results of the update.
        wrong: whether the results differ from the guess; a pending scalar on the host.
        guessed: whether the update was applied on the guess.
    """

    gradients: Sequence[Gradient]
    results: Callable[[], Update]
    wrong: Pending
    guessed: bool


class PreservedGradient(InMemory):
    """Gradients that yield a copy to the update rule, which may overwrite it."""

    def fetch(self) -> InMemory:
        return InMemory(self.tensor.clone())


class Optimistic:
    """Applies the updates of an optimizer with states in the device's memory.

    Args:
        states: states of the optimizer.
        gatherer: gathers their parameters.
        everyone: axis of all ranks.
        consistency: consistency of the states.
        counters: scalar tensors that an update changes.
        outcome: returns the function from the sums to the results of the next update.
        apply: applies an update; its third argument is whether it runs on a guess.
        observe: called with the results of an update that ran on a guess, when they are known; or
            None.

    Attributes:
        restarts: number of updates that were undone.
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
        self._last_guess_right = True  # or would have been right; the same on all ranks
        self._attempt: Attempt | None = None
        self._copies: list[Tensor] = []  # copies of the tensors that an update changes

    @property
    def pending(self) -> bool:
        """Whether the last update may have to be undone."""
        return self._attempt is not None and self._attempt.guessed

    def step(self, gradients: Sequence[Gradient], own_sums: Tensor) -> Callable[[], Update]:
        """Updates the weights, without waiting for the norm if the last guess was right.
        Collective.

        Args:
            gradients: portions of the summed gradients, per bucket.
            own_sums: fp64 [k], this rank's contribution to the sums that an update depends on.

        Returns:
            A function that waits for the sums and returns the results.
        """
        outcome = self.outcome()
        guess, guessed = outcome(torch.zeros_like(own_sums)), self._last_guess_right
        attempt = self._begin(gradients, outcome, guess, own_sums)
        if guessed:
            self._copy()
            copies = [
                Gradient(PreservedGradient(g.storage.fetch().wait()), g.squares) for g in gradients
            ]
            self.apply(copies, guess, True)
        else:
            self.apply(gradients, attempt.results(), False)
        self._attempt = attempt
        return attempt.results

    def _begin(
        self, gradients: Sequence[Gradient], outcome: Outcome, guess: Update, own_sums: Tensor
    ) -> Attempt:
        """Starts the all-reduce; on a GPU, `wrong` is copied to the host during the update."""
        pending, device = collectives.start_sum_of_scalars(own_sums, self.everyone), own_sums.device

        def is_wrong() -> Tensor:
            found = outcome(pending.wait())
            return ~((found.skip == guess.skip) & (found.clip == guess.clip))

        wrong = Pending(is_wrong)
        if is_accelerator(device):
            with on_stream(copy_stream(device, "out")):
                wrong = start_copy(is_wrong(), HOST)

        @functools.cache
        def results() -> Update:
            sums = pending.wait()
            if is_accelerator(device):
                current_stream(device).wait_stream(copy_stream(device, "out"))
            return outcome(sums.clone())

        return Attempt(gradients, results, wrong, self._last_guess_right)

    def validate(self) -> bool:
        """Validates the last update; if it was wrong, undoes it and applies the right one.

        Collective if it was wrong: gathered parameters are released, and changed parameters are
        gathered again.

        Returns:
            Whether the update was right.
        """
        attempt, self._attempt = self._attempt, None
        if attempt is None:
            return True
        self._last_guess_right = not bool(attempt.wrong.wait())
        if self._last_guess_right and attempt.guessed and self.observe is not None:
            self.observe(attempt.results())
        if self._last_guess_right or not attempt.guessed:
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

    # --------------------------------------------------------------------------------------------------------- backup

    def _changed(self) -> list[Tensor]:
        """Returns the tensors that an update changes: counters, and the slices of every bucket."""
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
    """Returns the bytes of the copies that optimistic updates keep, without counters."""
    return sum(
        state.bucket.updates * storage.dtype.itemsize
        for state in states
        for storage in state.changed
    )
