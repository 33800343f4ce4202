"""csrc/cuda/sums.cu against fp64, with what it reads and writes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.cuda.cases import (
    assert_close,
    assert_coalesced,
    assert_traffic,
    bf16,
    devices,
    in_every_order,
    normal,
)
from tests.cuda.emulator import COMPILER, Machine, emulated
from threed.ops import sums

pytestmark = [pytest.mark.skipif(COMPILER is None, reason="needs g++"), devices]


@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 8), (7, 72), (65, 256), (300, 264), (64, 4096), (1000, 8)]
)
@pytest.mark.parametrize("add", [False, True])
def test_column_sums(rows: int, columns: int, add: bool) -> None:
    x, held = bf16(rows, columns) + 1, normal(columns, seed=1)

    def work(machine: Machine) -> tuple[Tensor, ...]:
        out = held.clone() if add else torch.empty(columns)
        sums.column_sums(x, out, add=add)
        first, second = machine.launches
        assert_traffic(first, {"x": (1, 0), "parts": (0, 1)})
        assert_traffic(second, {"parts": (1, 0), "out": (int(add), 1)})
        if columns % 256 == 0 and rows * columns >= 4096:
            assert_coalesced(first)
        return (out,)

    (out,) = in_every_order(work)
    assert_close(out, x.double().sum(0) + (held.double() if add else 0), 1e-6)


@pytest.mark.parametrize("add", [(False, True, False), (True, False, True), (True, False)])
def test_several_sets_of_partial_sums(add: tuple[bool, ...]) -> None:
    """In one launch; their numbers of partial sums differ."""
    parts = [normal(count, 264, seed=count) for count in (3, 130, 17)[: len(add)]]
    held = [normal(264, seed=seed) for seed in range(len(add))]

    def work(machine: Machine) -> tuple[Tensor, ...]:
        outs = [
            one.clone() if added else torch.empty(264) for one, added in zip(held, add, strict=True)
        ]
        sums.add_parts(*map(sums.Parts, parts, outs, add))
        assert len(machine.launches) == 1
        return tuple(outs)

    for out, part, one, added in zip(in_every_order(work), parts, held, add, strict=True):
        assert_close(out, part.double().sum(0) + (one.double() if added else 0), 1e-6)


@pytest.mark.parametrize("n", [0, 4, 1020, 4096, 300_000])
def test_sum_of_squares(n: int) -> None:
    x = normal(n, seed=0)

    def work(machine: Machine) -> tuple[Tensor, ...]:
        out = sums.square_sum(x)
        (ran,) = machine.launches
        assert not ran.counts or ran.traffic["x"].times == (1 if n else 0, 0)
        if n >= 4096:
            assert_coalesced(ran)
        return (out,)

    (out,) = in_every_order(work)
    assert out.dtype == torch.float64
    assert out.item() == pytest.approx(x.double().square().sum().item(), rel=1e-6)


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_a_sum_of_squares_shows_what_is_not_finite(bad: float) -> None:
    x = torch.ones(4096)
    x[17] = bad
    with emulated():
        assert not sums.square_sum(x).isfinite()


def test_wrong_arguments_are_refused() -> None:
    with emulated(), pytest.raises(ValueError, match="column_sums takes"):
        sums.column_sums(bf16(3, 12), torch.empty(12), add=False)
    with emulated(), pytest.raises(ValueError, match="square_sum takes"):
        sums.square_sum(torch.ones(7))
    with emulated(), pytest.raises(ValueError, match="add_parts takes"):
        sums.add_parts(sums.Parts(torch.ones(2, 8), torch.empty(4), False))
    one, other = (sums.Parts(torch.ones(2, n), torch.empty(n), False) for n in (8, 12))
    with emulated(), pytest.raises(ValueError, match="add_parts takes"):
        sums.add_parts(one, other)
