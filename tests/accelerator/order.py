"""The order of a step's work on the streams of the pretend accelerator: what waits for what, and a model of its time.

    order = device.order                 # of `pretending`; of the last step
    order.step                           # kernels and collectives as they were enqueued, with what each waits for
    order.waits(entry)                   # all entries of the step that must have run before this one
    order.ends(duration)                 # when each entry ends, if it takes `duration(entry)` seconds

A communicator is a stream, as NCCL's: its collectives run one after the other, after what the stream from which they
were enqueued was told; `wait` of a collective makes the stream that is current wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._distributed_c10d import FakeWork

MAIN = "main"


@dataclass(frozen=True, eq=False)
class Entry:
    """A kernel or a collective. after: entries that it waits for; layer: the layer whose backward enqueued it."""

    stream: Hashable
    name: str
    flops: int
    nbytes: int
    after: frozenset[Entry]
    layer: int | None


class Event:
    """A place in a stream's order. after: entries that have run when it is reached."""

    def __init__(self, order: Order, after: frozenset[Entry]) -> None:
        self.order, self.after = order, after

    def synchronize(self) -> None:
        """The host waits for it."""
        self.order.host_waits("event")

    def query(self) -> bool:
        """It has come; CUDA does not permit the question in a capture."""
        self.order.asked("event query")
        return True

    def elapsed_time(self, later: Event) -> float:
        """Milliseconds until another: none."""
        return 0.0


class Stream(torch.Stream):
    """A stream that runs nothing. after: entries that its next entry waits for."""

    order: Order
    name: Hashable
    after: frozenset[Entry] = frozenset()

    __eq__ = object.__eq__  # torch's streams of a device made in Python are all equal
    __hash__ = object.__hash__

    def wait_stream(self, other: Any) -> None:
        """What comes next waits for all that the other was told."""
        self.after |= other.after

    def wait_event(self, event: Any) -> None:
        """What comes next waits for the event."""
        self.after |= event.after

    def record_event(self, event: Any = None) -> Any:
        """An event."""
        return Event(self.order, self.after)

    def synchronize(self) -> None:
        """The host waits for it."""
        self.order.host_waits("stream")


class Work(FakeWork):
    """A collective that was enqueued."""

    def __init__(self, order: Order, event: Event) -> None:
        super().__init__()
        self.order, self.event = order, event

    def wait(self, *_: Any) -> bool:
        """Makes the current stream wait."""
        self.order.current.wait_event(self.event)
        return True


class Order:
    """The streams of a device. host_waits: called when the host waits for it; asked: when it asks for an event."""

    def __init__(
        self, where: torch.device, host_waits: Callable[[str], None],
        asked: Callable[[str], None] = lambda _: None,
    ) -> None:  # fmt: skip
        self.where, self.host_waits, self.asked = where, host_waits, asked
        self.streams: dict[Hashable, Stream] = {}
        self.step: list[Entry] = []
        self.works: list[Work] = []  # else Python would forget that they are no plain `FakeWork`
        self.layer: int | None = None
        self.current = self.named(MAIN)

    def begin(self) -> None:
        """Begins a step, before which all that was enqueued has run."""
        self.step, self.works = [], []
        for stream in self.streams.values():
            stream.after = frozenset()

    def named(self, name: Hashable) -> Stream:
        """The stream of a name."""
        if name not in self.streams:
            stream = self.streams[name] = Stream(self.where)
            stream.order, stream.name = self, name
        return self.streams[name]

    def use(self, stream: Stream) -> None:
        """Makes a stream the current one."""
        self.current = stream

    def add(self, name: str, flops: int, nbytes: int, stream: Stream | None = None) -> None:
        """Enqueues a kernel on the current stream, or on another one."""
        on = stream or self.current
        self.step.append(Entry(on.name, name, flops, nbytes, on.after, self.layer))
        on.after = frozenset({self.step[-1]})

    def collective(self, name: str, group: Hashable, nbytes: int) -> Work:
        """Enqueues a collective on a communicator."""
        stream = self.named(("communicator", group))
        stream.wait_stream(self.current)
        self.add(name, 0, nbytes, stream)
        self.works.append(Work(self, stream.record_event()))
        return self.works[-1]

    def waits(self, entry: Entry) -> set[Entry]:
        """All entries of the step that an entry waits for, also by way of others."""
        step, found, new = set(self.step), set[Entry](), {entry}
        while new:
            new = {before for each in new for before in each.after} & step - found
            found |= new
        return found

    def ends(self, duration: Callable[[Entry], float]) -> dict[Entry, float]:
        """When each entry ends, in seconds from the beginning of the step, if nothing waits for the host."""
        ends = dict[Entry, float]()
        for entry in self.step:
            begins = max((ends.get(before, 0.0) for before in entry.after), default=0.0)
            ends[entry] = begins + duration(entry)
        return ends
