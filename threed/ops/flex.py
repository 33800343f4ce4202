"""Causal attention with windows, soft caps and packed documents by FlexAttention (arXiv 2412.05496).

torch.compile generates one kernel for GPUs. The kernel skips blocks of 128 queries and 128 keys
without visible pairs, and compares positions and documents only in blocks where some pairs are
masked. The lists of blocks are computed from the positions of block borders, so no tensor has
s × s elements. Keys are not repeated for grouped queries.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

from threed.core.device import is_capturing
from threed.ops import launch

BLOCK = 128  # queries and keys per block
# Maximum number of generated kernels; one per combination of shapes, window and cap.
RECOMPILES = 64
# documents of a micro-batch -> (their version, {(length, window): the result of `block_mask`})
_MASKS = WeakTensorKeyDictionary()


def fits(q: Tensor) -> bool:
    """Returns whether FlexAttention supports q [b a s d] on its device."""
    supported = q.dtype in (torch.bfloat16, torch.float16, torch.float32) and q.shape[-1] >= 16
    if q.is_meta or not supported or not launch.on_gpu(q):
        return False
    return torch.compiler.is_compiling() or not problem(q.device)


@functools.cache
def problem(where: torch.device) -> str:
    """Returns why FlexAttention does not run on a GPU; "" if it runs.

    The first call for a device compiles and runs a small forward and backward, and warns if they
    fail. They fail, for example, if Triton or a C compiler is missing.
    """
    try:
        with _disable_current_modes(), torch.inference_mode(False), torch.enable_grad():
            x = torch.ones(1, 1, BLOCK, 16, dtype=torch.bfloat16, device=where, requires_grad=True)
            attend(x, x, x, 1, 0.0, None).sum().backward()
    except Exception as error:  # torch.compile raises errors of many types
        lines = str(error).strip().splitlines() or [type(error).__name__]
        text = f"FlexAttention does not run on {where}: {lines[0]}"
        cost = (
            "plain operations compute windows and soft caps instead; every layer then writes and reads the scores of each"
            " query several times (4 bytes per head and key in its window), and reads the borders of documents on the host"
        )
        warnings.warn(f"{text}; {cost}", stacklevel=2)
        return text
    return ""


def attend(
    q: Tensor, k: Tensor, v: Tensor, window: int, softcap: float, scale: float | None,
    documents: Tensor | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Returns causal attention [b a s d].

    Args:
        q: queries [b a s d].
        k: keys [b k s d].
        v: values [b k s d].
        window: number of positions that a query attends to, including its own. 0: no limit.
        softcap: c in c tanh(score / c), which replaces each score. 0: no cap.
        scale: factor of the scores. Default: 1 / sqrt(d).
        documents: number of each position's document, [b s], not decreasing along s. A query
            attends only to its own document. Default: each sequence is one document.
        sinks: attention sinks [a]. Default: none.
    """
    mask = block_mask(q.shape[2], window, q.device, documents)
    return compute(q, k, v, mask, softcap, scale, sinks)


def compute(
    q: Tensor, k: Tensor, v: Tensor, mask: Any, softcap: float, scale: float | None,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Returns attention [b a s d] under a mask.

    Args:
        q: queries [b a s d].
        k: keys [b k s d].
        v: values [b k s d].
        mask: torch's `BlockMask`.
        softcap: as in `attend`.
        scale: as in `attend`.
        sinks: as in `attend`.
    """
    how = (_cap(softcap) if softcap else None, mask, scale, q.shape[1] != k.shape[1])
    if sinks is None:
        return _kernel()(q, k, v, *how)
    from torch.nn.attention.flex_attention import AuxRequest  # imports torch's compiler

    y, found = _kernel()(q, k, v, *how, return_aux=AuxRequest(lse=True))
    return with_sinks(y, found.lse, sinks)


def with_sinks(y: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Returns attention with sinks, [b a s d].

    Args:
        y: attention without sinks [b a s d].
        lse: log-sum-exp [b a s].
        sinks: attention sinks [a].
    """
    return (y * torch.sigmoid(lse - sinks.unsqueeze(1)).unsqueeze(-1)).to(y.dtype)


def block_mask(length: int, window: int, device: torch.device, documents: Tensor | None) -> Any:
    """Returns the lists of blocks, and the mask inside of blocks, for `attend`.

    The result is cached per length and window, and per tensor of documents, so that the layers of a
    micro-batch share it. A CUDA graph computes it in every layer, because the documents of its next
    replay are other ones, in the same tensor.
    """
    if torch.compiler.is_compiling():
        return _block_mask(length, window, device, documents)
    if documents is None:
        return _cached_block_mask(length, window, device)
    if is_capturing(device):
        return _block_mask(length, window, device, documents)
    version = -1 if documents.is_inference() else documents._version
    if _MASKS.get(documents, (None,))[0] != version:
        _MASKS[documents] = version, {}
    masks = _MASKS[documents][1]
    if (length, window) not in masks:
        # An alias of the documents: if the value referred to its key, neither would be freed.
        masks[length, window] = _block_mask(length, window, device, documents.detach())
    return masks[length, window]


@functools.lru_cache(maxsize=32)
def _cached_block_mask(length: int, window: int, device: torch.device) -> Any:
    return _block_mask(length, window, device, None)


def _block_mask(length: int, window: int, device: torch.device, documents: Tensor | None) -> Any:
    from torch.nn.attention.flex_attention import BlockMask  # imports torch's compiler

    first = torch.arange(0, length, BLOCK, device=device)
    last = (first + BLOCK - 1).clamp_max(length - 1)
    queries, until = first.unsqueeze(1), last.unsqueeze(1)
    some, all_pairs = first <= until, last <= queries
    if window:
        some = some & (last > queries - window)
        all_pairs = all_pairs & (first > until - window)
    some, all_pairs = (x.view(1, 1, *x.shape) for x in (some, all_pairs))
    if documents is not None:
        lowest, highest = documents[:, None, first], documents[:, None, last]
        some = some & (highest.unsqueeze(2) >= lowest.unsqueeze(3))
        all_pairs = all_pairs & (lowest.unsqueeze(2) == highest.unsqueeze(3))
    visible = _visible(window) if documents is None else _visible_in_documents(window, documents)
    return BlockMask.from_kv_blocks(
        *listed(some & ~all_pairs), *listed(all_pairs), BLOCK, visible, (length, length)
    )


def listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the number of true elements per row, and the indices of a row, true elements first."""
    order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), order.to(torch.int32)


# The functions below are cached, because torch.compile generates a kernel per function object.


@functools.lru_cache(maxsize=32)
def _visible(window: int) -> Callable[..., Tensor]:
    def visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        causal = key <= query
        return causal & (key > query - window) if window else causal

    return visible


def _visible_in_documents(window: int, documents: Tensor) -> Callable[..., Tensor]:
    inside = _visible(window)

    def visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return inside(b, h, query, key) & (documents[b, query] == documents[b, key])

    return visible


@functools.lru_cache(maxsize=32)
def _cap(softcap: float) -> Callable[..., Tensor]:
    def capped(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped


@functools.cache
def _kernel() -> Callable[..., Any]:
    """Returns torch's flex_attention, compiled at its first use for a combination of arguments."""
    from torch.nn.attention.flex_attention import flex_attention  # imports torch's compiler

    limit = torch._dynamo.config.recompile_limit
    torch._dynamo.config.recompile_limit = max(limit, RECOMPILES)
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)
