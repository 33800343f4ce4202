"""Times each layer of a model on this machine: forward, input gradient and weight gradients.

    timer = Timer(micro_batch, dtype, grad_dtype, device)
    times = timer.measure(layers, recomputed)       # one LayerTimes per layer

The layers are timed one after the other. Only the timed layer has weights and gradient buffers. It
runs forward and backward, as it does in a pipeline stage. The series over all layers is repeated
`ROUNDS` times. In each repetition, a layer first runs `WARM` passes without measurement, and then
`REPEATS` measured passes. The time of a layer is the lower quartile of its measured passes, because
other processes can only make a pass slower.

A layer with the same structure and input shapes as an earlier layer is not run, but gets the
earlier layer's times. So for a model of equal blocks only three layers run: the embedding, one
block and the head. If layers communicate with other tensor ranks, all of these ranks must measure
at the same time.

The times of the input gradient and of the weight gradients are separated as in a split backward:
the gradient sinks (`param.sink`) of linear layers collect the matrix products of weight gradients,
and run them after the input gradient. torch's own linear layers do not use such sinks, so the time
of their weight gradients is counted as time of the input gradient.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from threed.core.device import Clock, Moment, rng_states, set_rng_states
from threed.distributed.sharding import attach, dtype_of, initial, spec_of
from threed.layers.contract import contract
from threed.layers.slicing import ForwardScope, MicroBatch
from threed.models.measured_partition import LayerTimes
from threed.ops.matmul import NATIVE, Matmul
from threed.pipeline.activation_checkpointing import Recomputed
from threed.pipeline.boundary import Form, like, tensors
from threed.pipeline.stage import AlwaysGathered, Stage
from threed.pipeline.trace import BufferSink, attach_sink, cost_key, for_layer_alone, materialize

ROUNDS, WARM, REPEATS = 3, 2, 5


class _DeferringSink(BufferSink):
    """A gradient sink that defers the matrix products of weight gradients until `run` is called."""

    def __init__(self, target: Tensor, scope: ForwardScope) -> None:
        super().__init__(target)
        self.scope, self.waiting = scope, list[tuple[Tensor, Tensor, Matmul]]()

    def add_product(self, a: Tensor, b: Tensor, by: Matmul = NATIVE) -> None:
        self.waiting.append((a, b, by))

    def in_forward(self) -> bool:
        return self.scope.active

    def run(self) -> None:
        """Computes the deferred matrix products, and adds them to the gradient."""
        for a, b, by in self.waiting:
            by.add_product_(self.target, a, b, fresh=False)
        self.waiting.clear()


@dataclass(eq=False)
class _Timed:
    """A timed layer with its input and output.

    Attributes:
        layer: the layer of the model. A copy of this layer runs, not the layer itself.
        name: name of the layer, for error messages.
        input: value that the previous layer returned; None for the first layer.
        recomputed: recomputation settings; None if the layer is not recomputed.
        output: value that the layer returned in the last measured pass.
        rows: for each measured pass, seconds of (forward, input gradient, weight gradients).
    """

    layer: nn.Module
    name: str
    input: Any
    recomputed: Recomputed | None
    output: Any = None
    rows: list[tuple[float, float, float]] = field(default_factory=list)

    @property
    def times(self) -> LayerTimes:
        return LayerTimes(
            *(statistics.quantiles(part, n=4)[0] for part in zip(*self.rows, strict=True))
        )


class Timer:
    """Times the layers of a model.

    Args:
        micro: a micro-batch on the device, with the shapes and dtypes of the run.
        dtype: dtype of parameters and activations.
        grad_dtype: dtype of gradients.
        device: device on which the layers run.
        seed: seed of the weights' initial values.
        prepare: function that is called with the copy of each layer before the copy runs, for
            example to compile it.
    """

    def __init__(
        self, micro: MicroBatch, dtype: torch.dtype, grad_dtype: torch.dtype, device: torch.device, seed: int = 0,
        prepare: Callable[[nn.Module], None] = lambda layer: None,
    ) -> None:  # fmt: skip
        self.micro, self.dtype, self.grad_dtype, self.device = micro, dtype, grad_dtype, device
        self.seed, self.prepare = seed, prepare
        self._scope = ForwardScope()
        self._clock = Clock(device)

    def measure(
        self, layers: Sequence[nn.Module], recomputed: Recomputed | None = None
    ) -> list[LayerTimes]:
        """Returns the times of every layer of a model, in order. Collective over the tensor ranks.

        The states of torch's random generators are restored afterwards.

        Args:
            layers: the layers of the model.
            recomputed: the recomputed layers; `recomputed.units` are their indices in `layers`.
                None: no layer is recomputed.

        Raises:
            RuntimeError: if a layer cannot be run; the message names the layer.
        """
        recomputed, rng = recomputed or Recomputed(), rng_states(self.device)
        known: dict[Any, _Timed] = {}
        rows, x = list[_Timed](), None
        try:
            for number, layer in enumerate(layers):
                recompute = recomputed if number in recomputed.units else None
                form = None if x is None else Form.of(x)
                key = cost_key(layer, layers, form, recompute is not None)
                if key not in known:
                    known[key] = _Timed(
                        layer, contract(layer).name or f"layer {number}", x, recompute
                    )
                    self._time(known[key])
                rows.append(known[key])
                x = known[key].output
            for _ in range(ROUNDS - 1):
                for timed in known.values():
                    self._time(timed)
        finally:
            set_rng_states(rng, self.device)
        return [timed.times for timed in rows]

    def _time(self, timed: _Timed) -> None:
        """Times a copy of a layer, so that the layer's own state does not change."""
        layer = copy.deepcopy(timed.layer)
        params = materialize(timed.layer, layer, self._parameter, self.device)
        sinks: list[_DeferringSink] = [param.sink for param in params]  # type: ignore[attr-defined]
        self.prepare(layer)
        recomputed = for_layer_alone(timed.recomputed, layer)
        stage = Stage([layer], AlwaysGathered(), recomputed=recomputed, scope=self._scope)
        try:
            passes = [self._run(stage, timed.input, sinks) for _ in range(WARM + REPEATS)]
        except Exception as error:  # the code of a custom layer may raise any exception
            raise RuntimeError(
                f"{timed.name} ({type(layer).__name__}) could not be run alone for timing: {error}; choose"
                " --parallel.partition balanced, uniform, or the layers of each stage"
            ) from error
        for moments, timed.output in passes[WARM:]:
            at = [self._clock.seconds(moment) for moment in moments]
            timed.rows.append((at[1] - at[0], at[3] - at[2], at[4] - at[3]))

    def _run(self, stage: Stage, x: Any, sinks: list[_DeferringSink]) -> tuple[list[Moment], Any]:
        """Runs one forward, one backward, and the matrix products that the sinks have deferred.

        Returns:
            (moments, output). The five moments are the start and the end of the forward, the start
            and the end of the backward, and the end of the deferred products. `output` is the
            output of the layer.
        """
        now = self._clock.now
        given = like(x, [p.detach().requires_grad_(p.requires_grad) for p in tensors(x)])
        stage.reset()
        moments = [now()]
        y = stage.forward(0, given, self.micro)
        moments.append(now())
        dy = self._gradient(y)
        moments.append(now())
        stage.backward(0, dy)
        moments.append(now())
        for sink in sinks:
            sink.run()
        moments.append(now())
        return moments, y

    def _gradient(self, y: Any) -> Any:
        """Returns a gradient of small random numbers for an output; None for a loss."""
        if isinstance(y, Tensor) and y.dim() == 0:
            return None
        form = Form.of(y)
        return form.gradients(
            [part.normal_(std=1e-3) for part in form.empty(self.device, gradients=True)]
        )

    def _parameter(self, param: nn.Parameter) -> nn.Parameter:
        """Returns a new parameter on the device, with initial values and a gradient sink."""
        own = dtype_of(param, self.dtype)
        values = torch.zeros(param.numel(), dtype=own, device=self.device)
        for piece in spec_of(param).pieces:
            at = piece.offset
            values[at : at + piece.numel].copy_(initial(piece, self.seed).view(-1))
        new = attach(nn.Parameter(values.view(param.shape), param.requires_grad), spec_of(param))
        return attach_sink(
            new, _DeferringSink(torch.zeros_like(new, dtype=self.grad_dtype), self._scope)
        )
