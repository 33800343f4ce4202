"""Two streams of a device, on which a forward and a backward run together.

    with overlap.pair():
        with overlap.forward(key, beside=other): ...        # on the stream that the backward of `other` does not use
        with overlap.backward(other): ...
    with overlap.backward(key): ...                         # a backward alone

Autograd runs a backward on the stream of its forward, so the streams take turns: a micro-batch keeps the one on which
its forward ran. On a CPU everything runs in the order in which it is told.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager

import torch

from threed.device import beside as told_beside
from threed.device import copy_stream, current_stream, is_accelerator
from threed.topology import Axis


class Overlap:
    """The main stream and a second one; none where `device` has no streams.

    Args:
        axis: the ranks that layers communicate with during a forward or a backward.
        twin: the same ranks with a second communicator, for what runs on the second stream.
    """

    def __init__(
        self, device: torch.device, axis: Axis | None = None, twin: Axis | None = None
    ) -> None:
        self._side = copy_stream(device, "overlap") if is_accelerator(device) else None
        if self._side is not None and axis is not None and twin is not None:
            axis.give_channel(self._side, twin)
        self._there = set[Hashable]()  # whose forward ran beside the main stream
        self._paired = False

    def reset(self) -> None:
        """Begins a step: forgets forwards of an aborted one."""
        self._there.clear()

    @contextmanager
    def pair(self) -> Iterator[None]:
        """In the block a forward and a backward are told, which begin together; after it both are waited for."""
        if self._side is None:
            yield
            return
        self._side.wait_stream(current_stream(self._side.device))
        self._paired = True
        try:
            yield
        finally:
            self._paired = False
            current_stream(self._side.device).wait_stream(self._side)

    @contextmanager
    def forward(self, key: Hashable, beside: Hashable) -> Iterator[None]:
        """In the block runs the forward of `key`, in a pair with the backward of `beside`."""
        if self._side is None or beside in self._there:
            yield
            return
        self._there.add(key)
        with told_beside(self._side):  # nothing else was told since the pair began
            yield

    @contextmanager
    def backward(self, key: Hashable) -> Iterator[None]:
        """In the block runs the backward of `key`."""
        if self._side is None or key not in self._there:
            yield
            return
        self._there.discard(key)
        main = current_stream(self._side.device)
        if not self._paired:
            self._side.wait_stream(main)
        torch.accelerator.set_stream(self._side)
        try:
            yield
        finally:
            torch.accelerator.set_stream(main)
            if not self._paired:
                main.wait_stream(self._side)
