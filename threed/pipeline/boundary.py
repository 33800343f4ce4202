"""Values that layers pass to each other, within a stage or between stages: a tensor, or a tuple or
dict of tensors.

    parts = tensors(value)      the tensors of a value, in order
    like(value, parts)          other tensors in the same structure
    form = Form.of(value)       structure, shapes and dtypes of a value; the next stage needs them
                                to receive the value
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from threed.layers.slicing import MicroBatch

# The structure of a value: the length if it is a tuple, the keys if it is a dict, None if it is a
# single tensor.
Keys = int | tuple[str, ...] | None


def tensors(value: Any) -> tuple[Any, ...]:
    """Returns the tensors of a value; an empty tuple for None.

    Raises:
        TypeError: if the value is not a tensor, or a tuple or dict (with string keys) of tensors.
    """
    if isinstance(value, Tensor):
        return (value,)
    if value is None:
        return ()
    parts = _parts(value)
    named = not isinstance(value, dict) or all(isinstance(key, str) for key in value)
    if parts and named and all(isinstance(part, Tensor) for part in parts):
        return parts
    raise TypeError(
        f"{_describe(value)} where a layer must return a tensor, or a tuple or dict (of names) of tensors"
    )


def like(value: Any, parts: Sequence[Any]) -> Any:
    """Returns `parts` in the structure of `value`: the only part, or a tuple or dict of parts.

    Args:
        value: a value with as many tensors as there are parts.
        parts: tensors or None.
    """
    if value is None or isinstance(value, Tensor):
        return parts[0] if parts else None
    return dict(zip(value, parts, strict=True)) if isinstance(value, dict) else tuple(parts)


def gradients_of(gradient: Any, count: int) -> tuple[Tensor | None, ...]:
    """Returns the gradient of a value as one gradient per tensor of the value.

    Args:
        gradient: the gradient, in the structure of the value; None if the value has no gradient.
        count: number of tensors of the value, used if `gradient` is `None`.

    Returns:
        A flat tuple of gradients; `count` times None if `gradient` is `None`.
    """
    if gradient is None:
        return (None,) * count
    if isinstance(gradient, Tensor):
        return (gradient,)
    return _parts(gradient)


def _parts(value: Any) -> tuple[Any, ...]:
    """Returns the parts of a dict, tuple or list; an empty tuple for other values."""
    if isinstance(value, dict):
        return tuple(value.values())
    return tuple(value) if isinstance(value, tuple | list) else ()


def _describe(value: Any) -> str:
    if isinstance(value, dict | tuple | list):
        kinds = ", ".join(type(part).__name__ for part in _parts(value))
        return f"a {type(value).__name__} of {kinds or 'no tensors'}"
    return f"{type(value).__name__}"


@dataclass(frozen=True)
class Form:
    """Structure, shapes and dtypes of a value, and which of its tensors require a gradient.

    Attributes:
        keys: the structure, see `Keys`.
        shapes: shape of each tensor.
        dtypes: dtype of each tensor.
        grads: for each tensor, whether it requires a gradient.
    """

    keys: Keys
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    grads: tuple[bool, ...]

    @classmethod
    def of(cls, value: Any) -> Form:
        """Returns the form of a value: a tensor, or a tuple or dict of tensors."""
        parts = tensors(value)
        keys: Keys = len(parts)
        if isinstance(value, Tensor):
            keys = None
        elif isinstance(value, dict):
            keys = tuple(value)
        return cls(
            keys, tuple(tuple(p.shape) for p in parts), tuple(p.dtype for p in parts),
            tuple(p.requires_grad for p in parts),
        )  # fmt: skip

    def to_bytes(self) -> Tensor:
        """Returns the form as a message: its JSON text, uint8 [bytes]."""
        names = [str(dtype).removeprefix("torch.") for dtype in self.dtypes]
        text = json.dumps([self.keys, self.shapes, names, self.grads])
        return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)

    @classmethod
    def from_bytes(cls, data: Tensor) -> Form:
        """Returns the form that a message of `to_bytes` contains.

        Args:
            data: the message, uint8 [bytes].
        """
        keys, shapes, names, grads = json.loads(data.cpu().numpy().tobytes())
        dtypes = tuple(getattr(torch, name) for name in names)
        return cls(
            tuple(keys) if isinstance(keys, list) else keys, tuple(map(tuple, shapes)), dtypes, tuple(grads)
        )  # fmt: skip

    def empty(self, device: torch.device, gradients: bool = False) -> list[Tensor]:
        """Returns uninitialized tensors to receive into.

        Args:
            device: device of the tensors.
            gradients: False to receive a value: one tensor for each tensor of the value. True to
                receive gradients: one tensor for each tensor that requires a gradient.
        """
        wanted = [n for n, grad in enumerate(self.grads) if grad or not gradients]
        return [torch.empty(self.shapes[n], dtype=self.dtypes[n], device=device) for n in wanted]

    def value(self, parts: Sequence[Tensor]) -> Any:
        """Arranges received tensors as a value of this form: a tensor, tuple or dict.

        The tensors become leaves of a new autograd graph.

        Args:
            parts: the received tensors, one for each tensor of the value.
        """
        leaves = [part.requires_grad_(grad) for part, grad in zip(parts, self.grads, strict=True)]
        if self.keys is None:
            return leaves[0]
        if isinstance(self.keys, tuple):
            return dict(zip(self.keys, leaves, strict=True))
        return tuple(leaves)

    def gradients(self, parts: Sequence[Tensor]) -> Any:
        """Arranges received gradients in the structure of a value of this form.

        The result is a gradient, or a tuple or dict of gradients, as `Stage.backward` expects it.
        It contains None for each tensor that requires no gradient. If the value is a single tensor
        that requires no gradient, the result is the tuple (None,): a plain None would mean that the
        value is a loss, from which the backward starts.

        Args:
            parts: the received gradients, one for each tensor that requires a gradient.
        """
        received = iter(parts)
        grads = [next(received) if grad else None for grad in self.grads]
        if self.keys is None:
            return grads[0] if self.grads[0] else (None,)
        if isinstance(self.keys, tuple):
            return dict(zip(self.keys, grads, strict=True))
        return tuple(grads)

    def gradients_to_send(self, gradient: Any, device: torch.device) -> list[Tensor]:
        """Returns the gradients to send to the previous stage, in a flat list.

        The previous stage restores the structure by `gradients`.

        Args:
            gradient: the gradient in the structure of the value. It contains None for a tensor that
                did not contribute to the loss; for this tensor, zeros are sent.
            device: device of the zeros.
        """
        given = gradients_of(gradient, len(self.shapes))
        return [
            torch.zeros(self.shapes[n], dtype=self.dtypes[n], device=device)
            if part is None
            else part
            for n, part in enumerate(given)
            if self.grads[n]
        ]

    def __str__(self) -> str:
        rows = zip(self.dtypes, self.shapes, self.grads, strict=True)
        return ", ".join(
            f"{d} {list(s)}{'' if g else ' (no gradient)'}".removeprefix("torch.")
            for d, s, g in rows
        )


def signature(micro: MicroBatch) -> tuple[Any, ...]:
    """Returns a hashable key; micro-batches with equal keys have activations of equal shapes.

    The key contains the shapes and dtypes of all tensors of the micro-batch, and whether the
    micro-batch is for training.
    """
    given = {"tokens": micro.tokens, "labels": micro.labels, "documents": micro.documents}
    given |= micro.inputs or {}
    shapes = ((name, tuple(t.shape), t.dtype) for name, t in given.items() if isinstance(t, Tensor))
    return (micro.training, *sorted(shapes, key=lambda one: one[0]))
