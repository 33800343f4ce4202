"""The feed-forward part of a block, sharded by inner features.

The activation is an element-wise function such as GELU (SwiGLU in `GatedMLP`), or a module with
parameters that carry a `ShardSpec`.

With `--recompute.mlp-chunks N`, an MLP runs on one of N chunks of the sequence at a time, and
computes each chunk again in the backward (tiled MLP, arXiv 2506.13996, section 3.1.1). Only the
inner features of one chunk, [s/N b f], exist at a time; the MLP saves only its input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from threed.distributed.collectives import split
from threed.layers.linear import ColumnLinear, RowLinear
from threed.layers.recompute import Recompute, RngState
from threed.layers.slicing import (
    Slicing,
    VectorGradient,
    for_autograd,
    has_gradient_hooks,
    is_plain,
    one_contribution,
    sink_of,
)
from threed.ops import activation as activation_ops
from threed.ops import launch


def gelu(x: Tensor) -> Tensor:
    """Returns GELU of x in its tanh form."""
    return activation_ops.apply("gelu", x)


def squared_relu(x: Tensor) -> Tensor:
    """Returns max(x, 0)^2 (arXiv 2109.08668)."""
    return activation_ops.apply("squared_relu", x)


def clamped_swiglu(gate_up: Tensor) -> Tensor:
    """Returns gate * sigmoid(1.702 gate) * (up + 1) of clamped gate and up, as in gpt-oss.

    The gate is clamped to at most 7, and up to [-7, 7]. Pass this function as the activation of
    `GatedMLP` or `MixtureOfExperts`, in place of an activation of the gates alone.

    Args:
        gate_up: gate and up, [... 2f].

    Returns:
        [... f].
    """
    return activation_ops.apply("clamped_swiglu", gate_up)


# names of the kernels of activation(gate) * up, and of functions of gate and up
_GATED = {F.silu: "swiglu", gelu: "geglu", clamped_swiglu: "clamped_swiglu"}
# kernels of activation(x + bias): forward and backward
_BIASED: dict[Callable[[Tensor], Tensor], tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    gelu: (activation_ops.gelu, activation_ops.gelu_backward),
    squared_relu: (activation_ops.squared_relu, activation_ops.squared_relu_backward),
}


class _Biased(torch.autograd.Function):
    """Returns activation(x + bias). The backward sums the bias's gradient in the pass that computes that of x.

    tracked: the bias, or None if autograd needs no gradient for it (`for_autograd`).
    """

    @staticmethod
    def forward(
        ctx: Any,
        activation: Callable[[Tensor], Tensor],
        x: Tensor,
        tracked: Tensor | None,
        bias: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.bias = bias
        forward, ctx.kernel = _BIASED[activation]
        return forward(x.view(-1, x.shape[-1]), bias).view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor, Tensor | None, None]:
        ((x,), bias) = ctx.saved_tensors, ctx.bias
        rows = dy.contiguous().view(-1, dy.shape[-1]), x.view(-1, x.shape[-1])
        if not bias.requires_grad:
            return None, ctx.kernel(*rows, bias).view_as(x), None, None
        gradient = VectorGradient(bias)
        dx = ctx.kernel(*rows, bias, gradient.out, add=gradient.add)
        ended = gradient.done()
        return None, dx.view_as(x), ended if ctx.needs_input_grad[2] else None, None


def gated(activation: Callable[[Tensor], Tensor], gate_up: Tensor) -> Tensor:
    """Returns activation(gate) * up: [... 2f] -> [... f]."""
    if activation in _GATED:
        return activation_ops.apply(_GATED[activation], gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return activation(gate) * up


class _InChunks(torch.autograd.Function):
    """Runs an MLP on one chunk of the sequence at a time, in the forward and in the backward.

    With sequence parallelism, a chunk consists of positions of every tensor rank, and is gathered
    and reduce-scattered on its own. So the gathered input of only one chunk exists at a time, and
    the forward sends as many bytes as without chunks. The backward gathers the input again.

    tracked: the parameters, as in `layers.linear._Linear`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, mlp: MLP, chunks: int, *tracked: Tensor | None) -> Tensor:
        ctx.mlp, ctx.rng = mlp, RngState(x.device)
        ctx.parts = [slice(*split(len(x), chunks, i)) for i in range(chunks)]
        y: Tensor | None = None
        for at in ctx.parts:
            part = mlp.down(mlp._inner(x[at]))
            y = part.new_empty(len(x), *part.shape[1:]) if y is None else y
            y[at] = part
        ctx.rng.drawn()
        ctx.save_for_backward(x)
        assert y is not None
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x,), mlp, dx = ctx.saved_tensors, ctx.mlp, None
        if torch.is_grad_enabled():
            raise RuntimeError(
                "torch.autograd.grad with create_graph=True, through an MLP that runs in chunks; use"
                " --recompute.mlp-chunks 1"
            )
        # The chunks run in the order of the forward, so that they draw the same random numbers.
        with ctx.rng.again(), one_contribution([*mlp.parameters()]) as grads:
            for at in ctx.parts:
                part = mlp._chunk_backward(x[at], dy[at])
                dx = torch.empty_like(x) if dx is None else dx
                dx[at] = part
        return dx, None, None, *grads


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

    Attributes:
        chunks: number of chunks of the sequence, the first dimension of x, set by
            `--recompute.mlp-chunks`. A shorter sequence has a chunk per position.
    """

    recompute = Recompute()
    context = True
    chunks = 1
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

    def set_chunks(self, chunks: int) -> None:
        """Sets the number of chunks of the sequence (`chunks`)."""
        self.chunks = chunks

    def forward(self, x: Tensor) -> Tensor:
        """Returns down(activation(up(x))). Collective.

        Args:
            x: [s b h]; with sequence parallelism [s/t b h]. The result has the same shape.
        """
        chunks = min(self.chunks, len(x)) if x.dim() > 1 else 1
        if chunks < 2:
            return self.down(self._inner(x))
        return _InChunks.apply(x, self, chunks, *for_autograd(x, *self.parameters()))

    def start(self, x: Tensor) -> Callable[[], Tensor]:
        """Computes the first part of the forward; returns a function that computes the rest. Collective.

        Other work can run in between. If the MLP runs in chunks or has hooks, the first part is all.

        Args:
            x: see `forward`.
        """
        if self.chunks > 1 or not is_plain(self, type(self)):
            y = self(x)
            return lambda: y
        inner = self._inner(x)
        return lambda: self.down(inner)

    def _inner(self, x: Tensor) -> Tensor:
        """Returns the input of `down`, activation(up(x)): [s b f/t]. Collective."""
        if self._fuses_bias(x):
            y = self.recompute.column(self.up, x, add_bias=False)
            return self.recompute.run("activation", self._activate_biased, y)
        y = self.recompute.column(self.up, x)
        return self.recompute.run("activation", self.activate, y)

    def _chunk_backward(self, x: Tensor, dy: Tensor) -> Tensor:
        """Computes a chunk again, and returns the gradient of its input x. Collective.

        The gradients of the parameters are added to their sinks. `down` is not computed again,
        unless it was replaced or has hooks.

        Args:
            x: input of the chunk.
            dy: gradient of the chunk's output.

        Raises:
            RuntimeError: if a parameter of the activation has gradient hooks.
        """
        x, plain = x.detach().requires_grad_(), is_plain(self.down, RowLinear)
        params = {name: param for name, param in self.named_parameters() if param.requires_grad}
        with torch.enable_grad():
            y = self.recompute.run_as_one(self._inner, x)
            y = y if plain else self.down(y)
        edge = get_gradient_edge(y)
        if plain:
            dy = self.down.backward(y.detach(), dy)
        del y  # frees the memory of the inner features before their gradient is used
        # Autograd computes the gradients of the parameters of an activation, not of linear layers.
        dx, *grads = torch.autograd.grad(edge, [x, *params.values()], dy, allow_unused=True)
        for (name, param), grad in zip(params.items(), grads, strict=True):
            sink = sink_of(param)
            if grad is None or sink is None or sink.in_forward():
                continue
            if has_gradient_hooks(param):
                raise RuntimeError(
                    f"{name} of an MLP: its gradient hooks would run once per chunk; use --recompute.mlp-chunks 1"
                )
            sink.add(grad)
        return dx

    def _fuses_bias(self, x: Tensor) -> bool:
        """Returns whether one kernel adds the bias of `up` and computes the activation, for input x."""
        bias = self.up.bias
        return (
            any(self.activation is known for known in _BIASED) and type(self).activate is MLP.activate and bias is not None
            and is_plain(self.up, ColumnLinear)
            and activation_ops.fits(x, bias.numel()) and launch.packed(bias)  # the first is False under compile
        )  # fmt: skip

    def _activate_biased(self, x: Tensor) -> Tensor:
        return _Biased.apply(self.activation, x, *for_autograd(x, self.up.bias), self.up.bias)

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
        activation: element-wise function or module, or `clamped_swiglu`. Default: SiLU (SwiGLU).
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
