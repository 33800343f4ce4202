"""SGD with momentum on a flat slice of the parameters, by a reference or torch's fused kernel.

As in torch.optim.SGD, weight decay is part of the gradient, and the momentum buffer starts as the
first gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from threed.ops.update import StepScalars, needs_reference


@dataclass(frozen=True)
class SGD:
    """The `Rule` of SGD.

    Attributes:
        momentum: decay of the momentum buffer. 0: no buffer.
        nesterov: whether to use Nesterov momentum.
    """

    momentum: float = 0.9
    nesterov: bool = False

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the states: the momentum buffer, if there is one."""
        return ("momentum_buffer",) if self.momentum else ()

    def update(
        self,
        p: Tensor,
        g: Tensor,
        state: Sequence[Tensor],
        now: StepScalars,
        decay: float,
        out: Tensor | None = None,
    ) -> None:
        """Updates p and its state in place, by torch's fused kernel if it supports p."""
        step = reference if needs_reference(p) else _fused
        step(p, g, state, now, self, decay)
        if out is not None:
            out.copy_(p)


def _fused(
    p: Tensor, g: Tensor, state: Sequence[Tensor], now: StepScalars, sgd: SGD, decay: float
) -> None:
    g = g.to(p.dtype)
    scale, lr = None, now.lr
    # The kernel divides the gradient by the scale, so it gets the reciprocal. It reads the scale as
    # fp32. This is too coarse for an fp64 p, whose gradient is therefore scaled before the call.
    if p.dtype == torch.float32:
        scale, lr = now.scale.float().reciprocal(), now.lr.float()
    else:
        g.mul_(now.scale.to(p.dtype))
    # In the first step the buffer is zero, so it becomes the gradient without a special case.
    torch.ops.aten._fused_sgd_.tensor_lr(
        [p], [g], list(state), weight_decay=decay, momentum=sgd.momentum, lr=lr, dampening=0.0,
        nesterov=sgd.nesterov, maximize=False, is_first_step=False, grad_scale=scale, found_inf=now.skip.float(),
    )  # fmt: skip


def reference(
    p: Tensor, g: Tensor, state: Sequence[Tensor], now: StepScalars, sgd: SGD, decay: float
) -> None:
    """Updates p and the momentum buffer in place by the formulas of torch.optim.SGD."""
    go = now.skip == 0
    g = g.to(p.dtype) * now.scale.to(p.dtype) + decay * p
    if state:
        buffer = sgd.momentum * state[0] + g
        state[0].copy_(torch.where(go, buffer, state[0]))
        g = g + sgd.momentum * buffer if sgd.nesterov else buffer
    p.copy_(torch.where(go, p - now.lr.to(p.dtype) * g, p))
