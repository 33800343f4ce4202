"""The matrix products of linear layers: torch's, or oneDNN's in fp32 on processors that torch's BLAS uses half of.

    by = matmul.NATIVE                          the products of y = x W^T, which layers take as `Product.matmul`
    y = by.linear(x, weight, bias)
    dx = by.input_gradient(dy, weight)
    by.add_product_(dw, dy.t(), x, fresh=...)   into the gradient's buffer, without rounding where the device can
    dw = by.product(dy.t(), x)                  a tensor of its own

Another way to multiply (in fp8, say) is another `Matmul`.

For fp32 torch calls MKL, which on an AVX-512 processor that is not Intel's runs a 256-bit kernel. oneDNN, which torch
also carries and uses for narrower types, compiles one for the processor at hand: 225 against 97 GFLOP/s a core on a
Zen 5. Which of the two runs depends on processor, dtype and device alone, never on a measurement: so all ranks agree,
and so does a run that is resumed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from threed.ops import fused_cpu, launch
from threed.topology import default_device


@functools.cache
def _onednn_is_faster() -> bool:
    """Whether this is an AVX-512 processor that MKL has no kernel for, and this torch has oneDNN."""
    try:
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    wide = "AuthenticAMD" in info and torch.backends.cpu.get_cpu_capability() == "AVX512"
    return (
        wide
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def _by_onednn(x: Tensor, weight: Tensor, device: str = "") -> bool:
    fits = x.dtype == weight.dtype == torch.float32 and (device or x.device.type) == "cpu"
    return fits and x.numel() > 0 and weight.numel() > 0 and _onednn_is_faster()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x weight^T + bias: x [... in], weight [out in] of any strides -> [... out]. No gradient of its own."""
    if not _by_onednn(x, weight):
        return F.linear(x, weight, bias)
    flat = torch.ops.mkldnn._linear_pointwise(x.flatten(0, -2), weight, bias, "none", [], "")
    # Not a view to autograd: the loss works in the memory of its logits.
    out: Tensor = torch.ops.aten._unsafe_view(flat, (*x.shape[:-1], len(weight)))
    return out


def input_gradient(rows: Tensor, weight: Tensor) -> Tensor:
    """rows weight: [m out] [out in] -> [m in], what `linear` makes of rows and the transposed weight; no gradient."""
    return linear(rows, weight.t()) if _by_onednn(rows, weight) else torch.mm(rows, weight)


def product(a: Tensor, b: Tensor) -> Tensor:
    """Returns a b: a [m k], b [k n] -> [m n]. No gradient of its own."""
    if not _by_onednn(a, b, default_device().type if a.is_meta else ""):
        return torch.mm(a, b)
    # oneDNN repacks its second operand but not the first: a tall, transposed `a` goes second.
    turned = a.stride(0) == 1 and len(a) > b.shape[1]
    return linear(b.t(), a).t() if turned else linear(a, b.t())


def widens(a: Tensor, b: Tensor, to: torch.dtype) -> bool:
    """Returns whether the device adds products of a and b to a wider sum in one kernel, without rounding them."""
    if to != torch.float32 or a.dtype not in (torch.bfloat16, torch.float16):
        return False
    if launch.on_gpu(a):
        return hasattr(torch.ops.aten.addmm, "dtype_out")  # torch 2.11
    return fused_cpu.adds_products(a, b)


def add_product_(out: Tensor, a: Tensor, b: Tensor, *, fresh: bool) -> None:
    """Computes out += a b, or out = a b if `fresh`: out [m n], a [m k], b [k n].

    If out is wider than a and b, products are rounded to their dtype first, unless the device
    `widens` them. On the meta device it makes what it would make on the device of this process.
    """
    if a.dtype != out.dtype and widens(a, b, out.dtype):
        _add_widened_(out, a, b, fresh)
    elif a.dtype != out.dtype or _by_onednn(a, b, default_device().type if a.is_meta else ""):
        out.copy_(product(a, b)) if fresh else out.add_(product(a, b))
    else:
        torch.mm(a, b, out=out) if fresh else out.addmm_(a, b)


def _add_widened_(out: Tensor, a: Tensor, b: Tensor, fresh: bool) -> None:
    if not launch.on_gpu(a):
        fused_cpu.add_product_(out, a, b, fresh=fresh)
    elif fresh:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)


@dataclass(frozen=True)
class Matmul:
    """How a linear layer multiplies. See the functions of these names."""

    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor] = linear
    input_gradient: Callable[[Tensor, Tensor], Tensor] = input_gradient
    product: Callable[[Tensor, Tensor], Tensor] = product
    add_product_: Callable[..., None] = add_product_


NATIVE = Matmul()
