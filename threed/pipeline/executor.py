"""Runs one rank's plan through a table of handlers, one for each kind of action; it knows no schedule by name.

    executor = Executor(stages, transport, rank)
    outputs  = executor.run(plan, micro_batches)

A backward is whole (B), or split: I computes the input's gradient, and sets aside what W computes the weights' from.
Where VALIDATE finds that the update before the plan was wrong, `run` raises Outdated: it has to begin again.

An asynchronous plan leaves micro-batches open, with messages on their way; the plan after it goes on with them.

Receives are posted where the plan has them, when the other side sends, and waited for at first use. Sends are waited
for two messages later, or at the end. Training, evaluation and sampling are all plans.

Stages exchange tensors of any shape, dtype and number. The first message for micro-batches of a shape is preceded by
its form, which both sides store: later messages are tensors only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from threed.collectives import Pending
from threed.device import Clock, Moment, start_copy_in
from threed.layers.contract import title
from threed.layers.slicing import MicroBatch
from threed.pipeline.boundary import Form, signature, tensors
from threed.pipeline.overlap import Overlap
from threed.pipeline.stage import Stage
from threed.pipeline.transport import Transport
from threed.schedules.action import COMPUTE, RECEIVES, Action, Kind
from threed.schedules.plan import Plan

Span = tuple[Action, float, float]


class Outdated(Exception):
    """A plan found at VALIDATE that its forwards ran with wrong weights. They are right now: run the plan again."""


def with_next_pass(actions: Sequence[Action]) -> Iterator[tuple[Action, tuple[Action, ...]]]:
    """Returns every action with the next compute action after it, in its parts: none where that is a W, which reads no
    weights, or where there is none."""
    following: list[tuple[Action, ...]] = []
    then: tuple[Action, ...] = ()
    for action in reversed(actions):
        following.append(then)
        if action.kind in COMPUTE:
            then = () if action.kind is Kind.W else action.parts
    return zip(actions, reversed(following), strict=True)


def _key(action: Action) -> tuple[int, int]:
    return action.microbatch, action.chunk


def _message(action: Action) -> tuple[Kind, int, int]:
    return action.kind, action.microbatch, action.chunk


class WeightGradients(Protocol):
    """Sets aside what weights' gradients are computed from, and computes them later (`threed.zero.counting.Deferral`)."""

    def defer(self) -> AbstractContextManager[list[Any]]:
        """In the block, sets it aside in the list."""

    def add_deferred(self, waiting: list[Any]) -> None:
        """Computes and adds the gradients."""


class Updates(Protocol):
    """What updates the weights while an asynchronous plan runs (`threed.zero.asynchronous`)."""

    def use(self, before: bool) -> None:
        """Shows the layers the weights that the next pass runs with; before: it is of the step before."""

    def start_update(self) -> None:
        """Begins the sum over all ranks that the update depends on."""

    def end_update(self) -> None:
        """Waits for it, and updates."""


class Observer(Protocol):
    """Sees what a rank computes while its plans run (`threed.reliability.recheck`)."""

    def sent(self, activations: Sequence[Tensor]) -> None:
        """Called before activations are sent to the next stage."""

    def ended(self, micros: Sequence[MicroBatch], losses: Sequence[Tensor]) -> None:
        """Called at the end of a plan; losses by micro-batch, on the last stage."""


class Executor:
    """Runs plans over the stages (chunks) of one pipeline rank.

    on_backward(chunk) is called after each backward, of a split one after its W; on_reduce(chunk) where the plan has
    the reduction of a chunk's gradients; on_validate() says at VALIDATE whether the weights are right, and if not, it
    has corrected them. updates: those of asynchronous plans. weight_gradients: what split backwards need. overlap: the
    streams of pairs; by default their parts run one after the other. varying: forms depend on more than the shapes of a
    micro-batch, and precede every message. After `record()`, `spans` are (action, start, end) of every action, in
    seconds of `time.perf_counter`.
    """

    def __init__(
        self, stages: Sequence[Stage], transport: Transport, rank: int,
        on_reduce: Callable[[int], None] | None = None, on_backward: Callable[[int], None] | None = None, *,
        weight_gradients: WeightGradients | None = None, overlap: Overlap | None = None,
        device: torch.device | None = None, varying: bool = False, on_validate: Callable[[], bool] | None = None,
        updates: Updates | None = None,
    ) -> None:  # fmt: skip
        self.stages, self.transport, self.rank = stages, transport, rank
        self.on_reduce = on_reduce
        self.on_backward = on_backward
        self.weight_gradients = weight_gradients
        self.device = device or torch.device("cpu")
        self.varying = varying
        self.on_validate = on_validate
        self.overlap, self.updates = overlap or Overlap(torch.device("cpu")), updates
        self._forms: dict[tuple[Any, ...], Form] = {}
        self._plan = Plan("none", 1, 0, 1, ((),))
        self._signatures: list[tuple[Any, ...]] = []
        self._arriving: dict[tuple[Kind, int, int], list[Pending] | list[Tensor]] = {}
        self._sent: deque[list[Pending]] = deque()
        self._clock: Clock | None = None  # while spans are recorded
        self._observer: Observer | None = None
        self._marks: list[tuple[Action, Moment, Moment]] = []
        self._handlers: dict[Kind, Callable[[Action], None]] = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.I: self._backward,
            Kind.W: self._weight_backward,
            Kind.FB: self._pair,
            Kind.SEND_F: self._send,
            Kind.SEND_B: self._send,
            Kind.RECV_F: self._receive,
            Kind.RECV_B: self._receive,
            Kind.GATHER: self._gather,
            Kind.REDUCE: self._reduce,
            Kind.VALIDATE: self._validate,
        }
        if updates is not None:
            self._handlers |= {
                Kind.NORM: lambda _: updates.start_update(),
                Kind.UPDATE: lambda _: updates.end_update(),
            }

    def record(self, on: bool = True) -> list[Span]:
        """Starts or stops recording spans; returns those recorded so far."""
        spans = self.spans
        self._clock, self._marks = Clock(self.device) if on else None, []
        return spans

    @contextmanager
    def observed(self, observer: Observer) -> Iterator[None]:
        """Calls `observer` for the plans that run inside the block."""
        self._observer = observer
        try:
            yield
        finally:
            self._observer = None

    @property
    def spans(self) -> list[Span]:
        """What was recorded, when it is over."""
        seconds = self._clock.seconds if self._clock else None
        return (
            [(action, seconds(began), seconds(end)) for action, began, end in self._marks]
            if seconds
            else []
        )

    def run(self, plan: Plan, micros: Sequence[MicroBatch]) -> list[Tensor]:
        """Runs this rank's part of a lowered plan; returns the losses, by micro-batch, on the last stage. Raises
        Outdated, on all ranks, where it has to begin again; ValueError for a plan that goes on where none has left off.
        """
        self._take_over(plan, micros)
        self._plan, self._micros = plan, micros
        self._then: tuple[Action, ...] = ()
        self.overlap.reset()
        self._leaving: dict[tuple[Kind, int, int], list[Tensor]] = {}
        self._waiting: dict[tuple[int, int], list[Any]] = {}  # of split backwards, for their W
        self._outputs: dict[int, Tensor] = {}
        self._posted: set[tuple[Kind, int, int]] = set()
        actions = plan.ranks[self.rank]
        for number, (action, then) in enumerate(with_next_pass(actions)):
            self._then = then
            if action.kind in COMPUTE and self.transport.posts_ahead:
                self._post_ahead(actions, number + 1)
            self._begin()
            self._handlers[action.kind](action)
            if self._clock is not None:
                self._marks.append((action, self._began, self._clock.now()))
        while self._sent and not plan.left:
            self._wait_for_oldest_send()
        return self._end(micros, [self._outputs[m] for m in sorted(self._outputs)])

    def _end(self, micros: Sequence[MicroBatch], losses: list[Tensor]) -> list[Tensor]:
        if self._observer is not None:
            self._observer.ended(micros, losses)
        return losses

    def _take_over(self, plan: Plan, micros: Sequence[MicroBatch]) -> None:
        """Goes on with the micro-batches that the last plan has left, of which the last is number -1 now; drops what is
        there where the plan begins anew."""
        if plan.begun and plan.begun != self._plan.left:
            raise ValueError(
                f"plan {plan.name}: rank {self.rank}: the plan before did not leave {plan.begun} open"
            )
        ended = self._plan.microbatches if plan.begun else None
        for stage in self.stages:
            stage.reset(ended)
        own = [(n, *signature(m)) if self.varying else signature(m) for n, m in enumerate(micros)]
        self._signatures = own + self._signatures[:ended] if plan.begun else own
        self._forms_before = self._forms
        if self.varying:
            self._forms = {}
        arriving = self._arriving.items() if ended is not None else ()
        self._arriving = {
            (kind, m - (ended or 0), chunk): parts for (kind, m, chunk), parts in arriving
        }
        if ended is None:
            self._sent.clear()

    def _forward(self, action: Action) -> None:
        parts, m = self._take(Kind.RECV_F, action), self._micros[action.microbatch]
        x = None if parts is None else self._form("in", action).value(parts)
        keep = self._turns(action, Kind.B, Kind.I)
        self._use_weights(action)
        y = self.stages[action.chunk].forward(action.microbatch, x, m, keep)
        if self._plan.consumer(self.rank, action) is None:
            self._outputs[action.microbatch] = y.detach()
        else:
            self._give(Kind.SEND_F, Kind.RECV_F, action, y)

    def _pair(self, action: Action) -> None:
        """Runs a forward and a backward of another micro-batch: together, on a device that has streams."""
        forward, backward = action.parts
        self._wait_for(Kind.RECV_F, forward)
        self._wait_for(Kind.RECV_B, backward)
        # memory must stay while another stream reads it
        given = [list(parts) for parts in self._arriving.values()]
        then, self._then = self._then, (backward,)
        with self.overlap.pair():
            with self.overlap.forward(_key(forward), beside=_key(backward)):
                self._forward(forward)
            self._then = then
            waiting = self._run_backward(backward)
        del given
        self._end_backward(backward, waiting)

    def _backward(self, action: Action) -> None:
        """B: the gradients of the input and of the weights. I: that of the input; the others are set aside for W."""
        self._end_backward(action, self._run_backward(action))

    def _run_backward(self, action: Action) -> list[Any]:
        whole = action.kind is Kind.B
        with (
            nullcontext([]) if whole else self._split(action).defer() as waiting,
            self.overlap.backward(_key(action)),
        ):
            self._differentiate(action, split=not whole)
        return waiting

    def _end_backward(self, action: Action, waiting: list[Any]) -> None:
        if action.kind is Kind.I:
            self._waiting[_key(action)] = waiting
        elif self.on_backward is not None:
            self.on_backward(action.chunk)

    def _weight_backward(self, action: Action) -> None:
        self._split(action).add_deferred(self._waiting.pop(_key(action)))
        if self.on_backward is not None:
            self.on_backward(action.chunk)

    def _split(self, action: Action) -> WeightGradients:
        if self.weight_gradients is None:
            raise ValueError(
                f"plan {self._plan.name}: rank {self.rank}: {action}: nothing can defer weight gradients"
            )
        return self.weight_gradients

    def _turns(self, action: Action, *kinds: Kind) -> bool:
        """Whether the next pass is one of these kinds over the same chunk, and so begins where this one ends."""
        return (
            bool(self._then) and self._then[0].kind in kinds and self._then[0].chunk == action.chunk
        )

    def _differentiate(self, action: Action, split: bool) -> None:
        parts = self._take(Kind.RECV_B, action)
        dy = None if parts is None else self._form("out", action).gradients(parts)
        self._use_weights(action)
        dx = self.stages[action.chunk].backward(
            action.microbatch, dy, self._turns(action, Kind.F), split
        )
        if self._plan.consumer(self.rank, action) is not None:
            self._give(Kind.SEND_B, Kind.RECV_B, action, dx)

    def _use_weights(self, action: Action) -> None:
        if self.updates is not None and self._plan.asynchronous:
            self.updates.use(action.microbatch < 0)

    def _take(self, kind: Kind, action: Action) -> list[Tensor] | None:
        """Waits for the tensors that another stage made for this action; None at the model's ends."""
        if self._plan.producer(self.rank, action) is None:
            return None
        self._wait_for(kind, action)
        return cast(list[Tensor], self._arriving.pop((kind, action.microbatch, action.chunk)))

    def _wait_for(self, kind: Kind, action: Action) -> None:
        key = kind, action.microbatch, action.chunk
        coming = [part for part in self._arriving.get(key, ()) if isinstance(part, Pending)]
        if coming:
            self._arriving[key] = [part.wait() for part in coming]
            self._begin()  # waiting for another stage counts as bubble, not as work

    def _begin(self) -> None:
        if self._clock is not None:
            self._began = self._clock.now()

    def _give(self, send: Kind, receive: Kind, action: Action, value: Any) -> None:
        """Stores a result for the send that follows, or for the next stage if that is on this rank."""
        consumer = self._plan.consumer(self.rank, action)
        here = consumer is not None and consumer[0] == self.rank
        if send is Kind.SEND_F:
            form = self._remember("out", action, Form.of(value))
            parts = [part.detach() for part in tensors(value)]
            if consumer is not None and here:
                self._remember("in", action._replace(chunk=consumer[1]), form)
        else:
            parts = self._form("in", action).gradients_to_send(value, self.device)
        if consumer is not None and here:
            self._arriving[receive, action.microbatch, consumer[1]] = parts
        else:
            self._leaving[send, action.microbatch, action.chunk] = parts

    def _send(self, action: Action) -> None:
        target = self._plan.consumer(self.rank, action)
        if target is None:
            raise ValueError(
                f"plan {self._plan.name}: rank {self.rank}: {action} has nobody to send to"
            )
        parts = self._leaving.pop((action.kind, action.microbatch, action.chunk))
        if (
            action.kind is Kind.SEND_F
            and (key := ("sent", *self._key("out", action))) not in self._forms
        ):
            self._forms[key] = form = self._form("out", action)
            data = start_copy_in(form.to_bytes(), self.device)
            size = torch.full((1,), len(data), device=self.device)
            self._sent += [
                self.transport.send([part], self.rank, target[0]) for part in (size, data)
            ]
        if self._observer is not None and action.kind is Kind.SEND_F:
            self._observer.sent(parts)
        self._sent.append(self.transport.send(parts, self.rank, target[0]))
        while len(self._sent) > 2:
            self._wait_for_oldest_send()

    def _wait_for_oldest_send(self) -> None:
        for part in self._sent.popleft():
            part.wait()

    def _post_ahead(self, actions: Sequence[Action], start: int) -> None:
        """Posts the receives up to the next compute action, in their order, as far as their forms are known."""
        for at in range(start, len(actions)):
            action = actions[at]
            if action.kind in COMPUTE or action.kind is Kind.VALIDATE:
                return
            if action.kind in RECEIVES and (key := _message(action)) not in self._posted:
                side = "in" if action.kind is Kind.RECV_F else "out"
                if self._key(side, action) not in self._forms:
                    return
                self._receive(action)
                self._posted.add(key)

    def _receive(self, action: Action) -> None:
        key = _message(action)
        if key in self._posted:
            return
        source = self._plan.producer(self.rank, action)
        if source is None:
            raise ValueError(
                f"plan {self._plan.name}: rank {self.rank}: {action} has nobody to receive from"
            )
        backward = action.kind is Kind.RECV_B
        if not backward and self._key("in", action) not in self._forms:
            self._remember("in", action, self._receive_form(source[0]))
        buffers = self._form("out" if backward else "in", action).empty(
            self.device, gradients=backward
        )
        self._arriving[key] = [*self.transport.receive(buffers, source[0], self.rank)]

    # ---------------------------------------------------------------------------------------------------------- forms

    def _receive_form(self, source: int) -> Form:
        size = torch.empty(1, dtype=torch.int64, device=self.device)
        (coming,) = self.transport.receive([size], source, self.rank)
        data = torch.empty(int(coming.wait()), dtype=torch.uint8, device=self.device)
        (coming,) = self.transport.receive([data], source, self.rank)
        return Form.from_bytes(coming.wait())

    def _key(self, side: str, action: Action) -> tuple[Any, ...]:
        return side, action.chunk, *self._signatures[action.microbatch]

    def _form(self, side: str, action: Action) -> Form:
        return (self._forms if action.microbatch >= 0 else self._forms_before)[
            self._key(side, action)
        ]

    def _remember(self, side: str, action: Action, form: Form) -> Form:
        """Stores and returns the form of a chunk's input or output; RuntimeError if it had another one before."""
        known = self._forms.setdefault(self._key(side, action), form)
        if known != form:
            layers = self.stages[action.chunk].layers
            raise RuntimeError(
                f"{title(layers[-1], len(layers) - 1)} returned {form} where it returned"
                f" {known} before, for micro-batches of the same shape; the next stage cannot know: give the model the"
                " attribute `boundaries_vary = True`"
            )
        return known

    def _gather(self, action: Action) -> None:
        """Begins to gather the first units of the next compute action, while this rank waits for messages."""
        for part in self._then:
            if part.chunk == action.chunk:
                self.stages[action.chunk].start(backward=part.kind is not Kind.F)

    def _reduce(self, action: Action) -> None:
        if self.on_reduce is not None:
            self.on_reduce(action.chunk)

    def _validate(self, action: Action) -> None:
        if self.on_validate is None or self.on_validate():
            return
        # every message before the cut has both its ends there
        for arrived in self._arriving.values():
            for part in arrived:
                if isinstance(part, Pending):
                    part.wait()
        while self._sent:
            self._wait_for_oldest_send()
        raise Outdated(
            f"plan {self._plan.name}: rank {self.rank}: {action}: the update before it was undone"
        )
