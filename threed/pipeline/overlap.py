"""Runs the forward of one micro-batch and the backward of another at the same time, on two streams.

    deferred = overlap.run_pair(key, forward, other, backward)      # two generators that yield after each layer
    with overlap.backward(key): ...                                 # a backward alone

Autograd runs a backward on the stream of its forward. So the passes of a micro-batch run on one
stream, and each of the two streams alternates between forwards and backwards.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from contextlib import closing, contextmanager

import torch

from threed.core.device import copy_stream, current_stream
from threed.distributed.topology import Axis
from threed.pipeline.stage import Pass, T, finish


class Overlap:
    """Runs overlapped passes on two streams of a device: the main stream and a side stream.

    A key, which is any hashable value, identifies a forward and its backward.

    Args:
        device: the accelerator on which the passes run.
        twins: for each axis over which layers communicate, (axis, twin): `twin` has the same ranks
            and a second communicator, which the side stream uses.
    """

    def __init__(self, device: torch.device, twins: Iterable[tuple[Axis, Axis]] = ()) -> None:
        self._side = copy_stream(device, "overlap")
        for axis, twin in twins:
            axis.give_channel(self._side, twin)
        self._on_side = set[Hashable]()  # keys of forwards that ran on the side stream

    def reset(self) -> None:
        """Begins a step; forgets the forwards of an aborted step."""
        self._on_side.clear()

    def run_pair(
        self,
        key: Hashable,
        forward: Pass[None],
        paired_with: Hashable,
        backward: Pass[T],
        in_turns: bool = True,
    ) -> T:
        """Runs a forward and a backward concurrently; returns the result of the backward.

        The main stream waits for the end of both.

        Args:
            key: key of the forward.
            forward: the forward.
            paired_with: key of the backward.
            backward: the backward, which runs on the stream of its forward. The forward of the pair
                runs on the other stream.
            in_turns: whether layers are launched in turns. If all of the forward is launched first,
                the backward begins late: the host launches one kernel at a time, and it waits while
                about a thousand launched kernels have not begun.
        """
        main = current_stream(self._side.device)
        streams = (self._side, main)
        if paired_with in self._on_side:
            self._on_side.discard(paired_with)
            streams = (main, self._side)
        else:
            self._on_side.add(key)
        self._side.wait_stream(main)
        with closing(forward), closing(backward):
            try:
                if not in_turns:
                    torch.accelerator.set_stream(streams[0])
                    finish(forward)
                return _take_turns(forward, backward, streams)
            finally:
                torch.accelerator.set_stream(main)
                main.wait_stream(self._side)

    @contextmanager
    def backward(self, key: Hashable) -> Iterator[None]:
        """Context for the backward of `key`, which runs on the stream of its forward."""
        if key not in self._on_side:
            yield
            return
        self._on_side.discard(key)
        main = current_stream(self._side.device)
        self._side.wait_stream(main)
        torch.accelerator.set_stream(self._side)
        try:
            yield
        finally:
            torch.accelerator.set_stream(main)
            main.wait_stream(self._side)


def _take_turns(
    forward: Pass[None], backward: Pass[T], streams: tuple[torch.Stream, torch.Stream]
) -> T:
    """Runs the layers of two passes in turns, each on its stream; returns the backward's result."""
    while True:
        torch.accelerator.set_stream(streams[0])
        try:
            next(forward)
        except StopIteration:
            torch.accelerator.set_stream(streams[1])
            return finish(backward)
        torch.accelerator.set_stream(streams[1])
        try:
            next(backward)
        except StopIteration as end:
            torch.accelerator.set_stream(streams[0])
            finish(forward)
            return end.value
