"""LayerNorm and RMSNorm: whole on every tensor rank, over its part of the sequence when sequences are cut.

partial, of both: as in `Slicing.shared`; True for a norm over heads, of which a rank sees its own only.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from threed.layers.slicing import Slicing
from threed.sharding import parameter, vector


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dimension: [... h] -> [... h]."""

    def __init__(
        self, name: str, width: int, slicing: Slicing, *, eps: float = 1e-5, bias: bool = True,
        partial: bool | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.width, self.eps = width, eps
        spec = slicing.shared(vector(f"{name}.weight", width, value=1.0), partial=partial)
        self.weight = parameter(spec, (width,))
        spec = slicing.shared(vector(f"{name}.bias", width), partial=partial)
        self.bias = parameter(spec, (width,)) if bias else None

    def flops(self, tokens: int, seq: int) -> int:
        """None that count."""
        return 0

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (self.width,), self.weight, self.bias, self.eps)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv 1910.07467): [... h] -> [... h]."""

    def __init__(
        self, name: str, width: int, slicing: Slicing, *, eps: float = 1e-5, partial: bool | None = None
    ) -> None:
        super().__init__()
        self.width, self.eps = width, eps
        spec = slicing.shared(vector(f"{name}.weight", width, value=1.0), partial=partial)
        self.weight = parameter(spec, (width,))

    def flops(self, tokens: int, seq: int) -> int:
        """None that count."""
        return 0

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (self.width,), self.weight, self.eps)
