"""The feed-forward part of a block, sharded by inner features.

The activation is an element-wise function such as GELU (SwiGLU in `GatedMLP`), or a module with
parameters that carry a `ShardSpec`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from threed.layers.linear import ColumnLinear, RowLinear
from threed.layers.recompute import Recompute
from threed.layers.slicing import Slicing, VectorGradient, for_autograd
from threed.ops import activation as activation_ops
from threed.ops import launch


def gelu(x: Tensor) -> Tensor:
    """Returns GELU of x in its tanh form."""
    return activation_ops.apply("gelu", x)


_GATED = {F.silu: "swiglu", gelu: "geglu"}  # names of the kernels of activation(gate) * up


class _BiasedGelu(torch.autograd.Function):
    """Returns GELU of x + bias. The backward sums the bias's gradient in the pass that computes that of x.

    tracked: the bias, or None if autograd needs no gradient for it (`for_autograd`).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, tracked: Tensor | None, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.bias = bias
        return activation_ops.gelu(x.view(-1, x.shape[-1]), bias).view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
        ((x,), bias) = ctx.saved_tensors, ctx.bias
        rows = dy.contiguous().view(-1, dy.shape[-1]), x.view(-1, x.shape[-1])
        if not bias.requires_grad:
            return activation_ops.gelu_backward(*rows, bias).view_as(x), None, None
        gradient = VectorGradient(bias)
        dx = activation_ops.gelu_backward(*rows, bias, gradient.out, add=gradient.add)
        ended = gradient.done()
        return dx.view_as(x), ended if ctx.needs_input_grad[1] else None, None


def gated(activation: Callable[[Tensor], Tensor], gate_up: Tensor) -> Tensor:
    """Returns activation(gate) * up: [... 2f] -> [... f]."""
    if activation in _GATED:
        return activation_ops.apply(_GATED[activation], gate_up)
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
    context = True
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
        if self._fuses_bias(x):
            y = self.recompute.column(self.up, x, add_bias=False)
            return self.down(self.recompute.run("activation", self._biased_gelu, y))
        y = self.recompute.column(self.up, x)
        return self.down(self.recompute.run("activation", self.activate, y))

    def _fuses_bias(self, x: Tensor) -> bool:
        """Returns whether one kernel adds the bias of `up` and computes the activation, for input x."""
        bias, up = self.up.bias, self.up
        plain = type(up) is ColumnLinear and not (
            up._forward_hooks or up._forward_pre_hooks or up._backward_hooks or up._backward_pre_hooks
        )  # fmt: skip
        return (
            self.activation is gelu and type(self).activate is MLP.activate and bias is not None and plain
            and activation_ops.fits(x, bias.numel()) and launch.packed(bias)  # the first is False under compile
        )  # fmt: skip

    def _biased_gelu(self, x: Tensor) -> Tensor:
        y: Tensor = _BiasedGelu.apply(x, *for_autograd(x, self.up.bias), self.up.bias)
        return y

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
