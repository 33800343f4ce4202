"""Attention of some queries and some keys, merged: equal to attention of all, in fp64, in any dtype that is supported."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.models.test_models_families import plain_attention
from threed.layers import Causal
from threed.ops import attention, attention_costs
from threed.ops.positions import Range

ZIGZAG = (((0, 3), (14, 17)), ((3, 7), (10, 14)), ((7, 10),))  # of 17 positions, over three ranks
CORES = [
    Causal(),
    Causal(5),
    Causal(1),
    Causal(16),
    Causal(99),
    Causal(0, 0.7),
    Causal(4, 0.7, 0.9),
    Causal(scale=0.3),
]


def heads(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """q [s b a d], k and v [s b k d]."""
    draw = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(17, 2, n, 6, dtype=torch.float64, generator=draw) for n in (4, 2, 2))
    return q.to(dtype), k.to(dtype), v.to(dtype)


def batch_first(*parts: Tensor) -> list[Tensor]:
    return [part.permute(1, 2, 0, 3) for part in parts]


def merged(
    q: Tensor, kv: tuple[Tensor, Tensor], rows: Range, core: Causal
) -> tuple[Tensor, Tensor]:
    """The result of queries at some positions: keys of all ranks, one range at a time, in another order."""
    (queries,), y, lse = batch_first(q[slice(*rows)]), None, None
    for keys in [part for rank in reversed(ZIGZAG) for part in rank]:
        pair = batch_first(*(x[slice(*keys)] for x in kv))
        more = attention.forward(rows[0] - keys[0], core, queries, *pair)
        if y is None or lse is None:
            wide = torch.promote_types(q.dtype, torch.float32)
            y, lse = (torch.zeros_like(x, dtype=wide) for x in more)
            lse.fill_(-torch.inf)
        attention.merge_(y, lse, *more)
    assert y is not None
    assert lse is not None
    return y, lse


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("core", CORES, ids=str)
def test_merged_parts_are_attention_of_the_whole(core: Causal, plain: bool) -> None:
    q, k, v = (x.requires_grad_() for x in heads())
    want = plain_attention(q, k, v, core)
    dy = torch.randn(want.shape, dtype=want.dtype, generator=torch.Generator().manual_seed(4))
    grads = torch.autograd.grad(want, (q, k, v), dy)
    dy, want = dy.view_as(q), want.detach().view_as(q)
    got = [torch.zeros_like(x) for x in (q, q, k, v)]
    with torch.no_grad(), _backend(plain):
        for rows in [part for rank in ZIGZAG for part in rank]:
            of_rows = slice(*rows)
            y, lse = merged(q, (k, v), rows, core)
            got[0][of_rows] = y.permute(2, 0, 1, 3)
            for keys in [part for rank in ZIGZAG for part in rank]:
                pair = [x[slice(*keys)] for x in (k, v)]
                of = batch_first(dy[of_rows], q[of_rows], *pair)
                parts = attention.backward(rows[0] - keys[0], core, *of, y, lse)
                for total, part, at in zip(got[1:], parts, (rows, keys, keys), strict=True):
                    total[slice(*at)] += part.permute(2, 0, 1, 3)
    for name, ours, right in zip("yqkv", got, (want, *grads), strict=True):
        torch.testing.assert_close(
            ours, right, rtol=0, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
        )


def _backend(plain: bool) -> mock._patch[object]:
    """Torch's flash attention where it is used, or plain operations alone."""
    chosen = (lambda *_: False) if plain else attention._is_flash
    return mock.patch.object(attention, "_is_flash", chosen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_of_narrower_numbers_are_merged_in_fp32(dtype: torch.dtype) -> None:
    """Within four roundings of the largest."""
    q, k, v = heads(dtype)
    for core in CORES:
        want = plain_attention(q.double(), k.double(), v.double(), core).view(q.shape)
        y, lse = merged(q, (k, v), (7, 10), core)
        assert y.dtype == lse.dtype == torch.float32
        bound = 4 * torch.finfo(dtype).eps * float(want.abs().max())
        (right,) = batch_first(want[7:10])
        torch.testing.assert_close(y.double(), right, rtol=0, atol=bound)


@pytest.mark.parametrize("plain", [False, True])
def test_a_query_that_sees_no_key_has_weight_zero(plain: bool) -> None:
    q, k, v = batch_first(*heads())
    cases = [(-2, Causal(), [0, 1]), (-9, Causal(), [0, 1, 2, 3]), (3, Causal(2), [1, 2, 3])]
    with _backend(plain):
        for offset, core, blind in cases:
            y, lse = attention.forward(offset, core, q[:, :, :4], k[:, :, :3], v[:, :, :3])
            sees = torch.ones(4, dtype=torch.bool)
            sees[blind] = False
            assert torch.equal(lse.isneginf(), ~sees.expand_as(lse))
            assert not y[:, :, blind].any()
            assert not y.isnan().any()
            before = torch.zeros_like(y), torch.full_like(lse, -torch.inf)
            attention.merge_(*before, y, lse)
            assert torch.equal(before[0], y)
            assert torch.equal(before[1], lse)
            parts = attention.backward(
                offset, core, torch.ones_like(y), q[:, :, :4], k[:, :, :3], v[:, :, :3], y, lse
            )
            assert not any(part.isnan().any() for part in parts)
            assert not parts[0][:, :, blind].any()


def test_flops_count_every_pair() -> None:
    q, k = (torch.empty(2, n, s, 8, device="meta") for n, s in ((4, 5), (2, 7)))
    assert attention_costs.kernel_flops(q, k, k[..., :6]) == 2 * 2 * 4 * 5 * 7 * (8 + 6)
    assert Causal().flops(2 * 5, 5, 4, 8) == attention_costs.kernel_flops(q, q, q)
