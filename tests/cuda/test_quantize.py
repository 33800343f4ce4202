"""csrc/cuda/quantize.cu against fp64, with what it reads and writes."""

from __future__ import annotations

import pytest
import torch
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
    integers,
)
from tests.cuda.emulator import COMPILER, Machine, emulated
from threed.ops import quantize

pytestmark = [pytest.mark.skipif(COMPILER is None, reason="needs g++"), devices]


def numbers(blocks: int, seed: int = 0) -> Tensor:
    """Blocks of different sizes; one of zeros."""
    x = bf16(blocks, 256, seed=seed) * torch.logspace(-6, 6, blocks).bfloat16().view(-1, 1)
    x[blocks // 2] = 0
    return x.flatten()


@pytest.mark.parametrize("blocks", [1, 7, 8, 9, 100])
@pytest.mark.parametrize("bits", [8, 4])
def test_quantize(blocks: int, bits: int) -> None:
    x = numbers(blocks)

    def work(machine: Machine) -> tuple[Tensor, ...]:
        out = quantize.quantize(x, bits)
        assert_traffic(machine.launches[0], {"x": (1, 0), "out": (0, 1), "scales": (0, 1)})
        if blocks >= 16:
            assert_coalesced(machine.launches[0])
        return out

    q, scales = in_every_order(work)
    whole, truth = quantize.quantize_reference(x.double(), bits)
    assert_close(scales, truth, 1e-6)
    # a number between two may go either way
    assert (quantize.unpacked(q, bits).int() - whole.int()).abs().max() <= 1
    assert torch.equal(quantize.packed(quantize.unpacked(q, bits), bits), q)
    back = quantize.unpacked(q, bits).double() * truth.view(-1, 1)
    assert ((back - x.double().view(-1, 256)).abs() <= 0.5001 * truth.view(-1, 1)).all()


@pytest.mark.parametrize(
    ("ranks", "blocks", "bits"), in_turns(5, (1, 2, 5, 8, 9, 17), (1, 9, 40), (8, 4))
)
def test_dequantize(ranks: int, blocks: int, bits: int) -> None:
    with emulated():
        both = [quantize.quantize(numbers(blocks, seed), bits) for seed in range(ranks)]
    q, scales = (torch.stack(parts) for parts in zip(*both, strict=True))

    def work(machine: Machine) -> tuple[Tensor, ...]:
        out = quantize.dequantize(q, scales, bits)
        assert_traffic(machine.launches[0], {"q": (1, 0), "scales": (2 * bits, 0), "out": (0, 1)})
        if blocks >= 16:
            assert_coalesced(machine.launches[0])
        return (out,)

    (out,) = in_every_order(work)
    truth = quantize.dequantize_reference(q, scales.double(), bits)
    assert_close_in_bf16(out.view(-1, 256), truth.view(-1, 256))


def scales_of(kind: str, ranks: int) -> Tensor:
    """Scales [ranks 3]."""
    alike = torch.full((ranks, 3), 3e-3)
    if kind == "alike":
        return alike
    if kind == "far apart":
        return torch.logspace(-6, 6, ranks * 3).view(ranks, 3)
    return (
        alike.masked_fill(torch.arange(ranks).view(-1, 1) % 3 == 0, 0.0)
        if kind == "some zero"
        else alike * 0
    )


@pytest.mark.parametrize("kind", ["alike", "far apart", "some zero", "zero"])
@pytest.mark.parametrize("bits", [8, 4])
def test_sums_of_extreme_numbers_and_scales(bits: int, kind: str) -> None:
    least = -(1 << bits - 1)  # which the kernel does not make, and must not be the end of it
    whole = (integers(-2 * least, 17 * 3 * 256) + least).to(torch.int8).view(17, 3, 256)
    whole[:, 0] = least
    whole[:, 1] = -least - 1
    q, scales = quantize.packed(whole, bits), scales_of(kind, 17)
    with emulated():
        out = quantize.dequantize(q, scales, bits)
    truth = quantize.dequantize_reference(q, scales.double(), bits)
    assert_close_in_bf16(out.view(-1, 256), truth.view(-1, 256))


@pytest.mark.parametrize("bits", [8, 4])
def test_very_small_and_very_large_blocks(bits: int) -> None:
    x = bf16(6, 256)
    largest = torch.tensor([1e-30, 1e-27, 1e-20, 1e20, 1e37, 3e38]).view(-1, 1)
    x = (x / x.abs().amax(1, keepdim=True) * largest).bfloat16()
    torch.set_flush_denormal(True)  # as the kernels are compiled for GPUs
    try:
        with emulated():
            q, scales = quantize.quantize(x.flatten(), bits)
            back = quantize.dequantize(q.unsqueeze(0), scales.unsqueeze(0), bits).view(6, 256)
    finally:
        torch.set_flush_denormal(False)
    assert not back[0].any()
    top = x.double().abs().amax(1, keepdim=True)
    assert (
        (back.double() - x.double()).abs()[1:] <= (0.5 / quantize.TOPS[bits] + 0.005) * top[1:]
    ).all()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_stays_so(bits: int, bad: float) -> None:
    x = numbers(3)
    x[300] = bad
    with emulated():
        q, scales = quantize.quantize(x, bits)
        back = quantize.dequantize(q.unsqueeze(0), scales.unsqueeze(0), bits).view(3, 256)
    assert back[1].isnan().all()
    assert back[[0, 2]].isfinite().all()


def test_wrong_arguments_are_refused() -> None:
    for x, bits in ((bf16(255), 8), (bf16(256).float(), 8), (bf16(256), 2)):
        with emulated(), pytest.raises(ValueError, match=r"quantize takes bf16 \[n\]"):
            quantize.quantize(x, bits)
    q, scales = torch.zeros(2, 3, 256, dtype=torch.uint8), torch.zeros(2, 3)
    for wrong in (
        (q, scales.flatten(), 8),
        (q[0], scales[0], 8),
        (q, scales, 4),
        (q, scales.double(), 8),
    ):
        with emulated(), pytest.raises(ValueError, match=r"dequantize takes q uint8"):
            quantize.dequantize(*wrong)


def test_messages_of_the_kernel_decode_to_the_numbers() -> None:
    """Kernel and plain operations agree on the order of bytes in a message."""
    rows = numbers(12).view(2, -1)
    with emulated() as machine:
        messages = quantize.Int8Blocks().encode(rows)
    assert len(machine.launches) == 1
    decoded = quantize.Int8Blocks().decode(messages, rows.shape[1], torch.float32).view(-1, 256)
    blocks = rows.float().view(-1, 256)
    half = blocks.abs().amax(1, keepdim=True) / 127 / 2
    assert bool(((decoded - blocks).abs() <= 1.01 * half).all())
