"""csrc/cuda/rotary.cu against fp64, with what it reads and writes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.cuda.cases import assert_close_in_bf16, assert_coalesced, assert_traffic, bf16, devices, in_every_order
from tests.cuda.emulator import COMPILER, Machine, emulated
from threed.ops import rotary

pytestmark = [pytest.mark.skipif(COMPILER is None, reason="needs g++"), devices]
# positions, sequences, heads that turn, heads that do not, size
CASES = [(1, 1, 1, 0, 16), (5, 3, 2, 1, 32), (7, 1, 3, 0, 48), (4, 2, 12, 4, 64), (9, 2, 5, 1, 128), (3, 1, 1, 1, 4096)]


@pytest.mark.parametrize("case", CASES)
def test_heads_turn(case: tuple[int, int, int, int, int]) -> None:
    length, sequences, heads, others, size = case
    x = bf16(length * sequences, (heads + others) * size)

    def work(machine: Machine) -> tuple[Tensor, ...]:
        turned, back = x.clone(), x.clone()
        rotary.turn_(turned, sequences, heads, size, 1e4)
        rotary.turn_(back, sequences, heads, size, 1e4, back=True)
        share = heads / (heads + others)
        for ran in machine.launches:
            assert_traffic(ran, {"x": (share, share), "table": (sequences * heads, 0)})
            if heads * size * length >= 4096 and size % 128 == 0:
                assert_coalesced(ran)
        return turned, back

    turned, back = in_every_order(work)
    heads_of = x.double().view(length, sequences, -1, size)
    angle = rotary.angles(length, size, 1e4, x.device)
    for got, sign in ((turned, 1.0), (back, -1.0)):
        cosines, sines = angle.cos().double(), sign * angle.sin().double()
        left, right = heads_of[:, :, :heads].chunk(2, -1)
        c, s = cosines[:, None, None], sines[:, None, None]
        truth = torch.cat((left * c - right * s, right * c + left * s), -1)
        assert_close_in_bf16(got.view_as(heads_of)[:, :, :heads].reshape(-1, size), truth.reshape(-1, size))
        assert torch.equal(got.view_as(heads_of)[:, :, heads:].double(), heads_of[:, :, heads:])


def test_the_reference_is_what_the_attention_does() -> None:
    from threed.layers.attention import rotate

    x = torch.randn(6, 2, 3, 32, dtype=torch.float64)
    assert torch.allclose(rotary.reference(x, 1e4), rotate(x, 1e4), atol=1e-6)


def test_wrong_arguments_are_refused() -> None:
    x = bf16(6, 64)
    for sequences, heads, size in ((4, 1, 32), (2, 3, 32), (2, 1, 24)):
        with emulated(), pytest.raises(ValueError, match="rotary takes"):
            rotary.turn_(x, sequences, heads, size, 1e4)
