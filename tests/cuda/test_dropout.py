"""csrc/cuda/dropout.cu: the bits of threed/core/rng.py, with what it reads and writes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.covering import in_turns
from tests.cuda.cases import (
    assert_close_in_bf16,
    assert_coalesced,
    assert_traffic,
    bf16,
    devices,
    in_every_order,
)
from tests.cuda.emulator import COMPILER, Machine, emulated
from threed.distributed.topology import alone
from threed.layers import Slicing
from threed.layers.dropout import Dropout
from threed.layers.slicing import MicroBatch
from threed.ops import dropout
from threed.ops.dropout import Draw
from threed.ops.positions import Positions, Range

pytestmark = [pytest.mark.skipif(COMPILER is None, reason="needs g++"), devices]
SHAPES = [(1, 1, 8), (3, 2, 40), (5, 3, 256), (2, 2, 1032), (4, 2, 2048)]


def draw(sequences: int, p: float, *ranges: Range) -> Draw:
    """Samples beyond 32 bits, too."""
    samples = torch.tensor([7, 2**32 + 5, 2**40 + 1])[:sequences]
    return Draw(1234, "blocks.3.mlp.dropout", 2**31 + 17, samples, Positions(ranges, 16), p)


def test_the_step_may_be_a_number_of_the_device() -> None:
    x, what = bf16(3, 2, 40), draw(2, 0.5, (3, 6))
    at = torch.tensor(what.step, dtype=torch.int64)
    with emulated():
        got = dropout.dropout(x, replace(what, step=at))
        assert torch.equal(got, dropout.dropout(x, what))
        assert not torch.equal(got, dropout.dropout(x, replace(what, step=at + 1)))
        with pytest.raises(ValueError, match="dropout takes bf16"):
            dropout.dropout(x, replace(what, step=at.int()))
    assert torch.equal(replace(what, step=at).mask(x), what.mask(x))


@pytest.mark.parametrize(
    ("shape", "p", "with_bias", "with_residual"),
    in_turns(5, SHAPES, (0.0, 0.1, 0.75), (False, True), (False, True)),
)
def test_dropout(
    shape: tuple[int, int, int], p: float, with_bias: bool, with_residual: bool
) -> None:
    length, sequences, h = shape
    x, what = bf16(*shape) + 2, draw(sequences, p, (3, 3 + length))
    bias = bf16(h, seed=1) if with_bias else None
    residual = bf16(*shape, seed=2) if with_residual else None

    def work(machine: Machine) -> tuple[Tensor, ...]:
        out = dropout.dropout(x, what, bias, residual)
        (ran,) = machine.launches
        times = {"x": (1, 0), "residual": (1, 0), "out": (0, 1), "bias": (length * sequences, 0)}
        assert_traffic(
            ran,
            {n: t for n, t in (times | {"samples": (32 * length, 0)}).items() if n in ran.traffic},
        )
        if x.numel() >= 4096:
            assert_coalesced(ran)
        return (out,)

    (out,) = in_every_order(work)
    wide = [None if t is None else t.double() for t in (x, bias, residual)]
    truth = dropout.reference(wide[0], what, wide[1], wide[2])  # type: ignore[arg-type]
    assert_close_in_bf16(out.view(-1, h), truth.view(-1, h))
    if not with_residual:
        assert torch.equal(out != 0, truth != 0)  # the same bits


def test_a_part_of_a_sequence_has_that_part_of_the_mask() -> None:
    x = bf16(8, 2, 64)
    parts = [((2, 5),), ((0, 2), (6, 8)), ((6, 8), (1, 1), (3, 4))]
    with emulated() as machine:
        whole = dropout.dropout(x, draw(2, 0.5, (0, 8)))
        for ranges in parts:
            what = draw(2, 0.5, *ranges)
            before = len(machine.launches)
            part = dropout.dropout(what.positions.rows(x), what, None, what.positions.rows(x))
            assert len(machine.launches) - before == sum(last > first for first, last in ranges)
            want = what.positions.rows(whole.double() + x.double())
            assert_close_in_bf16(part.view(-1, 64), want.view(-1, 64))
            part = dropout.dropout(what.positions.rows(x), what)
            assert torch.equal(what.positions.rows(whole), part)


@pytest.mark.parametrize("trained", [False, True])
def test_a_layer_adds_the_residual_in_the_kernel(trained: bool) -> None:
    """trained: whether the residual needs a gradient, which is that of the output."""
    x, residual, dy = (bf16(5, 2, 64, seed=seed) for seed in range(3))
    x.requires_grad_(), residual.requires_grad_(trained)
    layer = Dropout("d", 0.25, Slicing(alone()))
    micro = MicroBatch(samples=torch.tensor([3, 2**33]), step=7)
    with emulated(torch_writes=True) as machine:
        y = layer(x, micro, residual)
        dx, *rest = torch.autograd.grad(y, [x, *([residual] if trained else [])], dy)
    assert [ran.name for ran in machine.launches] == ["dropout"] * 2
    what = layer._draw(x, torch.tensor([3, 2**33]), 7)
    truth = dropout.reference(x.detach().double(), what, None, residual.detach().double())
    assert_close_in_bf16(y.detach().view(-1, 64), truth.view(-1, 64))
    assert_close_in_bf16(dx.view(-1, 64), dropout.reference(dy.double(), what).view(-1, 64))
    assert not rest or torch.equal(rest[0], dy)


def test_wrong_arguments_are_refused() -> None:
    for x, what in (
        (bf16(2, 2, 12), draw(2, 0.1, (0, 2))),
        (bf16(2, 3, 16), draw(2, 0.1, (0, 2))),
        (bf16(2, 2, 16), draw(2, 1.0, (0, 2))),
        (bf16(2, 2, 16), draw(2, 0.1, (0, 1), (3, 5))),
    ):
        with emulated(), pytest.raises(ValueError, match=r"dropout takes bf16 \[s b h\]"):
            dropout.dropout(x, what)
