"""Gradients of another engine's backward: a generator's loss reaches the discriminator's weights.

    with own_backward(reducer):      gradients of that reducer's parameters go to its sinks
    foreign_gradients(slots)         gradients of other backwards, which add up in `.grad`

As in plain PyTorch they count in the next step, unless `zero_grad` drops them before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor

from threed.zero.layout import Slot


class Owner(Protocol):
    """The part of `Reducer` that `own_backward` uses."""

    def give_up(self) -> None: ...


# owners of the running backwards, the innermost last; global, as autograd's engine is
_running: list[object] = []


@contextmanager
def own_backward(owner: Owner) -> Iterator[None]:
    """Marks the backwards in the block as the owner's. If the block raises, the owner's step is discarded."""
    _running.append(owner)
    try:
        yield
    except BaseException:
        owner.give_up()
        raise
    finally:
        _running.pop()


def is_own(owner: object, slot: Slot) -> bool:
    """Returns whether the backward that computes this gradient is the owner's. RuntimeError if it is no engine's."""
    if not _running:
        slot.param.grad = None
        raise RuntimeError(
            f"{slot.spec.name}: a gradient came in a backward that is no engine's: call engine.backward(loss) in place"
            " of loss.backward(), or torch.autograd.grad for gradients of inputs"
        )
    return _running[-1] is owner


def foreign_gradients(slots: Iterable[Slot]) -> list[tuple[Slot, Tensor]]:
    """Returns the gradients of other engines' backwards, with their parameters."""
    return [(slot, slot.param.grad) for slot in slots if slot.param.grad is not None]


def check_scales(dtype: str, slots: Iterable[Slot]) -> None:
    """Raises RuntimeError under fp16 if another engine's backward left a gradient, which has that engine's loss scale.

    dtype: `precision.dtype` of this engine.
    """
    for slot, _ in foreign_gradients(slots) if dtype == "fp16" else ():
        raise RuntimeError(
            f"{slot.spec.name}: another engine's backward left a gradient, with that engine's loss scale: call"
            " zero_grad() before this engine's backward"
        )
