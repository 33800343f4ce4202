"""Layer-major gradient accumulation: every layer runs all micro-batches of a step before the next
layer starts.

    stage    = LayerMajorStage(layers, gatherer, unit_ended=reducer.unit_ended)
    executor = LayerMajorExecutor([stage], transport, 0)
    losses   = executor.run(gpipe(1, 8), micro_batches)

A layer's parameters are gathered, or read from a drive, once for the forwards and once for the
backwards of a step, instead of once per micro-batch. The layer's gradient is reduced once per step.
The plan is GPipe's on one stage: all forwards, then all backwards. The forwards run layer by layer,
and so do the backwards. As in GPipe, the saved state of all micro-batches is alive at once. With
full recomputation this state consists of the inputs of layers, which are saved according to
`--recompute.offload`. The last layer is an exception: it runs the backward of each micro-batch
right after the forward of this micro-batch, so that only one micro-batch has logits, the largest
tensor. Gradients are summed in the order of micro-batches, as in 1F1B.

Source: arXiv 2512.17570 (GreedySnake), which calls this order vertical scheduling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from threed.layers.slicing import ForwardScope, MicroBatch
from threed.pipeline.activation_checkpointing import Recomputed
from threed.pipeline.executor import Executor
from threed.pipeline.stage import Frame, ParameterGatherer, Stage
from threed.schedules.action import COMPUTE, Action, Kind
from threed.schedules.all_forward_all_backward import gpipe
from threed.schedules.plan import Plan
from threed.schedules.prefetch_order import Step

# `during(kind, microbatch)`: a context manager around a layer's forward (F) or backward (B).
During = Callable[[Kind, int], AbstractContextManager[None]]


class LayerMajorStage(Stage):
    """A stage that can run all micro-batches on a layer before it runs the next layer.

    Every layer has a separate autograd graph.

    Args:
        layers: the layers of the stage. `Stage` documents the other positional arguments.
        unit_ended: `unit_ended(unit)` is called when a layer has run the backwards of all
            micro-batches; `unit` is the index of the layer among the layers of this rank.
        between: function that is called after each backward of a layer on one micro-batch, except
            after backwards of the model's last layer.
    """

    def __init__(
        self, layers: Sequence[nn.Module], gatherer: ParameterGatherer, prefetch: int = 1, first: int = 0,
        recomputed: Recomputed | None = None, scope: ForwardScope | None = None, *,
        unit_ended: Callable[[int], None] | None = None, between: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(layers, gatherer, prefetch, first, recomputed, scope)
        self.unit_ended, self.between = unit_ended, between
        # No layer shares a graph with the next layer. The backward of a shared graph would run both
        # layers on one micro-batch before the later layer has run its other backwards.
        self._joined = set()
        self._frames: list[Frame] = []  # frames for the backward, which pops them from the end

    def reset(self, ended: int | None = None) -> None:
        """Begins a step; drops the frames (autograd graphs) that an aborted step has left."""
        super().reset(ended)
        self._drop(self._frames)
        self._frames.clear()

    def run_all(self, micros: Sequence[MicroBatch], during: During) -> list[Tensor]:
        """Runs forward and backward of all micro-batches.

        Gradients of parameters are added to the parameters' gradient sinks (`param.sink`).

        Args:
            micros: the micro-batches of the step, in order.
            during: `during(kind, microbatch)` returns a context manager, which is entered around
                each forward (F) and backward (B) of a layer.

        Returns:
            The losses in the order of micro-batches.
        """
        *units, last = self._units
        values: list[Any] = [None] * len(micros)
        for step in self._walks[False, self._backward_units[:1] == [last]]:
            self._gather(step)
            if step.run == last:
                losses, grads = self._turn(last, micros, values, during)
            else:
                self._forward_of(step.run, micros, values, during)
            if step.release:
                self.gatherer.release(step.run)
        self._end(last)
        for unit in reversed(units):
            self._gather_for_backward(unit)
            for number in range(len(micros)):
                with during(Kind.B, number):
                    grads[number] = self._back(
                        unit, self._frames.pop(), self._frames, grads[number], first=False
                    )
                if self.between is not None:
                    self.between()
            self._end(unit)
        return losses

    def _forward_of(
        self, unit: int, micros: Sequence[MicroBatch], values: list[Any], during: During
    ) -> None:
        """Runs the forward of a layer on all micro-batches.

        Each entry of `values` is the layer's input, and is replaced by the layer's output.
        """
        first = len(self._frames)
        with torch.enable_grad(), self.scope.enter():
            for number, micro in enumerate(micros):
                with during(Kind.F, number):
                    values[number], frame = self._run(unit, values[number], micro, values[number])
                assert frame is not None
                self._frames.append(frame)
        # Reversed, because the backward pops frames from the end of the list, and also begins with
        # micro-batch 0.
        self._frames[first:] = self._frames[first:][::-1]

    def _turn(
        self, unit: int, micros: Sequence[MicroBatch], values: list[Any], during: During
    ) -> tuple[list[Tensor], list[Any]]:
        """Runs forward and backward of the last layer, one micro-batch after the other.

        Returns the losses, and the gradients of the inputs in `values`. Sets the entries of
        `values` to None.
        """
        losses, grads = list[Tensor](), list[Any]()
        self._gather_for_backward(unit)
        if self._recomputed:
            self._prefetch_inputs(self._frames)
        for number, micro in enumerate(micros):
            with during(Kind.F, number), torch.enable_grad(), self.scope.enter():
                loss, frame = self._run(unit, values[number], micro, values[number])
            assert frame is not None
            self._frames.append(frame)
            losses.append(loss.detach())
            values[number] = None
            del loss, frame
            with during(Kind.B, number):
                grads.append(self._back(unit, self._frames.pop(), self._frames, None, first=True))
        return losses, grads

    def _gather(self, step: Step) -> None:
        for unit in step.gather:
            self.gatherer.start(unit)
        self.gatherer.ready(step.run)

    def _gather_for_backward(self, unit: int) -> None:
        for step in self._walks[True, False]:
            if step.run == unit:
                self._gather(step)

    def _end(self, unit: int) -> None:
        """Ends the backward of a layer: releases its parameters and calls `unit_ended`."""
        if any(step.run == unit and step.release for step in self._walks[True, False]):
            self.gatherer.release(unit)
        if self.unit_ended is not None:
            self.unit_ended(unit)


class LayerMajorExecutor(Executor):
    """Runs training plans layer by layer, on one stage with the full model.

    Forward-only plans run as in `Executor`. A recorded span covers one layer on one micro-batch.
    """

    def run(self, plan: Plan, micros: Sequence[MicroBatch]) -> list[Tensor]:
        """Runs a plan; returns the losses in the order of micro-batches.

        Raises:
            ValueError: if a training plan has several stages, or does not run all forwards and then
                all backwards, each in the order of micro-batches.
        """
        if plan.forward_only:
            return super().run(plan, micros)
        check(plan)
        (stage,) = self.stages
        assert isinstance(stage, LayerMajorStage)
        stage.reset()
        losses = stage.run_all(micros, self._during)
        if self.on_backward is not None:
            for _ in micros:
                self.on_backward(0)
        if self.on_reduce is not None:
            self.on_reduce(0)
        if self._observer is not None:
            self._observer.ended(micros, losses)
        return losses

    @contextmanager
    def _during(self, kind: Kind, microbatch: int) -> Iterator[None]:
        began = None if self._clock is None else self._clock.now()
        yield
        if self._clock is not None and began is not None:
            self._marks.append((Action(kind, microbatch), began, self._clock.now()))


def check(plan: Plan) -> None:
    """Raises ValueError if a plan cannot be run layer by layer."""
    expected = gpipe(1, plan.microbatches).ranks[0]
    found = [action for action in plan.ranks[0] if action.kind in COMPUTE]
    if plan.stages > 1 or tuple(found) != expected:
        first = found[0] if found else "nothing"
        wrong = next((a for a, b in zip(found, expected, strict=False) if a != b), first)
        raise ValueError(
            f"plan {plan.name}: rank 0: {wrong}: layer-major execution needs a plan of one stage that runs all"
            " forwards and then all backwards, in the order of micro-batches (gpipe)"
        )
