"""Lion (arXiv 2302.06675, algorithm 2) on a flat slice: the sign of an interpolated momentum, with decoupled decay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from threed.ops.update import Moment

CHUNK = 2**18  # elements worked on at a time: temporaries stay in the cache, and do not grow with the model


@dataclass(frozen=True)
class Lion:
    """The constants of the update; see `Rule`."""

    beta1: float = 0.9
    beta2: float = 0.99
    parts: tuple[str, ...] = ("exp_avg",)

    def update(self, p: Tensor, g: Tensor, state: Sequence[Tensor], now: Moment, decay: float) -> None:
        """One update in place."""
        for first in range(0, len(p), CHUNK):
            part = slice(first, first + CHUNK)
            reference(p[part], g[part], [state[0][part]], now, self, decay)


def reference(p: Tensor, g: Tensor, state: Sequence[Tensor], now: Moment, lion: Lion, decay: float) -> None:
    """The same update in plain operations."""
    (m,), lr = state, now.lr.to(p.dtype)
    go = now.skip == 0
    g = g.to(p.dtype) * now.scale.to(p.dtype)
    direction = torch.lerp(g, m, lion.beta1).sign_()
    p.copy_(torch.where(go, p * (1 - lr * decay) - lr * direction, p))
    m.copy_(torch.where(go, torch.lerp(g, m, lion.beta2), m))
