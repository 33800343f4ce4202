"""Operators against torch's own: cross entropy over a cut vocabulary, and AdamW in its two forms."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.harness import run_ranks
from threed.distributed.collectives import split
from threed.distributed.topology import Axis, Topology, alone
from threed.ops import adam, cross_entropy, matmul

# --------------------------------------------------------------------------------------------------- cross entropy

# fp64: the order of two sums. fp32: logits of size 10 have steps of 1e-6, and the loss is a difference of such.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 4e-6, torch.bfloat16: 4e-6}


@functools.cache
def axis_of_all(world: int) -> Axis:
    return Topology(tp=world).axis("tp")


def problem(vocab: int, dtype: torch.dtype, scale: float = 3.0) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [s b v], targets [s b] of which some are not counted, and the gradients [s b] of the losses."""
    draw = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(5, 3, vocab, generator=draw, dtype=torch.float64) * scale).to(dtype)
    targets = torch.randint(0, vocab, (5, 3), generator=draw)
    targets[0, 1], targets[2, 0], targets[4, 2] = -100, -1, -100
    targets[1, 0], targets[1, 1] = 0, vocab - 1
    return logits, targets, torch.randn(5, 3, generator=draw, dtype=torch.float64)


def truth(logits: Tensor, targets: Tensor, dloss: Tensor) -> tuple[Tensor, Tensor]:
    """Losses and the logits' gradient by F.cross_entropy, in fp64 from the same numbers."""
    x = logits.to(torch.float64, copy=True).requires_grad_()
    flat = F.cross_entropy(
        x.flatten(0, 1), targets.clamp(min=-1).flatten(), reduction="none", ignore_index=-1
    )
    losses = flat.view_as(targets)
    losses.backward(dloss)
    assert x.grad is not None
    return losses.detach(), x.grad


def parallel(
    logits: Tensor, targets: Tensor, dloss: Tensor, axis: Axis
) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """Losses, this shard's gradient and its span of the vocabulary."""
    span = split(logits.shape[-1], axis.size, axis.index)
    shard = logits[..., slice(*span)].clone().requires_grad_()
    # * 1: memory to use up
    losses = cross_entropy.vocab_parallel_cross_entropy(shard * 1, targets, axis, span[0])
    losses.backward(dloss.to(losses.dtype))
    assert shard.grad is not None
    return losses.detach(), shard.grad, span


def compare(logits: Tensor, targets: Tensor, dloss: Tensor, axis: Axis) -> None:
    want, want_grad = truth(logits, targets, dloss)
    losses, grad, span = parallel(logits, targets, dloss, axis)
    tolerance = TOLERANCE[logits.dtype]
    assert losses.dtype == (torch.float64 if logits.dtype == torch.float64 else torch.float32)
    assert grad.dtype == logits.dtype
    torch.testing.assert_close(losses.double(), want, rtol=tolerance, atol=tolerance)
    assert (losses[targets < 0] == 0).all()
    assert (grad[targets < 0] == 0).all()
    # A 16-bit gradient is the right one rounded to 8 bits.
    rtol = 2**-8 if logits.dtype == torch.bfloat16 else tolerance
    torch.testing.assert_close(
        grad.double(), want_grad[..., slice(*span)], rtol=rtol, atol=tolerance
    )
    everyones = [torch.empty_like(losses) for _ in range(axis.size)]
    if axis.size > 1:
        torch.distributed.all_gather(everyones, losses, group=axis.group)
        assert all(torch.equal(losses, other) for other in everyones)


def check_vocabularies(world: int) -> None:
    axis = axis_of_all(world)
    for vocab in (*range(1, 10), 53, 260):
        for dtype in TOLERANCE:
            compare(*problem(vocab, dtype), axis)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_cross_entropy_of_a_cut_vocabulary_is_torchs(world: int) -> None:
    """Vocabularies of 1 to 9 over 4 ranks: uneven shards, shards of nothing, never a padded column in the softmax."""
    run_ranks(world, check_vocabularies, world)


def test_cross_entropy_on_one_rank_is_torchs() -> None:
    for vocab in (1, 2, 53):
        for dtype in TOLERANCE:
            compare(*problem(vocab, dtype), alone())


def check_extremes() -> None:
    axis = axis_of_all(4)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        huge, targets, dloss = problem(7, dtype, scale=1e4)
        compare_finite(huge, targets, dloss, axis)
        compare_finite(-huge.abs() - 1e4, targets, dloss, axis)  # exp of any of them alone is 0
        spike = torch.full_like(huge, -1e30)
        spike[..., 2] = 1e30
        compare_finite(spike, targets, dloss, axis)


def compare_finite(logits: Tensor, targets: Tensor, dloss: Tensor, axis: Axis) -> None:
    want, want_grad = truth(logits, targets, dloss)
    losses, grad, span = parallel(logits, targets, dloss, axis)
    assert losses.isfinite().all()
    torch.testing.assert_close(losses.double(), want, rtol=1e-6, atol=1e-3)
    torch.testing.assert_close(grad.double(), want_grad[..., slice(*span)], rtol=1e-2, atol=1e-3)


def test_huge_logits_neither_overflow_nor_underflow() -> None:
    """The maximum is taken over all shards before anything is exponentiated."""
    run_ranks(4, check_extremes)


def check_nothing_counted() -> None:
    axis = axis_of_all(2)
    logits, targets, dloss = problem(5, torch.float64)
    losses, grad, _ = parallel(logits, torch.full_like(targets, -100), dloss, axis)
    assert (losses == 0).all()
    assert (grad == 0).all()


def test_nothing_counted_costs_nothing() -> None:
    run_ranks(2, check_nothing_counted)


def check_poison() -> None:
    axis = axis_of_all(2)
    logits, targets, dloss = problem(6, torch.float32)
    logits[3, 1, 4] = float("nan")  # in the second shard
    losses, grad, _ = parallel(logits, targets, dloss, axis)
    assert losses[3, 1].isnan()
    assert grad[3, 1].isnan().all()
    assert losses.isnan().sum() == 1


def test_one_shards_nan_is_every_ranks_nan() -> None:
    run_ranks(2, check_poison)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_the_readable_reference_is_torchs(dtype: torch.dtype) -> None:
    logits, targets, dloss = problem(9, dtype)
    torch.testing.assert_close(
        cross_entropy.reference(logits, targets).double(),
        truth(logits, targets, dloss)[0],
        rtol=1e-6,
        atol=1e-6,
    )


# ------------------------------------------------------------------------------------------------------------ AdamW

SIZES = [1, 7, 64, 1023, 10007]
ADAM = adam.Adam(beta1=0.9, beta2=0.95, eps=1e-8)


def moment(
    step: int, *, lr: float = 1e-2, scale: float = 1.0, skip: bool = False
) -> adam.StepScalars:
    double = functools.partial(torch.tensor, dtype=torch.float64)
    return adam.StepScalars(double(lr), double(float(step)), double(scale), double(float(skip)))


def gradients(size: int, dtype: torch.dtype, steps: int = 10) -> list[Tensor]:
    draw = torch.Generator().manual_seed(size)
    grads = torch.randn(steps, size, generator=draw, dtype=torch.float64)
    # from where eps matters to where it does not
    grads *= torch.logspace(-6, 3, size, dtype=torch.float64)
    grads[:, ::5] = 0
    return list(grads.to(dtype))


def start(size: int, dtype: torch.dtype) -> list[Tensor]:
    p = torch.randn(size, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    return [p, torch.zeros_like(p), torch.zeros_like(p)]


def torchs(
    size: int, dtype: torch.dtype, decay: float, scales: list[float], lrs: list[float]
) -> list[Tensor]:
    """Weights and moments after some steps of torch.optim.AdamW, the plain loop."""
    p = torch.nn.Parameter(start(size, dtype)[0])
    optimizer = torch.optim.AdamW(
        [p],
        betas=(ADAM.beta1, ADAM.beta2),
        eps=ADAM.eps,
        weight_decay=decay,
        foreach=False,
        fused=False,
    )
    for g, scale, lr in zip(gradients(size, dtype), scales, lrs, strict=True):
        optimizer.param_groups[0]["lr"] = lr
        p.grad = g * scale
        optimizer.step()
    return [p.detach(), optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"]]


def check_close(got: list[Tensor], want: list[Tensor], dtype: torch.dtype) -> None:
    """Weights, first and second moments. fp32: ten updates of a few roundings of 6e-8 each, relative to weights of
    size 1; first moments relative to the gradients' size, for these may cancel."""
    tolerance = 1e-13 if dtype == torch.float64 else 2e-6
    torch.testing.assert_close(got[0], want[0], rtol=tolerance, atol=tolerance)
    assert ((got[1] - want[1]).abs() <= tolerance * want[2].sqrt()).all()
    torch.testing.assert_close(got[2], want[2], rtol=tolerance, atol=0.0)


@pytest.mark.parametrize("update", [adam.adamw_, adam.reference], ids=["fused", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", SIZES)
def test_ten_steps_are_torchs_adamw(size: int, dtype: torch.dtype, update: object) -> None:
    scales = [1.0, 0.25, 1.0, 1e-3, 0.7, 1.0, 1.0, 0.5, 1.0, 0.9]
    lrs = [1e-2 * (10 - step) / 10 for step in range(10)]
    for decay in (0.0, 0.1):
        p, m, v = start(size, dtype)
        for step, g in enumerate(gradients(size, dtype)):
            update(p, g, m, v, moment(step + 1, lr=lrs[step], scale=scales[step]), ADAM, decay)  # type: ignore[operator]
        check_close([p, m, v], torchs(size, dtype, decay, scales, lrs), dtype)


@pytest.mark.parametrize("update", [adam.adamw_, adam.reference], ids=["fused", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1.0])
def test_a_skipped_step_leaves_everything_untouched(
    update: object, dtype: torch.dtype, poison: float
) -> None:
    p, m, v = start(1023, dtype)
    update(p, gradients(1023, dtype)[0], m, v, moment(1), ADAM, 0.1)  # type: ignore[operator]
    before = [t.clone() for t in (p, m, v)]
    update(p, torch.full_like(p, poison), m, v, moment(2, skip=True), ADAM, 0.1)  # type: ignore[operator]
    assert all(torch.equal(a, b) for a, b in zip((p, m, v), before, strict=True))


def test_a_slice_of_a_buffer_is_updated_in_place_and_nothing_beside_it() -> None:
    buffers = [torch.arange(100, dtype=torch.float32) + k for k in range(4)]
    p, g, m, v = (buffer[32:64] for buffer in buffers)
    alone_ = [part.clone() for part in (p, g, m, v)]
    adam.adamw_(p, g, m, v, moment(3), ADAM, 0.1)
    adam.adamw_(*alone_, moment(3), ADAM, 0.1)
    for k, part in ((0, alone_[0]), (2, alone_[2]), (3, alone_[3])):
        assert torch.equal(buffers[k][32:64], part)
        rest = torch.arange(100, dtype=torch.float32) + k
        assert torch.equal(buffers[k][:32], rest[:32])
        assert torch.equal(buffers[k][64:], rest[64:])


@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
def test_narrow_gradients_update_wide_weights(wide: torch.dtype) -> None:
    p, m, v = start(1023, wide)
    q, n, w = start(1023, wide)
    for step, g in enumerate(gradients(1023, torch.bfloat16)):
        kept = g.clone()
        adam.adamw_(p, g, m, v, moment(step + 1, scale=0.3), ADAM, 0.1)
        assert torch.equal(g, kept)
        adam.reference(q, g, n, w, moment(step + 1, scale=0.3), ADAM, 0.1)
    check_close([p, m, v], [q, n, w], wide)


def test_a_padding_of_zeros_stays_zero() -> None:
    """Whatever decay and steps: a bucket's padding must not grow into anything."""
    p = torch.zeros(64)
    m, v = torch.zeros(64), torch.zeros(64)
    for step in range(5):
        adam.adamw_(p, torch.zeros(64), m, v, moment(step + 1), ADAM, 0.1)
    assert not p.any()
    assert not m.any()
    assert not v.any()


# ------------------------------------------------------------------------------------------------------------- matmul

# A sum of 300 products of size 1: fp32 errs by some 1e-6, bf16's result has 8 bits.
MATMUL = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-7}


def matrix(rows: int, columns: int, dtype: torch.dtype, seed: int, turned: bool) -> Tensor:
    """A matrix in row- or column-major order."""
    draw = torch.Generator().manual_seed(seed)
    made = torch.randn(
        (columns, rows) if turned else (rows, columns), generator=draw, dtype=torch.float64
    ).to(dtype)
    return made.t() if turned else made


def near(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), want, rtol=MATMUL[dtype], atol=MATMUL[dtype] * 10)


@pytest.mark.parametrize("dtype", list(MATMUL))
@pytest.mark.parametrize(
    ("m", "k", "n"), [(1, 1, 1), (6, 300, 7), (33, 64, 128), (0, 5, 3), (4, 5, 0), (129, 31, 2)]
)
def test_linear_is_the_product_for_any_shape_and_order(
    m: int, k: int, n: int, dtype: torch.dtype
) -> None:
    for turned in (False, True):
        weight = matrix(n, k, dtype, 2, turned)
        for x in (
            matrix(m, k, dtype, 1, turned),
            matrix(m, k, dtype, 1, False).unsqueeze(1).expand(m, 3, k),
        ):
            for bias in (None, torch.linspace(-1, 1, n).to(dtype)):
                want = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
                got = matmul.linear(x, weight, bias)
                assert got.shape == (*x.shape[:-1], n)
                near(got, want, dtype)


@pytest.mark.parametrize("dtype", list(MATMUL))
@pytest.mark.parametrize(
    ("m", "k", "n"), [(1, 1, 1), (96, 300, 7), (7, 300, 96), (64, 48, 64), (3, 5, 0)]
)
def test_products_are_added_in_place_or_begin_anew(
    m: int, k: int, n: int, dtype: torch.dtype
) -> None:
    """Into a part of a larger buffer, as gradients are; what stood there before a first one does not matter."""
    for a_turned in (False, True):
        a, b = matrix(m, k, dtype, 1, a_turned), matrix(k, n, dtype, 2, False)
        buffer = torch.full((m * n + 64,), float("nan"), dtype=dtype)
        out = buffer[32 : 32 + m * n].view(m, n)
        for number, fresh in enumerate((True, False, False), 1):
            matmul.add_product_(out, a, b, fresh=fresh)
            near(out, number * (a.double() @ b.double()), dtype)
        assert buffer[:32].isnan().all()
        assert buffer[32 + m * n :].isnan().all()
