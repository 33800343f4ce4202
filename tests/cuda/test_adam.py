"""csrc/cuda/adam.cu against fp64, with what it reads and writes: AdamW and Lion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.covering import in_turns
from tests.cuda.cases import (
    assert_close,
    assert_coalesced,
    assert_traffic,
    devices,
    in_every_order,
    normal,
)
from tests.cuda.emulator import COMPILER, Machine, emulated
from threed.ops import adam, lion
from threed.ops.adam import Adam
from threed.ops.lion import Lion
from threed.ops.update import StepScalars

pytestmark = [pytest.mark.skipif(COMPILER is None, reason="needs g++"), devices]


def now(step: int = 3, skip: float = 0.0) -> StepScalars:
    lr, number, scale, skipped = (
        torch.tensor(x, dtype=torch.float64) for x in (3e-4, step, 0.37, skip)
    )
    return StepScalars(lr, number, scale, skipped)


def update(
    arrays: Sequence[Tensor],
    g: Tensor,
    out: Tensor | None,
    at: StepScalars,
    rule: Adam,
    decay: float,
    **more: Any,
) -> None:
    scalars = (at.lr, at.step, at.scale, at.skip)
    adam.call_cuda(*arrays, g, out, *scalars, rule.beta1, rule.beta2, rule.eps, decay, **more)


@pytest.mark.parametrize(
    ("n", "gradient", "with_out", "step"),
    in_turns(
        3, (4, 12, 1020, 4096, 100_000), (torch.float32, torch.bfloat16), (True, False), (1, 1000)
    ),
)
def test_update(n: int, gradient: torch.dtype, with_out: bool, step: int) -> None:
    rule, decay = Adam(0.9, 0.95, 1e-8), 0.1
    p = normal(n, seed=0)
    m = 0.1 * normal(n, seed=1)
    v = 0.01 * normal(n, seed=2).square()
    g = normal(n, seed=3).to(gradient)
    v[::7], g[::7], m[::7] = 0, 0, 0  # never used yet

    def work(machine: Machine) -> tuple[Tensor, ...]:
        states = [t.clone() for t in (p, m, v)]
        out = torch.empty(n, dtype=torch.bfloat16) if with_out else None
        update(states, g, out, now(step), rule, decay)
        (ran,) = machine.launches
        arrays = {"p": (1, 1), "m": (1, 1), "v": (1, 1), "g": (1, 0), "out": (0, 1)}
        scalars = {n: t.times for n, t in ran.traffic.items() if t.size == 8 and n not in arrays}
        assert_traffic(ran, {n: t for n, t in arrays.items() if n in ran.traffic} | scalars)
        moved = sum(
            ran.traffic[name].read + ran.traffic[name].written
            for name in arrays
            if name in ran.traffic
        )
        assert moved == n * (24 + g.element_size() + 2 * with_out) or not ran.counts
        if n >= 4096:
            assert_coalesced(ran)
        return (*states, out) if out is not None else tuple(states)

    states = in_every_order(work)
    wide = [t.double() for t in (p, m, v)]
    adam.reference(wide[0], g.double(), wide[1], wide[2], now(step), rule, decay)
    for got, truth in zip(states, wide, strict=False):
        assert_close(got, truth, 1e-6)
    change = (states[0].double() - p.double(), wide[0] - p.double())
    assert (change[0] - change[1]).abs().max() <= 2.0**-23 * p.abs().max() + 1e-5 * change[
        1
    ].abs().max()
    if with_out:
        assert torch.equal(states[3], states[0].bfloat16())


def test_a_skipped_step_changes_nothing() -> None:
    before = [normal(64, seed=seed) for seed in range(3)]
    after, out = [t.clone() for t in before], torch.zeros(64, dtype=torch.bfloat16)
    with emulated():
        update(after, torch.full((64,), torch.nan), out, now(skip=1.0), Adam(), 0.1)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert not out.any()


@pytest.mark.parametrize(
    ("n", "gradient", "with_out", "skip"),
    in_turns(
        3, (4, 12, 1020, 100_000), (torch.float32, torch.bfloat16), (True, False), (False, True)
    ),
)
def test_lion(n: int, gradient: torch.dtype, with_out: bool, skip: bool) -> None:
    p, m, g, at = normal(n, seed=0), 0.1 * normal(n, seed=1), normal(n, seed=2), now(skip=skip)
    g = (g + g.sign()).to(gradient)  # with m it never gives nearly 0, whose sign would be chance
    m, g[::7], m[::7] = g.float().sign() * m.abs(), 0, 0  # never used yet

    def work(machine: Machine) -> tuple[Tensor, ...]:
        states, out = (p.clone(), m.clone()), torch.zeros(n, dtype=torch.bfloat16)
        Lion().update(states[0], g, states[1:], at, 0.1, out if with_out else None)
        (ran,) = machine.launches
        assert ran.name == "lion"
        arrays = {"p": (1, 1), "m": (1, 1), "g": (1, 0), "out": (0, 1)}
        scalars = {n: t.times for n, t in ran.traffic.items() if n not in arrays}
        if not skip:
            assert_traffic(ran, {n: t for n, t in arrays.items() if n in ran.traffic} | scalars)
            if n >= 4096:
                assert_coalesced(ran)
        return (*states, out)

    *states, out = in_every_order(work)
    wide = [p.double(), m.double()]
    lion.reference(wide[0], g.double(), wide[1:], at, Lion(), 0.1)
    for got, truth, before in zip(states, wide, (p, m), strict=True):
        assert_close(got, truth, 2.0**-22)
        assert torch.equal(got, before) == skip
    change = (states[0].double() - p.double(), wide[0] - p.double())
    assert (change[0] - change[1]).abs().max() <= 2.0**-22 * p.abs().max()
    assert torch.equal(
        out, states[0].bfloat16() if with_out and not skip else torch.zeros_like(out)
    )


def test_stochastic_rounding_is_right_on_average() -> None:
    n, tries = 256, 400
    p = normal(n, seed=0)
    p[0], p[1], p[2], p[3] = 1.0, -2.5, 3.0e38, 0.0  # exact in bf16, or near its end
    total = torch.zeros(n, dtype=torch.float64)
    for step in range(1, tries + 1):
        with emulated(checks=False):
            out = torch.empty(n, dtype=torch.bfloat16)
            zero = [torch.zeros(n) for _ in range(3)]
            update([p.clone(), *zero[:2]], zero[2], out, now(step), Adam(), 0.0, stream=(5, 7))
        low, high = _neighbors(p)
        assert ((out == low) | (out == high)).all()
        total += out.double()
    gap = (high.double() - low.double()).abs().clamp(min=1e-30)
    # five standard deviations
    assert ((total / tries - p.double()).abs() / gap).max() < 5 * 0.5 / tries**0.5
    assert torch.equal(total[:2] / tries, p[:2].double())


def _neighbors(p: Tensor) -> tuple[Tensor, Tensor]:
    """bf16 numbers at p, or on both sides of it."""
    bits = p.view(torch.int32)
    low = (bits & -65536).view(torch.float32)
    high = torch.where(low == p, low, ((bits & -65536) + 65536).view(torch.float32))
    return low.bfloat16(), high.bfloat16()


def test_wrong_arguments_are_refused() -> None:
    three, g = [normal(8, seed=seed) for seed in range(3)], normal(8, seed=3)
    wide, at = [t.double() for t in three], now()
    for arrays, gradient in ((three, g.half()), (wide, g), (three, normal(4, seed=3))):
        with emulated(), pytest.raises(ValueError, match="lion takes weights and states fp32"):
            lion.call_cuda(*arrays[:2], gradient, None, at.lr, at.scale, at.skip, 0.9, 0.99, 0.0)
        with emulated(), pytest.raises(ValueError, match="adamw takes weights and states fp32"):
            update(arrays, gradient, None, now(), Adam(), 0.0)
