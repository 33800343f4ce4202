"""Optimistic updates: applied before the gradient norm is known, and undone if a guess was wrong.

    results = optimistic.step(gradients, own_sums)  starts the all-reduce of the norm, and updates
                                                    the weights without waiting for the norm
    optimistic.validate()                           if the guess was wrong: undoes the update, and
                                                    applies the right update

This is post-update validation (arXiv 2401.10241, section 4). If updates waited for the all-reduce
of the norm, every rank would wait for the slowest rank at the end of each step. Some schedules are
faster because ranks end their steps at different times, and this wait would remove the gain. An
update therefore guesses that the step is neither clipped nor skipped, and does not wait for the
norm. All values that an update changes are copied first, and restored if the guess was wrong. So
the final result is bit-identical to the result of an update that waits.

All ranks call `validate` at the same point of the next step's plan
(`threed.schedules.post_update_validation`) and read the same sum, so they agree on whether to
restart that step. After a wrong guess, updates wait for the norm, up to and including the first
step for which the guess would have been right. So if every step is clipped, only the first update
is undone.
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
        gradients: per bucket, the summed gradients of this rank's portion.
        results: function that waits for the sums over all ranks, and returns the true results of
            the step, which are computed from these sums.
        wrong: pending bool scalar, True if the true clip factor or skip flag differs from the
            guess.
        guessed: True if the update used the guess; False if it waited for the sums.
    """

    gradients: Sequence[Gradient]
    results: Callable[[], Update]
    wrong: Pending
    guessed: bool


class PreservedGradient(InMemory):
    """Gradients that an update rule cannot overwrite, because `fetch` returns a copy of them."""

    def fetch(self) -> InMemory:
        return InMemory(self.tensor.clone())


class Optimistic:
    """Applies updates before the gradient norm is known, and undoes an update if it guessed wrong.

    The guess is that the step is neither clipped nor skipped. All states must be in the device's
    memory.

    Args:
        states: states of the optimizer.
        gatherer: gathers the parameters after an update.
        everyone: axis of all ranks, over which the norm is summed.
        consistency: records that the states are inconsistent while an update is being undone.
        counters: scalar tensors that an update changes in addition to the states, such as the
            number of updates.
        outcome: `outcome()` returns a function from the sums over all ranks to the results of the
            next update; see `BadSteps.outcome`.
        apply: `apply(gradients, results, guessed)` applies an update; `guessed` is whether the
            results are a guess.
        observe: function that is called with the true results of an update after `validate` has
            found that the guess was right; or None.

    Attributes:
        restarts: number of updates that were undone so far.
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
        # Whether the guess was right for the last step, even if that step did not use the guess.
        # The value is the same on all ranks.
        self._last_guess_right = True
        self._attempt: Attempt | None = None
        # the tensors that an update changes, copied before the last guessed update
        self._copies: list[Tensor] = []

    @property
    def pending(self) -> bool:
        """Whether the last update may have to be undone."""
        return self._attempt is not None and self._attempt.guessed

    def step(self, gradients: Sequence[Gradient], own_sums: Tensor) -> Callable[[], Update]:
        """Updates the weights. Collective.

        If the guess was right for the last step, this call uses the guess and does not wait for the
        norm. Otherwise it waits. The guess can also be right for a step that did not use it.

        Args:
            gradients: per bucket, the summed gradients of this rank's portion.
            own_sums: fp64 [3 + k], this rank's contribution to the sums that an update depends on;
                see `BadSteps.outcome`.

        Returns:
            A function that waits for the sums and returns the true results of the step.
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
        """Starts the all-reduce of the sums that the update depends on.

        On a GPU, `Attempt.wrong` is computed on a separate stream.
        """
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
        """Validates the last update. If its guess was wrong, undoes and replaces the update.

        All ranks get the same result. If the guess was wrong, the call is collective: gathered
        parameters are released, and changed parameters are gathered again.

        Returns:
            Whether the update was right. If False, the caller must restart the step in progress.
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
        """Ends the last update without validating it. Waits for the update's all-reduce.

        Call it before a load, which overwrites all values.
        """
        if self._attempt is not None:
            self._attempt.results()
        self._attempt = None

    # --------------------------------------------------------------------------------------------------------- backup

    def _changed(self) -> list[Tensor]:
        """Returns all tensors that an update changes: counters, states, slices of parameters."""
        slices = [storage.fetch().wait() for state in self.states for storage in state.changed]
        return [*self.counters, *slices]

    def _copy(self) -> None:
        changed = self._changed()
        self._copies = self._copies or [torch.empty_like(tensor) for tensor in changed]
        for copy, tensor in zip(self._copies, changed, strict=True):
            copy.copy_(tensor)

    def _restore(self) -> None:
        self.gatherer.wait_all()  # gathers in flight still read the slices that are restored below
        self.gatherer.release_all()
        with self.consistency.changing():
            for copy, tensor in zip(self._copies, self._changed(), strict=True):
                tensor.copy_(copy)


def copied_bytes(states: Sequence[State]) -> int:
    """Returns the bytes of the copies that optimistic updates keep of states and parameters."""
    return sum(
        state.bucket.updates * storage.dtype.itemsize
        for state in states
        for storage in state.changed
    )
