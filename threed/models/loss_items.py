"""Counts the items (labels or rows) over which a wrapped module's mean loss is computed.

The number of items is the weight of a micro-batch in the loss of a step.

    items = Items(module)
    items(inputs)                    # before the forward: one or two possible numbers of items
    with items.observing(inputs):    # around the forward: finds out which number is correct
    items.select_weight(weights)     # after the forward: the weight for the correct number
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

Inputs = Mapping[str, Any]


class Items:
    """Counts the items of a module's loss.

    A causal model of Hugging Face predicts each label from the positions before it, so it does not
    count the first label of a row. If the module contains such a model as a submodule, there are
    two cases. If the submodule gets the labels, the first label of a row does not count. If the
    module computes the loss itself, the first label counts. Only the forward shows which case
    applies. So the numbers of items with and without the first labels are computed, and one of them
    is selected after the forward.
    """

    def __init__(self, module: nn.Module) -> None:
        self.shifted = shifts_labels(module)
        self._inner = (
            [] if self.shifted else [(n, m) for n, m in module.named_modules() if shifts_labels(m)]
        )
        self._inputs: Inputs | None = None
        self._inner_got_labels = False
        self._handles: list[RemovableHandle] = []

    def register(self) -> None:
        """Registers the hooks that observe causal models in the module."""
        self._handles = [
            inner.register_forward_pre_hook(
                lambda m, args, kwargs, name=name: self._called(name, m, args, kwargs),
                with_kwargs=True,
            )
            for name, inner in self._inner
        ]

    def remove(self) -> None:
        """Removes the hooks from the module."""
        for handle in self._handles:
            handle.remove()

    def __call__(self, inputs: Inputs) -> Tensor:
        """Returns the number of items of a micro-batch, fp64.

        The result is a scalar. If only the forward shows whether the first label of a row counts,
        the result is a tensor [2]: the number with the first labels, then the number without them.
        """
        if not self._inner:
            return count_items(inputs, self.shifted)
        return torch.stack([count_items(inputs, shifted) for shifted in (False, True)])

    @contextmanager
    def observing(self, inputs: Inputs) -> Iterator[None]:
        """Context manager: records whether a causal model in the module gets the batch's labels."""
        self._inputs, self._inner_got_labels = inputs, False
        try:
            yield
        finally:
            self._inputs = None

    def select_weight(self, weight: Tensor) -> Tensor:
        """Returns the scalar weight of the micro-batch whose forward was observed.

        Args:
            weight: a scalar or, if `__call__` returned a tensor [2], a tensor [2]: the weight if
                the first label of a row counts, then the weight if it does not count.
        """
        return weight[int(self._inner_got_labels)] if self._inner else weight

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
            self._inner_got_labels = True
        elif labels is not None or not any(
            same_memory(given, value) for value in self._inputs.values()
        ):
            raise ValueError(
                f"{name} computes the loss from labels that are not the batch's 'labels', so the number of items"
                " in its mean is unknown: pass threed.models.Wrapped(module, count=...)"
            )


def same_memory(a: object, b: object) -> bool:
    """Returns whether two tensors have the same elements in the same memory."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return False
    return a is b or (
        a.data_ptr() == b.data_ptr() and a.numel() == b.numel() and a.dtype == b.dtype
    )


def shifts_labels(module: nn.Module) -> bool:
    """Returns whether the module is a causal model of Hugging Face.

    Such a model predicts each label from the positions before it, so the first label of a row is
    not counted.
    """
    names = [kind.__name__ for kind in type(module).__mro__]
    return any(word in name for name in names for word in ("CausalLM", "LMHeadModel"))


def class_labels(inputs: Inputs) -> Tensor | None:
    """Returns the labels of a micro-batch if they are classes, else None."""
    labels = inputs.get("labels")
    return labels if isinstance(labels, Tensor) and not labels.is_floating_point() else None


def count_items(inputs: Inputs, shifted: bool) -> Tensor:
    """Returns the number of items in a mean loss, an fp64 scalar.

    Items are the labels that are 0 or more (labels below 0 are ignored), or the rows if there are
    no integer labels. If `shifted`, the first label of each row is not counted.
    """
    labels = class_labels(inputs)
    if labels is None:
        first = next(value for value in inputs.values() if isinstance(value, Tensor))
        return torch.full((), float(len(first)), dtype=torch.float64, device=first.device)
    return ((labels[:, 1:] if shifted else labels) >= 0).sum().double()


def with_some_label(inputs: Inputs, items: Tensor) -> dict[str, Any]:
    """Returns the inputs. If all labels are ignored, replaces them by valid labels.

    The loss of a micro-batch without valid labels has the weight zero. But its mean loss would be
    0 / 0, and the gradient would be NaN even after a multiplication of the loss by zero.

    Args:
        inputs: the inputs of a micro-batch.
        items: number of items, as `Items` returns it.
    """
    labels = class_labels(inputs)
    if labels is None:
        return dict(inputs)
    some = (items.amax() > 0).to(labels.device)
    return {**inputs, "labels": torch.where(some, labels, labels.clamp(min=0))}


@contextmanager
def with_dtype_note(inputs: Inputs) -> Iterator[None]:
    """Context manager: adds the dtypes of the batch's tensors as a note to a dtype error."""
    try:
        yield
    except RuntimeError as error:
        floats = [
            f"{k} is {v.dtype}"
            for k, v in inputs.items()
            if isinstance(v, Tensor) and v.is_floating_point()
        ]
        if "dtype" in str(error) and floats:
            error.add_note(
                f"threed: a batch's tensors keep their dtype ({', '.join(floats)}): cast them in the module's forward,"
                " or set precision.cast_inputs"
            )
        raise
