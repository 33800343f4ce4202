"""csrc/cuda/head_norm.cu against fp64, with what it reads and writes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.covering import in_turns
from tests.cuda.cases import (
    assert_close,
    assert_close_in_bf16,
    assert_coalesced,
    assert_traffic,
    bf16,
    devices,
    in_every_order,
)
from tests.cuda.emulator import COMPILER, Machine, emulated
from threed.core import device
from threed.ops import head_norm, rotary
from threed.ops.frequencies import frequencies
from threed.ops.head_norm import HeadNorm
from threed.ops.positions import Positions

pytestmark = [pytest.mark.skipif(COMPILER is None, reason="needs g++"), devices]
EPS = 1e-5
# positions, sequences, query heads, key heads, size, offset
CASES = [
    (1, 1, 1, 1, 64, 0.0),
    (5, 3, 7, 1, 64, 0.0),
    (9, 2, 5, 3, 128, 0.0),
    (3, 2, 4, 2, 256, 1.0),
    (40, 2, 3, 1, 128, 1.0),
]
Case = tuple[int, int, int, int, int, float]


def arguments(case: Case) -> tuple[Tensor, tuple[Tensor, Tensor], HeadNorm]:
    length, sequences, queries, keys, size, offset = case
    x = bf16(length, sequences, (queries + 2 * keys) * size)
    weights = bf16(size, seed=1), bf16(size, seed=2)
    by = HeadNorm((queries, keys), size, 1e4, Positions.all(length), offset, EPS)
    return x, weights, by


def plain(x: Tensor, weights: tuple[Tensor, Tensor], by: HeadNorm) -> tuple[Tensor, ...]:
    """The same in plain operations: queries, keys and values."""
    heads = x.unflatten(-1, (-1, by.size)).split([*by.heads, by.heads[1]], 2)
    normed = (
        F.rms_norm(part, (by.size,), weight + by.offset, by.eps)
        for part, weight in zip(heads[:2], weights, strict=True)
    )
    return (*(rotary.rotate(part, by.theta, by.positions) for part in normed), heads[2])


@pytest.mark.parametrize("case", CASES)
def test_heads_are_normalized_and_turn(case: Case) -> None:
    x, weights, by = arguments(case)
    (queries, keys), size = by.heads, by.size

    def work(machine: Machine) -> tuple[Tensor, ...]:
        y = head_norm.forward(x, weights, by)
        (ran,) = machine.launches
        share = (queries + keys) / (queries + 2 * keys)
        rows = case[0] * case[1]
        turns = case[1] * 32 / (size // 16)  # lanes that process different heads read the same
        times = {"x": (share, 0), "y": (0, 1), "table": (turns, 0)}
        rounds = -(-(queries + keys) * size // 16 // 32) * 32 // (size // 16)
        weighed = rows * min(queries, rounds), rows * max(rounds - queries, 0)
        assert_traffic(ran, times | {"q_weight": (weighed[0], 0), "k_weight": (weighed[1], 0)})
        if rows * size >= 4096:
            assert_coalesced(ran)
        return (y,)

    (y,) = in_every_order(work)
    wide = x.double(), (weights[0].double(), weights[1].double())
    truth = torch.cat(plain(*wide, by)[:2], 2)
    assert_close_in_bf16(y.view_as(truth).reshape(-1, size), truth.reshape(-1, size))


@pytest.mark.parametrize(("case", "layout"), in_turns(2, CASES, ["s b n d", "b n s d", "odd"]))
def test_gradients(case: Case, layout: str) -> None:
    x, weights, by = arguments(case)
    (queries, keys), size = by.heads, by.size
    given = []
    for seed, n in enumerate((queries, keys, keys)):
        of = bf16(*case[:2], n, size + 8 * (layout == "odd") + (layout == "odd"), seed=seed)
        of = of[..., :size]
        if layout == "b n s d":
            of = of.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3)
        given.append(of)
    before = [bf16(size, seed=3).float(), bf16(size, seed=4).float()]

    def work(machine: Machine) -> tuple[Tensor, ...]:
        outs = [part.clone() for part in before]
        dx = head_norm.backward(tuple(given), x, weights, by, (outs[0], outs[1]), (True, False))
        if layout != "odd":
            share = (queries + keys) / (queries + 2 * keys)
            times = dict.fromkeys(("dq", "dk", "dv"), (1, 0)) | {"dx": (0, 1), "parts": (0, 1)}
            lanes = 32 / (size // 16)  # that process different heads read the same
            rows = case[0] * case[1]
            warps = 8 * min(head_norm.BLOCKS * device.processors(x.device), -(-rows // 8))
            each = {"q_weight": (warps * lanes, 0), "k_weight": (warps * lanes, 0)}
            table = {"table": (2 * case[1] * lanes, 0)}
            assert_traffic(machine.launches[0], times | {"x": (share, 0)} | each | table)
            if case[0] * case[1] * size >= 4096:
                assert_coalesced(machine.launches[0])
        return (dx, *outs)

    dx, *dweights = in_every_order(work)
    wide = [t.double().requires_grad_() for t in (x, *weights)]
    truth = torch.autograd.grad(
        plain(wide[0], (wide[1], wide[2]), by), wide, [g.double() for g in given]
    )
    assert_close_in_bf16(dx.reshape(-1, size), truth[0].reshape(-1, size))
    assert_close(dweights[0], truth[1] + before[0].double())
    assert_close(dweights[1], truth[2])


def test_wrong_arguments_are_refused() -> None:
    x, weights, by = arguments(CASES[1])
    with emulated(), pytest.raises(ValueError, match="head_norm takes"):
        head_norm.forward(x[:4], weights, by)
    with emulated(), pytest.raises(ValueError, match="head_norm takes"):
        head_norm.forward(x, (weights[0], weights[1][:32]), by)
    partly = frequencies(1e4, 64, part=0.5)
    assert not head_norm.fits(x, 64, partly, *weights)
    assert not head_norm.fits(x, 48, 1e4, *weights)
