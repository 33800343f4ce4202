"""Collectives of a late device: each runs on the real process group when the stream of its group comes to it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from tests.accelerator.late_streams import Event, Streams
from tests.accelerator.watching import tensors_in
from threed.distributed import collectives

COLLECTIVES = ("all_to_all_single", "all_reduce", "broadcast", "barrier")
OF_TWO = ("send", "recv", "isend", "irecv")


class Work:
    """A collective that was queued. kept: what it reads and writes."""

    def __init__(self, event: Event, kept: Any) -> None:
        self.event, self.kept = event, kept

    def wait(self) -> None:
        """Makes the current stream wait, and the host if the tensors are the host's. They may be freed from here on."""
        self.event.stream.owner.current.wait_event(self.event)
        if all(t.device.type == "cpu" for t in tensors_in(*self.kept)):
            self.event.synchronize()
        self.kept = ()


class Communication:
    """`torch.distributed`, but for the collectives. values: a tensor's values on the CPU."""

    def __init__(self, streams: Streams, values: Callable[[Any], Any]) -> None:
        self.streams, self.values, self.threads = streams, values, ThreadPoolExecutor(32)

    def __getattr__(self, name: str) -> Any:
        if name in OF_TWO:
            begin = getattr(dist, "i" + name.removeprefix("i"))
            return functools.partial(self.queue, begin, async_op=name.startswith("i"))
        function = getattr(dist, name)
        return self.late(function) if name in COLLECTIVES else function

    def P2POp(self, message: Callable[..., Any], *args: Any) -> Callable[[], Any]:
        """A message of a batch, not yet queued."""
        *given, group = args
        return functools.partial(message, *given, group=group)

    def batch_isend_irecv(self, messages: Iterable[Callable[[], Any]]) -> list[Any]:
        """Queues the messages of a batch, one after another."""
        return [message() for message in messages]

    def late(self, function: Callable[..., Any]) -> Callable[..., Work | None]:
        """A collective, queued."""
        return functools.partial(self.queue, functools.partial(function, async_op=True))

    def queue(
        self,
        begin: Callable[..., dist.Work],
        *args: Any,
        group: Any = None,
        async_op: bool = False,
        **keywords: Any,
    ) -> Work | None:
        """Queues a collective on the stream of its group, after what the current stream was told."""
        given, stream = self.values(args), self.streams.named("group", group or dist.group.WORLD)
        running: list[Future[Any]] = []

        def start() -> None:
            running.append(self.threads.submit(begin(*given, group=group, **keywords).wait))
            running[0].add_done_callback(lambda _: self.streams.ended.set())
            self.streams.elsewhere += 1

        def end() -> bool:
            if not running[0].done():
                return False
            self.streams.elsewhere -= 1
            running[0].result()
            return True

        stream.wait_event(self.streams.current.record_event())
        stream.add(start, "a collective")
        stream.add(end, "the end of a collective")
        work = Work(stream.record_event(), args)
        if async_op:
            return work
        work.wait()
        return None


@contextmanager
def communicating(streams: Streams, values: Callable[[Any], Any]) -> Iterator[None]:
    """Has threed's collectives run late."""
    there = Communication(streams, values)
    all_gather = there.late(collectives._all_gather_single)
    with (
        patch.object(collectives, "dist", there),
        patch.object(collectives, "_all_gather_single", all_gather),
    ):
        try:
            yield
        finally:
            there.threads.shutdown(wait=False)
