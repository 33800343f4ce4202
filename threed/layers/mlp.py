"""The feed-forward part of a block, sharded by inner features.

The activation is an element-wise function such as GELU (SwiGLU in `GatedMLP`), or a module with
parameters that carry a `ShardSpec`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from threed.layers.linear import ColumnLinear, RowLinear
from threed.layers.recompute import Recompute
from threed.layers.slicing import Slicing
from threed.ops import activation as activation_ops


def gelu(x: Tensor) -> Tensor:
    """Returns GELU of x in its tanh form."""
    return activation_ops.apply("gelu", x)


def gated(activation: Callable[[Tensor], Tensor], gate_up: Tensor) -> Tensor:
    """Returns activation(gate) * up: [... 2f] -> [... f]."""
    if activation is F.silu:
        return activation_ops.apply("swiglu", gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return activation(gate) * up


class MLP(nn.Module):
    """Returns down(activation(up(x))): x [s b h] -> [s b h] (with sequence parallelism [s/t b h]).

    Args:
        name: global name, the prefix of the parameters' names.
        hidden: hidden width h.
        ffn: number of inner features.
        slicing: parallel layout.
        bias: whether both linear layers have a bias.
        std: standard deviation of the initial weights of `up`.
        out_std: standard deviation of the initial weights of `down`.
        activation: element-wise function or module. Default: GELU in its tanh form.
    """

    recompute = Recompute()
    outputs: tuple[str, ...] = ("up",)  # names of the global matrices packed into `self.up`

    def __init__(
        self, name: str, hidden: int, ffn: int, slicing: Slicing, *, bias: bool = True, std: float = 0.02,
        out_std: float = 0.02, activation: Callable[[Tensor], Tensor] = gelu,
    ) -> None:  # fmt: skip
        super().__init__()
        self.activation = activation
        outputs = [(output, ffn) for output in self.outputs]
        self.up = ColumnLinear(name, hidden, outputs, slicing, std=std, bias=bias)
        self.down = RowLinear(f"{name}.down", ffn, hidden, slicing, std=out_std, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Returns down(activation(up(x))). Collective.

        Args:
            x: [s b h]; with sequence parallelism [s/t b h]. The result has the same shape.
        """
        y = self.recompute.column(self.up, x)
        return self.down(self.recompute.run("activation", self.activate, y))

    def activate(self, x: Tensor) -> Tensor:
        """Returns the activation of the output x of `up`; it is the input of `down`."""
        return self.activation(x)


class GatedMLP(MLP):
    """Returns down(activation(gate(x)) * up(x)) (arXiv 2002.05202): x [s b h] -> [s b h].

    One matmul computes the gate and up projections.

    Args:
        name: global name, the prefix of the parameters' names.
        hidden: hidden width h.
        ffn: number of inner features.
        slicing: parallel layout.
        bias: whether the linear layers have a bias.
        std: standard deviation of the initial weights of `gate` and `up`.
        out_std: standard deviation of the initial weights of `down`.
        activation: element-wise function or module. Default: SiLU (SwiGLU).
    """

    outputs = ("gate", "up")

    def __init__(
        self, name: str, hidden: int, ffn: int, slicing: Slicing, *, bias: bool = False, std: float = 0.02,
        out_std: float = 0.02, activation: Callable[[Tensor], Tensor] = F.silu,
    ) -> None:  # fmt: skip
        super().__init__(
            name, hidden, ffn, slicing, bias=bias, std=std, out_std=out_std, activation=activation
        )

    def activate(self, x: Tensor) -> Tensor:
        """Returns activation(gate) * up from the output x of the joint gate and up projection."""
        return gated(self.activation, x)
