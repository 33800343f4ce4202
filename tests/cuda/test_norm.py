"""csrc/cuda/norm.cu and sums.cu against fp64, with what they read and write."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
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
from tests.cuda.emulator import COMPILER, PROCESSORS, Machine, emulated
from threed.distributed.topology import alone
from threed.layers import MLP, Attention, Block, LayerNorm, MicroBatch, RMSNorm, Slicing
from threed.layers.norm import sum_and_norm
from threed.ops import norm

pytestmark = [pytest.mark.skipif(COMPILER is None, reason="needs g++"), devices]
# every shape of the kernel, each with rows that fill it and rows that do not
SHAPES = [
    (1, 8),
    (9, 64),
    (17, 256),
    (5, 264),
    (11, 1024),
    (3, 1032),
    (7, 2048),
    (4, 4096),
    (3, 8192),
    (8, 8200),
    (2, 16384),
]
EPS = 1e-5


def threads_of_a_row(h: int) -> int:
    return next(
        threads
        for most, threads in ((1024, 32), (2048, 128), (4096, 256), (16384, 512))
        if h <= most
    )


def reads_of_weights(rows: int, h: int) -> int:
    """How often the backward reads the weights: once for each row that runs at a time, or twice a row."""
    if 256 < h <= 1024 or h > 8192:
        return 2 * rows
    blocks = min(rows, norm.blocks_of_backward(h) * PROCESSORS)
    return blocks * (8 if h <= 256 else 1)


def vectors(h: int, layer: bool) -> tuple[Tensor, Tensor | None]:
    return (1 + bf16(h, seed=8, scale=0.2)), bf16(h, seed=9) if layer else None


@pytest.mark.parametrize(
    ("shape", "added", "layer"),
    in_turns(7, SHAPES, ("", "residual", "before", "residual before"), (False, True)),
)
def test_forward(shape: tuple[int, int], added: str, layer: bool) -> None:
    rows, h = shape
    x, (weight, bias) = bf16(rows, h) + 3, vectors(h, layer)
    residual = bf16(rows, h, seed=1) if "residual" in added else None
    before = bf16(h, seed=2) if "before" in added else None

    def work(machine: Machine) -> tuple[Tensor, ...]:
        done = norm.forward(x, weight, bias, EPS, layer, residual, before)
        (ran,) = machine.launches
        again = {"weight": (rows, 0), "before": (rows, 0), "bias": (rows, 0)}
        elements = {
            "x": (1, 0),
            "residual": (1, 0),
            "sum": (0, 1),
            "y": (0, 1),
            "means": (0, 1),
            "scales": (0, 1),
        }
        assert_traffic(ran, {n: t for n, t in (again | elements).items() if n in ran.traffic})
        if rows * h >= 4096:
            assert_coalesced(ran)
        return done.sum, done.y, done.scales, *([done.means] if done.means is not None else [])

    total, y, scales, *means = in_every_order(work)
    s = sum(t.double() for t in (x, residual, before) if t is not None)
    assert isinstance(s, Tensor)
    assert_close_in_bf16(total, s)
    rounded = total.double()
    assert_close_in_bf16(
        y,
        norm.reference(
            rounded, weight.double(), None if bias is None else bias.double(), EPS, layer
        ),
    )
    variance = (rounded - rounded.mean(-1, keepdim=True) * layer).square().mean(-1)
    assert_close(scales, torch.rsqrt(variance + EPS), 1e-6)
    if layer:
        assert_close(means[0], rounded.mean(-1), 1e-6)


@pytest.mark.parametrize(
    ("shape", "layer", "add", "with_residual"), in_turns(7, SHAPES, *[(False, True)] * 3)
)
def test_backward(shape: tuple[int, int], layer: bool, add: bool, with_residual: bool) -> None:
    rows, h = shape
    x, dy, (weight, bias) = bf16(rows, h) + 1, bf16(rows, h, seed=3), vectors(h, layer)
    residual = bf16(rows, h, seed=4) if with_residual else None
    held = normal(2, h, seed=5)

    def work(machine: Machine) -> tuple[Tensor, ...]:
        done = norm.forward(x, weight, bias, EPS, layer)
        gradients = held.clone() if add else torch.empty_like(held)
        dbias = gradients[1] if layer else None
        dx = norm.backward(
            dy, done, weight, gradients[0], dbias, add=add, add_bias=add, residual=residual
        )
        _, ran, summed = machine.launches
        elements = {
            "dy": (1, 0),
            "x": (1, 0),
            "residual": (1, 0),
            "dx": (0, 1),
            "weight": (reads_of_weights(rows, h), 0),
        }
        parts = {"dw_parts": (0, 1), "db_parts": (0, 1)}
        stats = {n: (threads_of_a_row(h), 0) for n in ("means", "scales")}  # each of them reads
        assert_traffic(
            ran, {n: t for n, t in (elements | parts | stats).items() if n in ran.traffic}
        )
        both = {
            "parts": (1, 0),
            "out": (int(add), 1),
            "second_parts": (1, 0),
            "second_out": (int(add), 1),
        }
        assert_traffic(summed, {n: t for n, t in both.items() if n in summed.traffic})
        if rows * h >= 4096:
            assert_coalesced(ran)
        return dx, *(gradients if layer else gradients[:1])

    dx, *gradients = in_every_order(work)
    a, w = x.double().requires_grad_(), weight.double().requires_grad_()
    b = bias.double().requires_grad_() if bias is not None else None
    y = norm.reference(a, w, b, EPS, layer)
    truth = torch.autograd.grad(y, [t for t in (a, w, b) if t is not None], dy.double())
    assert_close_in_bf16(dx, truth[0] + (0 if residual is None else residual.double()), 2e-6)
    for got, wanted, before in zip(gradients, truth[1:], held, strict=False):
        assert_close(got, wanted + (before.double() if add else 0))


def test_wrong_arguments_are_refused() -> None:
    x, w = bf16(4, 16), bf16(16)
    shifted = x.flatten()[4:-12].view(3, 16)
    for rows, weight in (
        (x.float(), w),
        (x[:, :8], w[:8]),
        (x, w[:8]),
        (bf16(4, 12), bf16(12)),
        (shifted, w),
    ):
        with emulated(), pytest.raises(ValueError, match=r"norm takes bf16 \[n h\] and \[h\]"):
            norm.forward(rows, weight, None, EPS, False)


def test_no_rows_are_no_launch() -> None:
    with emulated() as machine:
        assert norm.forward(bf16(0, 16), bf16(16), None, EPS, False).y.shape == (0, 16)
    assert not machine.launches


@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
@pytest.mark.parametrize("hook", [False, True])
def test_a_frozen_norm_gives_the_gradient_of_its_input(
    kind: type[LayerNorm] | type[RMSNorm], hook: bool
) -> None:
    """Also behind a residual sum, and with a backward hook, which is called."""
    module, calls = kind("norm", 64, Slicing(alone())), list[int]()
    module.weight = torch.nn.Parameter(1 + bf16(64, seed=8, scale=0.2), requires_grad=False)
    if module.bias is not None:
        module.bias = torch.nn.Parameter(bf16(64, seed=9), requires_grad=False)
    if hook:
        module.register_full_backward_hook(lambda *_: calls.append(1))
    x, residual, dy = (bf16(9, 64, seed=seed) for seed in range(3))
    x.requires_grad_()
    with emulated(torch_writes=True) as machine:
        total, y = sum_and_norm(module, x, residual)
        (got,) = torch.autograd.grad(y, x, dy)
    assert len(calls) == hook
    assert [ran.name for ran in machine.launches][:2] == ["norm", "norm_backward"]
    wide = total.detach().double().requires_grad_()
    bias = None if module.bias is None else module.bias.double()
    truth = norm.reference(wide, module.weight.double(), bias, module.eps, kind is LayerNorm)
    assert_close_in_bf16(got, torch.autograd.grad(truth, wide, dy.double())[0], 2e-6)


@pytest.mark.parametrize("add", [False, True])
def test_the_gradient_of_a_bias_before_the_norm(add: bool) -> None:
    """The sum over rows of the gradient of the norm's input, in the launch that ends the other sums."""
    rows, h = 300, 264
    x, dy, residual = (bf16(rows, h, seed=seed) for seed in range(3))
    weight, held = 1 + bf16(h, seed=3, scale=0.2), normal(h, seed=4)
    dweight, dbias, dbefore = torch.empty(h), torch.empty(h), held.clone()
    with emulated() as machine:
        result = norm.forward(x, weight, weight, EPS, True, residual, weight)
        dx = norm.backward(
            dy, result, weight, dweight, dbias, add=False, residual=residual, dbefore=dbefore, add_before=add
        )  # fmt: skip
    assert [ran.name for ran in machine.launches] == [
        "norm",
        "norm_backward",
        "column_sums",
        "add_parts",
    ]
    total = x.double() + residual.double() + weight.double()
    assert_close_in_bf16(result.sum, total, 2e-6)
    assert_close(dbefore, dx.double().sum(0) + (held.double() if add else 0), 1e-6)


class Plain(Block):
    """A block that adds the bias of its attention in the projection."""

    def _bias_for_norm(self, x: Tensor) -> None:
        return None


def _gradients(
    kind: type[Block], change: Callable[[Block], object]
) -> tuple[list[Tensor], list[str]]:
    """Output and gradients of a block of this kind, and the kernels that it launched."""
    slicing, h = Slicing(alone()), 32
    norms = (LayerNorm("first", h, slicing), LayerNorm("second", h, slicing))
    attention = Attention("attention", h, 2, slicing)
    block = kind("block", norms, attention, MLP("mlp", h, 64, slicing), slicing)
    block = block.to_empty(device="cpu").bfloat16()
    for seed, param in enumerate(block.parameters()):
        param.data.copy_(bf16(*param.shape, seed=seed, scale=0.2))
    change(block)
    x = bf16(9, 2, h, seed=30).requires_grad_()
    with emulated(torch_writes=True) as machine:
        y = block(x, MicroBatch())
        y.backward(bf16(9, 2, h, seed=31))
    given = [x, *block.parameters()]
    return [y, *(t.grad for t in given if t.grad is not None)], [
        ran.name for ran in machine.launches
    ]


def _freeze(block: Block) -> None:
    block.attention.out.bias.requires_grad_(False)  # type: ignore[union-attr]


@pytest.mark.parametrize("change", [lambda block: None, _freeze])
def test_a_norm_adds_the_bias_of_the_attention_before_it(change: Callable[[Block], object]) -> None:
    """Its gradient's sum ends in the norm's last launch; values differ by roundings to bf16 only."""
    (got, names), (want, plain) = _gradients(Block, change), _gradients(Plain, change)
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert (a - b).norm() <= 0.02 * b.norm()
    if change is _freeze:
        return
    assert plain.count("add_parts") - names.count("add_parts") == 1
    assert plain.count("column_sums") == names.count("column_sums")


@pytest.mark.parametrize("where", ["attention", "attention.out", "mlp_norm"])
def test_hooks_see_the_bias_of_the_attention(where: str) -> None:
    """So with a hook the projection adds its bias."""
    seen = list[Tensor]()

    def change(block: Block) -> None:
        block.get_submodule(where).register_forward_hook(lambda module, args, y: seen.append(y))

    got, want = _gradients(Block, change), _gradients(Plain, change)
    assert all(map(torch.equal, got[0], want[0]))
    assert torch.equal(*seen)
    assert got[1] == want[1]
