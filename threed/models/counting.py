"""How many items a wrapped module's mean loss is over: what its micro-batches weigh.

items = Items(module)
items(inputs)                    counts a micro-batch before its forward, in every way that may turn out right
with items.watching(inputs):     ... the forward ...
items.chosen(weights)            the weight that belongs to the way that was
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

Inputs = Mapping[str, Any]


class Items:
    """Counts the items of a module's loss.

    A causal model of Hugging Face predicts each label from the positions before it, so it does not count the first
    label of a row. Where such a model is a part of the module, only the forward shows whether it gets the labels, or
    the module computes the loss itself: then both are counted.
    """

    def __init__(self, module: nn.Module) -> None:
        self.shifted = shifts_labels(module)
        self._inner = (
            [] if self.shifted else [(n, m) for n, m in module.named_modules() if shifts_labels(m)]
        )
        self._inputs: Inputs | None = None
        self._took_labels = False
        for name, inner in self._inner:
            inner.register_forward_pre_hook(
                lambda m, args, kwargs, name=name: self._called(name, m, args, kwargs),
                with_kwargs=True,
            )

    def __call__(self, inputs: Inputs) -> Tensor:
        """The number of items of a micro-batch: a fp64 scalar, or [2], without and with the first label of a row."""
        if not self._inner:
            return count_items(inputs, self.shifted)
        return torch.stack([count_items(inputs, shifted) for shifted in (False, True)])

    @contextmanager
    def watching(self, inputs: Inputs) -> Iterator[None]:
        """Notices what the causal models within get while this is open."""
        self._inputs, self._took_labels = inputs, False
        try:
            yield
        finally:
            self._inputs = None

    def chosen(self, weight: Tensor) -> Tensor:
        """The scalar weight of the micro-batch whose forward was watched."""
        return weight[int(self._took_labels)] if self._inner else weight

    def _called(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._inputs is None:
            return
        given = (
            inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments.get("labels")
        )
        given = kwargs.get("labels", given)
        labels = self._inputs.get("labels")
        if given is None:
            return
        if labels is not None and same_memory(given, labels):
            self._took_labels = True
        elif labels is not None or not any(
            same_memory(given, value) for value in self._inputs.values()
        ):
            raise ValueError(
                f"{name} computes the loss from labels that are not the batch's 'labels', so it is not known how many"
                " items it is a mean over: pass threed.models.Wrapped(module, count=...)"
            )


def same_memory(a: object, b: object) -> bool:
    """Whether two tensors are the same elements."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return False
    return a is b or (
        a.data_ptr() == b.data_ptr() and a.numel() == b.numel() and a.dtype == b.dtype
    )


def shifts_labels(module: nn.Module) -> bool:
    """Whether the module predicts each label from the positions before it, as Hugging Face's causal models do: then
    the first label of a row is not counted."""
    names = [kind.__name__ for kind in type(module).__mro__]
    return any(word in name for name in names for word in ("CausalLM", "LMHeadModel"))


def whole_labels(inputs: Inputs) -> Tensor | None:
    """The labels of a micro-batch, if they are classes."""
    labels = inputs.get("labels")
    return labels if isinstance(labels, Tensor) and not labels.is_floating_point() else None


def count_items(inputs: Inputs, shifted: bool) -> Tensor:
    """How many items a mean loss is over: labels that are not ignored (below 0), else rows; fp64 scalar."""
    labels = whole_labels(inputs)
    if labels is None:
        first = next(value for value in inputs.values() if isinstance(value, Tensor))
        return torch.full((), float(len(first)), dtype=torch.float64, device=first.device)
    return ((labels[:, 1:] if shifted else labels) >= 0).sum().double()


def with_some_label(inputs: Inputs, items: Tensor) -> dict[str, Any]:
    """The same inputs; without any item their labels become valid ones, which weigh nothing.

    A mean over no labels is 0 / 0, and its gradient is no number even where the loss is multiplied by zero.
    """
    labels = whole_labels(inputs)
    if labels is None:
        return dict(inputs)
    some = (items.amax() > 0).to(labels.device)
    return {**inputs, "labels": torch.where(some, labels, labels.clamp(min=0))}
