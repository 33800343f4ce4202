"""LayerNorm and RMSNorm: whole on every tensor rank, over its part of the sequence when sequences are cut."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from threed.layers.slicing import Slicing
from threed.sharding import ShardSpec, parameter, vector


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dimension: [... h] -> [... h]."""

    def __init__(self, name: str, width: int, slicing: Slicing, *, eps: float = 1e-5, bias: bool = True) -> None:
        super().__init__()
        self.width, self.eps = width, eps
        spec = ShardSpec(
            (vector(f"{name}.weight", width, value=1.0),), slicing.replicated, slicing.partial, decay=False
        )
        self.weight = parameter(spec, (width,))
        spec = ShardSpec((vector(f"{name}.bias", width),), slicing.replicated, slicing.partial, decay=False)
        self.bias = parameter(spec, (width,)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (self.width,), self.weight, self.bias, self.eps)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv 1910.07467): [... h] -> [... h].

    partial: the axis its gradient is partial over, where that is not the rule for layers between blocks (a norm over
    heads sees this rank's heads only).
    """

    def __init__(
        self, name: str, width: int, slicing: Slicing, *, eps: float = 1e-5, partial: str | None = None
    ) -> None:
        super().__init__()
        self.width, self.eps = width, eps
        spec = ShardSpec(
            (vector(f"{name}.weight", width, value=1.0),), slicing.replicated, partial or slicing.partial, decay=False
        )
        self.weight = parameter(spec, (width,))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (self.width,), self.weight, self.eps)
