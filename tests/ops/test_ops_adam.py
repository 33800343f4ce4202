"""The CPU's AdamW: torch.optim.AdamW element by element, the same bits on every instruction set and thread count."""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks import adam as benchmark
from tests import programs
from tests.covering import in_turns
from threed.core import native
from threed.ops import adam as op
from threed.ops.adam import Adam
from threed.ops.update import StepScalars

ROOT = Path(__file__).resolve().parents[2]
SIZES = [1, 7, 64, 1023, 2**20 + 3]
MANY = 2**20 + 3  # three threads' worth, and enough for stores past the cache
STEPS = 10
ADAM = Adam(0.9, 0.999, 1e-8)
BITS = {
    torch.float32: torch.int32,
    torch.float64: torch.int64,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}
NARROW = [torch.bfloat16, torch.float16]

needs_native = pytest.mark.skipif(native.library("cpu") is None, reason=native.status()["cpu"])


def instruction_sets() -> list[str]:
    """Those that this processor has."""
    names = ["portable"]
    names += ["avx2"] if torch.cpu._is_avx2_supported() else []
    return names + (["avx512"] if torch.cpu._is_avx512_supported() else [])


def moment(step: float = 1, lr: float = 1e-2, scale: float = 0.5, skip: float = 0.0) -> StepScalars:
    return StepScalars(
        *(torch.tensor(value, dtype=torch.float64) for value in (lr, step, scale, skip))
    )


def normal(n: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(
        dtype
    )


def new(n: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """p, m and v."""
    return [normal(n, dtype, 0), torch.zeros(n, dtype=dtype), torch.zeros(n, dtype=dtype)]


def run(
    n: int, dtype: torch.dtype, grad: torch.dtype, decay: float = 0.1, out: Tensor | None = None
) -> list[Tensor]:
    p, m, v = new(n, dtype)
    for step in range(1, STEPS + 1):
        ADAM.update(p, normal(n, grad, step), (m, v), moment(step, 1e-2 / step), decay, out)
    return [p, m, v]


def call(
    tensors: list[Tensor],
    g: Tensor,
    now: StepScalars,
    out: Tensor | None = None,
    instructions: str | None = None,
) -> None:
    """One update by the kernel, on an instruction set."""
    scalars = now.lr, now.step, now.scale, now.skip
    op.call_native(
        *tensors, g, out, *scalars, ADAM.beta1, ADAM.beta2, ADAM.eps, 0.1, instructions=instructions
    )  # fmt: skip


def torchs(n: int, dtype: torch.dtype, grad: torch.dtype, decay: float) -> list[Tensor]:
    """The same steps by torch.optim.AdamW."""
    p = normal(n, dtype, 0).requires_grad_()
    optimizer = torch.optim.AdamW(
        [p], betas=(0.9, 0.999), eps=1e-8, weight_decay=decay, foreach=False
    )
    for step in range(1, STEPS + 1):
        p.grad = normal(n, grad, step).to(dtype) * 0.5
        optimizer.param_groups[0]["lr"] = 1e-2 / step
        optimizer.step()
    state = optimizer.state[p]
    return [p.detach(), state["exp_avg"], state["exp_avg_sq"]]


def check_close(got: list[Tensor], want: list[Tensor]) -> None:
    """Within four units in the last place of the largest number that was summed, over ten steps.

    v is a sum of squares: relative alone. m (terms up to 0.5) and p (terms up to about 0.1 where it passes zero) may
    cancel, so that the roundings of what was summed stay. torch's own fused kernel is as far from its plain loop.
    """
    eps = torch.finfo(got[0].dtype).eps
    for tensor, wanted, size in zip(got, want, (0.1, 0.5, 0.0), strict=True):
        torch.testing.assert_close(tensor, wanted, rtol=4 * eps, atol=4 * eps * size)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(BITS[a.dtype]), b.view(BITS[b.dtype]))


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("n", "dtype", "decay"), in_turns(3, SIZES, [torch.float32, torch.float64], [0.0, 0.1])
)
def test_it_is_torchs(n: int, dtype: torch.dtype, decay: float) -> None:
    check_close(run(n, dtype, dtype, decay), torchs(n, dtype, dtype, decay))


@pytest.mark.parametrize("grad", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_of_every_format(dtype: torch.dtype, grad: torch.dtype) -> None:
    check_close(run(1023, dtype, grad), torchs(1023, dtype, grad, 0.1))


@pytest.mark.parametrize("beta1", [0.0, 0.3, 0.95])
def test_other_constants_follow_the_reference(beta1: float) -> None:
    adam = Adam(beta1, 0.9, 1e-5)
    got, want = new(1023, torch.float64), new(1023, torch.float64)
    for step in range(1, STEPS + 1):
        g, now = normal(1023, torch.float64, step), moment(step, scale=0.3)
        adam.update(got[0], g, got[1:], now, 0.2)
        op.reference(want[0], g, want[1], want[2], now, adam, 0.2)
    check_close(got, want)


@pytest.mark.parametrize(
    ("n", "dtype", "out"),
    in_turns(5, [1023, MANY], [torch.float32, torch.float64], [torch.float32, *NARROW]),
)
def test_out_is_the_new_weights_rounded_as_torch_rounds(
    n: int, dtype: torch.dtype, out: torch.dtype
) -> None:
    copy = torch.full((n,), torch.nan, dtype=out)
    p, *_ = run(n, dtype, torch.bfloat16, out=copy)
    assert same_bits(copy, p.to(out))


@needs_native
@pytest.mark.parametrize("instructions", instruction_sets())
@pytest.mark.parametrize("n", [5, 1023, MANY])
@pytest.mark.parametrize("offset", [1, 3])
def test_slices_at_odd_places(n: int, offset: int, instructions: str) -> None:
    """Views that begin anywhere give the bits of aligned tensors, and nothing beside them is written."""
    aligned = new(n)
    wide = [torch.full((n + 8,), 7.0) for _ in aligned]
    views = [base[offset + i : offset + i + n] for i, base in enumerate(wide)]
    for view, tensor in zip(views, aligned, strict=True):
        view.copy_(tensor)
    grads, copies = torch.full((n + 8,), 7.0).bfloat16(), torch.full((n + 8,), 7.0).bfloat16()
    grads[offset : offset + n] = normal(n, torch.bfloat16, 1)
    copy = torch.empty(n, dtype=torch.bfloat16)
    call(aligned, normal(n, torch.bfloat16, 1), moment(), copy)
    call(views, grads[offset : offset + n], moment(), copies[offset : offset + n], instructions)
    assert all(same_bits(view, tensor) for view, tensor in zip(views, aligned, strict=True))
    assert same_bits(copies[offset : offset + n], copy)
    for i, base in enumerate([*wide, copies]):
        start = offset + (i if i < 3 else 0)
        assert torch.cat((base[:start], base[start + n :])).eq(7).all()


@needs_native
@pytest.mark.parametrize("grad", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("out", [None, *NARROW])
def test_instruction_sets_agree_bit_for_bit(
    dtype: torch.dtype, grad: torch.dtype, out: torch.dtype | None
) -> None:
    results = []
    for instructions in instruction_sets():
        tensors = new(1023, dtype)
        copy = None if out is None else torch.zeros(1023, dtype=out)
        for step in range(1, 4):
            call(tensors, normal(1023, grad, step), moment(step), copy, instructions)
        results.append([*tensors, *([] if copy is None else [copy])])
    for other in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(results[0], other, strict=True))


@needs_native
@pytest.mark.parametrize("instructions", instruction_sets())
@pytest.mark.parametrize("narrow", NARROW)
def test_every_16_bit_number_is_read_and_every_rounding_is_torchs(
    narrow: torch.dtype, instructions: str
) -> None:
    """All 65536 gradients; as results, numbers between neighbors, at the middle, subnormal, infinite and NaN."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(narrow)
    tensors = [torch.zeros(2**16) for _ in range(3)]
    adam = Adam(0.0, 0.0, 1.0)  # m becomes the gradient
    op.call_native(
        *tensors, every, None, *moment(scale=1.0), adam.beta1, adam.beta2, adam.eps, 0.0,
        instructions=instructions,
    )  # fmt: skip
    finite = every.isfinite()
    assert torch.equal(tensors[1][finite], every.float()[finite])
    assert not tensors[1][~finite].isfinite().any()

    patterns = torch.arange(2**16, dtype=torch.int64) << 16
    for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x0FFF, 0x1000, 0x1001, 0x3000):
        p = (patterns + low).to(torch.int32).view(torch.float32)
        still = [p.clone(), torch.zeros(2**16), torch.zeros(2**16)]
        out = torch.zeros(2**16, dtype=narrow)
        call(still, torch.zeros(2**16), moment(lr=0.0), out, instructions)
        want = p.to(narrow)
        assert torch.equal(out.isnan(), p.isnan())
        assert same_bits(out.nan_to_num(), want.nan_to_num())


@needs_native
@pytest.mark.usefixtures("threads")
def test_the_number_of_threads_changes_no_bit() -> None:
    results = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        copy = torch.zeros(MANY, dtype=torch.bfloat16)
        tensors = new(MANY)
        for step in (1, 2):
            call(tensors, normal(MANY, torch.bfloat16, step), moment(step), copy)
        results.append([*tensors, copy])
    for other in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_spoils_its_own_element_alone(value: float) -> None:
    got, want = new(100), new(100)
    g = normal(100, torch.float32, 1)
    want_g = g.clone()
    g[37] = value
    copy = torch.zeros(100, dtype=torch.bfloat16)
    ADAM.update(got[0], g, got[1:], moment(), 0.1, copy)
    ADAM.update(want[0], want_g, want[1:], moment(), 0.1)
    others = torch.arange(100) != 37
    for tensor, wanted in zip(got, want, strict=True):
        assert torch.equal(tensor[others], wanted[others])
        assert not tensor[37].isfinite()
    assert copy[37].isnan()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_skipped_step_changes_not_a_bit(dtype: torch.dtype) -> None:
    tensors = run(1023, dtype, dtype)
    for tensor in tensors:
        tensor[:3] = torch.tensor([-0.0, torch.nan, torch.inf])
    before = [tensor.clone() for tensor in tensors]
    g = torch.full((1023,), torch.nan, dtype=dtype)
    ADAM.update(tensors[0], g, tensors[1:], moment(11, skip=1.0), 0.1)
    assert all(same_bits(a, b) for a, b in zip(tensors, before, strict=True))
    if native.library("cpu"):
        out = torch.full((1023,), 7.0, dtype=torch.bfloat16)
        call(tensors, g, moment(11, skip=1.0), out)
        assert out.eq(7).all()


@needs_native
def test_what_the_kernel_would_misread_is_refused() -> None:
    p, m, v = new(8)
    g, now = torch.zeros(8), moment()
    with pytest.raises(ValueError, match=r"one length.*[[]7[]]"):
        call([p, m, v], g[:7], now)
    with pytest.raises(ValueError, match=r"contiguous.*strides \(2,\)"):
        call([p, m, v], torch.zeros(16)[::2], now)
    with pytest.raises(ValueError, match=r"one of.*bfloat16"):
        call([p.bfloat16(), m, v], g, now)
    with pytest.raises(ValueError, match="out of one of"):
        call([p, m, v], g, now, torch.zeros(8, dtype=torch.float64))
    with pytest.raises(ValueError, match="fp64 scalars"):
        call([p, m, v], g, StepScalars(now.lr.float(), now.step, now.scale, now.skip))
    with pytest.raises(RuntimeError, match="sse9"):
        call([p, m, v], g, now, instructions="sse9")


def test_scalars_of_other_types_are_converted() -> None:
    got, want, now = new(8), new(8), moment(3, lr=0.25)
    narrow = StepScalars(now.lr.float(), now.step.long(), now.scale.half(), now.skip.bool())
    ADAM.update(got[0], normal(8, torch.float32, 1), got[1:], narrow, 0.1)
    ADAM.update(want[0], normal(8, torch.float32, 1), want[1:], now, 0.1)
    assert torch.equal(got[0], want[0])


@needs_native
def test_autograd_notices_weights_that_changed_under_a_graph() -> None:
    p, m, v = new(8)
    p.requires_grad_()
    loss = (p * p).sum()
    with torch.no_grad():
        ADAM.update(p, torch.ones(8), (m, v), moment(), 0.1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@needs_native
def test_it_runs_under_fake_tensors() -> None:
    with FakeTensorMode():
        p, m, v, g = (torch.zeros(10**12) for _ in range(4))
        out = torch.zeros(10**12, dtype=torch.bfloat16)
        ADAM.update(p, g, (m, v), moment(), 0.1, out)
    p, m, v = new(8)
    arguments = (
        p,
        m,
        v,
        torch.ones(8),
        out.new_zeros(8, device="meta"),
        *moment(),
        0.9,
        0.9,
        1e-8,
        0.1,
    )
    torch.library.opcheck(torch.ops.threed.adamw_, (*arguments[:4], None, *arguments[5:]))


@needs_native
@pytest.mark.usefixtures("threads")
def test_a_forked_child_has_threads_too() -> None:
    """The helpers of the parent are not in the child: it makes its own, and gets the same bits."""
    torch.set_num_threads(2)
    g, want = normal(MANY, torch.float32, 1), new(MANY)
    call(want, g, moment())
    tensors = new(MANY)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(120)  # ends it, should it hang
        call(tensors, g, moment())
        threads = len(os.listdir("/proc/self/task"))
        torch.set_num_threads(1)  # torch's own threads do not outlive a fork
        os._exit(
            0
            if threads == 2 and all(same_bits(a, b) for a, b in zip(tensors, want, strict=True))
            else 1
        )
    assert os.waitpid(child, 0)[1] == 0
    call(tensors, g, moment())
    assert all(same_bits(a, b) for a, b in zip(tensors, want, strict=True))


@needs_native
@pytest.mark.usefixtures("threads")
def test_calls_from_several_threads_at_once() -> None:
    """Helpers serve one call; the others go on without, and all give the same bits."""
    torch.set_num_threads(3)
    g, want = normal(MANY, torch.float32, 1), new(MANY)
    call(want, g, moment())
    results = [new(MANY) for _ in range(8)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda tensors: call(tensors, g, moment()), results))
    assert all(same_bits(a, b) for tensors in results for a, b in zip(tensors, want, strict=True))


def test_without_the_library_torchs_kernel_runs() -> None:
    """THREED_NATIVE=0 gives the same within the tolerance, `out` included."""
    script = (
        "import torch; from threed.core import native; native._find.cache_clear();"  # loaded before the fork
        "from tests.ops import test_ops_adam as t;"
        "assert native.library('cpu') is None and 'THREED_NATIVE' in native.status()['cpu'];"
        "out = torch.zeros(1023, dtype=torch.bfloat16);"
        "got = t.run(1023, torch.float32, torch.bfloat16, out=out);"
        "t.check_close(got, t.torchs(1023, torch.float32, torch.bfloat16, 0.1));"
        "assert torch.equal(out, got[0].bfloat16())"
    )
    environment = {**os.environ, "THREED_NATIVE": "0", "PYTHONPATH": str(ROOT)}
    done = programs.run(["-c", script], ROOT, environment)
    assert done.returncode == 0, done.stderr


@needs_native
@pytest.mark.usefixtures("threads")
def test_the_benchmark_measures_contenders_that_agree(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(benchmark, "STREAM", 2**16)
    arguments = [
        "--numel",
        "20007",
        "--rounds",
        "1",
        "--huge-pages",
        "--only",
        "threed",
        "torch_fused",
    ]
    assert benchmark.main(arguments) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [found["impl"] for found in records] == ["threed", "torch_fused"]
    for found in records:
        assert found["full"]["gb_s"] == pytest.approx(
            28 * 20007 / found["full"]["best_ms"] / 1e6, rel=0.3
        )


def test_an_output_at_an_odd_address_is_written_all_the_same() -> None:
    """Stores past the cache need aligned addresses, which elements that begin between two do not reach."""
    n = 2**20 + 5
    p, m, v, g = torch.randn(n), torch.zeros(n), torch.zeros(n), torch.randn(n)
    memory = torch.zeros(2 * n + 64, dtype=torch.uint8)
    out = torch.frombuffer(memory.numpy(), dtype=torch.bfloat16, offset=1, count=n)
    Adam().update(p, g, (m, v), moment(), 0.0, out)
    assert torch.equal(out.view(torch.int16), p.bfloat16().view(torch.int16))
    empty = torch.zeros(0)
    Adam().update(empty, empty, (empty, empty), moment(), 0.0, empty.bfloat16())
