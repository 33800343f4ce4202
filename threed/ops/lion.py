"""Lion (arXiv 2302.06675, algorithm 2) on a flat slice of the parameters.

A step moves each weight by the learning rate, in the direction of the sign of an interpolation
between momentum and gradient. Weight decay is decoupled.

There are two implementations: a reference, and a fast update by torch's fused SGD kernel. The fast
update is possible because both halves of Lion are plain SGD steps: the weights take a step along
the sign, with SGD's weight decay; the momentum takes a step of size 1 - beta2 towards the gradient.
The kernel handles the skip flag. Scaling the gradient and computing the sign are separate
operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from threed.core.device import is_accelerator
from threed.ops.update import StepScalars, needs_reference

# elements per chunk on a CPU, so that the sign of a chunk fits into the cache and takes little
# memory
CHUNK = 2**18


@dataclass(frozen=True)
class Lion:
    """The `Rule` of Lion.

    Attributes:
        beta1: weight of the momentum in the direction of the step.
        beta2: decay of the momentum.
        state_names: names of the optimizer states: the momentum.
    """

    beta1: float = 0.9
    beta2: float = 0.99
    state_names: tuple[str, ...] = ("exp_avg",)

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
        if needs_reference(p):
            reference(p, g, state, now, self, decay)
        else:
            size = max(1, p.numel()) if is_accelerator(p.device) else CHUNK
            for part, grad, m in zip(
                p.split(size), g.split(size), state[0].split(size), strict=True
            ):
                _update(part, grad, m, now, self, decay)
        if out is not None:
            out.copy_(p)


def _update(p: Tensor, g: Tensor, m: Tensor, now: StepScalars, lion: Lion, decay: float) -> None:
    g = g.to(p.dtype).mul_(now.scale.to(p.dtype))
    direction = torch.lerp(m, g, 1 - lion.beta1).sign_()
    _sgd_(m, g, 1 - lion.beta2, now, decay=1.0, maximize=True)  # m -= (1 - beta2) (m - g)
    _sgd_(p, direction, now.lr.to(p.dtype), now, decay=decay, maximize=False)


def _sgd_(
    x: Tensor, g: Tensor, lr: float | Tensor, now: StepScalars, *, decay: float, maximize: bool
) -> None:
    """Computes x -= lr (g + decay x) unless the step is skipped. If `maximize`, uses -g for g."""
    step = (
        torch.ops.aten._fused_sgd_.tensor_lr
        if isinstance(lr, Tensor)
        else torch.ops.aten._fused_sgd_.default
    )
    step(
        [x], [g], [], weight_decay=decay, momentum=0.0, lr=lr, dampening=0.0, nesterov=False, maximize=maximize,
        is_first_step=False, grad_scale=None, found_inf=now.skip.float(),
    )  # fmt: skip


def reference(
    p: Tensor, g: Tensor, state: Sequence[Tensor], now: StepScalars, lion: Lion, decay: float
) -> None:
    """Updates p and the momentum in place by the formulas of the paper."""
    (m,), lr = state, now.lr.to(p.dtype)
    go = now.skip == 0
    g = g.to(p.dtype) * now.scale.to(p.dtype)
    direction = torch.sign(lion.beta1 * m + (1 - lion.beta1) * g)
    p.copy_(torch.where(go, p * (1 - lr * decay) - lr * direction, p))
    m.copy_(torch.where(go, lion.beta2 * m + (1 - lion.beta2) * g, m))
