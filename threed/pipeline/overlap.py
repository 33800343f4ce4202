"""Runs the forward of one micro-batch and the backward of another at the same time, on two streams.

    with overlap.pair():
        with overlap.forward(key, paired_with=other): ...   # on the stream that the backward of `other` does not use
        with overlap.backward(other): ...
    with overlap.backward(key): ...                         # a backward alone

Autograd runs a backward on the stream of its forward. So the passes of a micro-batch run on one
stream, and each of the two streams alternates between forwards and backwards. On a CPU everything
runs in program order.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager

import torch

from threed.core.device import copy_stream, current_stream, is_accelerator, on_stream
from threed.distributed.topology import Axis


class Overlap:
    """Runs overlapped passes on two streams of a device: the main stream and a side stream.

    On a device without streams, all passes run in program order. A key, which is any hashable
    value, identifies a forward and its backward.

    Args:
        device: device on which the passes run.
        axis: the ranks with which layers communicate during a forward or a backward.
        twin: the same ranks as `axis`, with a second communicator for the side stream.
    """

    def __init__(
        self, device: torch.device, axis: Axis | None = None, twin: Axis | None = None
    ) -> None:
        self._side = copy_stream(device, "overlap") if is_accelerator(device) else None
        if self._side is not None and axis is not None and twin is not None:
            axis.give_channel(self._side, twin)
        self._on_side = set[Hashable]()  # keys of forwards that ran on the side stream
        self._paired = False

    def reset(self) -> None:
        """Begins a step; forgets the forwards of an aborted step."""
        self._on_side.clear()

    @contextmanager
    def pair(self) -> Iterator[None]:
        """Context in which a forward and a backward run concurrently.

        When the context ends, the main stream waits for the side stream.
        """
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
    def forward(self, key: Hashable, paired_with: Hashable) -> Iterator[None]:
        """Context for the forward of `key`, which overlaps with the backward of `paired_with`."""
        if self._side is None or paired_with in self._on_side:
            yield
            return
        self._on_side.add(key)
        # The side stream need not wait for the main stream again: it has already waited in `pair`,
        # and the main stream has received no work since.
        with on_stream(self._side):
            yield

    @contextmanager
    def backward(self, key: Hashable) -> Iterator[None]:
        """Context for the backward of `key`, which runs on the stream of its forward."""
        if self._side is None or key not in self._on_side:
            yield
            return
        self._on_side.discard(key)
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
