"""Kernels on whole numbers, where no rounding has a part: the bits are those of fp64, on the emulator and on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.cuda.cases import devices, in_every_order, integers
from tests.cuda.emulator import COMPILER
from threed.ops import cross_entropy, dropout, quantize, sums
from threed.ops.positions import Positions

pytestmark = [pytest.mark.skipif(COMPILER is None, reason="needs g++"), devices]


def whole(*shape: int, below: int = 9, seed: int = 0) -> Tensor:
    """bf16 whole numbers between -below and below."""
    count = torch.Size(shape).numel()
    return (integers(2 * below - 1, count, seed) - (below - 1)).view(shape).bfloat16()


def test_sums_over_rows() -> None:
    x = whole(300, 264)

    def work(machine: object) -> tuple[Tensor, ...]:
        out = torch.zeros(264)
        sums.column_sums(x, out, add=True)
        return (out,)

    assert torch.equal(in_every_order(work)[0], x.double().sum(0).float())


def test_sums_of_squares() -> None:
    x = whole(40_000).float()
    (got,) = in_every_order(lambda machine: (sums.square_sum(x),))
    assert torch.equal(got, x.double().square().sum())


@pytest.mark.parametrize("factor", [1.0, -0.5, 4.0])
def test_scaling_by_a_power_of_two(factor: float) -> None:
    x = whole(16, 24)

    def work(machine: object) -> tuple[Tensor, ...]:
        scaled = x.clone()
        cross_entropy.scale_(scaled, torch.tensor(factor))
        return (scaled,)

    assert torch.equal(in_every_order(work)[0], (x.double() * factor).bfloat16())


@pytest.mark.parametrize("p", [0.0, 0.5, 0.75])
def test_dropout(p: float) -> None:
    """1 / (1 - p) is a power of two, so that nothing is rounded: masks and all are the same bits."""
    x, bias, residual = whole(9, 2, 264), whole(264, seed=1), whole(9, 2, 264, seed=2)
    positions = Positions(((2, 11),), 11)
    draw = dropout.Draw(3, "blocks.1.dropout", 5, torch.tensor([7, 2**40 + 1]), positions, p)
    (got,) = in_every_order(lambda machine: (dropout.dropout(x, draw, bias, residual),))
    assert torch.equal(
        got, dropout.reference(x.double(), draw, bias.double(), residual.double()).bfloat16()
    )


@pytest.mark.parametrize("bits", [8, 4])
def test_quantizing_there_and_back(bits: int) -> None:
    """The largest number of a block is that of the format: the scale is 1."""
    top = quantize.TOPS[bits]
    x = whole(9, quantize.BLOCK, below=top + 1)
    x[:, 3] = top
    x = x.flatten()

    def work(machine: object) -> tuple[Tensor, ...]:
        q, scales = quantize.quantize(x, bits)
        back = quantize.dequantize(torch.stack((q, q)), torch.stack((scales, 2 * scales)), bits)
        return q, scales, back

    q, scales, back = in_every_order(work)
    assert torch.equal(scales, torch.ones(9))
    assert torch.equal(quantize.unpacked(q, bits).flatten(), x.to(torch.int8))
    assert torch.equal(back, (3 * x.double()).bfloat16())
