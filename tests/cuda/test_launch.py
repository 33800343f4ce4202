"""Kernels are used only where one has run, with the types of their launchers, within the GPU's shared memory."""

from __future__ import annotations

import ctypes
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest
import torch

from tests.cuda.cases import assert_close_in_bf16, bf16
from tests.cuda.emulator import COMPILER, SOURCES, build, emulated
from threed.core import device as accelerator
from threed.core import native
from threed.core.native.build import CUDA, BuildError, find_compiler
from threed.ops import activation, cross_entropy, launch

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")
AVAILABLE, START = launch.available, launch.start  # which the emulator replaces
OLD_DRIVER, NO_CODE = 35, 209


@contextmanager
def pretending(library: ctypes.CDLL) -> Iterator[None]:
    """Takes the CPU for a GPU, with the real launches, of a library."""
    launch.problem.cache_clear()
    launch._launcher.cache_clear()
    with (
        mock.patch.object(launch, "available", AVAILABLE),
        mock.patch.object(launch, "start", START),
        mock.patch.object(launch, "on_gpu", return_value=True),
        mock.patch.object(native, "library", return_value=library),
        mock.patch.object(accelerator, "made_current", return_value=nullcontext()),
    ):
        yield
    launch.problem.cache_clear()
    launch._launcher.cache_clear()


@contextmanager
def kernels(driver_error: int = 0) -> Iterator[None]:
    with emulated(checks=False, driver_error=driver_error) as machine, pretending(machine.library):
        yield


def assert_swiglu_is_plain() -> None:
    """What layers ask before they use a kernel says no, and what they compute is right."""
    x = bf16(4, 16).requires_grad_()
    assert not activation.fits(x, 8)
    y = activation.apply("swiglu", x)
    gate, up = x.double().chunk(2, -1)
    assert_close_in_bf16(y.detach(), (torch.nn.functional.silu(gate) * up).detach(), row=2.0**-7)


@pytest.mark.parametrize("error", [OLD_DRIVER, NO_CODE])
def test_a_library_whose_kernels_do_not_run_is_not_used_and_one_warning_names_why(
    error: int,
) -> None:
    with kernels(error):
        with pytest.warns(
            UserWarning, match=rf"do not run on cpu: .*CUDA error {error} .*plain torch"
        ):
            assert not launch.available(bf16(8))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert not launch.ready(bf16(8))
            assert_swiglu_is_plain()


def test_each_device_is_probed_once() -> None:
    with kernels(), mock.patch.object(launch, "_probe", wraps=launch._probe) as probe:
        assert all(launch.available(bf16(8)) for _ in range(3))
        assert probe.call_count == 1
        launch.problem(torch.device("cpu", 0))
        assert probe.call_count == 2


def test_a_device_on_which_a_kernel_computes_wrongly_is_not_used() -> None:
    with (
        kernels(),
        mock.patch.object(launch, "start"),
        pytest.warns(UserWarning, match="a kernel that doubles ones"),
    ):
        assert not launch.available(bf16(8))


def test_the_probe_runs_within_other_modes() -> None:
    """A step is traced on the meta device, with fake tensors and under a default device."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with kernels(), FakeTensorMode(), torch.device("meta"):
        assert launch.problem(torch.device("cpu")) == ""


def test_the_library_of_this_machine_is_not_used_without_a_driver() -> None:
    """The kernels that nvcc compiles, on a machine without a GPU: every launch is refused."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    try:
        find_compiler(CUDA)
    except BuildError as error:
        pytest.skip(str(error))
    library = native.library("cuda")
    assert library is not None, native.status()["cuda"]
    with pretending(library), pytest.warns(UserWarning, match=r"CUDA error \d+"):
        assert_swiglu_is_plain()


# ---------------------------------------------------------------------------------------------------- errors and limits


def test_a_refused_launch_is_not_blamed_on_the_next(device: str) -> None:
    with emulated() as machine:
        refused, _ = bf16(2, 120_000), torch.zeros(())
        targets, one = torch.zeros(2, dtype=torch.int64), torch.ones(())
        with pytest.raises((ValueError, RuntimeError), match="CUDA error 1"):
            # more shared memory than any GPU has
            launch.start("cross_entropy", refused, targets, one, one, 2, 120_000, 120_000, 15_000)
        x = torch.ones(8, dtype=torch.bfloat16)
        launch.start("scale", x, torch.full((), 2.0), 8, 1)
        assert x.tolist() == [2.0] * 8
    assert machine.launches[-1].name == "scale"


@pytest.mark.parametrize(("columns", "limit"), [
    (50_624, 99 << 10), (50_632, 99 << 10), (52_001, 99 << 10), (57_352, 227 << 10), (116_168, 227 << 10),
    (128_256, 227 << 10), (32_000, 64 << 10), (32_768, 64 << 10), (151_665, 64 << 10),
])  # fmt: skip
def test_what_the_shared_memory_does_not_hold_of_a_row_is_read_again(
    columns: int, limit: int
) -> None:
    """99 KiB have sm_86, 89 and 120, 64 KiB sm_75."""
    width = -(-columns // 8) * 8
    logits, targets = bf16(3, width, scale=3.0), torch.tensor([columns - 1, 7, -1])
    logits[:, columns:] = torch.nan
    given, weight = logits.clone(), torch.tensor(0.5)
    with emulated(shared_memory=limit) as machine:
        loss = cross_entropy.whole(given, targets, weight, columns)
    (done,) = machine.launches
    kept = min(width // 8, (limit - cross_entropy.OF_WARPS) // 16)
    again = width // 8 - kept
    assert (again > 0) == (columns not in (50_624, 57_352, 32_000))
    last = 2 if again else 0  # the logit of the last column, which is the first row's target
    read = 3 * (2 * width + 16 * again) + last
    assert (done.traffic["logits"].read, done.traffic["logits"].written) == (read, 6 * width)
    x = logits[:, :columns].double().requires_grad_()
    truth = cross_entropy.reference(x, targets)
    assert loss.tolist() == pytest.approx(truth.tolist(), rel=1e-6)
    gradient = torch.autograd.grad(truth.sum() * 0.5, x)[0]
    assert_close_in_bf16(given[:, :columns], gradient, row=1e-5)
    assert not given[:, columns:].any()


# ---------------------------------------------------------------------------------------------------------------- types


def test_launchers_are_declared_as_their_sources_have_them() -> None:
    found = {}
    for source in sorted(SOURCES.glob("*.cu")):
        for name, inside in re.findall(r"\bint threed_cuda_(\w+)\(([^)]*)\)", source.read_text()):
            kinds = [
                "P" if "*" in one else {"int64_t": "q", "double": "d"}[one.split()[0]]
                for one in inside.split(",")[:-1]
            ]
            found[name] = "".join(kinds)
    assert found == launch.LAUNCHERS


def test_arguments_of_other_types_are_refused() -> None:
    x, factor = torch.ones(8, dtype=torch.bfloat16), torch.ones(())
    for wrong in (
        (x, factor, 8),
        (x, factor, 8.0, 1),
        (x, factor, factor, 1),
        (x, 4096, 8, 1),
        (x, 2.0, 8, 1),
    ):
        with emulated(), pytest.raises(TypeError, match="threed_cuda_scale takes PPqq"):
            launch.start("scale", *wrong)
    launcher = launch.declare(ctypes.CDLL(str(build())), "norm")
    assert launcher.argtypes[-2:] == [ctypes.c_double, ctypes.c_void_p]
    assert launch.check_types("norm", (*[None] * 9, 1, 8, 1)) == [
        *[None] * 9,
        1,
        8,
        1,
    ]  # ctypes makes it a double
