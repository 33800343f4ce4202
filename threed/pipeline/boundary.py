"""What one layer hands to the next, within a stage or between two: a tensor, or a tuple or dict of tensors.

parts = tensors(value)          its tensors, in order
like(value, parts)              other tensors in the same arrangement
form = Form.of(value)           what a stage must know before it can receive such a value
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from threed.layers.slicing import MicroBatch

Keys = int | tuple[str, ...] | None  # of a tuple, of a dict, of a tensor


def tensors(value: Any) -> tuple[Any, ...]:
    """The tensors of a value; TypeError for what cannot be handed on. No value has none."""
    if isinstance(value, Tensor):
        return (value,)
    if value is None:
        return ()
    parts = (
        tuple(value.values() if isinstance(value, dict) else value)
        if isinstance(value, dict | tuple | list)
        else ()
    )
    if (
        parts
        and all(isinstance(part, Tensor) for part in parts)
        and all(isinstance(k, str) for k in _keys(value) or ())
    ):
        return parts
    raise TypeError(
        f"{_what(value)} where a layer must return a tensor, or a tuple or dict (of names) of tensors"
    )


def like(value: Any, parts: Sequence[Any]) -> Any:
    """These parts (or None in place of some) arranged as the tensors of `value` are."""
    if value is None or isinstance(value, Tensor):
        return parts[0] if parts else None
    return dict(zip(value, parts, strict=True)) if isinstance(value, dict) else tuple(parts)


def gradients_of(gradient: Any, count: int) -> tuple[Tensor | None, ...]:
    """The gradients of `count` tensors, out of their arrangement; no gradient at all is one of none of them."""
    if gradient is None:
        return (None,) * count
    if isinstance(gradient, Tensor):
        return (gradient,)
    return tuple(gradient.values() if isinstance(gradient, dict) else gradient)


def _keys(value: Any) -> tuple[Any, ...] | None:
    return tuple(value) if isinstance(value, dict) else None


def _what(value: Any) -> str:
    if isinstance(value, dict | tuple | list):
        parts = value.values() if isinstance(value, dict) else value
        return f"a {type(value).__name__} of {', '.join(type(part).__name__ for part in parts) or 'nothing'}"
    return f"{type(value).__name__}"


@dataclass(frozen=True)
class Form:
    """Arrangement, shapes and dtypes of a value, and which of its tensors get a gradient."""

    keys: Keys
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    grads: tuple[bool, ...]

    @classmethod
    def of(cls, value: Any) -> Form:
        """The form of a value."""
        parts = tensors(value)
        keys = (
            None
            if isinstance(value, Tensor)
            else tuple(value)
            if isinstance(value, dict)
            else len(parts)
        )
        return cls(
            keys, tuple(tuple(p.shape) for p in parts), tuple(p.dtype for p in parts),
            tuple(p.requires_grad for p in parts),
        )  # fmt: skip

    def to_bytes(self) -> Tensor:
        """As it travels: uint8 [n]."""
        names = [str(dtype).removeprefix("torch.") for dtype in self.dtypes]
        text = json.dumps([self.keys, self.shapes, names, self.grads])
        return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)

    @classmethod
    def from_bytes(cls, data: Tensor) -> Form:
        """The inverse of `to_bytes`."""
        keys, shapes, names, grads = json.loads(data.cpu().numpy().tobytes())
        dtypes = tuple(getattr(torch, name) for name in names)
        return cls(
            tuple(keys) if isinstance(keys, list) else keys, tuple(map(tuple, shapes)), dtypes, tuple(grads)
        )  # fmt: skip

    def empty(self, device: torch.device, gradients: bool = False) -> list[Tensor]:
        """Tensors to receive such a value into, or the gradients of one."""
        wanted = [n for n, grad in enumerate(self.grads) if grad or not gradients]
        return [torch.empty(self.shapes[n], dtype=self.dtypes[n], device=device) for n in wanted]

    def value(self, parts: Sequence[Tensor]) -> Any:
        """A value of received tensors, ready for a graph of its own."""
        leaves = [part.requires_grad_(grad) for part, grad in zip(parts, self.grads, strict=True)]
        if self.keys is None:
            return leaves[0]
        return (
            dict(zip(self.keys, leaves, strict=True))
            if isinstance(self.keys, tuple)
            else tuple(leaves)
        )

    def gradients(self, parts: Sequence[Tensor]) -> Any:
        """The gradients of such a value, arranged as it is; None where a tensor gets none, but (None,) for a sole one:
        None alone is what a loss is given."""
        coming = iter(parts)
        whole = [next(coming) if grad else None for grad in self.grads]
        if self.keys is None:
            return whole[0] if self.grads[0] else (None,)
        return (
            dict(zip(self.keys, whole, strict=True))
            if isinstance(self.keys, tuple)
            else tuple(whole)
        )

    def gradients_to_send(self, gradient: Any, device: torch.device) -> list[Tensor]:
        """The tensors that `gradients` is given at the other end: zeros for what had no part in the loss."""
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
    """What the shapes of activations depend on: shapes and dtypes of all tensors of a micro-batch, and the mode."""
    given = {"tokens": micro.tokens, "labels": micro.labels, **(micro.inputs or {})}
    shapes = ((name, tuple(t.shape), t.dtype) for name, t in given.items() if isinstance(t, Tensor))
    return (micro.training, *sorted(shapes, key=lambda one: one[0]))
