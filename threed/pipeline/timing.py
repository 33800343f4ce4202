"""How long each layer of a model takes here: forward, gradient of its input, gradient of its weights.

    times = Timer(micro_batch, dtype, grad_dtype, device).measure(layers, recomputed)       one LayerTimes a layer

One layer at a time gets weights, buffers of gradients and an input, and runs as a stage runs it: `ROUNDS` times over
all layers, `WARM` + `REPEATS` passes each. What is returned are lower quartiles, for what disturbs only adds. A layer
that is built as one before it, for inputs of the same shape, is not run again: of a model of equal blocks three layers
are. Where layers talk to other tensor ranks, all of those measure.

The two parts of a backward are told apart as a split backward does it: the products that make weights' gradients wait
in their sinks, and are run afterwards. A layer whose linears have no sinks (modules of torch's) has no second part, it
counts with the first.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from threed.device import Clock, Moment, rng_states, set_rng_states
from threed.layers.contract import contract
from threed.layers.slicing import ForwardScope, MicroBatch
from threed.ops.matmul import NATIVE, Matmul
from threed.pipeline.activation_checkpointing import Recomputed
from threed.pipeline.boundary import Form, like, tensors
from threed.pipeline.stage import AlwaysWhole, Stage
from threed.pipeline.trace import BufferSink, alike, alone, attach_sink, materialise
from threed.planner.measured import LayerTimes
from threed.sharding import attach, initial, spec_of

ROUNDS, WARM, REPEATS = 3, 2, 5


class _Sink(BufferSink):
    """Adds matrix products when it is asked to."""

    def __init__(self, target: Tensor, scope: ForwardScope) -> None:
        super().__init__(target)
        self.scope, self.waiting = scope, list[tuple[Tensor, Tensor, Matmul]]()

    def add_product(self, a: Tensor, b: Tensor, by: Matmul = NATIVE) -> None:
        self.waiting.append((a, b, by))

    def in_forward(self) -> bool:
        return self.scope.active

    def run(self) -> None:
        """Makes the products that wait."""
        for a, b, by in self.waiting:
            by.add_product_(self.target, a, b, fresh=False)
        self.waiting.clear()


@dataclass(eq=False)
class _Timed:
    """A layer that is timed, its input and its output; rows: seconds of forward, backward and products, by pass."""

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
    """micro: a micro-batch on the device, as the layers will see it. dtype, grad_dtype: of parameters and activations,
    and of gradients. seed: of weights' initial values. prepare: what is done to a layer before it runs."""

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
        """The times of every layer of a model, in order; `recomputed` as a stage is told, by the layer's number.

        torch's random numbers go on afterwards as if nothing had been run. Raises RuntimeError naming a layer that
        cannot be run.
        """
        recomputed, drawn = recomputed or Recomputed(), rng_states(self.device)
        known: dict[Any, _Timed] = {}
        rows, x = list[_Timed](), None
        try:
            for number, layer in enumerate(layers):
                again = recomputed if number in recomputed.units else None
                form = None if x is None else Form.of(x)
                key = alike(layer, layers, form, again is not None)
                if key not in known:
                    known[key] = _Timed(layer, contract(layer).name or f"layer {number}", x, again)
                    self._time(known[key])
                rows.append(known[key])
                x = known[key].output
            for _ in range(ROUNDS - 1):
                for timed in known.values():
                    self._time(timed)
        finally:
            set_rng_states(drawn, self.device)
        return [timed.times for timed in rows]

    def _time(self, timed: _Timed) -> None:
        """Times a copy of a layer, so that what it remembers of this is forgotten."""
        layer = copy.deepcopy(timed.layer)
        params = materialise(timed.layer, layer, self._parameter, self.device)
        sinks: list[_Sink] = [param.sink for param in params]  # type: ignore[attr-defined]
        self.prepare(layer)
        recomputed = alone(timed.recomputed, layer)
        stage = Stage([layer], AlwaysWhole(), recomputed=recomputed, scope=self._scope)
        try:
            passes = [self._run(stage, timed.input, sinks) for _ in range(WARM + REPEATS)]
        except Exception as error:  # whatever a layer of others may raise
            raise RuntimeError(
                f"{timed.name} ({type(layer).__name__}) could not be run alone, to be timed: {error}; choose"
                " --parallel.partition balanced, uniform, or the layers of each stage"
            ) from error
        for moments, timed.output in passes[WARM:]:
            at = [self._clock.seconds(moment) for moment in moments]
            timed.rows.append((at[1] - at[0], at[3] - at[2], at[4] - at[3]))

    def _run(self, stage: Stage, x: Any, sinks: list[_Sink]) -> tuple[list[Moment], Any]:
        """One forward and one backward: when the forward, the backward and the products began and ended; the output."""
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
        """A gradient of an output: small numbers; None for a loss."""
        if isinstance(y, Tensor) and y.dim() == 0:
            return None
        form = Form.of(y)
        return form.gradients(
            [part.normal_(std=1e-3) for part in form.empty(self.device, gradients=True)]
        )

    def _parameter(self, param: nn.Parameter) -> nn.Parameter:
        """Returns a parameter with its initial values on the device, and a sink."""
        values = torch.zeros(param.numel(), dtype=self.dtype, device=self.device)
        for piece in spec_of(param).pieces:
            at = piece.offset
            values[at : at + piece.numel].copy_(initial(piece, self.seed).view(-1))
        new = attach(nn.Parameter(values.view(param.shape), param.requires_grad), spec_of(param))
        return attach_sink(new, _Sink(torch.zeros_like(new, dtype=self.grad_dtype), self._scope))
