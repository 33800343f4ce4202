"""Matrix products of linear layers, by torch or oneDNN.

    by = matmul.NATIVE                          the default of `layers.linear.Product.matmul`
    y = by.linear(x, weight, bias)
    dx = by.input_gradient(dy, weight)
    by.add_product_(dw, dy.t(), x, fresh=...)   adds to the gradient's buffer dw
    dw = by.product(dy.t(), x)                  returns a new tensor

A different implementation, such as fp8, is an instance of `Matmul` with its own functions.

oneDNN is used for fp32 on AMD processors with AVX-512. On these processors torch by default calls
MKL, which runs only a 256-bit kernel on processors of vendors other than Intel. oneDNN, which torch
ships and uses for narrower types, compiles a kernel for the processor. On a Zen 5 core, oneDNN
reaches 225 GFLOP/s and MKL 97. The choice depends only on processor, dtype and device, not on a
measurement. So all ranks make the same choice, and a resumed run makes it again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from threed.distributed.topology import default_device
from threed.ops import fused_cpu, launch


@functools.cache
def _onednn_is_faster() -> bool:
    """Returns whether oneDNN is faster than MKL here: on AMD processors with AVX-512.

    Returns False if this torch has no oneDNN.
    """
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
    """Returns x weight^T + bias, without autograd: x [... in], weight [out in] -> [... out].

    The weight may have any strides.
    """
    if not _by_onednn(x, weight):
        return F.linear(x, weight, bias)
    flat = torch.ops.mkldnn._linear_pointwise(x.flatten(0, -2), weight, bias, "none", [], "")
    # The result must not be a view for autograd: the loss overwrites its logits in place, which
    # autograd rejects for a view.
    return torch.ops.aten._unsafe_view(flat, (*x.shape[:-1], len(weight)))


def input_gradient(rows: Tensor, weight: Tensor) -> Tensor:
    """Returns the product of rows [m out] and weight [out in], without autograd: [m in]."""
    return linear(rows, weight.t()) if _by_onednn(rows, weight) else torch.mm(rows, weight)


def product(a: Tensor, b: Tensor) -> Tensor:
    """Returns the product of a [m k] and b [k n], without autograd: [m n]."""
    if not _by_onednn(a, b, default_device().type if a.is_meta else ""):
        return torch.mm(a, b)
    # Before a product, oneDNN copies its second operand to a faster layout, but not the first. If
    # `a` is transposed in memory and larger than b, it is passed second: a b = (b^T a^T)^T.
    swapped = a.stride(0) == 1 and len(a) > b.shape[1]
    return linear(b.t(), a).t() if swapped else linear(a, b.t())


def widens(a: Tensor, b: Tensor, to: torch.dtype) -> bool:
    """Returns whether a kernel adds the product a b to a tensor of dtype `to` without rounding it.

    Otherwise the product would first be rounded to the dtype of a [m k] and b [k n].
    """
    if to != torch.float32 or a.dtype not in (torch.bfloat16, torch.float16):
        return False
    if launch.on_gpu(a):
        return hasattr(torch.ops.aten.addmm, "dtype_out")  # torch has this overload since 2.11
    return fused_cpu.adds_products(a, b)


def add_product_(out: Tensor, a: Tensor, b: Tensor, *, fresh: bool) -> None:
    """Computes out += a b, or out = a b if `fresh`.

    If out has a wider dtype than a and b, there are two cases. If `widens` returns True, the
    product is added without rounding. Otherwise it is first rounded to the dtype of a and b. On the
    meta device the function allocates the same tensors as on the default device, so that a cost
    trace counts them.

    Args:
        out: [m n].
        a: [m k].
        b: [k n].
        fresh: whether to overwrite out.
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
    elif fresh or out.is_meta:  # torch 2.11 has no addmm with out_dtype on the meta device
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)


@dataclass(frozen=True)
class Matmul:
    """The matrix products of a linear layer.

    By default, each attribute is the function of this module with the same name.
    """

    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor] = linear
    input_gradient: Callable[[Tensor, Tensor], Tensor] = input_gradient
    product: Callable[[Tensor, Tensor], Tensor] = product
    add_product_: Callable[..., None] = add_product_


NATIVE = Matmul()


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _wide_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return linear(_wide(x), _wide(weight), None if bias is None else _wide(bias))


def _wide_input_gradient(rows: Tensor, weight: Tensor) -> Tensor:
    return input_gradient(rows, _wide(weight)).to(weight.dtype)


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    return product(a, _wide(b)).to(b.dtype)


def _add_wide_product_(out: Tensor, a: Tensor, b: Tensor, *, fresh: bool) -> None:
    add_product_(out, a, _wide(b), fresh=fresh)


# Computes a layer's products in fp32 at least, and returns its output in that dtype.
WIDE = Matmul(_wide_linear, _wide_input_gradient, _wide_product, _add_wide_product_)
