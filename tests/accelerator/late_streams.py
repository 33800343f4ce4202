"""Streams whose work runs later, in an order that is drawn, and the memory that they have: what `late` is made of.

    streams = Streams(seed=3)
    side = streams.named("side")
    side.wait_stream(streams.current)       # what follows on `side` comes after what was told so far
    side.add(work, "its name")
    side.record_event().synchronize()       # runs the queues until `work` has run

An entry runs at a time. The first stream of an order that is drawn anew now and then goes first, unless it has to wait:
so the work of two streams that nothing orders comes now one way round and now the other.
"""

from __future__ import annotations

import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import threed

ROOT = str(Path(threed.__file__).parents[1])
OURS = str(Path(ROOT, "threed"))
GRAIN = 512  # bytes: blocks of memory are multiples, as CUDA's are
LARGER = 16  # times: memory is not reused for less than a part in so many


class LateError(RuntimeError):
    """What a real device would crash on, or hang in."""


def place() -> str:
    """The innermost line of threed that runs."""
    frame = sys._getframe(1)
    # another mode may look at the operations of a capture
    while frame is not None and (
        not (frame.f_code.co_filename).startswith(OURS)
        or frame.f_code.co_name == "__torch_dispatch__"
    ):
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None:
        return "?"
    return (
        f"{frame.f_code.co_filename.removeprefix(ROOT)[1:]}:{frame.f_lineno} {frame.f_code.co_name}"
    )


def no_values(tensor: Tensor) -> Tensor:
    """Fills a tensor with what nobody wrote: NaN, or -1."""
    if tensor.numel():
        tensor.view(torch.uint8).fill_(255)
    return tensor


class Event:
    """A place in a stream's queue."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.position = stream, stream.told

    @property
    def reached(self) -> bool:
        """Whether the stream is past it."""
        return self.stream.done >= self.position

    def synchronize(self) -> None:
        """The host waits for it."""
        self.stream.owner.run_until(self)

    def query(self) -> bool:
        """Whether it has come; the streams may get on meanwhile."""
        self.stream.owner.get_on()
        return self.reached

    def elapsed_time(self, later: Event) -> float:
        """Milliseconds until another: none."""
        return 0.0


class Block:
    """Memory, uint8 [n]. users: streams that `record_stream` named. release: frees it, once."""

    def __init__(self, nbytes: int, stream: Stream) -> None:
        self.bytes = torch.empty(nbytes, dtype=torch.uint8)
        self.stream, self.users = stream, set[Stream]()
        self.release: Any = None

    def free(self) -> None:
        """Gives the memory back to its stream, once its users have come here."""
        events = [user.record_event() for user in self.users if user is not self.stream]
        self.users.clear()
        self.stream.freed.append((self, events))


class Stream:
    """A queue of work, and the memory that was freed on it."""

    def __init__(self, owner: Streams) -> None:
        self.owner, self.device = owner, owner.device
        self.queue: deque[tuple[Callable[[], Any], object, str]] = deque()
        self.told = self.done = 0  # entries
        self.freed: list[tuple[Block, list[Event]]] = []

    def add(self, work: Callable[[], Any], what: object) -> None:
        """Adds work, which returns False when it cannot run yet; what: its name, by `str`."""
        self.queue.append((work, what, place()))
        self.told += 1

    def turn(self) -> bool:
        """Runs the next entry; returns whether that was possible."""
        if not self.queue:
            return False
        work, what, line = self.queue[0]
        try:
            if work() is False:
                return False
        except Exception as error:
            raise LateError(
                f"{what} of {line} failed, on values that may not have been there yet: {error}"
            ) from error
        self.queue.popleft()
        self.done += 1
        return True

    def record_event(self, event: Any = None) -> Event:
        """An event after all that the stream was told."""
        return Event(self)

    def wait_event(self, event: Event) -> None:
        """What comes next waits for the event."""
        self.add(lambda: event.reached, "a wait")

    def wait_stream(self, other: Stream) -> None:
        """What comes next waits for all that the other was told."""
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        """The host waits for it."""
        self.record_event().synchronize()

    def allocate(self, nbytes: int) -> Block:
        """Memory without values: the last that was freed here, if it is large enough, and no other stream uses it."""
        need = -(-nbytes // GRAIN) * GRAIN
        for n in reversed(range(len(self.freed))):
            block, events = self.freed[n]
            if need <= len(block.bytes) <= LARGER * need and all(event.reached for event in events):
                del self.freed[n]
                break
        else:
            block = Block(need, self)
        self.add(lambda: no_values(block.bytes), "a first use of memory")
        return block


class Streams:
    """All streams of a device, and the order that they run in."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device, self.random, self.lock = device, random.Random(seed), threading.RLock()
        self.names: dict[Any, Stream] = {}
        self.order: list[Stream] = []
        self.elsewhere = 0  # work that other threads do now
        self.ended = threading.Event()  # set when a thread has ended its work
        self.current = self.named("main")

    def named(self, *name: Any) -> Stream:
        """The stream of a name."""
        if name not in self.names:
            self.names[name] = Stream(self)
            self.order.append(self.names[name])
        return self.names[name]

    def turn(self) -> bool:
        """Runs an entry of the first stream that can run; returns whether there was one."""
        if self.random.random() < 1 / 16:
            self.random.shuffle(self.order)
        return any(stream.turn() for stream in self.order)

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Entries compute real values, which no mode looks at."""
        modes = torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction()
        with self.lock, modes[0], modes[1], torch.no_grad():
            yield

    def run_until(self, event: Event) -> None:
        """Runs the queues until an event comes."""
        with self._running():
            while not event.reached:
                self.ended.clear()
                if not self.turn():
                    if not self.elsewhere:
                        heads = "; ".join(
                            "{} of {}".format(*stream.queue[0][1:])
                            for stream in self.order
                            if stream.queue
                        )
                        raise LateError(f"streams wait for one another: {heads}")
                    self.ended.wait(1.0)

    def get_on(self) -> None:
        """Runs some entries, or none."""
        with self._running():
            for _ in range(self.random.choice((0, 0, 5, 50, 500))):
                self.turn()

    def synchronize(self) -> None:
        """Runs everything."""
        for stream in list(self.order):
            stream.synchronize()
