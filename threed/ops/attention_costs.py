"""Costs of attention: FLOPs of the fused operators, and their substitutes in traces on the meta device."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from threed.ops import attention

FUSED_BACKWARD = tuple(
    getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention_backward")
    for kernel in ("efficient", "flash", "cudnn")
)


def kernel_flops(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
    """Returns the FLOPs of a fused operator's forward, over all pairs of queries and keys."""
    return 2 * math.prod(q.shape[:-1]) * k.shape[-2] * (q.shape[-1] + v.shape[-1])


def kernel_backward_flops(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
    """Returns the FLOPs of a fused operator's backward, with the recomputation of the scores.

    The formula of torch 2.10 refuses fewer key heads than query heads.
    """
    return 2 * math.prod(q.shape[:-1]) * k.shape[-2] * (3 * q.shape[-1] + 2 * v.shape[-1])


def on_meta(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Computes torch's `scaled_dot_product_attention` of meta tensors by a fused operator.

    For meta tensors torch itself would use its unfused implementation, so a cost trace would count
    the memory of a score matrix that does not exist in a real run.
    """
    learned = attn_mask is not None and attn_mask.requires_grad
    if query.shape[-1] == value.shape[-1] and not learned:
        return attention.FLASH(query, key, value, 0.0, is_causal, attn_mask=attn_mask)[0]
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    return attention.EFFICIENT(query, key, value, attn_mask, True, 0.0, is_causal)[0]
