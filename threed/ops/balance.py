"""The update rule of a router's selection biases (arXiv 2408.15664).

The gradient of an expert's bias is the number of tokens that the expert got in the step, minus the
mean over experts, times the number of experts: an integer. Each step moves the bias by a constant
against the sign of the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from threed.ops.update import StepScalars


@dataclass(frozen=True)
class Balance:
    """The `Rule` of selection biases. It uses neither learning rate nor weight decay.

    Attributes:
        rate: change of a bias per step.
        state_names: names of the optimizer states: none.
    """

    rate: float = 1e-3
    state_names: tuple[str, ...] = ()

    def update(
        self,
        p: Tensor,
        g: Tensor,
        state: Sequence[Tensor],
        now: StepScalars,
        decay: float,
        out: Tensor | None = None,
    ) -> None:
        """Moves p by `rate` against the sign of g, unless the step is skipped."""
        go = (now.skip == 0).to(p.dtype)
        p.sub_(torch.sign(g).to(p.dtype) * (self.rate * go))
        if out is not None:
            out.copy_(p)
