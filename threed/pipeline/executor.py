"""Walks one rank's plan: a table of handlers, one an action; it knows no schedule by name.

    executor = Executor(stages, transport, rank)
    outputs  = executor.run(plan, micro_batches, shape)

Receives are posted where the plan has them, which is where the other side sends, and waited for at first use. Sends
are waited for two messages later, or at the end. Training, evaluation and sampling are plans like any other.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from threed.collectives import Pending
from threed.layers.slicing import MicroBatch
from threed.pipeline.stage import Stage
from threed.pipeline.transport import Transport
from threed.schedules.action import COMPUTE, Action, Kind, Plan

Span = tuple[Action, float, float]


@dataclass(frozen=True)
class Boundary:
    """The activation between two stages: what a receive allocates."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def with_next_compute(actions: Sequence[Action]) -> Iterator[tuple[Action, Action | None]]:
    """Every action, and the next one after it that computes."""
    following: list[Action | None] = []
    then: Action | None = None
    for action in reversed(actions):
        following.append(then)
        then = action if action.kind in COMPUTE else then
    return zip(actions, reversed(following), strict=True)


class Executor:
    """Runs plans over the stages (chunks) of one pipeline rank.

    on_backward(chunk) is called after each backward, on_reduce(chunk) where the plan says that a chunk's gradients are
    complete. `spans`, when given a list, collects what ran when: (action, start, end) in seconds of
    `time.perf_counter`.
    """

    def __init__(
        self, stages: Sequence[Stage], transport: Transport, rank: int,
        on_reduce: Callable[[int], None] | None = None, on_backward: Callable[[int], None] | None = None,
    ) -> None:  # fmt: skip
        self.stages, self.transport, self.rank = stages, transport, rank
        self.on_reduce, self.on_backward = on_reduce, on_backward
        self.spans: list[Span] | None = None
        self._handlers: dict[Kind, Callable[[Action], None]] = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.SEND_F: self._send,
            Kind.SEND_B: self._send,
            Kind.RECV_F: self._receive,
            Kind.RECV_B: self._receive,
            Kind.GATHER: self._gather,
            Kind.REDUCE: self._reduce,
        }

    def run(self, plan: Plan, micros: Sequence[MicroBatch], boundary: Boundary) -> list[Tensor]:
        """Runs this rank's part of a lowered plan; the model's outputs (losses) in micro-batch order, where it ends."""
        self._plan, self._micros, self._boundary = plan, micros, boundary
        self._then: Action | None = None
        for stage in self.stages:
            stage.reset()
        self._arriving: dict[tuple[Kind, int, int], Pending | Tensor] = {}
        self._leaving: dict[tuple[Kind, int, int], Tensor] = {}
        self._sent: deque[Pending] = deque()
        self._outputs: dict[int, Tensor] = {}
        for action, then in with_next_compute(plan.ranks[self.rank]):
            self._began, self._then = time.perf_counter(), then
            self._handlers[action.kind](action)
            if self.spans is not None:
                self._let_device_end()
                self.spans.append((action, self._began, time.perf_counter()))
        while self._sent:
            self._sent.popleft().wait()
        return [self._outputs[m] for m in sorted(self._outputs)]

    def _forward(self, action: Action) -> None:
        x = self._take(Kind.RECV_F, action)
        keep = self._then is not None and self._then.kind is Kind.B and self._then.chunk == action.chunk
        y = self.stages[action.chunk].forward(action.microbatch, x, self._micros[action.microbatch], keep)
        if self._plan.consumer(self.rank, action) is None:
            self._outputs[action.microbatch] = y
        else:
            self._give(Kind.SEND_F, Kind.RECV_F, action, y)

    def _backward(self, action: Action) -> None:
        dy = self._take(Kind.RECV_B, action)
        keep = self._then is not None and self._then.kind is Kind.F and self._then.chunk == action.chunk
        dx = self.stages[action.chunk].backward(action.microbatch, dy, keep)
        if self.on_backward is not None:
            self.on_backward(action.chunk)
        if dx is not None:
            self._give(Kind.SEND_B, Kind.RECV_B, action, dx)

    def _take(self, kind: Kind, action: Action) -> Tensor | None:
        """What another stage made for this action; None at the model's ends."""
        if self._plan.producer(self.rank, action) is None:
            return None
        arrived = self._arriving.pop((kind, action.microbatch, action.chunk))
        value = arrived.wait() if isinstance(arrived, Pending) else arrived
        self._let_device_end()
        self._began = time.perf_counter()  # waiting for another stage is no work: the bubble shows it
        return value

    def _let_device_end(self) -> None:
        """Where spans are wanted of a GPU, waits for what it computes; not for receives, which others may wait for."""
        if self.spans is not None and self._boundary.device.type == "cuda":
            torch.cuda.current_stream(self._boundary.device).synchronize()

    def _give(self, send: Kind, receive: Kind, action: Action, value: Tensor) -> None:
        """Leaves a result for the send that follows, or for the next stage if that is on this rank."""
        consumer = self._plan.consumer(self.rank, action)
        if consumer is not None and consumer[0] == self.rank:
            self._arriving[receive, action.microbatch, consumer[1]] = value
        else:
            self._leaving[send, action.microbatch, action.chunk] = value

    def _send(self, action: Action) -> None:
        target = self._plan.consumer(self.rank, action)
        if target is None:
            raise ValueError(f"plan {self._plan.name}: rank {self.rank}: {action} has nobody to send to")
        value = self._leaving.pop((action.kind, action.microbatch, action.chunk))
        self._sent.append(self.transport.send(value, self.rank, target[0]))
        if len(self._sent) > 2:
            self._sent.popleft().wait()

    def _receive(self, action: Action) -> None:
        source = self._plan.producer(self.rank, action)
        if source is None:
            raise ValueError(f"plan {self._plan.name}: rank {self.rank}: {action} has nobody to receive from")
        b = self._boundary
        out = torch.empty(b.shape, dtype=b.dtype, device=b.device)
        key = (action.kind, action.microbatch, action.chunk)
        self._arriving[key] = self.transport.receive(out, source[0], self.rank)

    def _gather(self, action: Action) -> None:
        """Begins what the next compute action will wait for first, while this rank waits for messages."""
        if self._then is not None:
            self.stages[action.chunk].start(backward=self._then.kind is Kind.B)

    def _reduce(self, action: Action) -> None:
        if self.on_reduce is not None:
            self.on_reduce(action.chunk)
