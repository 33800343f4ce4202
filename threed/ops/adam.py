"""AdamW (arXiv 1711.05101) on a flat slice: a plain reference, and the fused kernel that torch ships.

All scalars that change (learning rate, step, clip factor, skip flag) are tensors, so that a step reads nothing on the
host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from threed.ops.update import Moment, needs_reference


@dataclass(frozen=True)
class Adam:
    """The constants of the update; see `Rule`."""

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    parts: tuple[str, ...] = ("exp_avg", "exp_avg_sq")

    def update(self, p: Tensor, g: Tensor, state: Sequence[Tensor], now: Moment, decay: float) -> None:
        """One update in place, by the fused kernel."""
        step = reference if needs_reference(p) else adamw_
        step(p, g, state[0], state[1], now, self, decay)


def reference(p: Tensor, g: Tensor, m: Tensor, v: Tensor, now: Moment, adam: Adam, decay: float) -> None:
    """One update of p, m and v [n] in place from the gradient g [n], by the formulas of the paper."""
    g = g.to(p.dtype) * now.scale.to(p.dtype)
    lr, t = now.lr.to(p.dtype), now.step.double()
    m2 = adam.beta1 * m + (1 - adam.beta1) * g
    v2 = adam.beta2 * v + (1 - adam.beta2) * g * g
    denominator = (v2 / (1 - adam.beta2**t).to(p.dtype)).sqrt() + adam.eps
    p2 = p * (1 - lr * decay) - lr * (m2 / (1 - adam.beta1**t).to(p.dtype)) / denominator
    go = now.skip == 0
    for old, new in ((p, p2), (m, m2), (v, v2)):
        old.copy_(torch.where(go, new, old))


def adamw_(p: Tensor, g: Tensor, m: Tensor, v: Tensor, now: Moment, adam: Adam, decay: float) -> None:
    """The same update by torch's fused kernel: one pass over p, m, v [n] (fp32 or fp64) and g [n] (used up)."""
    if g.dtype != p.dtype:
        g = g.to(p.dtype)
    scale, lr = None, now.lr
    if p.dtype == torch.float32:
        # The kernel divides by the scale, and reads it (and on CUDA the rate) as fp32, whatever p is.
        scale, lr = now.scale.float().reciprocal(), now.lr.float()
    else:
        g.mul_(now.scale.to(p.dtype))
    torch._fused_adamw_(
        [p], [g], [m], [v], [], [now.step.float()], lr=lr, beta1=adam.beta1, beta2=adam.beta2, weight_decay=decay,
        eps=adam.eps, amsgrad=False, maximize=False, grad_scale=scale, found_inf=now.skip.float(),
    )  # fmt: skip
