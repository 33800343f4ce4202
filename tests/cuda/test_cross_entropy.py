"""csrc/cuda/cross_entropy.cu against fp64, with what it reads and writes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.covering import in_turns
from tests.cuda.cases import (
    BF16_ULP,
    assert_coalesced,
    assert_traffic,
    bf16,
    devices,
    in_every_order,
    integers,
)
from tests.cuda.emulator import COMPILER, Machine, emulated
from threed.distributed.collectives import split
from threed.ops import cross_entropy

pytestmark = [pytest.mark.skipif(COMPILER is None, reason="needs g++"), devices]
SHAPES = [(3, 1), (5, 7), (4, 8), (4, 9), (3, 100), (2, 4097), (2, 50257)]


def padded(logits: Tensor, width: int) -> Tensor:
    """Logits [n width] whose padding is NaN."""
    out = torch.full((len(logits), width), float("nan"), dtype=logits.dtype)
    out[:, : logits.shape[1]] = logits
    return out


def targets_of(rows: int, vocabulary: int, seed: int = 0) -> Tensor:
    """Some in the vocabulary, its last one, and some that cost nothing."""
    targets = integers(vocabulary, rows, seed)
    targets[0] = vocabulary - 1
    targets[rows // 2 :: 3] = -100
    return targets


def truth(logits: Tensor, targets: Tensor, weight: float) -> tuple[Tensor, Tensor]:
    """Losses and gradient in fp64."""
    x = logits.double().requires_grad_()
    losses = cross_entropy.reference(x, targets)
    (gradient,) = torch.autograd.grad(losses.sum() * weight, x)
    return losses.detach(), gradient


def assert_gradient(got: Tensor, gradient: Tensor, logits: Tensor, weight: float) -> None:
    """Within a rounding to bf16; or, where a softmax of nearly one is subtracted from one, within what fp32 has for an
    exponent as large as the row's largest logit."""
    largest = logits.double().abs().amax(1, keepdim=True).clamp(min=1)
    allowed = torch.maximum(gradient.abs() * BF16_ULP, weight * 2.0**-22 * largest)
    assert ((got.double() - gradient).abs() <= allowed).all()


def assert_loss(got: Tensor, losses: Tensor, logits: Tensor) -> None:
    """Within 1e-6 of the row's largest logit: a loss is a difference of two such numbers."""
    assert got.dtype == torch.float32
    assert ((got.double() - losses).abs() <= 1e-6 * logits.double().abs().amax(1)).all()


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("multiple", [8, 128])
def test_whole_rows(rows: int, columns: int, multiple: int) -> None:
    logits = bf16(rows, columns, scale=3.0)
    targets = targets_of(rows, columns)
    weight = torch.tensor(0.37)
    width = -(-columns // multiple) * multiple

    def work(machine: Machine) -> tuple[Tensor, ...]:
        x = padded(logits, width)
        loss = cross_entropy.whole(x, targets, weight, columns)
        done = machine.launches[0]
        assert_traffic(
            done, {"logits": (-(-columns // 8) * 8 / width, 1), "targets": (512, 0), "loss": (0, 1)}
        )
        if columns >= 4096 and multiple == 128:
            assert_coalesced(done)
        return loss, x

    loss, x = in_every_order(work)
    losses, gradient = truth(logits, targets, float(weight))
    assert_loss(loss, losses, logits)
    assert_gradient(x[:, :columns], gradient, logits, 0.37)
    assert not x[:, columns:].any()


@pytest.mark.parametrize(("shape", "ranks"), in_turns(2, SHAPES, (1, 2, 3)))
def test_shards(shape: tuple[int, int], ranks: int) -> None:
    rows, columns = shape
    logits = bf16(rows, columns, scale=3.0)
    targets = targets_of(rows, columns)
    weight = torch.tensor(0.37)
    spans = [split(columns, ranks, rank) for rank in range(ranks)]

    def work(machine: Machine) -> tuple[Tensor, ...]:
        shards = [padded(logits[:, a:b], -(-(b - a) // 8) * 8 + 8) for a, b in spans]
        numbers = torch.stack(
            [
                cross_entropy.shard_numbers(x, targets, b - a, a)
                for x, (a, b) in zip(shards, spans, strict=True)
            ]
        )
        losses = [
            cross_entropy.from_numbers(x, targets, weight, numbers, b - a, a, columns)
            for x, (a, b) in zip(shards, spans, strict=True)
        ]
        return *losses, *shards

    results = in_every_order(work)
    losses, gradient = truth(logits, targets, float(weight))
    for loss, x, (a, b) in zip(results, results[ranks:], spans, strict=False):
        assert_loss(loss, losses, logits)
        assert torch.equal(loss, results[0])  # the same on every rank
        assert_gradient(x[:, : b - a], gradient[:, a:b], logits, 0.37)
        assert not x[:, b - a :].any()


def test_extremes() -> None:
    logits = torch.tensor(
        [
            [1e4, -1e4, 3.0],
            [-torch.inf, 2.0, -torch.inf],
            [torch.inf, 0.0, 0.0],
            [torch.nan, 0.0, 0.0],
        ]
    )
    targets = torch.tensor([0, 1, 1, 1])
    x = padded(logits.bfloat16(), 8)
    with emulated():
        loss = cross_entropy.whole(x, targets, torch.ones(()), 3)
    losses, gradient = truth(logits.bfloat16(), targets, 1.0)
    assert_loss(loss[:2], losses[:2], logits[:2].nan_to_num(0, 0, 0))
    assert not torch.isfinite(loss[2:]).any()
    assert_gradient(x[:2, :3], gradient[:2], logits[:2].nan_to_num(0, 0, 0), 1.0)
    assert x[2:, :3].isnan().any(1).all()


def test_wrong_arguments_are_refused() -> None:
    x, t, w = bf16(4, 16), torch.zeros(4, dtype=torch.int64), torch.ones(())
    for logits, targets, weight in (
        (x.float(), t, w),
        (x[:, :12], t, w),
        (x, t.int(), w),
        (x, t, w.double()),
        (x, t[:3], w),
    ):
        with pytest.raises(ValueError, match=r"cross_entropy takes logits bf16 \[n width\]"):
            cross_entropy.whole(logits, targets, weight, 3)
