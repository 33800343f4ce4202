"""SGD and Lion on slices: element by element what torch and the paper say, clipping and skipping included."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from threed.ops import lion, sgd
from threed.ops.adam import Adam
from threed.ops.lion import Lion
from threed.ops.sgd import SGD
from threed.ops.update import Rule, StepScalars

SIZES = [1, 7, 64, 1023, 2**18 + 3]
STEPS = 10
TOLERANCE = {
    torch.float32: 2e-6,
    torch.float64: 1e-14,
}  # fp32: a few roundings of numbers of size 3, ten times


def moment(step: int, scale: float = 0.5, skip: float = 0.0) -> StepScalars:
    now = [torch.tensor(value, dtype=torch.float64) for value in (1e-2 / step, step, scale, skip)]
    return StepScalars(*now)


def tensors(n: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(
        dtype
    )


def run(
    rule: Rule, n: int, dtype: torch.dtype, grad: torch.dtype | None = None
) -> tuple[Tensor, list[Tensor]]:
    p = tensors(n, dtype, 0)
    state = [torch.zeros_like(p) for _ in rule.state_names]
    for step in range(1, STEPS + 1):
        rule.update(p, tensors(n, grad or dtype, step), state, moment(step), 0.1)
    return p, state


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "rule", [SGD(0.0), SGD(0.9), SGD(0.9, nesterov=True)], ids=["plain", "momentum", "nesterov"]
)
def test_sgd_is_torchs(rule: SGD, dtype: torch.dtype, n: int) -> None:
    p, _ = run(rule, n, dtype)
    want = tensors(n, dtype, 0).requires_grad_()
    optimizer = torch.optim.SGD(
        [want], lr=1.0, momentum=rule.momentum, nesterov=rule.nesterov, weight_decay=0.1
    )
    for step in range(1, STEPS + 1):
        want.grad = tensors(n, dtype, step) * 0.5
        optimizer.param_groups[0]["lr"] = 1e-2 / step
        optimizer.step()
    torch.testing.assert_close(p, want.detach(), rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lion_is_the_papers(dtype: torch.dtype, n: int) -> None:
    """Algorithm 2: update = sign(b1 m + (1 - b1) g); w -= lr (update + decay w); m = b2 m + (1 - b2) g."""
    p, (m,) = run(Lion(0.9, 0.99), n, dtype)
    w, momentum = tensors(n, dtype, 0), torch.zeros(n, dtype=dtype)
    for step in range(1, STEPS + 1):
        g = tensors(n, dtype, step) * 0.5
        w = w - 1e-2 / step * ((0.9 * momentum + 0.1 * g).sign() + 0.1 * w)
        momentum = 0.99 * momentum + 0.01 * g
    torch.testing.assert_close(m, momentum, rtol=0, atol=TOLERANCE[dtype])
    # a sign may flip where momentum and gradient cancel to a rounding
    off = (p - w).abs() > TOLERANCE[dtype]
    assert int(off.sum()) <= n * 1e-5


@pytest.mark.parametrize("grad", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule", [SGD(0.9), Lion(), Adam()], ids=["sgd", "lion", "adamw"])
def test_narrow_gradients_are_widened(rule: Rule, grad: torch.dtype) -> None:
    p, _ = run(rule, 100, torch.float32, grad)
    q = tensors(100, torch.float32, 0)
    state = [torch.zeros_like(q) for _ in rule.state_names]
    for step in range(1, STEPS + 1):
        rule.update(q, tensors(100, grad, step).float(), state, moment(step), 0.1)
    assert torch.equal(p, q)


@pytest.mark.parametrize("rule", [SGD(0.0), SGD(0.9), SGD(0.9, nesterov=True), Lion(0.9, 0.98)])
def test_the_plain_reference_is_the_update(rule: SGD | Lion) -> None:
    p, state = run(rule, 300, torch.float64)
    q = tensors(300, torch.float64, 0)
    held = [torch.zeros_like(q) for _ in rule.state_names]
    for step in range(1, STEPS + 1):
        g = tensors(300, torch.float64, step)
        if isinstance(rule, SGD):
            sgd.reference(q, g, held, moment(step), rule, 0.1)
        else:
            lion.reference(q, g, held, moment(step), rule, 0.1)
    for got, want in zip((p, *state), (q, *held), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-14)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "rule", [SGD(0.0), SGD(0.9), Lion(), Adam()], ids=["plain", "sgd", "lion", "adamw"]
)
def test_a_skipped_update_changes_not_a_bit(rule: Rule, dtype: torch.dtype, value: float) -> None:
    p, state = run(rule, 50, dtype)
    for tensor in (p, *state):
        tensor[:2] = torch.tensor([-0.0, 0.0])
    before = [tensor.clone() for tensor in (p, *state)]
    g = tensors(50, dtype, 99)
    g[3] = value
    rule.update(p, g, state, moment(11, scale=1.0, skip=1.0), 0.1)
    # -0.0 equals 0.0, but not bit for bit
    bits = torch.int32 if dtype == torch.float32 else torch.int64
    assert all(
        torch.equal(a.view(bits), b.view(bits)) for a, b in zip((p, *state), before, strict=True)
    )


@pytest.mark.parametrize(
    "rule",
    [SGD(0.0), SGD(0.9, nesterov=True), Lion(), Adam()],
    ids=["plain", "sgd", "lion", "adamw"],
)
def test_a_padding_of_zeros_stays_zero(rule: Rule) -> None:
    p = torch.zeros(64)
    state = [torch.zeros_like(p) for _ in rule.state_names]
    for step in range(1, STEPS + 1):
        rule.update(p, torch.zeros(64), state, moment(step), 0.1)
    assert not any(tensor.any() for tensor in (p, *state))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "rule",
    [SGD(0.0), SGD(0.9, nesterov=True), Lion(), Adam()],
    ids=["plain", "sgd", "lion", "adamw"],
)
def test_an_update_on_cuda_is_the_cpus(rule: Rule, dtype: torch.dtype) -> None:
    p, state = run(rule, 1023, dtype)
    q = tensors(1023, dtype, 0).cuda()
    held = [torch.zeros_like(q) for _ in rule.state_names]
    for step in range(1, STEPS + 1):
        now = moment(step)
        there = StepScalars(now.lr.cuda(), now.step.cuda(), now.scale.cuda(), now.skip.cuda())
        rule.update(q, tensors(1023, dtype, step).cuda(), held, there, 0.1)
    for got, want in zip((q, *held), (p, *state), strict=True):
        torch.testing.assert_close(got.cpu(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
