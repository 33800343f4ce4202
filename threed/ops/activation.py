"""SwiGLU and GEGLU (arXiv 2002.05202), GELU in its tanh form (arXiv 1606.08415), squared ReLU (arXiv 2109.08668).

The clamped SwiGLU of gpt-oss (arXiv 2508.10925) has no kernel, but a backward of its own.

The kernels are csrc/cuda/activation.cu on GPUs, for rows in bf16, and `ops.fused_cpu` on CPUs (for
SwiGLU and GELU). A forward saves only its input; the backward recomputes all other values in the
same pass.

In bf16, SwiGLU and GEGLU read and write 6 bytes of memory per output element in the forward, and 10 in the
backward. GELU and squared ReLU read and write 4 bytes in the forward, and 6 in the backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from threed.ops import fused_cpu, launch, sums


def swiglu_reference(gate_up: Tensor) -> Tensor:
    """Returns silu(gate) * up: [... 2f] -> [... f]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def geglu_reference(gate_up: Tensor) -> Tensor:
    """Returns gelu(gate) * up, with GELU in its tanh form: [... 2f] -> [... f]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gelu_reference(gate) * up


LIMIT, SLOPE = 7.0, 1.702  # of the clamped SwiGLU


def clamped_swiglu_reference(gate_up: Tensor) -> Tensor:
    """Returns gate * sigmoid(1.702 gate) * (up + 1): [... 2f] -> [... f].

    Before, gate is clamped to at most 7, and up to [-7, 7].
    """
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return gate * torch.sigmoid(SLOPE * gate) * (up + 1)


def _clamped_swiglu_backward(dy: Tensor, gate_up: Tensor) -> Tensor:
    """Returns the gradient of gate_up, [... 2f]."""
    gate, up = gate_up.chunk(2, dim=-1)
    linear = up.clamp(-LIMIT, LIMIT).add_(1).mul_(dy).mul_(gate <= LIMIT)
    within, gate = up.abs() <= LIMIT, gate.clamp(max=LIMIT)
    share = torch.sigmoid(SLOPE * gate)
    dup = dy * gate * share * within
    dgate = linear.mul_(share).mul_(1 + SLOPE * gate * (1 - share))
    return torch.cat((dgate, dup), -1)


def gelu_reference(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns GELU of x + bias, in its tanh form."""
    return F.gelu(x if bias is None else x + bias, approximate="tanh")


def squared_relu_reference(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns max(x + bias, 0)^2."""
    return F.relu(x if bias is None else x + bias).square()


def _squared_relu_backward(dy: Tensor, x: Tensor) -> Tensor:
    """Returns the gradient of x."""
    return F.relu(x) * dy * 2


def fits(x: Tensor, f: int) -> bool:
    """Returns whether the GPU kernels support the rows x; f is the number of output columns."""
    return f % 8 == 0 and launch.ready(x) and launch.packed(x)


def _half(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)


def _gated(name: str) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]:
    """Registers the kernel `name` of activation(gate) * up, [n 2f] -> [n f], and its backward.

    Returns:
        The forward, a function of gate_up, and the backward, a function of the output's gradient
        and gate_up. Each launches one kernel.
    """

    def forward(gate_up: Tensor) -> Tensor:
        rows, f = _check(name, gate_up.shape[-1] // 2, gate_up)
        out = gate_up.new_empty(rows, f)
        if out.numel():
            launch.start(name, gate_up, out, rows, f)
        return out

    def backward(dout: Tensor, gate_up: Tensor) -> Tensor:
        rows, f = _check(f"{name}_backward", gate_up.shape[-1] // 2, gate_up, dout)
        out = torch.empty_like(gate_up)
        if out.numel():
            launch.start(f"{name}_backward", dout, gate_up, out, rows, f)
        return out

    schema = f"{name}_backward(Tensor dout, Tensor gate_up) -> Tensor"
    return (
        launch.operator(f"{name}(Tensor gate_up) -> Tensor", _half, launches=1)(forward),
        launch.operator(schema, lambda dout, gate_up: torch.empty_like(gate_up), launches=1)(
            backward
        ),
    )


swiglu, swiglu_backward = _gated("swiglu")
geglu, geglu_backward = _gated("geglu")


def _biased(name: str) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Registers the kernel `name` of activation(x + bias), [n f] -> [n f], and its backward.

    Returns:
        The forward, a function of x and bias [f] or None, which launches one kernel; and the
        backward, which returns the gradient of x. It launches one kernel; with dbias two.
    """

    @launch.operator(
        f"{name}(Tensor x, Tensor? bias=None) -> Tensor",
        lambda x, bias=None: torch.empty_like(x), launches=1,
    )  # fmt: skip
    def forward(x: Tensor, bias: Tensor | None = None) -> Tensor:
        rows, f = _check(name, x.shape[-1], x, bias)
        out = torch.empty_like(x)
        if out.numel():
            launch.start(name, x, bias, out, rows, f)
        return out

    @launch.operator(
        f"{name}_backward(Tensor dout, Tensor x, Tensor? bias=None, Tensor(a!)? dbias=None, *, bool add=False)"
        " -> Tensor",
        lambda dout, x, *rest, **add: torch.empty_like(x),
        launches=lambda dout, x, bias=None, dbias=None, add=False: 1 if dbias is None else 2,
    )  # fmt: skip
    def backward(
        dout: Tensor, x: Tensor, bias: Tensor | None = None, dbias: Tensor | None = None, *, add: bool = False,
    ) -> Tensor:  # fmt: skip
        """Returns the gradient of x [n f]. If dbias is given, writes the sum over rows to dbias.

        Args:
            dout: gradient of the output [n f].
            x: input [n f].
            bias: [f], as in the forward.
            dbias: fp32 [f], gradient of the bias.
            add: whether to add to dbias instead of overwriting it.
        """
        rows, f = _check(f"{name}_backward", x.shape[-1], x, dout, bias)
        dx = torch.empty_like(x)
        blocks = sums.row_blocks(x) if dbias is not None else 0
        empty = x.new_empty if x.numel() else x.new_zeros
        parts = empty(blocks, f, dtype=torch.float32) if dbias is not None else None
        if x.numel():
            launch.start(f"{name}_backward", dout, x, bias, dx, parts, rows, f, blocks)
        if dbias is not None and parts is not None:
            sums.add_parts(sums.Parts(parts, dbias, add))
        return dx

    return forward, backward


gelu, gelu_backward = _biased("gelu")
squared_relu, squared_relu_backward = _biased("squared_relu")


def _check(name: str, f: int, *tensors: Tensor | None) -> tuple[int, int]:
    """Raises ValueError for unsupported tensors; returns (rows, f), with f output columns."""
    given = [t for t in tensors if t is not None]
    x = given[0]
    fits = x.dim() == 2 and f > 0 and f % 8 == 0 and x.shape[1] in (f, 2 * f)
    fits = fits and all(t.shape in ((len(x), f), (f,)) for t in given[1:])
    fits = fits and all(map(launch.packed, given))
    launch.check(
        fits, name, "bf16 [n f], contiguous and 16-byte aligned, f a multiple of 8", *given
    )
    return len(x), f


@dataclass(frozen=True)
class Pair:
    """A function of x [... n], and its gradient as a function of dy and x. Only x is saved."""

    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]


def _of_rows(
    forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor, Tensor], Tensor]
) -> Pair:
    """Wraps kernels for rows [n f] so that they accept [... f]."""

    def apply_rows(x: Tensor) -> Tensor:
        y = forward(x.view(-1, x.shape[-1]))
        return y.view(*x.shape[:-1], y.shape[-1])

    def gradient(dy: Tensor, x: Tensor) -> Tensor:
        return backward(dy.contiguous().view(-1, dy.shape[-1]), x.view(-1, x.shape[-1])).view_as(x)

    return Pair(apply_rows, gradient)


_GPU = {
    "swiglu": _of_rows(swiglu, swiglu_backward),
    "geglu": _of_rows(geglu, geglu_backward),
    "gelu": _of_rows(gelu, gelu_backward),
    "squared_relu": _of_rows(squared_relu, squared_relu_backward),
}
_CPU = {
    "swiglu": Pair(fused_cpu.swiglu, lambda dy, x: fused_cpu.swiglu(x, dy.contiguous())),
    "gelu": Pair(fused_cpu.gelu, lambda dy, x: fused_cpu.gelu(x, dy.contiguous())),
}
_PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": swiglu_reference,
    "geglu": geglu_reference,
    "gelu": gelu_reference,
    "squared_relu": squared_relu_reference,
    "clamped_swiglu": clamped_swiglu_reference,
}
# computed by torch where there is no kernel; autograd would save the results of all operations
_TORCH = {
    "squared_relu": Pair(squared_relu_reference, _squared_relu_backward),
    "clamped_swiglu": Pair(clamped_swiglu_reference, _clamped_swiglu_backward),
}
_OF_X = ("gelu", "squared_relu")  # have as many outputs as inputs; the others have half as many


def _fused(name: str, x: Tensor) -> Pair | None:
    """Returns the kernels for an activation (`apply`) of x; None if autograd differentiates it."""
    kernels = None
    if fused_cpu.fits(x):
        kernels = _CPU.get(name)
    elif name in _GPU and fits(x, x.shape[-1] // (1 if name in _OF_X else 2)):
        kernels = _GPU[name]
    return kernels if kernels or torch.compiler.is_compiling() else _TORCH.get(name)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kernels: Pair) -> Tensor:
        ctx.save_for_backward(x)
        ctx.kernels = kernels
        return kernels.forward(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return ctx.kernels.backward(dy, x), None


def apply(name: str, x: Tensor) -> Tensor:
    """Computes an activation by the fastest available kernel.

    Args:
        name: "gelu" (tanh form, [... f] -> [... f]), "squared_relu" ([... f] -> [... f]), "swiglu"
            (silu(gate) * up, [... 2f] -> [... f]), "geglu" (gelu(gate) * up), or "clamped_swiglu".
        x: input.
    """
    kernels = _fused(name, x)
    if kernels is None:
        return _PLAIN[name](x)
    return _Fused.apply(x, kernels)
