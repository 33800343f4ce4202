"""Attention over short sequences with a backward on tiles, against plain torch; on other processors with a stand-in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.layers.test_layers import local_weight
from threed.distributed.topology import alone
from threed.layers import Attention, Slicing
from threed.ops import fused_cpu
from threed.ops import short_attention as attention

SHAPES = [(128, 2, 3, 64), (100, 2, 3, 32), (1, 1, 1, 32), (33, 2, 2, 96)]


def projection(s: int, b: int, heads: int, d: int) -> tuple[Tensor, Tensor]:
    """Returns qkv [s b 3ad] and a gradient [s b ad], bf16."""
    draw = torch.Generator().manual_seed(s)
    qkv, dy = (torch.randn(s, b, n * heads * d, generator=draw).bfloat16() for n in (3, 1))
    return qkv.requires_grad_(), dy


def _by_torch(qkv: Tensor, dy: Tensor, logarithms: Tensor, d: int) -> Tensor:
    """Stands in for the kernel: torch's gradient, in fp64 up to its last rounding; checks the logarithms."""
    wide = qkv.detach().double().requires_grad_()
    q, k, _ = attention._heads(wide, d)
    hidden = torch.ones(len(qkv), len(qkv), dtype=torch.bool).triu(1)
    scores = (q @ k.mT * d**-0.5).masked_fill(hidden, -torch.inf)
    want = scores.logsumexp(-1).float()
    torch.testing.assert_close(logarithms.view_as(want), want, rtol=1e-4, atol=1e-4)
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad(attention.reference(wide, d), wide, dy.double())
    return gradient.to(qkv.dtype)


@contextmanager
def kernel() -> Iterator[mock.Mock | None]:
    """The kernel on processors that have tiles; otherwise a stand-in for it, which counts its calls."""
    if fused_cpu.has_tiles():
        spy = mock.Mock(side_effect=fused_cpu.attention_backward)
        with mock.patch.object(fused_cpu, "attention_backward", spy):
            yield spy
        return
    stand_in = mock.Mock(side_effect=_by_torch)
    with (
        mock.patch.object(fused_cpu, "has_tiles", return_value=True),
        mock.patch.object(fused_cpu, "attention_backward", stand_in),
    ):
        yield stand_in


@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_what_torch_computes(shape: tuple[int, int, int, int]) -> None:
    """The same forward; gradients within two roundings of bf16 (2^-8 each) of the largest in fp64."""
    (qkv, dy), d = projection(*shape), shape[3]
    with kernel() as spy:
        assert attention.fits(qkv, d)
        y = attention.short_attention(qkv, d)
        (got,) = torch.autograd.grad(y, qkv, dy)
        assert spy is not None
        assert spy.call_count == 1
    assert y.equal(attention.reference(qkv, d))
    wide = qkv.detach().double().requires_grad_()
    (want,) = torch.autograd.grad(attention.reference(wide, d), wide, dy.double())
    torch.testing.assert_close(got.double(), want, rtol=2**-7, atol=2**-7 * float(want.abs().max()))


def test_what_it_does_not_take() -> None:
    qkv, _ = projection(32, 2, 2, 32)
    long, _ = projection(257, 1, 1, 32)
    with kernel():
        assert attention.fits(qkv, 32)
        assert not attention.fits(long, 32)
        assert not attention.fits(qkv.float(), 32)
        assert not attention.fits(qkv.transpose(0, 1), 32)
        assert not attention.fits(qkv, 16)
        assert not attention.fits(qkv.to("meta"), 32)
        with torch.autocast("cpu", torch.bfloat16):
            assert not attention.fits(qkv, 32)
    with mock.patch.object(fused_cpu, "has_tiles", return_value=False):
        assert not attention.fits(qkv, 32)


LAYERS = {
    "causal": ({}, 1),
    "rotary": ({"rotary": 10000.0}, 0),
    "norms of heads": ({"qk_norm": True}, 0),
    "grouped": ({"kv_heads": 1}, 0),
    "a custom core": ({"core": lambda q, k, v: q + k + v}, 0),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_the_layer_uses_it_for_causal_attention_alone(kind: str) -> None:
    arguments, calls = LAYERS[kind]
    layer = Attention("a", 64, 2, Slicing(alone()), **arguments)  # type: ignore[arg-type]
    for module in layer.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            values = local_weight(param).bfloat16()
            setattr(module, name, torch.nn.Parameter(values))
    x = torch.randn(8, 2, 64).bfloat16().requires_grad_()
    with kernel() as spy:
        layer(x).sum().backward()
        assert spy is not None
        assert spy.call_count == calls
        got, x.grad = x.grad, None
        with torch.no_grad():
            layer(x)
    with mock.patch.object(fused_cpu, "has_tiles", return_value=False):
        layer(x).sum().backward()
    assert got is not None
    assert x.grad is not None
    scale = float(x.grad.abs().max())
    torch.testing.assert_close(got, x.grad, rtol=2**-5, atol=2**-5 * scale)
