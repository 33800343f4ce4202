"""csrc/cuda/activation.cu against fp64, with what it reads and writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.covering import in_turns
from tests.cuda.cases import (
    assert_close,
    assert_close_in_bf16,
    assert_coalesced,
    assert_traffic,
    bf16,
    devices,
    in_every_order,
    normal,
)
from tests.cuda.emulator import COMPILER, Machine, emulated
from threed.distributed.topology import alone
from threed.layers import MLP, Slicing
from threed.layers.mlp import gated, gelu, squared_relu
from threed.layers.recompute import Selective
from threed.ops import activation

pytestmark = [pytest.mark.skipif(COMPILER is None, reason="needs g++"), devices]
SHAPES = [(1, 8), (7, 72), (9, 256), (33, 264), (130, 512), (5, 4104)]


def wide(rows: int, f: int, seed: int = 0) -> Tensor:
    """Numbers of every size, also those whose exponential is infinite."""
    x = bf16(rows, f, seed=seed, scale=3.0)
    x.view(-1)[::13] *= 50
    return x


def large(rows: int, f: int) -> bool:
    return rows * f >= 4096 and f % 256 == 0


@pytest.mark.parametrize(("rows", "f"), SHAPES)
@pytest.mark.parametrize("name", ["swiglu", "geglu"])
def test_gated(name: str, rows: int, f: int) -> None:
    gate_up, dout = wide(rows, 2 * f), bf16(rows, f, seed=1)

    def work(machine: Machine) -> tuple[Tensor, ...]:
        out = getattr(activation, name)(gate_up)
        gradient = getattr(activation, f"{name}_backward")(dout, gate_up)
        forward, backward = machine.launches
        assert_traffic(forward, {"gate_up": (1, 0), "out": (0, 1)})
        assert_traffic(backward, {"dout": (1, 0), "gate_up": (1, 0), "dgate_up": (0, 1)})
        if large(rows, f):
            assert_coalesced(forward)
            assert_coalesced(backward)
        return out, gradient

    out, gradient = in_every_order(work)
    x = gate_up.double().requires_grad_()
    y = getattr(activation, f"{name}_reference")(x)
    assert_close_in_bf16(out, y.detach())
    assert_close_in_bf16(gradient, torch.autograd.grad(y, x, dout.double())[0])


@pytest.mark.parametrize(
    ("name", "shape", "bias_gradient", "with_bias"),
    in_turns(5, ("gelu", "squared_relu"), SHAPES, (None, False, True), (False, True)),
)
def test_biased(
    name: str, shape: tuple[int, int], bias_gradient: bool | None, with_bias: bool
) -> None:
    """bias_gradient: whether it is added to what is there; None: not asked for."""
    rows, f = shape
    x, dout = wide(rows, f), bf16(rows, f, seed=1)
    bias = bf16(f, seed=2) if with_bias else None
    held = normal(f, seed=3)

    def work(machine: Machine) -> tuple[Tensor, ...]:
        out = getattr(activation, name)(x, bias)
        dbias = None if bias_gradient is None else held.clone() if bias_gradient else torch.empty(f)
        run_backward = getattr(activation, f"{name}_backward")
        dx = run_backward(dout, x, bias, dbias, add=bool(bias_gradient))
        forward, backward, *rest = machine.launches
        elements = {"x": (1, 0), "out": (0, 1), "dout": (1, 0), "dx": (0, 1), "db_parts": (0, 1)}
        for ran in (forward, backward):
            # once a warp
            biases = {"bias": ran.traffic["bias"].times} if "bias" in ran.traffic else {}
            assert_traffic(ran, {n: t for n, t in elements.items() if n in ran.traffic} | biases)
            if large(rows, f):
                assert_coalesced(ran)
        assert len(rest) == (bias_gradient is not None)
        return (out, dx) if dbias is None else (out, dx, dbias)

    out, dx, *dbias = in_every_order(work)
    a = x.double().requires_grad_()
    y = getattr(activation, f"{name}_reference")(a, None if bias is None else bias.double())
    assert_close_in_bf16(out, y.detach())
    (gradient,) = torch.autograd.grad(y, a, dout.double())
    assert_close_in_bf16(dx, gradient)
    if dbias:
        assert_close(dbias[0], gradient.sum(0) + (held.double() if bias_gradient else 0))


def mlp(function: Callable[[Tensor], Tensor]) -> MLP:
    """With weights in bf16, and gradients for autograd."""
    module = MLP("mlp", 64, 264, Slicing(alone()), activation=function)
    for seed, (name, param) in enumerate(list(module.named_parameters())):
        layer = module.get_submodule(name.split(".")[0])
        value = bf16(*param.shape, seed=seed, scale=0.2)
        setattr(layer, name.split(".")[1], torch.nn.Parameter(value))
    return module


@pytest.mark.parametrize(
    ("function", "how"),
    [
        *((gelu, how) for how in ("trained", "frozen", "hooked", "recomputed")),
        (squared_relu, "trained"),
    ],
)
def test_a_layer_adds_the_bias_in_the_kernel(function: Any, how: str) -> None:
    """A frozen bias has no gradient. A hook on the product sees it with its bias."""
    module, seen, x, dy = mlp(function), list[Tensor](), bf16(9, 2, 64), bf16(9, 2, 64, seed=9)
    if how == "frozen":
        module.up.bias.requires_grad_(False)
    elif how == "hooked":
        module.up.register_forward_hook(lambda _, __, y: seen.append(y))
    elif how == "recomputed":
        module.recompute = Selective(["activation"])
    wanted = [param for param in module.parameters() if param.requires_grad]
    x.requires_grad_()
    with emulated(torch_writes=True) as machine:
        y = module(x)
        got = torch.autograd.grad(y, [x, *wanted], dy)
    name = function.__name__
    (forward, *again), backward = (
        [ran for ran in machine.launches if ran.name == kind] for kind in (name, f"{name}_backward")
    )
    assert len(again) == (how == "recomputed")
    if forward.counts:
        assert ("bias" in forward.traffic) == (how != "hooked")
        assert ("db_parts" in backward[0].traffic) == (how in ("trained", "recomputed"))
    names = [ran.name for ran in machine.launches]
    assert names.count("column_sums") == (2 if how == "hooked" else 1)  # down's bias

    double = {name: p.detach().double().requires_grad_() for name, p in module.named_parameters()}
    wide = x.detach().double().requires_grad_()
    inner = wide @ double["up.weight"].t() + double["up.bias"]
    truth = (
        getattr(activation, f"{name}_reference")(inner) @ double["down.weight"].t()
        + double["down.bias"]
    )
    names_wanted = [n for n, p in module.named_parameters() if p.requires_grad]
    right = torch.autograd.grad(truth, [wide, *(double[n] for n in names_wanted)], dy.double())
    for a, b in zip((y, *got), (truth, *right), strict=True):  # rounded to bf16 between the steps
        assert (a.double() - b).abs().max() <= 0.02 * b.abs().max()
    if how == "hooked":
        assert (seen[0].double() - inner).abs().max() <= 0.01 * inner.abs().max()


@pytest.mark.parametrize(("function", "name"), [(F.silu, "swiglu"), (gelu, "geglu")])
def test_a_gated_layer_runs_the_kernel_of_its_activation(function: Any, name: str) -> None:
    x = bf16(9, 2, 144).requires_grad_()
    with emulated(torch_writes=True) as machine:
        gated(function, x).sum().backward()
    assert [ran.name for ran in machine.launches] == [name, f"{name}_backward"]


def test_wrong_arguments_are_refused() -> None:
    with emulated(), pytest.raises(ValueError, match=r"swiglu takes bf16 \[n f\]"):
        activation.swiglu(bf16(3, 24))
    with emulated(), pytest.raises(ValueError, match=r"gelu takes bf16 \[n f\]"):
        activation.gelu(bf16(3, 16), bf16(8))
    with emulated(), pytest.raises(ValueError, match="gelu_backward takes"):
        activation.gelu_backward(bf16(3, 16), bf16(3, 16).float())


def test_squared_relu_on_the_cpu_saves_only_its_input() -> None:
    """Its gradient equals that of torch operations; the result of NaN is NaN."""
    x = torch.randn(5, 24, dtype=torch.float64, requires_grad=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = squared_relu(x)
    assert [t.data_ptr() for t in saved] == [x.data_ptr()]
    want = torch.relu(x).square()
    assert torch.equal(y, want)
    dy = torch.randn_like(y)
    torch.testing.assert_close(
        torch.autograd.grad(y, x, dy)[0], torch.autograd.grad(want, x, dy)[0], rtol=1e-15, atol=0
    )
    assert squared_relu(torch.tensor([float("nan"), -1.0, 2.0])).tolist()[1:] == [0.0, 4.0]
    assert squared_relu(torch.tensor([float("nan")])).isnan().all()
