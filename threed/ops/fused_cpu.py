"""Fused CPU kernels.

The kernels for GELU, SwiGLU and cross entropy (csrc/cpu/fused.cpp) make one pass over memory. They
take contiguous fp32 or bf16 tensors and compute in fp32. Their results are the same for every
number of threads and every instruction set.

On processors with AMX tiles, the module also has matrix products of bf16 that are accumulated in
fp32 (csrc/cpu/products.cpp), and the backward of causal attention over short sequences
(csrc/cpu/attention.cpp).
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from threed.core import native
from threed.distributed.topology import default_device
from threed.ops import launch

TILE_BLOCK = 32  # number of rows, and of columns, in a block of AMX tiles
MIN_NUMEL = 1 << 15  # minimum number of elements; for fewer, torch's operations are faster
_FORMATS = {torch.float32: 1, torch.bfloat16: 2}


def fits(x: Tensor) -> bool:
    """Returns whether GELU, SwiGLU and cross entropy support x and are faster than torch.

    x must be contiguous, in fp32 or bf16, have at least MIN_NUMEL elements, and be on the CPU (or
    on the meta device in a CPU process). A compiled library must exist.
    """
    suits = x.numel() >= MIN_NUMEL and x.dtype in _FORMATS and _on_cpu(x) and x.is_contiguous()
    return suits and not torch.compiler.is_compiling() and native.library("cpu") is not None


def _on_cpu(x: Tensor) -> bool:
    return x.device.type == "cpu" or (x.is_meta and default_device().type == "cpu")


def gelu(x: Tensor, dy: Tensor | None = None) -> Tensor:
    """Returns GELU of x in its tanh form; if `dy` is given, the gradient of x instead.

    dy: gradient of the output.
    """
    _check("gelu", x, dy)
    out = torch.empty_like(x)
    _call(
        x,
        "threed_gelu",
        "iPPPqiis",
        _address(x),
        _address(dy),
        _address(out),
        x.numel(),
        *_settings(x),
    )
    return out


def swiglu(gate_up: Tensor, dy: Tensor | None = None) -> Tensor:
    """Returns silu(gate) * up; if `dy` is given, the gradient of `gate_up` instead.

    Args:
        gate_up: [... 2f], the gate in the first half.
        dy: gradient of the output, [... f].
    """
    f = gate_up.shape[-1] // 2
    _check("swiglu", gate_up)
    like = (gate_up.dtype, (*gate_up.shape[:-1], f))
    fits = gate_up.shape[-1] % 2 == 0 and (dy is None or (dy.dtype, dy.shape) == like)
    launch.check(fits, "swiglu", "[... 2f] and a gradient [... f]", gate_up, dy)
    out = torch.empty_like(gate_up) if dy is not None else gate_up.new_empty(*gate_up.shape[:-1], f)
    rows = gate_up.numel() // (2 * f) if f else 0
    given = None if dy is None else dy.contiguous()
    addresses = (_address(gate_up), _address(given), _address(out))
    _call(gate_up, "threed_swiglu", "iPPPqqiis", *addresses, rows, f, *_settings(gate_up))
    return out


def row_numbers(x: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Returns each row's maximum and sum of e^(x - maximum) over the first `columns` columns.

    Both results are fp32 [...] for x [... width].
    """
    _check("row_numbers", x)
    launch.check(0 < columns <= x.shape[-1], "row_numbers", f"{columns} columns or more", x)
    top, total = (x.new_empty(x.shape[:-1], dtype=torch.float32) for _ in range(2))
    sizes = (top.numel(), x.shape[-1], columns, _FORMATS[x.dtype])
    addresses = (_address(top), _address(total))
    how = _settings(x)[1:]
    _call(x, "threed_row_numbers", "iPqqqiPPis", _address(x), *sizes, *addresses, *how)
    return top, total


def softmax_gradient_(
    x: Tensor, columns: int, logarithm: Tensor, loss: Tensor, target: Tensor
) -> None:
    """Overwrites logits x with their gradient, (softmax(x) - one_hot(target)) * loss.

    softmax(x) is computed as e^(x - logarithm).

    Args:
        x: logits [... width]. Columns after the first `columns` become zero.
        columns: number of columns without padding.
        logarithm: log-sum-exp of each row, fp32 [...].
        loss: gradient of each row's loss, fp32 [...].
        target: column of the target, int64 [...]. Below 0: the target is not in these columns.
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
    how = _settings(x)[1:]
    _call(
        x,
        "threed_softmax_gradient",
        "iPqqqiPPPis",
        _address(x),
        *sizes,
        *map(_address, given),
        *how,
    )
    torch.autograd.graph.increment_version((x,))  # autograd does not see writes by native code


@functools.cache
def has_tiles() -> bool:
    """Returns whether this processor has AMX tiles for bf16 and a compiled library exists."""
    found = native.function("threed_tiles", "i")
    return found is not None and bool(found())


def adds_products(a: Tensor, b: Tensor) -> bool:
    """Returns whether `add_product_` supports these factors."""
    fits = a.dtype == b.dtype == torch.bfloat16 and a.dim() == b.dim() == 2
    fits = fits and _on_cpu(a) and _on_cpu(b) and a.t().is_contiguous() and b.is_contiguous()
    fits = fits and not (len(a) % TILE_BLOCK or b.shape[1] % TILE_BLOCK)
    return fits and len(b) > 0 and not torch.compiler.is_compiling() and has_tiles()


def add_product_(out: Tensor, a: Tensor, b: Tensor, *, fresh: bool) -> None:
    """Computes out += a b, or out = a b if `fresh`; the product a b is not rounded to bf16.

    Args:
        out: fp32 [m n], contiguous. m and n are multiples of 32.
        a: bf16 [m k], transposed in memory.
        b: bf16 [k n], contiguous.
        fresh: whether to overwrite out.
    """
    k, (m, n) = len(b), out.shape
    fits = adds_products(a, b) and out.dtype == torch.float32 and out.is_contiguous()
    fits = fits and (len(a), b.shape[1], a.shape[1]) == (m, n, k)
    wanted = "contiguous fp32 [m n], bf16 [k m] transposed and [k n]"
    launch.check(fits, "add_product_", wanted, out, a, b)
    packed = b.new_empty(-(-k // TILE_BLOCK) * TILE_BLOCK * n)
    addresses = (_address(a), _address(b), k, m, n, _address(out), int(fresh), _address(packed))
    _call(a, "threed_add_product", "iPPqqqPiPi", *addresses, torch.get_num_threads())


MAX_LENGTH, MAX_HEAD = 256, 128


def attends_backward(qkv: Tensor, d: int) -> bool:
    """Returns whether `attention_backward` supports a projection [s b 3ad] with heads of size d."""
    fits = qkv.dtype == torch.bfloat16 and _on_cpu(qkv) and qkv.is_contiguous() and qkv.numel() > 0
    return fits and len(qkv) <= MAX_LENGTH and d % TILE_BLOCK == 0 and d <= MAX_HEAD and has_tiles()


def attention_backward(qkv: Tensor, dy: Tensor, logarithms: Tensor, d: int) -> Tensor:
    """Returns the gradient of qkv [s b 3ad] for causal attention y [s b ad].

    The scale of the scores is 1 / sqrt(d).

    Args:
        qkv: packed projection, bf16 [s b 3ad], s up to 256.
        dy: gradient of y, bf16 [s b ad].
        logarithms: log-sum-exp of each query's scores, fp32 [b a s].
        d: size of a head, a multiple of 32 up to 128.
    """
    s, b, width = qkv.shape
    heads, out = width // (3 * d), torch.empty_like(qkv)
    dy, logarithms = dy.contiguous(), logarithms.contiguous()
    fits = attends_backward(qkv, d) and width == 3 * heads * d and dy.dtype == qkv.dtype
    fits = fits and dy.shape == (s, b, heads * d) and logarithms.shape == (b, heads, s)
    wanted = "bf16 [s b 3ad], [s b ad], fp32 [b a s]"
    launch.check(fits, "attention_backward", wanted, qkv, dy, logarithms)
    addresses = (_address(qkv), _address(dy), _address(logarithms), _address(out))
    sizes = (s, b, heads, d, d**-0.5)
    _call(
        qkv, "threed_attention_backward", "iPPPPqqqqdi", *addresses, *sizes, torch.get_num_threads()
    )
    return out


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _settings(x: Tensor) -> tuple[int, int, bytes | None]:
    return _FORMATS[x.dtype], torch.get_num_threads(), instructions()


def instructions() -> bytes | None:
    """Returns the instruction set for GELU, SwiGLU and cross entropy; None: the best available.

    Tests replace this function to select an instruction set.
    """
    return None


def _check(name: str, x: Tensor, like: Tensor | None = None) -> None:
    fits = x.dtype in _FORMATS and _on_cpu(x) and x.is_contiguous()
    expected = (x.dtype, x.shape, True)
    fits = fits and (like is None or (like.dtype, like.shape, like.is_contiguous()) == expected)
    launch.check(fits, name, "contiguous fp32 or bf16 tensors on the CPU", x, like)


def _call(x: Tensor, name: str, types: str, *arguments: object) -> None:
    if not x.is_meta:
        native.call(name, types, *arguments)
