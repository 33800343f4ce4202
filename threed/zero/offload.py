"""The optimizer for offloaded states or parameters.

The scalars of an update are the learning rate, the clip factor and the skip flag. The host waits
for them at the end of the step, because it reads and writes offloaded values only if the step is
not skipped. The update runs in one of three ways:

- at the end of the step;
- in a thread during the next step (`zero.delayed_update`), so that the parameters receive the new
  weights one step late;
- bucket by bucket during the backward, with guessed scalars (`early_updates.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch

from threed.core.device import is_accelerator, synchronize
from threed.distributed.collectives import done
from threed.memory.tiers import InMemory, start_copy
from threed.ops.update import StepScalars
from threed.zero.early_updates import Early, max_pending_buckets
from threed.zero.optimizer import Optimizer, scalars_of
from threed.zero.reductions import Gradient
from threed.zero.state import PREVIOUS, WEIGHT, State

HOST = torch.device("cpu")


class OffloadedOptimizer(Optimizer):
    """An `Optimizer` for states or parameters in host memory or on a drive.

    It has the same arguments and attributes as `Optimizer`.
    """

    def __init__(self, *args: Any, grad_clip: float, **keywords: Any) -> None:
        super().__init__(*args, grad_clip=grad_clip, **keywords)
        layout, policy = self.layout, self.layout.policy
        if policy.early:
            self.early = Early(
                self.states, max_pending_buckets(layout), grad_clip > 0,
                guess=self._guess, apply=self._apply_rule,
            )  # fmt: skip
        if policy.delayed:
            self.earlier = [State(bucket, {PREVIOUS: bucket.portion}) for bucket in layout.buckets]
        self._thread = ThreadPoolExecutor(1, "delayed-update") if policy.delayed else None
        self._delayed: Future[None] | None = None  # the newest update that runs or ran in `_thread`
        self._unpublished = False  # whether parameters are one update older than master weights

    def wait(self) -> None:
        """Waits for the last update and for gathers in flight, so that states can be read.

        The new weights of a delayed update are not copied to the parameters by this call.
        """
        if self.early is not None:
            self.early.drop()  # drops updates of a step that raised an error
        super().wait()

    def close(self) -> None:
        """Ends the thread of delayed updates, and closes the swap files of the drives."""
        if self._thread is not None:
            self._thread.shutdown()
        for drive in self.layout.policy.drives:
            drive.disk.close()

    def _wait_for_update(self) -> None:
        if self._delayed is not None:
            self._delayed.result()
        super()._wait_for_update()

    def _guess(self) -> StepScalars:
        """Returns the guessed scalars of the next update, on the host.

        The guess is that the step is neither clipped nor skipped.
        """
        sums = torch.zeros(3, dtype=torch.float64, device=self.updates.device)
        return _on_host(scalars_of(self._outcome()(sums), self.updates + 1))

    def _start_update(self, gradients: Sequence[Gradient], now: StepScalars) -> None:
        self.publish_delayed()
        read, done = _on_host(now), set[State]()
        now = now if self.layout.policy.optimizer_tier is None else read
        self._let_device_read()
        if self.early is not None:
            with self.consistency.changing():
                done = self.early.end(now)
        if bool(read.skip):
            return
        if self._thread is None:
            self._update_all(gradients, now, done=done)
        else:
            copies = _copies_on_host(gradients)
            self._unpublished = True
            self._delayed = self._thread.submit(self._update_all, copies, now, publish=False)

    def publish_delayed(self) -> None:
        """Waits for a delayed update, and copies its weights to the parameters.

        Call this method only when the next update is about to run, or when other code is about to
        set weights. An earlier call would change the training result: the step that runs at the
        same time as the delayed update would use the new weights.
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

    def _before_overwriting(self, everything: bool) -> None:
        if not everything:
            self.publish_delayed()
        else:
            if self.early is not None:
                self.early.drop()
            if self._delayed is not None:
                wait((self._delayed,))
            self._delayed, self._unpublished = None, False
        super()._before_overwriting(everything)
        self._let_device_read()

    def _after_overwriting(self, everything: bool) -> None:
        if everything and self.layout.policy.delayed:
            for state in reversed(self.earlier):
                self.gatherer.publish(state.bucket)
            self._unpublished = True

    def _let_device_read(self) -> None:
        """Waits until the GPU has read all host memory that the caller is about to change."""
        if is_accelerator(self.updates.device):
            synchronize(self.updates.device)


def _on_host(now: StepScalars) -> StepScalars:
    """Returns the scalars and learning rates of a step on the host, after a single copy."""
    rates, *others = now
    values = start_copy(torch.cat((torch.stack(others), rates)), HOST).wait()
    return StepScalars(values[len(others) :], *values[: len(others)].unbind())


def _copies_on_host(gradients: Sequence[Gradient]) -> list[Gradient]:
    """Returns copies of gradients in host memory.

    A delayed update needs copies, because the next step overwrites the gradients while the update
    still reads them. All copies from a GPU are enqueued before the host waits for the first one.
    """
    copies = []
    for gradient in gradients:
        values = gradient.storage.fetch().wait()
        on_gpu = is_accelerator(values.device)
        copies.append(start_copy(values, HOST) if on_gpu else done(values.to(HOST, copy=True)))
    return [
        Gradient(InMemory(copy.wait()), g.squares)
        for copy, g in zip(copies, gradients, strict=True)
    ]
