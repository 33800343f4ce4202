"""The interface of optimizer rules, which compute new weights from a gradient.

A rule updates a flat slice: a one-dimensional range of a buffer that contains parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class StepScalars(NamedTuple):
    """The arguments of an update that change from step to step, as scalar tensors.

    Attributes:
        lr: learning rate.
        step: number of the update, from 1.
        scale: factor of the gradient, for clipping and the loss scale.
        skip: 1.0 if the update must be skipped, else 0.0.
    """

    lr: Tensor
    step: Tensor
    scale: Tensor
    skip: Tensor


class Rule(Protocol):
    """An update rule with its constants.

    Attributes:
        state_names: names of the optimizer states. Each state has one element per weight.
    """

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
        """Updates p and its state in place. Does not synchronize with the host.

        If `now.skip` is set, p and the state stay bit-identical.

        Args:
            p: weights [n].
            g: gradient [n], may be overwritten.
            state: tensors [n] in the order of `state_names`.
            now: learning rate, number of the update, factor of the gradient and skip flag.
            decay: coefficient of weight decay.
            out: [n], usually narrower than p. Receives the new p, in the same pass if the kernel
                supports that. After a skipped step `out` holds p or its previous content.
        """


def needs_reference(p: Tensor) -> bool:
    """Returns whether the reference must update this slice instead of torch's fused kernels.

    On CUDA these kernels read the learning rate, if it is a tensor, as fp32. This is too coarse
    for fp64 weights.
    """
    return p.is_cuda and p.dtype == torch.float64
