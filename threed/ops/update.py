"""What an optimizer's rule is: from a gradient to new weights, on a flat slice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class StepScalars(NamedTuple):
    """The arguments of an update that change from step to step, as scalar tensors.

    Attributes:
        lr: the learning rate.
        step: the number of the update, from 1.
        scale: the factor of the gradient, for clipping and the loss scale.
        skip: 1.0 if the update must not happen, else 0.0.
    """

    lr: Tensor
    step: Tensor
    scale: Tensor
    skip: Tensor


class Rule(Protocol):
    """An update rule, with its constants. state_names: what it keeps beside the weights, element by element."""

    @property
    def state_names(self) -> tuple[str, ...]: ...

    def update(
        self,
        p: Tensor,
        g: Tensor,
        state: Sequence[Tensor],
        now: StepScalars,
        decay: float,
        out: Tensor | None = None,
    ) -> None:
        """One update of p [n] and its state, in place, from the gradient g [n] (used up).

        out: [n], usually narrower than p; gets the new p, in the same pass where the kernel can. After a skipped step
        it may hold p, or what it held. Nothing is read on the host; where `now.skip` is set, not a bit of the others
        changes.
        """


def needs_reference(p: Tensor) -> bool:
    """Whether torch's fused kernels cannot update this slice: on CUDA they take a rate that is a tensor as fp32 only,
    which is too coarse for fp64 weights."""
    return p.is_cuda and p.dtype == torch.float64
