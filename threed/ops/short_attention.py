"""Causal attention over short sequences in bf16, with a backward on AMX tiles.

The forward is torch's flash attention for CPUs. The backward (csrc/cpu/attention.cpp) is one call
that reads the packed projection qkv and writes the projection's gradient.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from threed.ops import attention_backends, fused_cpu


def reference(qkv: Tensor, d: int) -> Tensor:
    """Returns causal attention of packed heads of size d: qkv [s b 3ad] -> [s b ad]."""
    q, k, v = _heads(qkv, d)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return y.permute(2, 0, 1, 3).flatten(2)


def fits(qkv: Tensor, d: int) -> bool:
    """Returns whether `short_attention` supports qkv [s b 3ad] and is faster than `reference`."""
    if qkv.dtype != torch.bfloat16 or qkv.is_meta or torch.compiler.is_compiling():
        return False
    if torch.is_autocast_enabled("cpu") or not fused_cpu.attends_backward(qkv, d):
        return False
    s, b, _ = qkv.shape
    return _is_flash(s, b, d, qkv.dtype, torch.backends.cuda.flash_sdp_enabled())


def short_attention(qkv: Tensor, d: int) -> Tensor:
    """Returns the same as `reference`, for tensors that `fits` accepts.

    The result can be differentiated only once.
    """
    return _ShortAttention.apply(qkv, d)


class _ShortAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, d: int) -> Tensor:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        q, k, v = _heads(qkv, d)
        attention_backends.record("flash attention, threed's backward on AMX tiles", q, k, "causal")
        y, logarithms = flash(q, k, v, 0.0, True)
        ctx.save_for_backward(qkv, logarithms)
        ctx.d = d
        return y.permute(2, 0, 1, 3).flatten(2)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        qkv, logarithms = ctx.saved_tensors
        return fused_cpu.attention_backward(qkv, dy, logarithms, ctx.d), None


def _heads(qkv: Tensor, d: int) -> list[Tensor]:
    """Returns views of queries, keys and values [b a s d]."""
    return [part.unflatten(-1, (-1, d)).permute(1, 2, 0, 3) for part in qkv.chunk(3, -1)]


@functools.lru_cache(maxsize=64)
def _is_flash(s: int, b: int, d: int, dtype: torch.dtype, enabled: bool) -> bool:
    """Returns whether torch uses flash attention for causal attention of this shape on a CPU.

    enabled: whether flash attention is enabled in `torch.backends`. It is an argument only so that
    the cache has one entry per setting.
    """
    q = torch.empty(b, 1, s, d, dtype=dtype)
    chosen = torch._fused_sdp_choice(q, q, q, None, 0.0, True)
    return bool(chosen == SDPBackend.FLASH_ATTENTION.value)
