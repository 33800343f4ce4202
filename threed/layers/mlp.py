"""The feed-forward part of a block, cut by its inner features: GELU, or gated with SiLU (SwiGLU)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from threed.layers.linear import ColumnLinear, RowLinear
from threed.layers.recompute import Recompute
from threed.layers.slicing import Slicing


def gelu(x: Tensor) -> Tensor:
    """GELU in its tanh form."""
    return F.gelu(x, approximate="tanh")


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up: [... 2f] -> [... f]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


class MLP(nn.Module):
    """down(gelu(up(x))): x [s b h] -> [s b h] (both [s/t b h] when sequences are cut); GELU in its tanh form."""

    recompute = Recompute()

    def __init__(
        self, name: str, hidden: int, ffn: int, slicing: Slicing, *, bias: bool = True, std: float = 0.02,
        out_std: float = 0.02,
    ) -> None:  # fmt: skip
        super().__init__()
        self.up = ColumnLinear(name, hidden, [("up", ffn)], slicing, std=std, bias=bias)
        self.down = RowLinear(f"{name}.down", ffn, hidden, slicing, std=out_std, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.recompute.run("activation", gelu, self.recompute.column(self.up, x)))


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)) (SwiGLU, arXiv 2002.05202): x [s b h] -> [s b h]; gate and up are one matmul."""

    recompute = Recompute()

    def __init__(
        self, name: str, hidden: int, ffn: int, slicing: Slicing, *, bias: bool = False, std: float = 0.02,
        out_std: float = 0.02,
    ) -> None:  # fmt: skip
        super().__init__()
        self.gate_up = ColumnLinear(name, hidden, [("gate", ffn), ("up", ffn)], slicing, std=std, bias=bias)
        self.down = RowLinear(f"{name}.down", ffn, hidden, slicing, std=out_std, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.recompute.run("activation", swiglu, self.recompute.column(self.gate_up, x)))
