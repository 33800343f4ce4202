"""AdamW (arXiv 1711.05101) on a flat slice of the parameters.

    Adam.update(p, g, state, now, decay, out)      the fastest of these that supports the tensors:
        torch.ops.threed.adamw_cuda_               csrc/cuda: one pass, writes `out` too
        torch.ops.threed.adamw_                    csrc/cpu: one pass, writes `out` too
        adamw_                                     torch's fused kernel
        reference                                  the formulas

All scalars that change (learning rate, step, clip factor, skip flag) are tensors, so that a step
never synchronizes the host with the device. Native code receives the addresses of these tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from threed.core import device, native
from threed.ops import launch
from threed.ops.update import StepScalars, needs_reference

# values of the enum `Format` in csrc/cpu/number.h; 0: no tensor
FORMATS = {None: 0, torch.float32: 1, torch.bfloat16: 2, torch.float16: 3, torch.float64: 4}
STATES, OUTPUTS = (torch.float32, torch.float64), (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Adam:
    """The `Rule` of AdamW.

    Attributes:
        beta1: decay of the first moments.
        beta2: decay of the second moments.
        eps: constant added to the denominator.
        state_names: names of the optimizer states: first and second moments.
    """

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    state_names: tuple[str, ...] = ("exp_avg", "exp_avg_sq")

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
        if fits(p, g, out):
            ADAMW_CUDA(p, *state, g, out, *now, self.beta1, self.beta2, self.eps, decay)
            return
        if p.device.type == "cpu" and p.dtype in STATES and native.library("cpu") is not None:
            scalars = [number.to("cpu", torch.float64) for number in now]
            ADAMW(p, *state, g, out, *scalars, self.beta1, self.beta2, self.eps, decay)
            return
        step = reference if needs_reference(p) else adamw_
        step(p, g, state[0], state[1], now, self, decay)
        if out is not None:
            out.copy_(p)


def reference(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, now: StepScalars, adam: Adam, decay: float
) -> None:
    """Updates p, m and v [n] in place from the gradient g [n] by the formulas of the paper."""
    g = g.to(p.dtype) * now.scale.to(p.dtype)
    lr, t = now.lr.to(p.dtype), now.step.double()
    m2 = adam.beta1 * m + (1 - adam.beta1) * g
    v2 = adam.beta2 * v + (1 - adam.beta2) * g * g
    denominator = (v2 / (1 - adam.beta2**t).to(p.dtype)).sqrt() + adam.eps
    p2 = p * (1 - lr * decay) - lr * (m2 / (1 - adam.beta1**t).to(p.dtype)) / denominator
    go = now.skip == 0
    for old, new in ((p, p2), (m, m2), (v, v2)):
        old.copy_(torch.where(go, new, old))


def adamw_(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, now: StepScalars, adam: Adam, decay: float
) -> None:
    """Updates p, m, v [n] (fp32 or fp64) from g [n] in one pass by torch's fused kernel."""
    g = g.to(p.dtype)
    scale, lr = None, now.lr
    if p.dtype == torch.float32:
        # The kernel divides the gradient by the scale, so it gets the reciprocal. It reads the
        # scale (and on CUDA the learning rate) as fp32. This is too coarse for an fp64 p, whose
        # gradient is therefore scaled before the call.
        scale, lr = now.scale.float().reciprocal(), now.lr.float()
    else:
        g = g * now.scale.to(p.dtype)
    torch._fused_adamw_(
        [p], [g], [m], [v], [], [now.step.float()], lr=lr, beta1=adam.beta1, beta2=adam.beta2, weight_decay=decay,
        eps=adam.eps, amsgrad=False, maximize=False, grad_scale=scale, found_inf=now.skip.float(),
    )  # fmt: skip


# ----------------------------------------------------------------------------------- native kernels


def call_native(
    p: Tensor, m: Tensor, v: Tensor, g: Tensor, out: Tensor | None, lr: Tensor, step: Tensor, scale: Tensor,
    skip: Tensor, beta1: float, beta2: float, eps: float, decay: float, *, instructions: str | None = None,
) -> None:  # fmt: skip
    """Runs `torch.ops.threed.adamw_` on the CPU, with torch's number of threads.

    The result does not depend on the number of threads.

    Args:
        p: parameters, fp32 or fp64 [n], updated in place.
        m: first moments, dtype of p [n], updated in place.
        v: second moments, dtype of p [n], updated in place.
        g: gradient, fp32, bf16, fp16 or fp64 [n]. Not changed.
        out: fp32, bf16 or fp16 [n], receives the new p. May be None.
        lr: learning rate, fp64 scalar.
        step: number of the update, from 1, fp64 scalar.
        scale: factor of the gradient, fp64 scalar.
        skip: 1.0 to leave all tensors unchanged, fp64 scalar.
        beta1: decay of the first moments.
        beta2: decay of the second moments.
        eps: constant added to the denominator.
        decay: weight decay.
        instructions: "avx512", "avx2" or "portable". Default: the best of the processor.

    Raises:
        ValueError: for unsupported tensors.
        RuntimeError: if the library or the instructions are not available.
    """
    tensors = (p, m, v, g) if out is None else (p, m, v, g, out)
    _check(tensors, (lr, step, scale, skip), out)
    native.call(
        "threed_adamw", "iPPPPPqiiiPPPPddddis",
        p.data_ptr(), m.data_ptr(), v.data_ptr(), g.data_ptr(), None if out is None else out.data_ptr(), p.numel(),
        FORMATS[p.dtype], FORMATS[g.dtype], FORMATS[None if out is None else out.dtype],
        lr.data_ptr(), step.data_ptr(), scale.data_ptr(), skip.data_ptr(), beta1, beta2, eps, decay,
        torch.get_num_threads(), None if instructions is None else instructions.encode(),
    )  # fmt: skip
    # Autograd does not see writes by native code, so the version counters of the written tensors
    # are increased here.
    torch.autograd.graph.increment_version([t for t in tensors if t is not g])


def fits(p: Tensor, g: Tensor, out: Tensor | None) -> bool:
    """Returns whether `call_cuda` supports these tensors."""
    dtypes = p.dtype == torch.float32 and g.dtype in (torch.float32, torch.bfloat16)
    dtypes = dtypes and (out is None or out.dtype == torch.bfloat16)
    layout = p.numel() % 4 == 0 and all(
        t is None or (t.is_contiguous() and launch.aligned(t)) for t in (p, g, out)
    )
    return dtypes and layout and launch.available(p)


def call_cuda(
    p: Tensor, m: Tensor, v: Tensor, g: Tensor, out: Tensor | None, lr: Tensor, step: Tensor, scale: Tensor,
    skip: Tensor, beta1: float, beta2: float, eps: float, decay: float, *, stream: tuple[int, int] | None = None,
) -> None:  # fmt: skip
    """Runs `torch.ops.threed.adamw_cuda_` (csrc/cuda/adam.cu). Launches one kernel.

    With g and out in bf16 it reads and writes 28 bytes of memory per element.

    Args:
        p: parameters, fp32 [n], n a multiple of 4, updated in place.
        m: first moments, fp32 [n], updated in place.
        v: second moments, fp32 [n], updated in place.
        g: gradient, fp32 or bf16 [n].
        out: bf16 [n], receives the new p. May be None.
        lr: learning rate, fp64 scalar on p's device.
        step: number of the update, from 1, fp64 scalar on p's device.
        scale: factor of the gradient, fp64 scalar on p's device.
        skip: 1.0 to leave all tensors unchanged, fp64 scalar on p's device.
        beta1: decay of the first moments.
        beta2: decay of the second moments.
        eps: constant added to the denominator.
        decay: weight decay.
        stream: key of a random stream (`rng.key`) for stochastic rounding of out. None: out is
            rounded to nearest.
    """
    scalars = (lr, step, scale, skip)
    blocks = check_cuda("adamw", (p, m, v), g, out, scalars)
    if blocks:
        launch.start(
            "adamw", p, m, v, g, out, p.numel(), g.dtype == torch.bfloat16, *scalars, beta1, beta2, eps, decay,
            stream is not None, *(stream or (0, 0)), blocks,
        )  # fmt: skip


def check_cuda(
    name: str, states: Sequence[Tensor], g: Tensor, out: Tensor | None, scalars: Sequence[Tensor]
) -> int:
    """Returns the number of thread blocks of an optimizer's kernel.

    Args:
        name: name of the kernel.
        states: the weights, fp32 [n], n a multiple of 4, and the optimizer's states, of the same shape.
        g: gradient, fp32 or bf16 [n].
        out: bf16 [n], or None.
        scalars: fp64 scalars on the device of the weights.

    Raises:
        ValueError: if the kernel does not support these tensors.
    """
    p, arrays = states[0], [t for t in (*states, g, out) if t is not None]
    fits = all(t.dtype == torch.float32 for t in states) and g.dtype in (
        torch.float32,
        torch.bfloat16,
    )
    fits = fits and (out is None or out.dtype == torch.bfloat16) and p.numel() % 4 == 0
    fits = fits and all(
        t.numel() == p.numel() and t.is_contiguous() and launch.aligned(t) for t in arrays
    )
    fits = fits and all(
        t.dtype == torch.float64 and t.numel() == 1 and t.device == p.device for t in scalars
    )
    wanted = "weights and states fp32, g fp32 or bf16, out bf16, 16-byte aligned, n a multiple of 4; fp64 scalars on the device"
    launch.check(fits, name, wanted, *arrays, *scalars)
    return min(8 * device.processors(p.device), -(-p.numel() // 1024))


def _check(tensors: Sequence[Tensor], scalars: Sequence[Tensor], out: Tensor | None) -> None:
    """Raises ValueError for tensors that the kernel does not support.

    The kernel cannot check them, because it receives only addresses.
    """
    p, m, v, g = tensors[:4]
    fits = p.dtype in STATES and m.dtype == v.dtype == p.dtype and g.dtype in FORMATS
    fits = fits and (out is None or out.dtype in OUTPUTS)
    fits = fits and all(t.numel() == p.numel() and t.is_contiguous() for t in tensors)
    fits = fits and all(t.numel() == 1 and t.dtype == torch.float64 for t in scalars)
    fits = fits and all(t.device.type == "cpu" for t in (*tensors, *scalars))
    wanted = f"contiguous CPU tensors of one length, p, m, v of one of {STATES}, out of one of {OUTPUTS}; fp64 scalars"
    launch.check(fits, "adamw_", wanted, *tensors, *scalars)


ADAMW: Any = launch.operator(
    "adamw_(Tensor(a!) p, Tensor(b!) m, Tensor(c!) v, Tensor g, Tensor(d!)? out, Tensor lr, Tensor step, "
    "Tensor scale, Tensor skip, float beta1, float beta2, float eps, float decay) -> ()",
    lambda *args: None, launches=0,
)(call_native)  # fmt: skip
ADAMW_CUDA: Any = launch.operator(
    "adamw_cuda_(Tensor(a!) p, Tensor(b!) m, Tensor(c!) v, Tensor g, Tensor(d!)? out, Tensor lr, Tensor step, "
    "Tensor scale, Tensor skip, float beta1, float beta2, float eps, float decay) -> ()",
    lambda *args: None, launches=1,
)(call_cuda)  # fmt: skip
