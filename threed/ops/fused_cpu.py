"""GELU, SwiGLU and cross entropy on the CPU, each in one pass over memory: csrc/cpu/fused.cpp. On processors with tiles
(AMX) also products of bf16 that are added to fp32 as they are made (csrc/cpu/products.cpp), and the backward of causal
attention over short sequences (csrc/cpu/attention.cpp).

The first take contiguous fp32 or bf16 tensors and compute in fp32. The result does not depend on the number of threads,
nor on the instructions.
"""

from __future__ import annotations

import functools
import os

import torch
from torch import Tensor

from threed import native
from threed.ops import launch
from threed.topology import default_device

SIDE = 32  # of a block of tiles
FROM = 1 << 15  # numbers: below, torch's own operations cost the host less than a call from Python
_FORMATS = {torch.float32: 1, torch.bfloat16: 2}


def fits(x: Tensor) -> bool:
    """Returns whether these functions take x, and pay: it is large, on the CPU (or on the meta device, where a step of
    it is only looked at), and there is a compiled library."""
    suits = x.numel() >= FROM and x.dtype in _FORMATS and _on_cpu(x) and x.is_contiguous()
    return suits and not torch.compiler.is_compiling() and native.library("cpu") is not None


def _on_cpu(x: Tensor) -> bool:
    return x.device.type == "cpu" or (x.is_meta and default_device().type == "cpu")


def gelu(x: Tensor, dy: Tensor | None = None) -> Tensor:
    """GELU of x in its tanh form; or the gradient of x, where dy is given."""
    _check("gelu", x, dy)
    out = torch.empty_like(x)
    _call(x, "threed_gelu", "iPPPqiis", _at(x), _at(dy), _at(out), x.numel(), *_how(x))
    return out


def swiglu(gate_up: Tensor, dy: Tensor | None = None) -> Tensor:
    """silu(gate) * up, [... 2f] -> [... f]; or the gradient of gate_up, where dy [... f] is given."""
    f = gate_up.shape[-1] // 2
    _check("swiglu", gate_up)
    like = (gate_up.dtype, (*gate_up.shape[:-1], f))
    fits = gate_up.shape[-1] % 2 == 0 and (dy is None or (dy.dtype, dy.shape) == like)
    launch.check(fits, "swiglu", "[... 2f] and a gradient [... f]", gate_up, dy)
    out = torch.empty_like(gate_up) if dy is not None else gate_up.new_empty(*gate_up.shape[:-1], f)
    rows = gate_up.numel() // (2 * f) if f else 0
    given = None if dy is None else dy.contiguous()
    places = (_at(gate_up), _at(given), _at(out))
    _call(gate_up, "threed_swiglu", "iPPPqqiis", *places, rows, f, *_how(gate_up))
    return out


def row_numbers(x: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Of the first `columns` of each row of x [... width]: the largest number, and the sum of e^(x - largest), fp32."""
    _check("row_numbers", x)
    launch.check(0 < columns <= x.shape[-1], "row_numbers", f"{columns} columns or more", x)
    top, total = (x.new_empty(x.shape[:-1], dtype=torch.float32) for _ in range(2))
    sizes = (top.numel(), x.shape[-1], columns, _FORMATS[x.dtype])
    places = (_at(top), _at(total))
    how = _how(x)[1:]
    _call(x, "threed_row_numbers", "iPqqqiPPis", _at(x), *sizes, *places, *how)
    return top, total


def softmax_gradient_(
    x: Tensor, columns: int, logarithm: Tensor, loss: Tensor, target: Tensor
) -> None:
    """x = e^(x - logarithm) * loss, less `loss` in each row's column `target`; columns beyond the first ones are zero.

    x: [... width]. logarithm (of a row's sum of exponentials), loss: fp32 [...]. target: int64 [...], below 0 for none.
    """
    _check("softmax_gradient_", x)
    rows = (logarithm, loss)
    fits = all(t.dtype == torch.float32 and t.shape == x.shape[:-1] for t in rows)
    fits = fits and 0 < columns <= x.shape[-1]
    fits = fits and target.dtype == torch.int64 and target.shape == x.shape[:-1]
    wanted = "fp32 and int64 [...] for [... width]"
    launch.check(fits, "softmax_gradient_", wanted, x, *rows, target)
    given = [t.contiguous() for t in (*rows, target)]
    sizes = (target.numel(), x.shape[-1], columns, _FORMATS[x.dtype])
    how = _how(x)[1:]
    _call(x, "threed_softmax_gradient", "iPqqqiPPPis", _at(x), *sizes, *map(_at, given), *how)
    torch.autograd.graph.increment_version((x,))  # it wrote behind autograd's back


@functools.cache
def has_tiles() -> bool:
    """Returns whether this processor multiplies tiles of bf16, and there is a compiled library."""
    found = native.function("threed_tiles", "i")
    return found is not None and bool(found())


def adds_products(a: Tensor, b: Tensor) -> bool:
    """Returns whether `add_product_` takes these factors."""
    fits = a.dtype == b.dtype == torch.bfloat16 and a.dim() == b.dim() == 2
    fits = fits and _on_cpu(a) and _on_cpu(b) and a.t().is_contiguous() and b.is_contiguous()
    fits = fits and not (len(a) % SIDE or b.shape[1] % SIDE)
    return fits and len(b) > 0 and not torch.compiler.is_compiling() and has_tiles()


def add_product_(out: Tensor, a: Tensor, b: Tensor, *, fresh: bool) -> None:
    """out += a b, or out = a b when `fresh`, without rounding to bf16.

    out: fp32 [m n], contiguous. a: bf16 [m k], transposed. b: bf16 [k n]. m and n are multiples of 32.
    """
    k, (m, n) = len(b), out.shape
    fits = adds_products(a, b) and out.dtype == torch.float32 and out.is_contiguous()
    fits = fits and (len(a), b.shape[1], a.shape[1]) == (m, n, k)
    wanted = "contiguous fp32 [m n], bf16 [k m] transposed and [k n]"
    launch.check(fits, "add_product_", wanted, out, a, b)
    packed = b.new_empty(-(-k // SIDE) * SIDE * n)
    places = (_at(a), _at(b), k, m, n, _at(out), int(fresh), _at(packed))
    _call(a, "threed_add_product", "iPPqqqPiPi", *places, torch.get_num_threads())


LONGEST, WIDEST_HEAD = 256, 128


def attends_backward(qkv: Tensor, d: int) -> bool:
    """Returns whether `attention_backward` takes this projection [s b 3ad] of heads of size d, and pays."""
    fits = qkv.dtype == torch.bfloat16 and _on_cpu(qkv) and qkv.is_contiguous() and qkv.numel() > 0
    return fits and len(qkv) <= LONGEST and d % SIDE == 0 and d <= WIDEST_HEAD and has_tiles()


def attention_backward(qkv: Tensor, dy: Tensor, logarithms: Tensor, d: int) -> Tensor:
    """The gradient of qkv [s b 3ad] of causal attention y [s b ad], whose gradient is dy; bf16, s up to 256.

    logarithms: of the sum of each row's exponentials, fp32 [b a s]. d: a head's size, a multiple of 32 up to 128.
    Scores are scaled by 1 / sqrt(d).
    """
    s, b, width = qkv.shape
    heads, out = width // (3 * d), torch.empty_like(qkv)
    dy, logarithms = dy.contiguous(), logarithms.contiguous()
    fits = attends_backward(qkv, d) and width == 3 * heads * d and dy.dtype == qkv.dtype
    fits = fits and dy.shape == (s, b, heads * d) and logarithms.shape == (b, heads, s)
    wanted = "bf16 [s b 3ad], [s b ad], fp32 [b a s]"
    launch.check(fits, "attention_backward", wanted, qkv, dy, logarithms)
    places, sizes = (_at(qkv), _at(dy), _at(logarithms), _at(out)), (s, b, heads, d, d**-0.5)
    _call(qkv, "threed_attention_backward", "iPPPPqqqqdi", *places, *sizes, torch.get_num_threads())
    return out


def _at(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _how(x: Tensor) -> tuple[int, int, bytes | None]:
    return _FORMATS[x.dtype], torch.get_num_threads(), instructions()


def instructions() -> bytes | None:
    """Returns the instruction set of the first functions; None: the best of this processor. Replaced by tests."""
    return None


def _check(name: str, x: Tensor, like: Tensor | None = None) -> None:
    fits = x.dtype in _FORMATS and _on_cpu(x) and x.is_contiguous()
    alike = (x.dtype, x.shape, True)
    fits = fits and (like is None or (like.dtype, like.shape, like.is_contiguous()) == alike)
    launch.check(fits, name, "contiguous fp32 or bf16 tensors on the CPU", x, like)


def _call(x: Tensor, name: str, types: str, *arguments: object) -> None:
    if x.is_meta:
        return
    function = native.function(name, types)
    if function is None:
        raise RuntimeError(
            "threed has no native library for the CPU here: `threed inspect` says why"
        )
    if code := function(*arguments):
        raise RuntimeError(f"{name}: {os.strerror(code)}")
