"""Lion (arXiv 2302.06675, algorithm 2) on a flat slice of the parameters.

A step moves each weight by the learning rate, in the direction of the sign of an interpolation
between momentum and gradient. Weight decay is decoupled.

There are three implementations: a reference, a kernel on GPUs (csrc/cuda/adam.cu), and a fast
update by torch's fused SGD kernel. The latter is possible because both halves of Lion are plain SGD
steps: the weights take a step along the sign, with SGD's weight decay; the momentum takes a step of
size 1 - beta2 towards the gradient. The kernel handles the skip flag. Scaling the gradient and
computing the sign are separate operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from threed.core.device import is_accelerator
from threed.ops import adam, launch
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
        """Updates p and its state in place by the fastest available kernel."""
        if adam.fits(p, g, out):
            scalars = (now.lr, now.scale, now.skip)
            LION_CUDA(p, state[0], g, out, *scalars, self.beta1, self.beta2, decay)
            return
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
    sgd = torch.ops.aten._fused_sgd_
    step = sgd.tensor_lr if isinstance(lr, Tensor) else sgd.default
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


def call_cuda(
    p: Tensor, m: Tensor, g: Tensor, out: Tensor | None, lr: Tensor, scale: Tensor, skip: Tensor, beta1: float,
    beta2: float, decay: float,
) -> None:  # fmt: skip
    """Runs `torch.ops.threed.lion_cuda_`. Launches one kernel.

    With g and out in bf16 it reads and writes 20 bytes of memory per element.

    Args:
        p: parameters, fp32 [n], n a multiple of 4, updated in place.
        m: momentum, fp32 [n], updated in place.
        g: gradient, fp32 or bf16 [n].
        out: bf16 [n], receives the new p. May be None.
        lr: learning rate, fp64 scalar on p's device.
        scale: factor of the gradient, fp64 scalar on p's device.
        skip: 1.0 to leave all tensors unchanged, fp64 scalar on p's device.
        beta1: weight of the momentum in the direction of the step.
        beta2: decay of the momentum.
        decay: weight decay.
    """
    scalars = (lr, scale, skip)
    blocks = adam.check_cuda("lion", (p, m), g, out, scalars)
    if blocks:
        narrow = g.dtype == torch.bfloat16
        launch.start("lion", p, m, g, out, p.numel(), narrow, *scalars, beta1, beta2, decay, blocks)


LION_CUDA: Any = launch.operator(
    "lion_cuda_(Tensor(a!) p, Tensor(b!) m, Tensor g, Tensor(c!)? out, Tensor lr, Tensor scale, Tensor skip, float beta1,"
    " float beta2, float decay) -> ()",
    lambda *args: None, launches=1,
)(call_cuda)  # fmt: skip
