"""Causal attention as some models have it: within a window, with a bound on scores, at a scale of their own.

    Attention(..., core=Causal(window=4096, softcap=50.0, scale=256**-0.5))

Without a bound it is torch's fused attention, with a mask where there is a window. torch has none with a bound, and on
CPUs none that leaves out what a short window hides: these are computed here for some queries at a time, with the keys
that they see, in tensors of bounded size, and again in the backward (arXiv 2205.14135).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from threed.layers.attention import attend
from threed.topology import default_device

SCORES, SCORES_ON_CPU = (
    1 << 25,
    1 << 19,
)  # in one tensor, of which there are three: 128 MiB in fp32; 2 MiB, in a cache


@dataclass(frozen=True)
class Causal:
    """A core of `Attention`. window: positions that a query sees, its own the last; 0: all before it. softcap: c, where
    scores become c tanh(score / c) (arXiv 2408.00118); 0: none. scale: of scores, by default 1 / sqrt(d)."""

    window: int = 0
    softcap: float = 0.0
    scale: float | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [s b a d], k and v [s b k d] -> [s b (a d)]."""
        length = q.shape[0]
        window = self.window if 0 < self.window < length else 0
        if self.softcap or (0 < 2 * window <= length and _on_cpu(q)):
            scale = q.shape[-1] ** -0.5 if self.scale is None else self.scale
            y: Tensor = _InParts.apply(q, k, v, window or length, self.softcap, scale)
            return y
        make = window_mask.__wrapped__ if torch.compiler.is_compiling() else window_mask
        mask = make(length, window, q.device, q.dtype) if window else None
        return attend(q, k, v, mask, self.scale)

    def flops(self, tokens: int, seq: int, heads: int, size: int) -> int:
        """FLOPs of a forward, over the whole square of positions."""
        return 4 * tokens * seq * heads * size


def _on_cpu(q: Tensor) -> bool:
    """Whether it is computed on a CPU; costs are looked for on the meta device, for the one that will be used."""
    return (default_device() if q.is_meta else q.device).type == "cpu"


@functools.lru_cache(maxsize=4)
def window_mask(length: int, window: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """What is added to scores [s s]: 0 where a query sees a key, else minus infinity."""
    at = torch.arange(length, device=device)
    seen = (at <= at.unsqueeze(1)) & (at > at.unsqueeze(1) - window)
    return torch.zeros(length, length, dtype=dtype, device=device).masked_fill_(~seen, -torch.inf)


class _InParts(torch.autograd.Function):
    """Attention in a window, with a bound on scores (0: none); keeps queries, keys, values, its output, and a number a
    query and head."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, window: int, cap: float, scale: float
    ) -> Tensor:
        s, b, a, d = q.shape
        k, v = k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3)  # [b k s d]
        y = q.new_empty(b, a, s, d)
        sums = q.new_empty(b, a, s, dtype=torch.promote_types(q.dtype, torch.float32))
        for rows, keys in _parts(q, window):
            scores, _ = _scores(
                _grouped(q[rows], k), k[:, :, keys], (rows, keys, window), cap, scale
            )
            logarithm = scores.logsumexp(-1, keepdim=True)
            shares = scores.sub_(logarithm).exp_().to(v.dtype)
            y[:, :, rows] = (shares @ v[:, :, keys]).view(b, a, -1, d)
            sums[:, :, rows] = logarithm.view(b, a, -1)
        y = y.permute(2, 0, 1, 3).flatten(2)
        ctx.save_for_backward(q, k, v, y, sums)
        ctx.of = window, cap, scale
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, y, sums = ctx.saved_tensors
        (window, cap, scale), (_, b, a, d) = ctx.of, q.shape
        dq, y, dy = torch.empty_like(q), y.view(q.shape), dy.reshape(q.shape)
        dk, dv = (torch.zeros(k.shape, dtype=sums.dtype, device=k.device) for _ in range(2))
        for rows, keys in _parts(q, window):
            own, given = _grouped(q[rows], k), _grouped(dy[rows], k)
            scores, bounded = _scores(own, k[:, :, keys], (rows, keys, window), cap, scale)
            shares = scores.sub_(sums[:, :, rows].reshape(*own.shape[:3], 1)).exp_()
            dv[:, :, keys] += shares.to(v.dtype).mT @ given
            beside = (given * _grouped(y[rows], k)).sum(-1, keepdim=True, dtype=sums.dtype)
            change = (given @ v[:, :, keys].mT).to(sums.dtype).sub_(beside).mul_(shares)
            change = change if bounded is None else change.mul_(bounded.square_().neg_().add_(1))
            change = change.mul_(scale).to(q.dtype)
            dq[rows] = (change @ k[:, :, keys]).view(b, a, -1, d).permute(2, 0, 1, 3)
            dk[:, :, keys] += change.mT @ own
        dk, dv = (gradient.to(k.dtype).permute(2, 0, 1, 3) for gradient in (dk, dv))
        return dq, dk, dv, None, None, None


def _parts(q: Tensor, window: int) -> Iterator[tuple[slice, slice]]:
    """Queries and the keys that these see, for each part of bounded size."""
    s, b, a, _ = q.shape
    most = SCORES_ON_CPU if _on_cpu(q) else SCORES
    count = min(max(16, most // (b * a * min(s, 2 * window))), max(window, 64))
    for first in range(0, s, count):
        last = min(s, first + count)
        # Where nothing is computed, costs are looked for: attention is counted over the whole square of positions.
        yield (
            slice(first, last),
            slice(0, s) if q.is_meta else slice(max(0, first - window + 1), last),
        )


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    """Heads [n b a d] that share one of k [b k s d], together: [b k (g n) d]."""
    return x.permute(1, 2, 0, 3).reshape(x.shape[1], k.shape[1], -1, x.shape[-1])


def _scores(
    q: Tensor, k: Tensor, seen: tuple[slice, slice, int], cap: float, scale: float
) -> tuple[Tensor, Tensor | None]:
    """Scores [b k (g n) m] in fp32 at least, minus infinity where a key is not seen, and their tanh if bounded."""
    rows, keys, window = seen
    scores, bounded = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32)), None
    if cap:
        bounded = scores.mul_(scale / cap).tanh_()
        scores = bounded * cap
    else:
        scores.mul_(scale)
    query, key = (torch.arange(part.start, part.stop, device=q.device) for part in (rows, keys))
    hidden = (key > query.unsqueeze(1)) | (key <= query.unsqueeze(1) - window)
    scores.unflatten(2, (-1, len(query))).masked_fill_(hidden, -torch.inf)
    return scores, bounded
