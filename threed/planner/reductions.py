"""Temporary memory and traffic of gradient reductions, from a `Reducer` on the meta device."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import torch

from threed.pipeline.trace import META, Watch
from threed.planner.blueprint import Blueprint
from threed.zero import setup
from threed.zero.layout import Slot
from threed.zero.reducer import Reducer
from threed.zero.state import State, storages

# Number of backwards after which the reducer has allocated all buffers that it uses in a step.
# Later backwards reuse these buffers, so only this many backwards are measured.
STEADY = 3


class Reductions:
    """Temporary memory of gradient reductions, measured with a `Reducer` on the meta device.

    Attributes:
        always: True if every backward reduces gradients (ZeRO-2 and 3), False if only the last
            backward of a step does.
        during: per layer, peak bytes of the reducer while the layer's backward runs.
        kept_between: bytes that the reducer keeps between two backwards; used only if `always`.
        waiting: bytes that the reducer keeps while the rank waits for other stages at the end of a
            step.
        end: peak bytes of the reducer at the end of a step.
        standing: bytes that the reducer keeps from step to step.
    """

    def __init__(self, blueprint: Blueprint, states: Sequence[State]) -> None:
        layout, config = blueprint.layout, blueprint.config
        reducer = Reducer(layout, setup.gradient_codecs(config), whole_step=blueprint.layer_major)
        self.always = reducer.rounds
        # per unit: a slot for each use of a parameter, in the order of a backward
        self._uses = defaultdict[int, list[Slot]](list)
        for slot in reversed(layout.slots):
            for unit in slot.units if slot.param.requires_grad else ():
                self._uses[unit].append(slot)
        plan = blueprint.pipeline.plan
        self.passes = plan.microbatches // plan.ways  # number of backwards of a step per chunk
        rounds = min(self.passes, STEADY) if reducer.rounds else 1
        traffic, before = blueprint.topology.traffic, Counter(blueprint.topology.traffic)
        # host buffers for drives are not measured here, because `_constant_bytes` counts them
        staged = [drive.take() for drive in layout.policy.drives]
        with Watch([*storages(layout, states), *staged]) as watch:
            # The second step may have a different peak, because it reuses buffers of the first one.
            for _ in range(2 if layout.policy.slices_gradients and rounds < STEADY else 1):
                traffic.clear()
                traffic.update(before)
                self._step(blueprint, reducer, rounds, watch)
            self.standing = watch.bytes()

    def _step(self, blueprint: Blueprint, reducer: Reducer, rounds: int, watch: Watch) -> None:
        """Runs the reductions of a step with `rounds` backwards per chunk; records their memory.

        If a step of the run has more backwards than `rounds`, each additional one is assumed to
        send as many bytes as the last backward that runs here.
        """
        traffic = blueprint.topology.traffic
        reducer.begin(rounds)
        self.during: dict[int, int] = {}
        for _ in range(rounds):
            before = Counter(traffic)
            last = sum(len(chunk) for chunk in blueprint.chunks)
            for chunk in reversed(range(len(blueprint.chunks))):
                first = last - len(blueprint.chunks[chunk])
                self._backward(reducer, blueprint, range(first, last), watch)
                reducer.pass_ended(chunk)
                last = first
        self.kept_between = watch.begin()
        for label in traffic if self.always else ():
            traffic[label] += (traffic[label] - before[label]) * (self.passes - rounds)
        asynchronous = blueprint.pipeline.plan.asynchronous
        finish = reducer.close() if asynchronous else reducer.finish
        self.waiting = watch.bytes()
        finish()
        self.end = watch.most

    def _backward(
        self, reducer: Reducer, blueprint: Blueprint, layers: range, watch: Watch
    ) -> None:
        """Adds a gradient for every use of a parameter in these layers, in reverse order."""
        found = torch.empty((), dtype=blueprint.layout.policy.grad_dtype, device=META)
        for layer in reversed(layers):
            watch.begin()
            for unit in reversed(blueprint.units_of(layer)):
                for slot in self._uses[unit]:
                    reducer.sink_of(slot).add(found.expand(slot.param.shape))
                if not self.always:
                    reducer.unit_ended(unit)
            self.during[layer] = watch.most
