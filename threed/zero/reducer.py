"""Gradient reduction: sums buckets of gradients over ranks while the backward runs.

The life of a gradient has four steps:

    add     a contribution is added to the gradient by the parameter's `Sink`: layers of
            `threed.layers` call the sink, and for other modules an autograd hook calls it
    ready   a bucket is ready when its gradients have all expected contributions (`contributions`)
    launch  the reductions of ready buckets are launched in one fixed order, which is the same on
            all ranks (`reductions`)
    wait    reductions are waited for, at the latest in `finish`, and this rank's slices are stored

Every bucket is reduced once per round. A round is a step or a micro-batch:

- If gradients are kept in full (ZeRO stages 0 and 1), a round is a step.
- If gradients are kept as slices (stages 2 and 3), a round is a micro-batch, and the sum over ranks
  of each round is added to this rank's slice.
- If every layer runs all micro-batches before the next layer (`whole_step`), a round is a step
  under every ZeRO stage.

A contribution that arrives after the launch of its bucket is kept, and reduced at the end of the
step (`late_gradients`). So every contribution is part of the step's gradient exactly once.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from threed.distributed import collectives
from threed.distributed.topology import Axis
from threed.layers.slicing import ForwardScope
from threed.memory.tiers import StagedBuffer
from threed.zero.contributions import Contributions, Deferral, LaunchQueue
from threed.zero.early_updates import Early
from threed.zero.gather import Gatherer
from threed.zero.late_gradients import LateGradients
from threed.zero.layout import Bucket, Layout, Slot
from threed.zero.parameter_access import GRAD
from threed.zero.plain_backwards import PlainBackwards
from threed.zero.reductions import (
    PLAIN,
    BucketGradients,
    FullGradients,
    Gradient,
    GradientCodecs,
    Gradients,
    Reductions,
    later_sums,
)
from threed.zero.sinks import Sink
from threed.zero.unused import Unused, warn_of_unused

# Value of `microbatches` in `Reducer.begin` if the number of micro-batches is not known yet. It is
# larger than any real number of micro-batches.
OPEN = 2**20


class StepState(enum.Enum):
    """The state of a reducer's step."""

    ENDED = enum.auto()
    RUNNING = enum.auto()
    ABORTED = enum.auto()  # an error ended the step, and its gradients must be discarded


class Reducer:
    """Sums gradients over ranks, bucket by bucket, while the backward runs.

    Call `begin(microbatches)` before the first backward, `pass_ended(chunk)` after each backward,
    and `finish()` after the last one. With `whole_step`, also call `unit_ended(unit)` after the
    last backward of each unit (a layer).

    Args:
        layout: parameters and their buckets.
        codecs: how gradients are encoded for communication.
        dynamic: whether the parameters belong to a wrapped module, which may use different
            parameters in every step. If so, backwards must run inside `own_backward`.
        whole_step: whether every layer runs all micro-batches before the next layer.
        early: object that updates buckets during the backward as soon as their gradients are
            complete, except in the first step. None: all updates run after the backward.
        unused: tracks which parameters of a wrapped module have been used.
        warns: whether this rank may warn of unused parameters; true for one rank of each
            tensor-parallel group.
        gatherer: gathers the parameters. The reducer notifies the gatherer when a gradient is
            complete and when a backward ends.
        plain: the backwards that the program starts by `loss.backward()`; only for wrapped modules.

    Attributes:
        rounds: True if buckets are reduced after every micro-batch; False if once per step.
        sinks: the `Sink` of every trainable parameter.
        memory: memory in which gradients accumulate until they are reduced.
        deferral: defers contributions to weight gradients in split backwards.
        scope: context that pipeline stages enter while a layer's forward runs. In this context
            sinks accept no gradients.
        recording: the list of `recorded` while its block runs, else None.
    """

    def __init__(
        self,
        layout: Layout,
        codecs: GradientCodecs = PLAIN,
        dynamic: bool = False,
        whole_step: bool = False,
        *,
        early: Early | None = None,
        unused: Unused | None = None,
        warns: bool = True,
        gatherer: Gatherer | None = None,
        plain: PlainBackwards | None = None,
    ) -> None:
        self.plain = plain
        self.layout, self.early, self.unused, self.warns = layout, early, unused, warns
        self.gatherer = gatherer
        sliced = layout.policy.slices_gradients
        self.rounds = sliced and not whole_step
        self.dynamic = dynamic
        self._first_step = True
        self.memory: Gradients = BucketGradients(layout) if sliced else FullGradients(layout)
        self.reductions = Reductions(
            layout, codecs, self.memory.release_window,
            None if early is None else self._update_in_backward,
        )  # fmt: skip
        self.late = LateGradients(layout, codecs, gatherer)
        self.deferral = Deferral()
        self.scope = ForwardScope()  # passed to the pipeline stages, which enter it in forwards
        self.recording: list[Sink] | None = None
        self._queues: list[LaunchQueue] = []
        self._sinks: dict[Slot, Sink] = {}
        for chunks, over in dict.fromkeys((g.key.chunks, g.key.over) for g in layout.groups):
            self._add_queue(chunks, over)
        self.sinks = [self._sinks[slot] for slot in layout.slots if slot in self._sinks]
        self._sinks_of_bucket = [
            [self._sinks[s] for s in bucket.slots] for bucket in layout.buckets
        ]
        self._state = StepState.ENDED
        self._passes = 1  # number of micro-batches per round
        self._open = False  # True while the number of micro-batches of the step is not known
        self._passes_ended = 0  # number of backwards that have ended in this step
        self._observer: Callable[[Tensor], None] | None = None

    @contextmanager
    def observed(self, observer: Callable[[Tensor], None]) -> Iterator[None]:
        """Context manager: calls `observer` with each bucket's local gradients before reduction."""
        self._observer = observer
        try:
            yield
        finally:
            self._observer = None

    def _add_queue(self, chunks: tuple[int, ...], over: str | None) -> None:
        """Creates a launch queue, and the `Sink`s of its parameters.

        Args:
            chunks: the chunks of the model that use the parameters.
            over: `ShardSpec.over` of the parameters.
        """
        groups = [
            g for g in self.layout.groups
            if g.key.trainable and (g.key.chunks, g.key.over) == (chunks, over)
        ]  # fmt: skip
        # whether a gradient gets contributions from several chunks in different rounds: if buckets
        # are reduced per micro-batch, the backward of each chunk is a separate round
        split = self.rounds and len(chunks) > 1
        counts = {
            slot: Contributions(1) if self.dynamic
            else Contributions(len(slot.places), known=not (split or slot.varies))
            for group in groups for slot in group.slots
        }  # fmt: skip
        buckets = {
            number: [counts[slot] for slot in bucket.slots]
            for number, bucket in enumerate(self.layout.buckets)
            if (bucket.group.key.chunks, bucket.group.key.over) == (chunks, over)
        }
        queue = LaunchQueue(chunks, list(counts.values()), buckets)
        self._queues.append(queue)
        self._sinks |= {slot: Sink(self, slot, count, queue) for slot, count in counts.items()}

    def sink_of(self, slot: Slot) -> Sink:
        """Returns the sink that accumulates the gradient of a trainable parameter."""
        return self._sinks[slot]

    # ------------------------------------------------------------------------ add, ready, launch

    def mark_complete(self, sink: Sink) -> None:
        """Marks a gradient as complete; launches the reductions of all ready buckets, in order."""
        if self.gatherer is not None:
            self.gatherer.gradient_complete(sink.slot)
        if not sink.counts.positions:  # the parameter is an empty vocabulary shard, in no bucket
            return
        sink.queue.mark_complete(sink.counts)
        while sink.queue.is_ready:
            self._launch(sink.queue)

    def _launch(self, queue: LaunchQueue) -> None:
        """Launches the reduction of the queue's next bucket.

        Gradients in the bucket that received no contributions are set to zero first.
        """
        number = queue.take()
        bucket = self.layout.buckets[number]
        for sink in self._sinks_of_bucket[number]:
            if not sink.counts.added:
                self.memory.set_zero(sink.slot, bucket)
        self.reductions.make_room(bucket)
        window = self.memory.take_window(bucket)
        if self._observer is not None:
            self._observer(window)
        last = not self.rounds or queue.backwards <= 1
        self.reductions.launch(
            bucket,
            window,
            add=self.rounds and queue.rounds > 0,
            complete=last and not later_sums(bucket),
        )

    def _launch_all(self, queue: LaunchQueue) -> None:
        while not queue.is_done:
            self._launch(queue)

    def _end_round(self, queue: LaunchQueue) -> None:
        """Launches the remaining reductions of the queue in a round (a micro-batch or a step).

        Then updates the expected numbers of contributions, if they may still change.
        """
        self._launch_all(queue)
        if not self.settled:
            # A step of unknown length may have several losses per micro-batch, and each of them may
            # use other parameters: then a smaller number does not replace a larger one.
            queue.learn(self._passes, self.dynamic and not self._open)

    def add_late(self, sink: Sink, grad: Tensor) -> None:
        """Keeps a gradient that arrived after the launch of its bucket.

        Raises:
            RuntimeError: the parameter belongs to a pipeline layer, and the first step has ended.
                The expected number of contributions to such a parameter is counted only in the
                first step.
        """
        if self.settled:
            raise RuntimeError(
                f"{sink.slot.spec.name}: a gradient arrived after the {sink.counts.per_pass} per"
                " micro-batch of the first step, and after the reduction of its bucket was launched:"
                " the layer runs a data-dependent number of times; set the attribute"
                " `runs_vary = True` on the pipeline layer"
            )
        sink.counts.add_late()
        self.late.add(sink.slot, grad)

    def _update_in_backward(self, bucket: Bucket, gradient: StagedBuffer) -> bool:
        """Queues a bucket for an update during the backward, if that is possible.

        Args:
            bucket: the bucket.
            gradient: staged buffer with the bucket's complete gradient, for this rank's slice.

        Returns:
            Whether the bucket was queued; see `Early.take`.
        """
        # in the first step, late gradients may still be added to the slice
        if self.early is None or self._first_step:
            return False
        return self.early.take(bucket, gradient)

    @property
    def settled(self) -> bool:
        """Whether the numbers of contributions to gradients are known and do not change anymore."""
        return not self.dynamic and not self._first_step

    @property
    def fresh(self) -> bool:
        """Whether no gradient has a contribution yet in this round."""
        return not any(sink.counts.added for sink in self.sinks)

    @contextmanager
    def recorded(self) -> Iterator[list[Sink]]:
        """Context manager that yields a list of the sinks that get contributions in the block.

        These contributions are not counted and launch no reductions, because a captured backward
        has not run yet. `count` counts them after each replay.
        """
        self.recording = added = list[Sink]()
        try:
            yield added
        finally:
            self.recording = None
            for sink in added:
                sink.counts.take_back()

    def count(self, added: list[Sink]) -> None:
        """Counts one contribution per sink of a list that `recorded` has yielded, in order."""
        for sink in added:
            sink.mark_added()

    # ------------------------------------------------------------------------- begin and end of a step

    def begin(self, microbatches: int) -> None:
        """Begins a step.

        If the last step did not finish, its gradients are discarded first. In this case the call is
        collective.

        Args:
            microbatches: number of micro-batches in the step; `OPEN` if it is not known yet.
        """
        with torch._C.DisableTorchFunctionSubclass():  # parameters may be guarded
            hooked = [sink for sink in self.sinks if sink.has_user_hooks]
        for sink in hooked:
            sink.run_last(microbatches)
        self._abort()
        self.recover()
        self._passes = 1 if self.rounds else microbatches
        self._open = microbatches == OPEN
        for queue in self._queues:
            queue.begin(microbatches * len(queue.chunks))
        self._restart()
        self._state = StepState.RUNNING

    def next_is_last(self) -> None:
        """Marks the next backward as the last one, in a step that began with `microbatches=OPEN`."""
        if self._open:
            self._expect(self._passes_ended + 1)

    def count_freely(self) -> None:
        """Makes the number of backwards of the step unknown, as if it began with `OPEN`.

        If a reduction of the step was launched already, later gradients are late instead.
        """
        launched = not self.rounds and any(queue.launched for queue in self._queues)
        if not self._open and not launched:
            self._expect(OPEN)

    @property
    def passes(self) -> int:
        """The number of backwards of the step in progress that have ended."""
        return self._passes_ended if self._state is StepState.RUNNING else 0

    def _expect(self, passes: int) -> None:
        """Changes the number of backwards of the step in progress; `OPEN` if it is not known."""
        if self.rounds:
            for queue in self._queues:
                queue.begin((passes - self._passes_ended) * len(queue.chunks))
        else:
            for queue in self._queues:
                queue.expect(passes - self._passes)
            self._passes = passes
        self._open = passes == OPEN

    def _restart(self) -> None:
        """Discards all gradients of the step and begins the first round again."""
        self._passes_ended = 0
        self.reductions.discard()
        self.memory.reset()
        self.late.clear()
        if self.early is not None:
            self.early.begin()
        for queue in self._queues:
            queue.restart(self._passes)

    @property
    def in_step(self) -> bool:
        """Whether a step is in progress and at least one of its backwards has ended."""
        return self._state is StepState.RUNNING and self._passes_ended > 0

    def pass_ended(self, chunk: int = 0) -> None:
        """Records the end of a backward on a chunk of the model.

        If buckets are reduced after every micro-batch, this call launches the chunk's remaining
        reductions.

        Args:
            chunk: number of the chunk.
        """
        self._passes_ended += 1
        for queue in self._queues if self.rounds else ():
            if chunk in queue.chunks:
                self._end_round(queue)
                queue.next_round(self._passes)
        if self.gatherer is not None:
            self.gatherer.pass_ended()

    def unit_ended(self, unit: int) -> None:
        """Launches the reductions of all buckets that are complete after a unit's last backward.

        Must be called when the unit has run the backwards of all micro-batches. The backward runs
        the units in reverse order, so the gradients of a bucket are then complete if its earliest
        unit is `unit` or a later unit.

        Args:
            unit: index of the unit.
        """
        for queue in self._queues:
            while not queue.is_done and self.layout.buckets[queue.next].earliest_unit >= unit:
                self._launch(queue)

    def all_passes_ended(self, chunk: int | None = None) -> None:
        """Records that all backwards of the step, or of one chunk of the model, have ended.

        If buckets are reduced once per step, this call launches the remaining reductions.

        Args:
            chunk: number of the chunk; None if the backwards of all chunks have ended.
        """
        if self._open:
            self._expect(max(1, self._passes_ended))
        for queue in self._queues if not self.rounds else ():
            if chunk is None or queue.chunks == (chunk,):
                self._end_round(queue)

    def finish(self) -> list[Gradient]:
        """Ends the step and waits for all reductions.

        Returns:
            Per bucket, in the order of `Layout.buckets`: the summed gradients of this rank's
            portion (the elements that this rank updates).
        """
        self._end_backwards()
        return self.reductions.finish()

    def close(self) -> Callable[[], list[Gradient]]:
        """Ends the step like `finish`, but does not wait for other pipeline stages.

        The returned function may be called after the next step has begun, but must be called before
        that step ends. So the slices of summed gradients must have separate memory, which the next
        step does not overwrite (`Policy.versions` is 2).

        Returns:
            A function that waits for the remaining sums and returns the gradients, one per bucket.
        """
        self._end_backwards()
        return self.reductions.close()

    def _end_backwards(self) -> None:
        self.all_passes_ended()
        for queue in self._queues:
            if queue.is_untouched:  # no micro-batch has run on the chunk, so its gradients are 0
                self._launch_all(queue)
        self.reductions.wait_all()
        if self.layout.slices_parameters:
            self.memory.trim()  # so that gathered parameters can use the memory
        if not self.settled:
            self._end_counting()
        self._passes_ended, self._first_step, self._state = 0, False, StepState.ENDED

    def _end_counting(self) -> None:
        """Adds the late gradients to the slices, and determines which parameters were not used."""
        for slot, grad in self.foreign if self.dynamic else ():
            slot.param.grad = None
            self.add_late(self._sinks[slot], grad.to_dense() if grad.is_sparse else grad)
        for bucket, staged in self.late.reduce():
            self.reductions.store(bucket, staged, complete=not later_sums(bucket))
        if self.unused is not None:
            self.unused.synchronize({sink.slot for sink in self.sinks if sink.counts.used})
        elif self._first_step:
            unused = {sink.slot for sink in self.sinks if not sink.counts.used}
            warn_of_unused(self.layout, unused, self.warns)

    @property
    def foreign(self) -> list[tuple[Slot, Tensor]]:
        """Gradients from backwards of other engines, as (parameter, gradient) pairs."""
        grads = ((slot, GRAD.__get__(slot.param)) for slot in self._sinks)
        return [(slot, grad) for slot, grad in grads if grad is not None]

    # --------------------------------------------------------------------- discarding a step

    def give_up(self) -> None:
        """Discards the step after an error, including gradients of other engines' backwards.

        If parameters are not sharded, calls `recover` immediately, because the user's program may
        call other collectives next. If parameters are sharded, another rank may still be waiting
        for a gather, so the engine calls `recover` later.
        """
        self._abort()
        self._drop_foreign()
        if not self.layout.slices_parameters:
            with suppress(RuntimeError):  # the caller raises the original error
                self.recover()

    def _drop_foreign(self) -> None:
        for sink in self.sinks:
            GRAD.__set__(sink.slot.param, None)
            sink.mark_given(False)

    def _abort(self) -> None:
        if self._state is StepState.RUNNING:
            self._state = StepState.ABORTED

    def recover(self) -> None:
        """Launches the remaining reductions of a wrapped module's discarded step. Collective.

        Afterwards all ranks have called the same collectives, even if they failed at different
        points. Call this method before any other collective. It does nothing if no step was
        discarded, or if the model is not a wrapped module. It also does nothing if updates run
        during the backward (`early`), because launching a bucket could then update its parameters.
        """
        if self._state is not StepState.ABORTED or not self.dynamic or self.early is not None:
            return
        self._state = StepState.ENDED
        for queue in self._queues:
            for _ in range(1 if self._open or not self.rounds else queue.backwards):
                self._launch_all(queue)
                queue.next_round(self._passes)

    def drop(self) -> None:
        """Discards all gradients so far, including gradients of other engines' backwards.

        Implements `Engine.zero_grad`. If an error has interrupted the step, the next `begin`
        discards the step's gradients instead.
        """
        self.recover()
        self._drop_foreign()
        if not self._passes_ended or self._state is not StepState.RUNNING:
            return
        if not self.rounds:
            # Reductions are collective, and some ranks may have launched fewer of them than
            # other ranks. So every rank launches its remaining reductions.
            for queue in self._queues:
                self._launch_all(queue)
            self._passes = max(1, self._passes - self._passes_ended)
        self._restart()

    def remove(self) -> None:
        """Removes the sinks from all parameters; the object cannot be used afterwards."""
        for sink in self.sinks:
            sink.remove()

    # ------------------------------------------------------------------------ checkpoints

    def state(self, stages: Axis) -> dict[str, Any]:
        """Returns the state for a checkpoint. Collective over the pipeline stages.

        Args:
            stages: axis of the pipeline stages.

        Returns:
            A dict with two entries. "uses": parameter name -> number of contributions per
            micro-batch; only for parameters whose number of contributions differs from the number
            of places that use the parameter. "unused", for a wrapped module only: the state of
            `Unused`.
        """
        own = {sink.slot.spec.name: sink.counts.counted for sink in self.sinks}
        own = {name: count for name, count in own.items() if count is not None}
        state: dict[str, Any] = {"uses": {}}
        for uses in collectives.exchange(own, stages):
            state["uses"] |= uses
        if self.unused is not None:
            state["unused"] = self.unused.state()
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores the state of a checkpoint.

        With the same expected numbers of contributions, a resumed run adds gradients in the same
        order as the original run.

        Args:
            state: the dict that `state()` returned.
        """
        for sink in self.sinks:
            sink.counts.restore(state.get("uses", {}).get(sink.slot.spec.name))
        if self.unused is not None:
            self.unused.restore(state.get("unused"))
