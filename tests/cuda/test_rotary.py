"""csrc/cuda/rotary.cu against fp64, with what it reads and writes."""

from __future__ import annotations

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
from threed.config.architectures.rope_scaling import RopeScaling
from threed.ops import rotary
from threed.ops.frequencies import frequencies, scale_of
from threed.ops.positions import Positions

pytestmark = [pytest.mark.skipif(COMPILER is None, reason="needs g++"), devices]
# positions, sequences, heads that turn, heads that do not, size
CASES = [
    (1, 1, 1, 0, 16),
    (5, 3, 2, 1, 32),
    (7, 1, 3, 0, 48),
    (4, 2, 12, 4, 64),
    (9, 2, 5, 1, 128),
    (3, 1, 1, 1, 4096),
]


@pytest.mark.parametrize("case", CASES)
def test_heads_turn(case: tuple[int, int, int, int, int]) -> None:
    length, sequences, heads, others, size = case
    x = bf16(length * sequences, (heads + others) * size)

    def work(machine: Machine) -> tuple[Tensor, ...]:
        turned, back = x.clone(), x.clone()
        rotary.rotate_(turned, Positions.all(length), heads, size, 1e4)
        rotary.rotate_(back, Positions.all(length), heads, size, 1e4, back=True)
        share = heads / (heads + others)
        for ran in machine.launches:
            assert_traffic(ran, {"x": (share, share), "table": (sequences * heads, 0)})
            if heads * size * length >= 4096 and size % 128 == 0:
                assert_coalesced(ran)
        return turned, back

    turned, back = in_every_order(work)
    heads_of = x.double().view(length, sequences, -1, size)
    angle = rotary.angles(Positions.all(length), size, 1e4, x.device)
    for got, sign in ((turned, 1.0), (back, -1.0)):
        cosines, sines = angle.cos().double(), sign * angle.sin().double()
        left, right = heads_of[:, :, :heads].chunk(2, -1)
        c, s = cosines[:, None, None], sines[:, None, None]
        truth = torch.cat((left * c - right * s, right * c + left * s), -1)
        assert_close_in_bf16(
            got.view_as(heads_of)[:, :, :heads].reshape(-1, size), truth.reshape(-1, size)
        )
        assert torch.equal(got.view_as(heads_of)[:, :, heads:].double(), heads_of[:, :, heads:])


@pytest.mark.parametrize(
    ("case", "layout"), in_turns(3, CASES[:5], ("s b n d", "b s n d", "b n s d", "odd"))
)
def test_gradients_turn_back_into_packed_rows(
    case: tuple[int, int, int, int, int], layout: str
) -> None:
    """From the layouts that torch's attention returns; one that the kernel does not read is copied."""
    length, sequences, heads, keys, size = case
    keys = keys or heads
    names = "s b n d".split()
    given = []
    for seed, n in enumerate((heads, keys, keys)):
        of = bf16(length, sequences, n, size + (layout == "odd"), seed=seed)[..., :size]
        if layout != "odd":
            order = layout.split()
            inner = of.permute(*(names.index(x) for x in order)).contiguous()
            of = inner.permute(*(order.index(x) for x in names))
        given.append(of)

    def work(machine: Machine) -> tuple[Tensor, ...]:
        dx = rotary.pack_back(tuple(given), Positions.all(length), 1e4)
        (ran,) = machine.launches
        if layout != "odd":
            times = dict.fromkeys(("dq", "dk", "dv"), (1, 0))
            table = sequences * (heads + keys)
            assert_traffic(ran, times | {"dx": (0, 1), "table": (table, 0)})
            if heads * size * length >= 4096 and size % 128 == 0:
                assert_coalesced(ran)
        return (dx,)

    (dx,) = in_every_order(work)
    angle = rotary.angles(Positions.all(length), size, 1e4, dx.device).double()
    c, s = angle.cos()[:, None, None], angle.sin()[:, None, None]
    parts = []
    for of in given[:2]:
        left, right = of.double().chunk(2, -1)
        parts.append(torch.cat((left * c + right * s, right * c - left * s), -1))
    truth = torch.cat((*parts, given[2].double()), 2)
    assert_close_in_bf16(dx.view_as(truth).reshape(-1, size), truth.reshape(-1, size))


YARN = RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)


def test_scaled_angles_turn_and_turn_back_as_plain_operations_do() -> None:
    """Back is the transposed matrix: cosines and sines keep their factor."""
    x, theta = bf16(5 * 2, 3 * 32), frequencies(1e4, 32, scaling=YARN)
    assert scale_of(theta) > 1.1

    def work(machine: Machine) -> tuple[Tensor, ...]:
        turned, back = x.clone(), x.clone()
        rotary.rotate_(turned, Positions.all(5), 3, 32, theta)
        rotary.rotate_(back, Positions.all(5), 3, 32, theta, back=True)
        return turned, back

    turned, back = in_every_order(work)
    heads = x.double().view(5, 2, 3, 32).requires_grad_()
    truth = rotary.rotate(heads, theta)
    assert_close_in_bf16(turned.view(-1, 32), truth.detach().reshape(-1, 32))
    (gradient,) = torch.autograd.grad(truth, heads, heads.detach())
    assert_close_in_bf16(back.view(-1, 32), gradient.reshape(-1, 32))


def test_two_ranges_of_a_sequence_have_these_rows_of_the_whole() -> None:
    x, positions = bf16(8 * 2, 3 * 32), Positions(((0, 2), (6, 8)), 8)

    def work(machine: Machine) -> tuple[Tensor, ...]:
        whole, part = x.clone(), positions.rows(x.view(8, 2, -1)).reshape(8, -1).contiguous()
        rotary.rotate_(whole, Positions.all(8), 3, 32, 1e4)
        rotary.rotate_(part, positions, 3, 32, 1e4)
        return whole, part

    whole, part = in_every_order(work)
    assert torch.equal(positions.rows(whole.view(8, 2, -1)).reshape(8, -1), part)


def test_wrong_arguments_are_refused() -> None:
    x = bf16(6, 64)
    for length, heads, size in ((4, 1, 32), (3, 3, 32), (3, 1, 24)):
        with emulated(), pytest.raises(ValueError, match="rotary takes"):
            rotary.rotate_(x, Positions.all(length), heads, size, 1e4)
    with emulated(), pytest.raises(ValueError, match="rotary takes"):
        rotary.rotate_(x, Positions.all(3), 1, 32, frequencies(1e4, 32, part=0.5))
    heads, five = x.view(3, 2, 2, 32), bf16(5, 2, 2, 32)
    for parts, size in (((heads, heads, heads[:, :, :1]), 3), ((five, five, five), 3)):
        with emulated(), pytest.raises(ValueError, match="rotary_backward takes"):
            rotary.pack_back(parts, Positions.all(size), 1e4)
