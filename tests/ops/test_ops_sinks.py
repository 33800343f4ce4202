"""Attention sinks against the formula with one more score per query, in every way in which attention is computed.

fp64 to 1e-12: the order of sums is all that differs.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.covering import in_turns
from tests.ops.test_ops_flex import assert_same, eager, packed  # noqa: F401
from threed.layers import Causal
from threed.ops import attention, attention_backends

LENGTH, SIZE, HEADS = 300, 16, 4
CORES = [
    Causal(),
    Causal(50),
    Causal(200),
    Causal(1),
    Causal(0, 0.7),
    Causal(129, 0.7, 0.9),
    Causal(scale=0.3),
]


def heads(
    dtype: torch.dtype = torch.float64, values: int = SIZE
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q [s b a d], k and v [s b k d], sinks [a]."""
    draw = torch.Generator().manual_seed(3)
    sizes = [(LENGTH, 2, n, d) for n, d in ((HEADS, SIZE), (2, SIZE), (2, values))]
    made = [torch.randn(size, dtype=torch.float64, generator=draw) for size in (*sizes, (HEADS,))]
    made[3] = 3 * made[3]
    q, k, v, sinks = (x.to(dtype).requires_grad_() for x in made)
    return q, k, v, sinks


def dense(
    core: Causal, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, documents: Tensor | None = None
) -> Tensor:
    """The formula: a column of scores, whose shares are dropped -> [s b (a d)]."""
    s, b, a, d = q.shape
    k, v = (x.repeat_interleave(a // k.shape[2], 2) for x in (k, v))
    scores = torch.einsum("sbad,tbad->bast", q, k) * (core.scale or d**-0.5)
    scores = torch.tanh(scores / core.softcap) * core.softcap if core.softcap else scores
    at = torch.arange(s)
    seen = (at <= at[:, None]) & (at > at[:, None] - (core.window or s))
    if documents is not None:
        seen = seen & (documents.unsqueeze(2) == documents.unsqueeze(1)).unsqueeze(1)
    column = sinks.view(1, a, 1, 1).expand(b, a, s, 1)
    shares = torch.cat((scores.masked_fill(~seen, -torch.inf), column), -1).softmax(-1)
    return torch.einsum("bast,tbad->sbad", shares[..., :-1], v).flatten(2)


def gradients(y: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    dy = torch.randn(y.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    return y, *torch.autograd.grad(y, inputs, dy.to(y.dtype))


@pytest.mark.parametrize(
    ("core", "through", "documents"),
    in_turns(5, CORES, ["chunks", "plain operations", "flex"], [False, True]),
    ids=str,
)
def test_a_sink_is_one_more_score(
    core: Causal, through: str, documents: bool, request: pytest.FixtureRequest
) -> None:
    if through == "flex":
        request.getfixturevalue("eager")
    chosen = (lambda *_: False) if through == "plain operations" else attention._is_flash
    q, k, v, sinks = inputs = heads()
    numbers = packed() if documents else None
    with mock.patch.object(attention, "_is_flash", chosen):
        got = gradients(core(q, k, v, numbers, sinks), inputs)
    assert_same(got, gradients(dense(core, *inputs, numbers), inputs))
    kernel = "FlexAttention" if through == "flex" else "chunks of threed"
    assert any(line.startswith(kernel) and line.endswith(", sinks")
               for line in attention_backends.described())  # fmt: skip


def test_values_may_be_of_another_size_than_keys() -> None:
    q, k, v, sinks = inputs = heads(values=6)
    got = gradients(Causal(50)(q, k, v, None, sinks), inputs)
    assert_same(got, gradients(dense(Causal(50), *inputs), inputs))


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("core", [Causal(), Causal(50)], ids=str)
def test_narrower_numbers(core: Causal, dtype: torch.dtype, bound: float) -> None:
    """Within a few roundings of the largest; the gradient of a sink is a sum over 600 queries."""
    q, k, v, sinks = inputs = heads(dtype)
    wide = tuple(x.detach().double().requires_grad_() for x in inputs)
    got = gradients(core(q, k, v, None, sinks), inputs)
    for ours, right in zip(got, gradients(dense(core, *wide), wide), strict=True):
        assert ours.dtype == dtype
        error = (ours.double() - right).abs().max()
        assert error <= bound * right.abs().max().clamp_min(1.0)


def test_a_low_sink_changes_nothing_and_a_high_one_leaves_nothing() -> None:
    q, k, v, sinks = (x.detach() for x in heads())
    without = Causal()(q, k, v)
    low, high = (Causal()(q, k, v, None, torch.full_like(sinks, at)) for at in (-1e3, 1e3))
    torch.testing.assert_close(low, without, rtol=0, atol=1e-12)
    assert not high.any()


def test_full_sequences_are_computed_at_once() -> None:
    """Flash attention keeps no scores, so a sink costs no chunks."""
    q, k, v, sinks = heads()
    real = attention.forward
    with mock.patch.object(attention, "forward", side_effect=real) as calls:
        Causal()(q, k, v, None, sinks)
    assert calls.call_count == 1
