"""SwiGLU (arXiv 2002.05202) and GELU in its tanh form (arXiv 1606.08415), on bf16 rows: csrc/cuda/activation.cu.

Forwards save nothing but their input; backwards compute the rest again in the same pass: 6 and 10 bytes an element of
the output for SwiGLU, 4 and 6 for GELU.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from threed.ops import launch, sums


def swiglu_reference(gate_up: Tensor) -> Tensor:
    """silu(gate) * up: [... 2f] -> [... f]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_reference(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """GELU of x + bias, in its tanh form."""
    return F.gelu(x if bias is None else x + bias, approximate="tanh")


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, [n 2f] -> [n f]. Launches one kernel."""
    rows, f = _check("swiglu", gate_up.shape[-1] // 2, gate_up)
    out = gate_up.new_empty(rows, f)
    if out.numel():
        launch.start("swiglu", gate_up, out, rows, f)
    return out


def swiglu_backward(dout: Tensor, gate_up: Tensor) -> Tensor:
    """The gradient of gate_up [n 2f]. Launches one kernel."""
    rows, f = _check("swiglu_backward", gate_up.shape[-1] // 2, gate_up, dout)
    out = torch.empty_like(gate_up)
    if out.numel():
        launch.start("swiglu_backward", dout, gate_up, out, rows, f)
    return out


def gelu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """GELU of x + bias, [n f]. Launches one kernel."""
    rows, f = _check("gelu", x.shape[-1], x, bias)
    out = torch.empty_like(x)
    if out.numel():
        launch.start("gelu", x, bias, out, rows, f)
    return out


def gelu_backward(
    dout: Tensor, x: Tensor, bias: Tensor | None = None, dbias: Tensor | None = None, *, add: bool = False
) -> Tensor:
    """The gradient of x [n f]; dbias, fp32 [f], gets its sum over rows. Launches one kernel, two with dbias.

    add: to what dbias holds.
    """
    rows, f = _check("gelu_backward", x.shape[-1], x, dout, bias)
    dx = torch.empty_like(x)
    blocks = sums.row_blocks(x) if dbias is not None else 0
    parts = x.new_empty(blocks, f, dtype=torch.float32) if dbias is not None else None
    if x.numel():
        launch.start("gelu_backward", dout, x, bias, dx, parts, rows, f, blocks)
    if dbias is not None:
        sums.add_parts(parts, dbias, add=add)
    return dx


def _check(name: str, f: int, *tensors: Tensor | None) -> tuple[int, int]:
    """Refuses what the kernel would misread; returns rows, and columns of the output."""
    given = [t for t in tensors if t is not None]
    x = given[0]
    fits = x.dim() == 2 and f > 0 and f % 8 == 0 and x.shape[1] in (f, 2 * f)
    fits = fits and all(t.shape in ((len(x), f), (f,)) for t in given[1:])
    fits = fits and all(launch.packed(t) for t in given)
    launch.check(fits, name, "bf16 [n f], contiguous and 16-byte aligned, f a multiple of 8", *given)
    return len(x), f
