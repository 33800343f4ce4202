"""CUDA graphs of the emulated device: a capture records work, and each replay enqueues it again.

As on CUDA, a capture runs nothing. Its allocations are in the memory of its pool, which contains no values when a
replay begins. A capture fails if the host waits, reads a value, or copies from or to the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tests.accelerator.late_streams import LateError, Stream, Streams, place


class Capture(Stream):
    """A stream that records its work. It also owns the memory of the graphs' pool, which no other stream uses."""

    def __init__(self, owner: Streams) -> None:
        super().__init__(owner)
        self.entries: list[tuple[Callable[[], Any], str]] = []
        self.generators: set[int] = set()

    def add(self, work: Callable[[], Any], what: object) -> None:
        self.entries.append((work, f"{what} of {place()}"))

    def refuse(self, *_: Any) -> Any:
        """What CUDA does not allow."""
        raise LateError(f"{place()}: not permitted when stream is capturing")

    record_event = wait_event = wait_stream = synchronize = refuse


def graphs_of(streams: Streams) -> type:
    """The class of a device's graphs, in place of `threed.core.device.DeviceGraph`."""

    class Graph:
        def __init__(self, pool: Capture, generators: Iterable[torch.Generator] = ()) -> None:
            self.pool, self.generators = pool, {id(g) for g in generators}
            self.entries: list[tuple[Callable[[], Any], str]] = []

        @contextmanager
        def capture(self) -> Iterator[None]:
            """Writes down what the current stream is told."""
            streams.synchronize()  # as torch.cuda.graph
            before, streams.current = streams.current, self.pool
            self.pool.entries, self.pool.generators = self.entries, self.generators
            try:
                yield
            finally:
                streams.current = before
            captured.append(self)

        def replay(self) -> None:
            """Queues it."""
            replays.append(self)
            for work, what in self.entries:
                streams.current.add(work, what)

    captured, replays = list[Graph](), list[Graph]()
    Graph.captured, Graph.replays = captured, replays  # type: ignore[attr-defined]
    return Graph


def is_capturing(streams: Streams) -> bool:
    """Whether the current stream is one."""
    return isinstance(streams.current, Capture)
