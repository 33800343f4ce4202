"""csrc/cpu: GELU, SwiGLU and cross entropy against fp64, the same bits everywhere, and in the engine; and products of
tiles."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.configs import Case, config_of, engine_of, share
from tests.configs import batch as tokens_of
from tests.harness import run_ranks
from threed.core import native
from threed.distributed.topology import alone
from threed.ops import cross_entropy, fused_cpu, matmul

pytestmark = pytest.mark.skipif(native.library("cpu") is None, reason="no C++ compiler")
DTYPES = [torch.float32, torch.bfloat16]
SIZES = [1, 7, 8, 9, 511, 513, 4097, 50257]
INSTRUCTIONS = ["avx512", "avx2", "portable"]


def numbers(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Numbers that reach where e^x overflows and vanishes."""
    draw = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=draw) * 4).to(dtype)


def close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    """Within 1e-6 of the largest beside fp32, within one rounding of bf16 (2^-8) of each number."""
    rtol, atol = (
        (2**-8, 1e-6)
        if dtype is torch.bfloat16
        else (1e-6, 1e-6 * max(1.0, float(want.abs().max())))
    )
    torch.testing.assert_close(got.double(), want, rtol=rtol, atol=atol)


def differentiated(f: object, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """f(x) and its gradient, in fp64."""
    wide = x.double().requires_grad_()
    y = f(wide)  # type: ignore[operator]
    (dx,) = torch.autograd.grad(y, wide, dy.double())
    return y.detach(), dx


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_gelu_is_what_it_is_in_fp64(size: int, dtype: torch.dtype) -> None:
    x, dy = numbers(size + 1, dtype=dtype)[1:], numbers(size, dtype=dtype, seed=1)  # misaligned
    y, dx = differentiated(lambda x: F.gelu(x, approximate="tanh"), x, dy)
    close(fused_cpu.gelu(x), y, dtype)
    close(fused_cpu.gelu(x, dy), dx, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_swiglu_is_what_it_is_in_fp64(size: int, dtype: torch.dtype) -> None:
    x, dy = numbers(3, 2 * size, dtype=dtype), numbers(3, size, dtype=dtype, seed=1)
    y, dx = differentiated(lambda x: F.silu(x[:, :size]) * x[:, size:], x, dy)
    close(fused_cpu.swiglu(x), y, dtype)
    close(fused_cpu.swiglu(x, dy), dx, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_cross_entropy_is_what_it_is_in_fp64(size: int, dtype: torch.dtype) -> None:
    rows, padding = 5, 3
    x = numbers(rows, size + padding, dtype=dtype)
    x[:, size:] = math.nan
    # one not counted, one of another rank
    targets = torch.tensor([0, size - 1, -100, size // 2, size])
    top, total = fused_cpu.row_numbers(x, size)
    close(top + total.log(), x[:, :size].double().logsumexp(-1), torch.float32)
    counted = (targets >= 0).double()
    soft = x[:, :size].double().softmax(-1) * counted.unsqueeze(-1)
    here = (targets >= 0) & (targets < size)
    soft[here, targets[here]] -= 1
    target = torch.where(here, targets, -1)
    fused_cpu.softmax_gradient_(x, size, top + total.log(), counted.float(), target)
    close(x[:, :size], soft, dtype)
    assert x[:, size:].eq(0).all()


def test_what_overflows_vanishes_or_is_no_number() -> None:
    x = torch.tensor([-1e12, -200.0, -88.5, -0.0, 0.0, 88.5, 200.0, 1e12, math.nan])
    y = fused_cpu.gelu(x)
    assert y[3:5].eq(0).all()
    assert torch.equal(y[5:8], x[5:8])
    assert y[:3].abs().max() < 1e-30
    assert y[-1].isnan()
    slope = fused_cpu.gelu(x[:-1].clone(), torch.ones(8))
    assert torch.equal(slope, torch.tensor([0.0, 0.0, 0.0, 0.5, 0.5, 1.0, 1.0, 1.0]))
    logits = torch.tensor([[0.0, -math.inf, -1e30], [math.nan, 0.0, 0.0]])
    top, total = fused_cpu.row_numbers(logits, 3)
    assert top[0] == 0
    assert total[0] == 1
    assert total[1].isnan()


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_depend_neither_on_instructions_nor_on_threads(dtype: torch.dtype) -> None:
    x, dy = numbers(64, 2 * 4097, dtype=dtype), numbers(64, 4097, dtype=dtype, seed=1)

    def all_of(instructions: str | None) -> list[Tensor]:
        named = None if instructions is None else instructions.encode()
        with mock.patch.object(fused_cpu, "instructions", return_value=named):
            top, total = fused_cpu.row_numbers(x, 8000)
            gradient, target = x.clone(), torch.arange(64) * 100
            fused_cpu.softmax_gradient_(gradient, 8000, top + total.log(), total, target)
            halves = [fused_cpu.gelu(x), fused_cpu.gelu(x, x)]
            gated = [fused_cpu.swiglu(x), fused_cpu.swiglu(x, dy)]
        return [*halves, *gated, top, total, gradient]

    want, before = all_of("portable"), torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for instructions in (None, *INSTRUCTIONS):
                try:
                    got = all_of(instructions)
                except RuntimeError:
                    if instructions is None:
                        raise
                    continue  # this processor has not all of them
                assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("columns", [4096, 4000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_loss_by_it_is_the_loss_without(dtype: torch.dtype, columns: int) -> None:
    logits, targets = numbers(4, 8, 4096, dtype=dtype), torch.randint(-1, columns, (4, 8))

    def loss() -> tuple[Tensor, Tensor]:
        mine = logits.clone().requires_grad_()
        losses = cross_entropy.vocab_parallel_cross_entropy(mine * 1, targets, alone(), 0, columns)
        (gradient,) = torch.autograd.grad(losses.sum(), mine)
        return losses.detach(), gradient

    assert fused_cpu.fits(logits)
    losses, gradient = loss()
    with mock.patch.object(fused_cpu, "MIN_NUMEL", 2**62):
        want_losses, want_gradient = loss()
    close(losses, want_losses.double(), torch.float32)
    close(gradient, want_gradient.double(), dtype)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: fused_cpu.gelu(torch.zeros(4, dtype=torch.float64)),
        lambda: fused_cpu.gelu(torch.zeros(4, 4).t()),
        lambda: fused_cpu.gelu(torch.zeros(4), torch.zeros(3)),
        lambda: fused_cpu.swiglu(torch.zeros(2, 3)),
        lambda: fused_cpu.swiglu(torch.zeros(2, 4), torch.zeros(2, 4)),
        lambda: fused_cpu.row_numbers(torch.zeros(2, 4), 5),
        lambda: fused_cpu.softmax_gradient_(
            torch.zeros(2, 4), 4, *[torch.zeros(2)] * 2, torch.zeros(2)
        ),
    ],
)
def test_what_it_would_misread_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match=r"got|columns"):
        wrong()  # type: ignore[operator]


tiles = pytest.mark.skipif(not fused_cpu.has_tiles(), reason="no AMX")


@tiles
@pytest.mark.parametrize(("m", "n"), [(32, 32), (96, 1056), (1088, 64), (0, 32)])
@pytest.mark.parametrize("k", [1, 31, 33, 512, 545])
def test_products_are_added_in_fp32(k: int, m: int, n: int) -> None:
    """Each of k sums is rounded by 2^-24 at most; a product that is rounded to bf16 misses by far."""
    dy, x = (numbers(k, size, dtype=torch.bfloat16, seed=size) for size in (m, n))
    want = dy.double().t() @ x.double()
    error = dy.double().abs().t() @ x.double().abs() * (k + 1) * 2**-24
    out = torch.full((m, n), torch.nan)
    fused_cpu.add_product_(out, dy.t(), x, fresh=True)
    assert ((out - want).abs() <= error).all()
    matmul.add_product_(out, dy.t(), x, fresh=False)
    assert ((out - 2 * want).abs() <= 4 * error).all()


@tiles
def test_bits_of_added_products_do_not_depend_on_threads() -> None:
    dy, x, found = *(numbers(300, size, dtype=torch.bfloat16) for size in (1056, 1120)), []
    for threads in (1, 2, 3):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        found.append(torch.ones(1056, 1120))
        fused_cpu.add_product_(found[-1], dy.t(), x, fresh=False)
        torch.set_num_threads(before)
    assert found[0].equal(found[1])
    assert found[0].equal(found[2])


@pytest.mark.parametrize(("m", "n", "strided"), [(33, 32, False), (32, 31, False), (32, 32, True)])
def test_factors_that_tiles_do_not_take_are_multiplied_by_torch(
    m: int, n: int, strided: bool
) -> None:
    dy, x = (numbers(64, size, dtype=torch.bfloat16) for size in (m, n))
    x = x.t().contiguous().t() if strided else x
    out = torch.ones(m, n)
    assert not fused_cpu.adds_products(dy.t(), x)
    matmul.add_product_(out, dy.t(), x, fresh=False)
    assert out.equal(1.0 + torch.mm(dy.t(), x).float())
    with pytest.raises(ValueError, match="add_product_ takes"):
        fused_cpu.add_product_(out, dy.t(), x, fresh=False)


def heads_of(x: Tensor, heads: int) -> tuple[Tensor, ...]:
    s, b, _ = x.shape
    return tuple(part.reshape(s, b, heads, -1).permute(1, 2, 0, 3) for part in x.chunk(3, -1))


@tiles
@pytest.mark.parametrize(
    "shape", [(128, 2, 3, 64), (100, 2, 3, 32), (1, 1, 1, 32), (33, 2, 2, 96), (256, 1, 2, 128)]
)
def test_attention_backward_is_no_worse_than_torchs(shape: tuple[int, int, int, int]) -> None:
    """Against fp64 gradients of the same bf16 numbers: nearer than torch's own, which rounds as often."""
    s, b, heads, d = shape
    qkv, dy = (numbers(s, b, n * heads * d, dtype=torch.bfloat16, seed=n) / 4 for n in (3, 1))
    wide = qkv.double().requires_grad_()
    y = F.scaled_dot_product_attention(*heads_of(wide, heads), is_causal=True)
    dys = dy.view(s, b, heads, d).permute(1, 2, 0, 3)
    (want,) = torch.autograd.grad(y, wide, dys.double())
    q, k, v = heads_of(qkv, heads)
    y, logarithms = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
    back = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    theirs = torch.cat(
        [x.permute(2, 0, 1, 3).flatten(2) for x in back(dys, q, k, v, y, logarithms, 0.0, True)], -1
    )
    got = fused_cpu.attention_backward(qkv, dy, logarithms, d)
    torch.testing.assert_close(got.double(), want, rtol=2**-7, atol=2**-7 * float(want.abs().max()))
    assert (got - want).norm() <= max((theirs - want).norm(), want.norm() * 2**-12)
    torch.set_num_threads(2 if torch.get_num_threads() == 1 else 1)
    assert got.equal(fused_cpu.attention_backward(qkv, dy, logarithms, d))
    torch.set_num_threads(2 if torch.get_num_threads() == 1 else 1)


@tiles
def test_attention_that_it_would_misread_is_refused() -> None:
    qkv = torch.zeros(8, 2, 192, dtype=torch.bfloat16)
    dy = torch.zeros(8, 2, 64)
    logarithms = torch.zeros(2, 2, 8)
    for wrong in [(qkv.float(), dy), (qkv[:, :, :96], dy), (qkv, dy), (qkv, dy[:, :1].bfloat16())]:
        with pytest.raises(ValueError, match="attention_backward takes"):
            fused_cpu.attention_backward(*wrong, logarithms, 32)


def train(case: Case, smallest: int) -> tuple[list[float], list[float]]:
    """Losses and norms of three steps, where tensors from this size on go to these functions."""
    config = config_of(case)
    with mock.patch.object(fused_cpu, "MIN_NUMEL", smallest):
        engine = engine_of(config)
        rows = config.train.global_batch
        done = [engine.step(share(tokens_of(step, rows), engine.topology)) for step in range(3)]
        return [m.loss for m in done], [m.grad_norm for m in done]


def compare(cases: list[Case]) -> None:
    """On every rank."""
    for case in cases:
        (losses, norms), (want, want_norms) = train(case, 1), train(case, 2**62)
        tolerance = 3e-6 if case.dtype == "fp32" else 2e-2  # bf16 rounds activations to 8 bits
        assert losses == pytest.approx(want, rel=tolerance)
        assert norms == pytest.approx(want_norms, rel=10 * tolerance)


@pytest.mark.parametrize("tp", [1, 2])
def test_an_engine_trains_alike_with_and_without(tp: int) -> None:
    models = ("gpt", "llama")
    cases = [
        Case(tp=tp, model=model, dtype=dtype, pad=8 * (tp - 1))
        for model in models
        for dtype in ("fp32", "bf16")
    ]
    run_ranks(tp, compare, cases)
