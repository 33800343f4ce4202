"""Runs one pipeline rank's part of a plan: a loop over its actions, and a table with a handler per
kind of action.

    executor = Executor(stages, transport, rank)
    losses   = executor.run(plan, micro_batches)

The executor contains no schedule: training, evaluation and sampling are different plans.

A backward is either full (action B) or split (actions I and W). In a split backward, I computes the
input gradient and keeps the operands of the weight gradients; later, W computes the weight
gradients from these operands. If the action VALIDATE finds that the previous weight update was
wrong, `run` raises Outdated, and the caller runs the plan again.

An asynchronous plan may end before the backwards of its last micro-batches have run, and while
messages are in flight. The next plan then runs these backwards and uses these messages.

Receives are posted one compute action earlier than in the plan (see `Transport.posts_ahead`).
The executor waits for a receive when the received tensors are first used. It waits for a send after
it has sent two further messages, or at the end of a plan that leaves no backward to the next plan.

Stages exchange tensors of any shape, dtype and number. The first activations for micro-batches of a
given shape are preceded by their form: structure, shapes and dtypes
(`threed.pipeline.boundary.Form`). Both sides store the form, so later messages contain only
tensors.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from threed.core.device import Clock, Moment, start_copy_in
from threed.distributed.collectives import Pending
from threed.layers.contract import title
from threed.layers.slicing import MicroBatch
from threed.pipeline.boundary import Form, signature, tensors
from threed.pipeline.overlap import Overlap
from threed.pipeline.stage import Pass, Stage, finish
from threed.pipeline.transport import Transport
from threed.schedules.action import COMPUTE, RECEIVES, Action, Kind
from threed.schedules.plan import Place, Plan

Span = tuple[Action, float, float]


class Outdated(Exception):
    """Raised at VALIDATE if the plan's forwards ran with wrong weights.

    The weights are corrected before the error is raised. The caller must run the plan again.
    """


def with_next_pass(actions: Sequence[Action]) -> Iterator[tuple[Action, tuple[Action, ...]]]:
    """Yields (action, parts of the next compute action) for every action.

    The executor gathers weights for these parts in advance. An FB pairs a forward with the backward
    of another micro-batch, so it has two parts. Any other compute action has one part, the action
    itself. The tuple of parts is empty if no compute action follows, or if the next one is a W,
    which reads no weights.
    """
    following: list[tuple[Action, ...]] = []
    next_parts: tuple[Action, ...] = ()
    for action in reversed(actions):
        following.append(next_parts)
        if action.kind in COMPUTE:
            next_parts = () if action.kind is Kind.W else action.parts
    return zip(actions, reversed(following), strict=True)


def _key(action: Action) -> tuple[int, int]:
    return action.microbatch, action.chunk


def _turns(action: Action, next_parts: tuple[Action, ...], *kinds: Kind) -> bool:
    """Returns whether the next compute action has one of `kinds` and the chunk of `action`.

    If so, the next pass starts with the unit (layer) with which the pass of `action` ends, so this
    unit may stay gathered.
    """
    return bool(next_parts) and next_parts[0].kind in kinds and next_parts[0].chunk == action.chunk


def _message(action: Action) -> tuple[Kind, int, int]:
    return action.kind, action.microbatch, action.chunk


class WeightGradients(Protocol):
    """Defers the computation of weight gradients (`threed.zero.contributions.Deferral`)."""

    def defer(self) -> AbstractContextManager[list[Any]]:
        """Returns a context manager that yields a list.

        A backward inside the block does not compute weight gradients. It appends their operands to
        the list.
        """

    def add_deferred(self, waiting: list[Any]) -> None:
        """Computes weight gradients, and adds them to the gradients of the parameters.

        Args:
            waiting: the list of operands that the context manager of `defer` has yielded.
        """


class Updates(Protocol):
    """Updates the weights while an asynchronous plan runs (`threed.zero.asynchronous`)."""

    def use(self, before: bool) -> None:
        """Points the layers at the version of the weights that the next pass must use.

        Args:
            before: whether the next pass (forward or backward) belongs to the previous step.
        """

    def start_update(self) -> None:
        """Starts the all-reduce of the gradient norm over all ranks."""

    def end_update(self) -> None:
        """Waits for the gradient norm and updates the weights."""


class Observer(Protocol):
    """Receives the results of a rank while its plans run (`threed.reliability.recheck`)."""

    def sent(self, activations: Sequence[Tensor]) -> None:
        """Called before activations are sent to the next stage."""

    def ended(self, micros: Sequence[MicroBatch], losses: Sequence[Tensor]) -> None:
        """Called at the end of a plan.

        Args:
            micros: the micro-batches of the plan.
            losses: losses in the order of micro-batches; empty except on the last stage.
        """


class Executor:
    """Runs plans over the stages (chunks) of one pipeline rank.

    Args:
        stages: the rank's stages; the index of a stage is the number of its chunk.
        transport: sends and receives the messages of the plan.
        rank: index of this rank among the pipeline ranks.
        on_reduce: `on_reduce(chunk)` is called at a REDUCE action, and reduces the gradients of the
            chunk.
        on_backward: `on_backward(chunk)` is called after each full backward, and after the W of
            each split backward.
        weight_gradients: defers weight gradients; required for plans with split backwards.
        overlap: streams on which the forward and the backward of a pair (FB) run concurrently.
            None: the backward runs after the forward.
        device: device of the received tensors.
        varying: whether the shapes of activations depend on more than the shapes of the tensors in
            a micro-batch. If so, every message with activations is preceded by its form.
        on_validate: function that is called at VALIDATE, and returns whether the previous weight
            update was correct. If the update was wrong, the function first corrects the weights.
        updates: object that updates the weights; required for asynchronous plans.

    Attributes:
        spans: (action, start, end) of every action since `record()`, in seconds of
            `time.perf_counter`.
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
        self.overlap, self.updates = overlap, updates
        # forms of this plan's micro-batches, and of the micro-batches that the previous plan left open
        self._forms: dict[tuple[Any, ...], Form] = {}
        self._forms_before: dict[tuple[Any, ...], Form] = {}
        self._plan = Plan("none", 1, 0, 1, ((),))
        self._signatures: list[tuple[Any, ...]] = []
        self._incoming: dict[tuple[Kind, int, int], list[Pending] | list[Tensor]] = {}
        self._sent: deque[list[Pending]] = deque()
        self._clock: Clock | None = None  # None unless spans are recorded
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
        """Starts or stops recording spans; returns and drops the spans recorded so far.

        Args:
            on: True to start, False to stop.
        """
        spans = self.spans
        self._clock, self._marks = Clock(self.device) if on else None, []
        return spans

    @contextmanager
    def observed(self, observer: Observer) -> Iterator[None]:
        """Context manager that passes the results of plans that run inside it to `observer`."""
        self._observer = observer
        try:
            yield
        finally:
            self._observer = None

    @property
    def spans(self) -> list[Span]:
        """The recorded spans. Waits until the device has finished the recorded actions."""
        seconds = self._clock.seconds if self._clock else None
        if seconds:
            return [(action, seconds(began), seconds(end)) for action, began, end in self._marks]
        return []

    def run(self, plan: Plan, micros: Sequence[MicroBatch]) -> list[Tensor]:
        """Runs this rank's part of a lowered plan. Collective over the pipeline.

        Args:
            plan: the plan, with communication actions.
            micros: the micro-batches whose forwards the plan contains, in order.

        Returns:
            The losses in the order of micro-batches, on the last stage; an empty list on other
            stages.

        Raises:
            Outdated: on all ranks, if VALIDATE found that the plan has to run again.
            ValueError: if the plan continues micro-batches that the previous plan did not leave
                open.
        """
        self._begin(plan, micros)
        self._next_parts: tuple[Action, ...] = ()
        self._outgoing: dict[tuple[Kind, int, int], list[Tensor]] = {}
        # Operands of weight gradients by (micro-batch, chunk), kept from an action I to its W.
        self._deferred: dict[tuple[int, int], list[Any]] = {}
        self._outputs: dict[int, Tensor] = {}
        self._posted: set[tuple[Kind, int, int]] = set()
        actions = plan.ranks[self.rank]
        posts_ahead = plan.stages > 1 and self.transport.posts_ahead > 0
        for number, (action, next_parts) in enumerate(with_next_pass(actions)):
            self._next_parts = next_parts
            if posts_ahead and action.kind in COMPUTE:
                self._post_ahead(actions, number + 1)
            self._mark_start()
            self._handlers[action.kind](action)
            if self._clock is not None:
                self._marks.append((action, self._started, self._clock.now()))
        while self._sent and not plan.left:
            self._wait_for_oldest_send()
        losses = [self._outputs[m] for m in sorted(self._outputs)]
        if self._observer is not None:
            self._observer.ended(micros, losses)
        return losses

    def _begin(self, plan: Plan, micros: Sequence[MicroBatch]) -> None:
        """Begins a plan; drops the state of the previous plan, unless this plan continues it."""
        if plan.begun:
            self._continue(plan)
        else:
            for stage in self.stages:
                stage.reset()
            self._signatures = []
            self._incoming.clear()
            self._sent.clear()
        if plan.total_stages > 1:  # then stages exchange messages
            own = [
                (n, *signature(m)) if self.varying else signature(m) for n, m in enumerate(micros)
            ]
            self._signatures = own + self._signatures
        if self.varying:
            self._forms = {}
        if self.overlap is not None:
            self.overlap.reset()
        self._plan, self._micros = plan, micros

    def _continue(self, plan: Plan) -> None:
        """Takes over the micro-batches whose backwards the previous plan left open to `plan`.

        They are renumbered so that the last micro-batch of the previous plan is -1.
        """
        if plan.begun != self._plan.left:
            raise ValueError(
                f"plan {plan.name}: rank {self.rank}: the plan before did not leave {plan.begun} open"
            )
        ended = self._plan.microbatches
        for stage in self.stages:
            stage.reset(ended)
        self._signatures, self._forms_before = self._signatures[:ended], self._forms
        self._incoming = {
            (kind, m - ended, chunk): parts for (kind, m, chunk), parts in self._incoming.items()
        }

    def _forward(self, action: Action) -> None:
        finish(self._forward_by_layer(action, self._next_parts))

    def _forward_by_layer(self, action: Action, next_parts: tuple[Action, ...]) -> Pass[None]:
        parts, m = self._take_incoming(Kind.RECV_F, action), self._micros[action.microbatch]
        x = None if parts is None else self._form("in", action).value(parts)
        keep = _turns(action, next_parts, Kind.B, Kind.I)
        self._use_weights(action)
        stage = self.stages[action.chunk]
        y = yield from stage.forward_by_layer(action.microbatch, x, m, keep)
        if (consumer := self._plan.consumer(self.rank, action)) is None:
            self._outputs[action.microbatch] = y.detach()
        else:
            self._store_result(Kind.SEND_F, Kind.RECV_F, action, consumer, y)

    def _pair(self, action: Action) -> None:
        """Runs the forward of one micro-batch and the backward of another.

        They run concurrently if the device has streams, otherwise one after the other.
        """
        forward, backward = action.parts
        self._wait_for(Kind.RECV_F, forward)
        self._wait_for(Kind.RECV_B, backward)
        # This list keeps the received tensors allocated until the other stream has read them.
        received = [list(parts) for parts in self._incoming.values()]
        forward_pass = self._forward_by_layer(forward, (backward,))
        backward_pass = self._backward_by_layer(backward)
        if self.overlap is None:
            finish(forward_pass)
            deferred = finish(backward_pass)
        else:
            deferred = self.overlap.run_pair(
                _key(forward), forward_pass, _key(backward), backward_pass,
                in_turns=not any(self.stages[part.chunk].reuses_storages for part in action.parts),
            )  # fmt: skip
        del received
        self._end_backward(backward, deferred)

    def _backward(self, action: Action) -> None:
        """Runs an action B or I.

        An I computes only the input gradient; the weight gradients are deferred to the action W of
        the same micro-batch.
        """
        with self.overlap.backward(_key(action)) if self.overlap is not None else nullcontext():
            deferred = finish(self._backward_by_layer(action))
        self._end_backward(action, deferred)

    def _backward_by_layer(self, action: Action) -> Pass[list[Any]]:
        """Runs a backward; yields after each graph, and returns the deferred weight gradients."""
        parts = self._take_incoming(Kind.RECV_B, action)
        dy = None if parts is None else self._form("out", action).gradients(parts)
        keep, split = _turns(action, self._next_parts, Kind.F), action.kind is Kind.I
        self._use_weights(action)
        stage = self.stages[action.chunk]
        with self._split(action).defer() if split else nullcontext([]) as deferred:
            dx = yield from stage.backward_by_layer(action.microbatch, dy, keep, split)
        if (consumer := self._plan.consumer(self.rank, action)) is not None:
            self._store_result(Kind.SEND_B, Kind.RECV_B, action, consumer, dx)
        return deferred

    def _end_backward(self, action: Action, deferred: list[Any]) -> None:
        if action.kind is Kind.I:
            self._deferred[_key(action)] = deferred
        elif self.on_backward is not None:
            self.on_backward(action.chunk)

    def _weight_backward(self, action: Action) -> None:
        self._split(action).add_deferred(self._deferred.pop(_key(action)))
        self._end_backward(action, [])

    def _split(self, action: Action) -> WeightGradients:
        if self.weight_gradients is None:
            raise ValueError(
                f"plan {self._plan.name}: rank {self.rank}: {action}: no weight_gradients to defer with"
            )
        return self.weight_gradients

    def _use_weights(self, action: Action) -> None:
        if self.updates is not None and self._plan.asynchronous:
            self.updates.use(action.microbatch < 0)

    def _take_incoming(self, kind: Kind, action: Action) -> list[Tensor] | None:
        """Waits for the tensors that another stage computed for this action, and returns them.

        Returns None if the action needs no such tensors, e.g. a forward of the model's first stage.
        """
        if self._plan.producer(self.rank, action) is None:
            return None
        self._wait_for(kind, action)
        return cast(list[Tensor], self._incoming.pop((kind, action.microbatch, action.chunk)))

    def _wait_for(self, kind: Kind, action: Action) -> None:
        key = kind, action.microbatch, action.chunk
        coming = [part for part in self._incoming.get(key, ()) if isinstance(part, Pending)]
        if coming:
            self._incoming[key] = [part.wait() for part in coming]
            self._mark_start()  # the time of the wait counts as idle time, not as the action's time

    def _mark_start(self) -> None:
        if self._clock is not None:
            self._started = self._clock.now()

    def _store_result(
        self, send: Kind, receive: Kind, action: Action, consumer: Place, value: Any
    ) -> None:
        """Stores a result for the send action that follows.

        If the stage that uses the result is on this rank, stores it as an input of that stage
        instead.

        Args:
            send: kind of the action that sends the result.
            receive: kind of the action that receives the result.
            action: the action that has computed the result.
            consumer: (pipeline rank, chunk) of the stage that uses the result.
            value: the result.
        """
        rank, chunk = consumer
        if send is Kind.SEND_F:
            form = self._store_form("out", action, Form.of(value))
            parts = [part.detach() for part in tensors(value)]
            if rank == self.rank:
                self._store_form("in", action._replace(chunk=chunk), form)
        else:
            parts = self._form("in", action).gradients_to_send(value, self.device)
        if rank == self.rank:
            self._incoming[receive, action.microbatch, chunk] = parts
        else:
            self._outgoing[send, action.microbatch, action.chunk] = parts

    def _send(self, action: Action) -> None:
        target = self._plan.consumer(self.rank, action)
        if target is None:
            raise ValueError(
                f"plan {self._plan.name}: rank {self.rank}: {action} has no stage to send to"
            )
        parts = self._outgoing.pop((action.kind, action.microbatch, action.chunk))
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
        backward = action.kind is Kind.SEND_B
        self._sent.append(self.transport.send(parts, self.rank, target[0], backward))
        while len(self._sent) > 2:
            self._wait_for_oldest_send()

    def _wait_for_oldest_send(self) -> None:
        for part in self._sent.popleft():
            part.wait()

    def _post_ahead(self, actions: Sequence[Action], start: int) -> None:
        """Posts the receives that precede the next compute action, in the order of the plan.

        Of each channel, at most `transport.posts_ahead` receives are posted. Stops at the first
        receive for which the form of the tensors is not known yet.
        """
        counts = Counter[tuple[int, Kind]]()
        for at in range(start, len(actions)):
            action = actions[at]
            if action.kind in COMPUTE or action.kind is Kind.VALIDATE:
                return
            if action.kind in RECEIVES and (key := _message(action)) not in self._posted:
                side = "in" if action.kind is Kind.RECV_F else "out"
                if self._key(side, action) not in self._forms:
                    return
                place = self._plan.producer(self.rank, action)
                source = self.rank if place is None else place[0]
                if counts[source, action.kind] == self.transport.posts_ahead:
                    continue
                counts[source, action.kind] += 1
                self._receive(action)
                self._posted.add(key)

    def _receive(self, action: Action) -> None:
        key = _message(action)
        if key in self._posted:
            return
        source = self._plan.producer(self.rank, action)
        if source is None:
            raise ValueError(
                f"plan {self._plan.name}: rank {self.rank}: {action} has no stage to receive from"
            )
        backward = action.kind is Kind.RECV_B
        if not backward and self._key("in", action) not in self._forms:
            self._store_form("in", action, self._receive_form(source[0]))
        buffers = self._form("out" if backward else "in", action).empty(
            self.device, gradients=backward
        )
        self._incoming[key] = self.transport.receive(buffers, source[0], self.rank, backward)

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

    def _store_form(self, side: str, action: Action, form: Form) -> Form:
        """Stores the form (structure, shapes and dtypes) of a chunk's input or output; returns it.

        Args:
            side: "in" for the input of the chunk, "out" for its output.
            action: action with the chunk and the micro-batch.
            form: form of the input or output.

        Raises:
            RuntimeError: if a different form is already stored for micro-batches of this shape.
        """
        known = self._forms.setdefault(self._key(side, action), form)
        if known != form:
            layers = self.stages[action.chunk].layers
            raise RuntimeError(
                f"{title(layers[-1], len(layers) - 1)} returned {form} where it returned"
                f" {known} before, for micro-batches of the same shape; the next stage cannot detect this: give the model the"
                " attribute `boundaries_vary = True`"
            )
        return known

    def _gather(self, action: Action) -> None:
        """Starts to gather the first units of the next compute action.

        They are then gathered while this rank waits for messages.
        """
        for part in self._next_parts:
            if part.chunk == action.chunk:
                self.stages[action.chunk].start(backward=part.kind is not Kind.F)

    def _reduce(self, action: Action) -> None:
        if self.on_reduce is not None:
            self.on_reduce(action.chunk)

    def _validate(self, action: Action) -> None:
        if self.on_validate is None or self.on_validate():
            return
        # No message crosses VALIDATE: a message that is sent before the sender's VALIDATE is
        # received before the receiver's VALIDATE. So all messages in flight arrive, and none of the
        # following waits hangs.
        for arrived in self._incoming.values():
            for part in arrived:
                if isinstance(part, Pending):
                    part.wait()
        while self._sent:
            self._wait_for_oldest_send()
        raise Outdated(
            f"plan {self._plan.name}: rank {self.rank}: {action}: the update before it was undone"
        )
