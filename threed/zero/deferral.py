"""Split backward: contributions to gradients that wait, and are added later (arXiv 2401.10241, section 2).

with deferral.defer() as waiting: ...       # I: the input's gradient; sinks set aside what comes
deferral.add_deferred(waiting)              # W: they are given what they had set aside
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

# What adds a contribution, and with what.
Contribution = tuple[Callable[..., None], tuple[Tensor, ...]]


class Deferral:
    """Whether a rank's sinks set contributions aside, and where."""

    def __init__(self) -> None:
        self.waiting: list[Contribution] | None = None

    @contextmanager
    def defer(self) -> Iterator[list[Contribution]]:
        """In the block, sinks set aside what comes instead of adding it; yields the list of that.

        Products for the weights' gradients are not even computed yet, only their factors kept. A round of reductions is
        that of the micro-batch whose contributions are added, so they may wait for as long as the schedule likes.
        """
        self.waiting = waiting = list[Contribution]()
        try:
            yield waiting
        finally:
            self.waiting = None

    @torch.no_grad()
    def add_deferred(self, waiting: list[Contribution]) -> None:
        """Adds what was set aside, in the order in which it came, and lets go of it one by one."""
        waiting.reverse()
        while waiting:
            add, tensors = waiting.pop()
            add(*tensors)
