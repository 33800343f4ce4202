"""The arguments that a base model of `transformers` passes to its layers, such as masks.

    arguments = LayerArguments.of(skeleton, layers)      # None if the base model is not a chain
    args, kwargs = arguments(3, x)

The base model runs on the CPU, with recorders instead of its layers. This needs no weights. The
arguments depend only on the shape and dtype of the input, so they are computed once per shape.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from threed.interop.huggingface.plan_layers import Arguments, Skeleton

SHAPES = 4  # number of input shapes for which arguments are kept
TRIED = (2, 3)  # batch and sequence length of the inputs by which a base model is checked


class Recorder(nn.Module):
    """Records its calls; returns random values, as a tensor or in a tuple.

    Args:
        in_tuple: whether to return a tuple, as the layers of some models do.
    """

    def __init__(self, in_tuple: bool) -> None:
        super().__init__()
        self._in_tuple = in_tuple
        self.inputs, self.results = list[Tensor](), list[Tensor]()
        self.arguments = list[Arguments]()

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Records the arguments."""
        self.inputs.append(hidden)
        self.arguments.append((args, kwargs))
        self.results.append(torch.randn_like(hidden))
        return (self.results[-1],) if self._in_tuple else self.results[-1]


class LayerArguments:
    """The arguments of each layer of a base model, other than the hidden states.

    Args:
        skeleton: the parts of the model.
        layers: number of layers.
        in_tuple: whether the base model requires layers that return a tuple.
    """

    def __init__(self, skeleton: Skeleton, layers: int, in_tuple: bool) -> None:
        self._skeleton, self._layers, self._in_tuple = skeleton, layers, in_tuple
        self._of_shape = functools.lru_cache(maxsize=SHAPES)(self._record)

    def __deepcopy__(self, memo: object) -> LayerArguments:
        return self

    @classmethod
    def of(cls, skeleton: Skeleton, layers: int) -> LayerArguments | None:
        """Returns the arguments of a base model, or None if it is not a chain of its layers.

        In a chain, each layer runs once, and reads the output of the previous layer and arguments
        that do not depend on hidden states.
        """
        for in_tuple in (False, True):
            found = cls(skeleton, layers, in_tuple)
            if found._is_chain():
                return found
        return None

    def __call__(self, number: int, x: Tensor) -> Arguments:
        """Returns the positional and keyword arguments of a layer.

        Args:
            number: number of the layer.
            x: input of the layer, [b s h].
        """
        b, s, _ = x.shape
        return self._of_shape(b, s, x.dtype, x.device)[number]

    def _record(self, b: int, s: int, dtype: torch.dtype, device: torch.device) -> list[Arguments]:
        parts, _ = self._run(torch.zeros(b, s, self._skeleton.hidden, dtype=dtype))
        moved: dict[int, Tensor] = {}  # layers share masks, also on the device
        return [_on_device(part.arguments[0], device, moved) for part in parts[:-1]]

    def _run(self, hidden: Tensor) -> tuple[list[Recorder], Tensor]:
        """Runs the base model; returns recorders of its layers and its norm, and the result."""
        parts = [Recorder(self._in_tuple) for _ in range(self._layers)]
        norm = Recorder(False)
        base = self._skeleton.part(parts, norm=norm)
        with torch.no_grad(), torch.random.fork_rng(devices=[]), torch.device("cpu"):
            out: Tensor = base(inputs_embeds=hidden, use_cache=False).last_hidden_state
        return [*parts, norm], out

    def _is_chain(self) -> bool:
        width = self._skeleton.hidden
        draw = torch.Generator().manual_seed(0)
        try:
            runs = [self._run(torch.randn(*TRIED, width, generator=draw)) for _ in range(2)]
        except Exception:  # raised by the model's own code if its layers need other parts of it
            return False
        for parts, out in runs:
            if any(len(part.inputs) != 1 for part in parts):
                return False
            inputs = [part.inputs[0] for part in parts[1:]] + [out]
            if not all(map(torch.equal, inputs, [part.results[0] for part in parts])):
                return False
        first, second = ([part.arguments[0] for part in parts] for parts, _ in runs)
        return all(map(_equal, first, second))


def _on_device(value: Any, device: torch.device, moved: dict[int, Tensor]) -> Any:
    """Returns an argument with its tensors on a device."""
    return tree_map_only(Tensor, lambda x: moved.setdefault(id(x), x.to(device)), value)


def _equal(a: Any, b: Any) -> bool:
    """Returns whether two arguments are equal.

    Dicts and lists inside of the arguments are never equal, because layers could pass values to
    later layers in them.
    """
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_equal_argument, a, b))
    return type(a) is type(b) and (a is b or bool(a == b))


def _equal_argument(a: Any, b: Any) -> bool:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(
            not isinstance(a[key], (dict, list)) and _equal(a[key], b[key]) for key in a
        )
    return _equal(a, b)
