"""Records the output and the input gradient of each layer of a model in one step.

    watch = Watch(engine, truth)
    engine.step(batch)
    watch.seen        # (kind, index of the layer, samples, index of the tensor) -> values

These values only locate a difference. Losses and parameters decide whether results differ.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from threed.distributed import collectives
from threed.engine import Engine
from threed.layers.contract import contract
from threed.testing.ranks import note

OUTPUT, INPUT_GRADIENT = "output", "gradient of the input"
Key = tuple[str, int, tuple[int, ...], int]


class Watch:
    """Records outputs and input gradients of this rank's layers until `stop`.

    Args:
        engine: engine with the layers.
        truth: values recorded on one process. Every output must have the shape of the recorded
            value, or of a shard of it; otherwise RuntimeError is raised.

    Attributes:
        seen: recorded values, by key (see the module's docstring).
        at: name of the running layer.
    """

    def __init__(self, engine: Engine, truth: Mapping[Key, Tensor]) -> None:
        self.truth = truth
        self.names = [label(layer, number) for number, layer in enumerate(engine.blueprint.layers)]
        self.seen: dict[Key, Tensor] = {}
        self.slicing, self.tensor = engine.model.slicing, engine.topology.axis("tp")
        self.at = ""
        self._recording = True
        self._serial = itertools.count(1)
        for number in engine.blueprint.held:
            self._follow(number, engine.blueprint.layers[number])

    def stop(self) -> None:
        """Stops recording."""
        self._recording = False

    def first_not_finite(self) -> str:
        """Returns the name of this rank's first layer with a non-finite output, or ""."""
        outputs = [(key[1], values) for key, values in self.seen.items() if key[0] == OUTPUT]
        wrong = [number for number, values in outputs if not values.isfinite().all()]
        return self.names[min(wrong)] if wrong else ""

    def _follow(self, number: int, layer: nn.Module) -> None:
        def before(layer: nn.Module, args: tuple[Any, ...]) -> None:
            self._note("forward", number)
            for key, x in self._keys(INPUT_GRADIENT, number, args[0], args[1]):
                if x.requires_grad:
                    x.register_hook(self._recorder(key))

        def after(layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            for key, y in self._keys(OUTPUT, number, output, args[1]):
                self._check_shape(y, self.truth.get(key, y))
                self._recorder(key)(y)
                if y.requires_grad and not y.is_leaf:
                    y.register_hook(lambda dy: self._note("backward", number))

        layer.register_forward_pre_hook(before)
        layer.register_forward_hook(after)

    def _note(self, what: str, number: int) -> None:
        # Synchronizes the tensor ranks after each layer. If ranks call different collectives, the
        # run then hangs in the faulty layer and not in a later one.
        if self._recording:
            collectives.all_gather(torch.zeros(1), self.tensor)
        self.at = self.names[number]
        note(f"call {next(self._serial)}, the {what} of {self.at}")

    def _check_shape(self, got: Tensor, want: Tensor) -> None:
        cp, tp = self.slicing.context.size, self.tensor.size
        fits = [
            any(abs(own * parts - full) < parts for parts in (1, tp, cp, cp * tp))
            for own, full in zip(got.shape, want.shape, strict=False)
        ]
        if got.dim() != want.dim() or not all(fits):
            alone = f"on one process {list(want.shape)}"
            raise RuntimeError(f"its output has shape {list(got.shape)}, {alone}")

    def _keys(self, kind: str, number: int, value: Any, micro: Any) -> Iterator[tuple[Key, Tensor]]:
        """Yields (key, tensor) for each floating-point tensor in a value; nothing after `stop`."""
        samples = getattr(micro, "samples", None)
        if self._recording and samples is not None:
            for index, tensor in enumerate(tree_leaves(value)):
                if isinstance(tensor, Tensor) and tensor.is_floating_point():
                    yield (kind, number, tuple(samples.tolist()), index), tensor

    def _recorder(self, key: Key) -> Any:
        def keep(values: Tensor) -> None:
            # Keeps the first values, because with recompute a layer's forward runs a second time.
            self.seen.setdefault(key, values.detach().to("cpu", copy=True))

        return keep


def label(layer: nn.Module, number: int) -> str:
    """Returns the name of a layer in reports."""
    return contract(layer).name or f"layer {number} ({type(layer).__name__})"
