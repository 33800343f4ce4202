"""All ranks of a pipeline on emulated accelerators whose communicators follow NCCL's rules: does a plan hang?

    with devices() as use:
        programs = recorded([plan, plan], sizes=[1, 1, 2], tp=2, use=use)
    played(programs, draw, queues=8, tp=2)      # raises Hang if the ranks wait for one another

`recorded` runs the real `Executor` once per pipeline rank, on stages that only enqueue a kernel and a collective per
layer, and returns what each rank enqueues, in order. `played` then runs the programs of all ranks together:

- the operations of a communicator run in the order in which they were enqueued, on every rank,
- a send and its receive, or the parts of a collective, end only when all sides have begun,
- an operation begins after what its stream was told to wait for,
- streams may share a hardware queue, in which an operation that cannot begin yet blocks all that were enqueued later,
- the host of a rank enqueues nothing while it waits for a message (the form of a new shape).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from tests.accelerator import pretend
from tests.accelerator.order import Entry, Order, Work
from threed.core import device as door
from threed.distributed.collectives import Pending, done
from threed.distributed.topology import Axis
from threed.layers import MicroBatch
from threed.pipeline.boundary import Form
from threed.pipeline.executor import Executor
from threed.pipeline.overlap import Overlap
from threed.pipeline.stage import Pass
from threed.schedules import Action, Kind, Plan

LAYERS = 2
WIDTH = 1  # of every message
FORM = Form.of(torch.empty(WIDTH, requires_grad=True))


class Hang(RuntimeError):
    """Raised if no rank can go on, or if a send meets the receive of another message."""


@dataclass
class Program:
    """What a rank enqueues.

    Attributes:
        entries: kernels and operations of communicators, in the order in which they are enqueued.
        labels: for an operation of a communicator, what the other side must run at the same time.
        waits: (number of entries that were enqueued before, entry): the host then waits for the
            entry.
    """

    entries: list[Entry] = field(default_factory=list)
    labels: dict[Entry, Hashable] = field(default_factory=dict)
    waits: list[tuple[int, Entry]] = field(default_factory=list)


class Recorder:
    """The device of one rank: a stream per communicator, and the rank's messages."""

    def __init__(self, where: torch.device, rank: int) -> None:
        self.rank, self.order = rank, Order(where, lambda what: None)
        self.program = Program(self.order.step)
        self.label: Hashable = None
        self.posts_ahead = 1  # as `Links` on an accelerator

    def collective(self, name: str, group: Hashable) -> Work:
        work = self.order.collective(name, group, 0)
        self.program.labels[self.order.step[-1]] = self.label
        return work

    # ------------------------------------------------------------------------------------------------- a transport

    def communicator(self, source: int, target: int, gradients: bool) -> Hashable:
        """The communicator of a link; one per direction, for activations or for gradients."""
        return source, target, gradients

    def send(
        self, tensors: Sequence[Tensor], source: int, target: int, gradients: bool = False
    ) -> list[Pending]:
        group = self.communicator(source, target, gradients)
        return [done(t, self.collective("send", group)) for t in tensors]

    def receive(
        self, outs: Sequence[Tensor], source: int, target: int, gradients: bool = False
    ) -> list[Pending]:
        group = self.communicator(source, target, gradients)
        return [self._receive(out, group) for out in outs]

    def _receive(self, out: Tensor, group: Hashable) -> Pending:
        work = self.collective("receive", group)
        entry = self.order.step[-1]

        def arrived() -> Tensor:
            if out.dtype.is_floating_point:
                return out
            self.program.waits.append((len(self.order.step), entry))  # the host reads the form
            data = FORM.to_bytes()
            return out.fill_(len(data)) if out.dtype == torch.int64 else data

        return Pending(arrived, work)


class Enqueuing:
    """A stage that enqueues a kernel and a collective of the tensor-parallel axis per layer."""

    reuses_storages = False
    layers = ()

    def __init__(self, recorder: Recorder, tp: Axis) -> None:
        self.recorder, self.tp = recorder, tp

    def reset(self, ended: int | None = None) -> None: ...

    def _layers(self, name: str) -> Pass[None]:
        for _ in range(LAYERS):
            self.recorder.order.add(name, 0, 0)
            if self.tp.size > 1:
                self.recorder.label = name
                self.recorder.collective("all_reduce", ("tp", self.tp.channel)).wait()
            yield

    def forward_by_layer(self, m: int, x: Any, micro: MicroBatch, keep: bool = False) -> Pass[Any]:
        yield from self._layers(f"F{m}")
        return torch.empty(WIDTH, requires_grad=True)

    def backward_by_layer(
        self, m: int, dy: Any, keep: bool = False, split: bool = False
    ) -> Pass[Any]:
        yield from self._layers(f"B{m}")
        return torch.empty(WIDTH)


class Deferral:
    """Weight gradients of split backwards: one kernel."""

    def __init__(self, order: Order) -> None:
        self.order = order

    @contextmanager
    def defer(self) -> Iterator[list[Any]]:
        yield []

    def add_deferred(self, waiting: list[Any]) -> None:
        self.order.add("W", 0, 0)


class NormUpdates:
    """Updates of an asynchronous plan: an all-reduce of all pipeline ranks, for which the update waits."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.started: Work | None = None

    def use(self, before: bool) -> None: ...

    def all_passes_ended(self, chunk: int | None = None) -> None: ...

    def start_update(self) -> None:
        self.recorder.label = "norm"
        self.started = self.recorder.collective("all_reduce", ("pp",))

    def end_update(self) -> None:
        assert self.started is not None
        self.started.wait()
        self.recorder.order.add("update", 0, 0)


class Labelling(Executor):
    """Notes which message each send and receive belongs to."""

    recorder: Recorder

    def _send(self, action: Action) -> None:
        place = self._plan.consumer(self.rank, action)
        assert place is not None
        self.recorder.label = _label(self._plan, *place, action)
        super()._send(action)

    def _receive(self, action: Action) -> None:
        self.recorder.label = _label(self._plan, self.rank, action.chunk, action)
        super()._receive(action)


def _label(plan: Plan, rank: int, chunk: int, action: Action) -> Hashable:
    backward = action.kind in (Kind.SEND_B, Kind.RECV_B)
    return backward, plan.stage_of(rank, chunk), action.microbatch


@contextmanager
def devices() -> Iterator[Callable[[Recorder], None]]:
    """Context manager that yields a function: it makes the device of a recorder the current one."""
    now: list[Recorder] = []
    order = lambda: now[0].order  # noqa: E731
    answers: list[tuple[Callable[..., Any], Callable[..., Any]]] = [
        (door.current_stream, lambda *_: order().current),
        (door.copy_stream, lambda _, purpose: order().named(purpose)),
    ]

    def use(recorder: Recorder) -> None:
        now[:] = [recorder]

    set_stream = patch.object(torch.accelerator, "set_stream", lambda stream: order().use(stream))
    with pretend.there(), pretend.replaced(answers), set_stream:
        yield use


def recorded(
    plans: Sequence[Plan],
    sizes: Sequence[int],
    tp: int,
    use: Callable[[Recorder], None],
    varying: bool = False,
) -> list[Program]:
    """Returns the program of each pipeline rank.

    Args:
        plans: the lowered plans of successive steps. One without forwards gets no micro-batches.
        sizes: the length of each micro-batch; the first message of a length is preceded by its form.
        tp: number of tensor-parallel ranks.
        use: the function that `devices` yields.
        varying: whether each message is preceded by its form.
    """
    where, programs = pretend.device(), []
    micros = [MicroBatch(torch.zeros(1, size, dtype=torch.int64)) for size in sizes]
    for rank in range(plans[0].stages):
        recorder = Recorder(where, rank)
        use(recorder)
        axis, twin = (Axis("tp", tuple(range(tp)), 0, group) for group in ("first", "second"))  # type: ignore[arg-type]
        overlap = Overlap(where, [(axis, twin)])
        stages: Any = [Enqueuing(recorder, axis) for _ in range(plans[0].chunks)]
        executor = Labelling(
            stages, recorder, rank, overlap=overlap, varying=varying,
            weight_gradients=Deferral(recorder.order), updates=NormUpdates(recorder),
        )  # fmt: skip
        executor.recorder = recorder
        for plan in plans:
            drains = all(action.microbatch < 0 for action in plan.ranks[0])
            executor.run(plan, () if drains else micros)
        programs.append(recorder.program)
    return programs


# ------------------------------------------------------------------------------------------------------------- playing


class Rank:
    """A rank while its program runs.

    Args:
        program: what it enqueues.
        queues: number of hardware queues that its streams share; 0 if each stream has its own.
        draw: chooses the hardware queue of each stream.
    """

    def __init__(self, program: Program, queues: int, draw: random.Random) -> None:
        self.program, self.enqueued, self.ended = program, 0, set[Entry]()
        self.waits = dict(program.waits)
        streams = dict.fromkeys(entry.stream for entry in program.entries)
        self.queue_of = {
            stream: draw.randrange(queues) if queues else number
            for number, stream in enumerate(streams)
        }
        self.queues: list[list[Entry]] = [[] for _ in range(queues or len(streams))]
        self.heads = [0] * len(self.queues)

    def enqueue(self) -> bool:
        """Enqueues the next entry; returns False if the host waits or has enqueued everything."""
        wait = self.waits.get(self.enqueued)
        if self.enqueued == len(self.program.entries) or not (wait is None or wait in self.ended):
            return False
        entry = self.program.entries[self.enqueued]
        self.queues[self.queue_of[entry.stream]].append(entry)
        self.enqueued += 1
        return True

    def begin(self, queue: int) -> Entry | None:
        """Begins the first entry of a hardware queue, if all that it waits for has ended."""
        at, entries = self.heads[queue], self.queues[queue]
        if at == len(entries) or not entries[at].after <= self.ended:
            return None
        self.heads[queue] += 1
        return entries[at]

    @property
    def left(self) -> str:
        """What cannot begin, or whose enqueuing the host waits for."""
        blocked = [q[at] for q, at in zip(self.queues, self.heads, strict=True) if at < len(q)]
        return ", ".join(f"{e.name} on {e.stream}" for e in blocked) or "its host"


def played(programs: Sequence[Program], draw: random.Random, queues: int = 0, tp: int = 1) -> None:
    """Runs the programs of all ranks, each rank at a speed that is drawn.

    Every tensor-parallel rank of a pipeline rank runs the same program.

    Raises:
        Hang: if they do not end, or if a send meets the receive of another message.
    """
    ranks = {
        (stage, t): Rank(program, queues, draw)
        for stage, program in enumerate(programs)
        for t in range(tp)
    }
    speeds = [draw.choice((1, 4, 16)) for _ in ranks]
    begun: dict[Hashable, dict[tuple[int, int], Entry]] = {}
    counts: dict[Hashable, int] = {}

    def end(place: tuple[int, int], entry: Entry) -> None:
        """Ends a kernel, or an operation that all sides have begun."""
        group = entry.stream[1] if isinstance(entry.stream, tuple) else None
        if group is None:
            ranks[place].ended.add(entry)
            return
        stage, t = place
        across = group[0] in ("tp", "pp")
        mine = (group, stage if group[0] == "tp" else t)
        number = counts[mine, place] = counts.get((mine, place), 0) + 1
        sides = begun.setdefault((mine, number), {})
        sides[place] = entry
        if len(sides) < {"tp": tp, "pp": len(programs)}.get(group[0], 2):
            return
        labels = {ranks[p].program.labels[e] for p, e in sides.items()}
        names = sorted(e.name for e in sides.values())
        if len(labels) > 1 or (not across and names != ["receive", "send"]):
            raise Hang(f"{sides} meet: {labels}")
        for p, e in sides.items():
            ranks[p].ended.add(e)

    places = list(ranks)
    while True:
        moved = False
        for place in dict.fromkeys(draw.choices(places, speeds, k=len(places)) + places):
            rank = ranks[place]
            for _ in range(draw.choice((1, 8, 64))):
                moved |= rank.enqueue()
            for queue in draw.sample(range(len(rank.queues)), len(rank.queues)):
                while (entry := rank.begin(queue)) is not None:
                    end(place, entry)
                    moved = True
        if not moved:
            break
    stuck = [
        f"rank {place}: {rank.left}"
        for place, rank in ranks.items()
        if len(rank.ended) < len(rank.program.entries)
    ]
    if stuck:
        raise Hang("; ".join(stuck))
