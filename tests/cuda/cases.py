"""What the tests of all kernels share: inputs, comparisons, and the checks that every kernel passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

from tests.cuda.emulator import ORDERS, Launch, Machine, emulated

# Every test of a kernel takes this: it runs on the emulator, and by `pytest -m gpu` once more on a GPU.
devices = pytest.mark.usefixtures("device")
BF16_ULP = 2.0**-8  # of the number itself: half of this is what rounding costs


def bf16(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Normal numbers, the same for the same shape and seed."""
    return (scale * normal(*shape, seed=seed)).bfloat16()


def normal(*shape: int, seed: int = 0) -> Tensor:
    """The same in fp32."""
    made = torch.randn(*shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
    return made.to(torch.get_default_device())


def integers(below: int, count: int, seed: int = 0) -> Tensor:
    """Whole numbers [count] in [0, below)."""
    made = torch.randint(
        below, (count,), generator=torch.Generator("cpu").manual_seed(seed), device="cpu"
    )
    return made.to(torch.get_default_device())


def assert_close_in_bf16(got: Tensor, truth: Tensor, row: float = 1e-6) -> None:
    """Every number of `got` (bf16) within a rounding of fp64 `truth` [n ...], or within `row` of its row's largest."""
    assert got.dtype == torch.bfloat16
    largest = truth.abs().flatten(1).amax(1) if truth.dim() > 1 else truth.abs()
    allowed = torch.maximum(
        truth.abs() * BF16_ULP, row * largest.view(-1, *[1] * (truth.dim() - 1))
    )
    wrong = (got.double() - truth).abs() > allowed
    assert not wrong.any(), (
        f"{int(wrong.sum())} of {wrong.numel()}: {got[wrong][:5]} for {truth[wrong][:5]}"
    )


def assert_close(got: Tensor, truth: Tensor, tolerance: float = 1e-5) -> None:
    """fp32 sums within `tolerance` of the largest of fp64 `truth`."""
    assert got.dtype == torch.float32
    difference = (got.double() - truth).abs().max() if truth.numel() else torch.zeros(())
    assert difference <= tolerance * truth.abs().max().clamp(min=1e-30), difference


def assert_traffic(done: Launch, times: Mapping[str, tuple[float, float]]) -> None:
    """Every tensor is read and written as often as said, (read, written). Single numbers need not be named.

    A GPU does not count; there this passes.
    """
    if done.counts is False:
        return
    found = {name: t.times for name, t in done.traffic.items() if name in times or t.size > 4}
    assert found == dict(times), done.name


def assert_coalesced(done: Launch) -> None:
    """Of the sectors that warps touch, 95 % are used; and shared memory takes no pass twice. Of a GPU this passes."""
    if done.counts is False:
        return
    assert done.used >= 0.95 * 32 * done.sectors, (done.name, done.used, 32 * done.sectors)
    assert done.bank_passes <= 1.05 * done.least_bank_passes, (
        done.name,
        done.bank_passes,
        done.least_bank_passes,
    )


def in_every_order(work: Callable[[Machine], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Runs `work` with threads in every order; its results must be the same bits. Returns them."""
    results = []
    for seed, order in enumerate(ORDERS):
        with emulated(order, seed) as machine:
            results.append(work(machine))
    for other in results[1:]:
        assert all(
            torch.equal(_bits(a), _bits(b)) for a, b in zip(results[0], other, strict=True)
        ), "depends on the order"
    return results[0]


def _bits(x: Tensor) -> Tensor:
    return x.reshape(-1).view(torch.uint8)
