"""The machine code of csrc/cuda against limits of speed (tests/cuda/static.py), without a GPU.

Every exception is named here with its reason, and one that is no longer needed is a failure, too.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cuda import compiled, sass, static
from tests.cuda.static import Kernel

pytestmark = [
    pytest.mark.skipif(bool(compiled.missing()), reason=compiled.missing() or "-"),
    # nvcc takes 18 s of CPU time for each architecture
    pytest.mark.seldom(*(name for name in compiled.ARCHITECTURES if name != "sm_90")),
]

ISSUE, SPECIAL, FLYING = 0.65, 0.70, 32 << 10

# Kernels that issue more than ISSUE, up to this.
BUSY = {
    # Ten rounds of Philox for four numbers. Without a residual two thirds are moved, in nearly as many instructions.
    "dropout.dropout": 0.66,
}
DROPOUT_ALONE = 0.99

ROW = "one number of a row, for all threads or from one"
LANE = "a lane has every 32nd expert, or one choice: rows of any length, next to each other all the same"
COUNTS = "sums of blocks, one number of an expert for each thread"
WORD = "eight numbers of 4 or 8 bits"
# Loads and stores of global memory in loops that are narrower than 128 bits.
NARROW = {
    "adam.adamw<bf16>": {"LDG 64": "four gradients in bf16", "STG 64": "four weights in bf16"},
    "adam.adamw<fp32>": {"STG 64": "four weights in bf16"},
    "adam.lion<bf16>": {"LDG 64": "four gradients in bf16", "STG 64": "four weights in bf16"},
    "adam.lion<fp32>": {"STG 64": "four weights in bf16"},
    "cross_entropy.gradient": {"LDG 32": ROW},
    "norm.backward": {"LDG 32": ROW},
    "norm.forward": {"STG 32": ROW},
    "choices.sort": {
        "LDG 32": COUNTS,
        "STG 32": COUNTS,
        "STG 64": "a choice's place, wherever that is",
    },
    "router.forward": {"LDG 32": LANE, "STG 16": LANE, "STG 32": LANE, "STG 64": LANE},
    "router.losses": {"LDG 32": COUNTS},
    "quantize.dequantize": {"LDG 32": ROW},
    "quantize.quantize<4>": {"STG 32": WORD},
    "quantize.quantize<8>": {"STG 32": ROW, "STG 64": WORD},
    "sums.sum_parts": {"LDG 32": "a thousand numbers, the parts of one sum"},
}
# Kernels that have less in flight than FLYING: beside four packs, whose sums take half of the registers, there are none
# left for a residual that is asked for early.
WAITING = {"norm.backward<1,1,4>": 19 << 10, "norm.backward<1,16,4>": 16 << 10}
# A thousand numbers, summed in fp64.
DOUBLE = {"sums.sum_parts"}
# What streams nothing: that sum, and what computes on a few bytes per token, whose time is latency and shuffles.
SMALL = (
    DOUBLE
    | {"choices.sort", "router.losses"}
    | {f"router.{way}<{n}>" for way in ("forward", "backward") for n in (1, 2, 4, 8, 16)}
)


@pytest.fixture(scope="module", params=compiled.ARCHITECTURES)
def kernels(request: pytest.FixtureRequest) -> list[Kernel]:
    found = static.every(request.param)
    assert {k.plain.split(".")[0] for k in found} == {path.stem for path in static.CUDA.sources}
    return found


def test_nothing_is_spilled(kernels: list[Kernel]) -> None:
    assert not [(k.name, k.resources) for k in kernels if k.resources.stack or k.resources.spills]
    assert not {k.name for k in kernels for i in k.looped if i.base in sass.LOCAL}


def test_loops_call_nothing_and_compute_in_fp32(kernels: list[Kernel]) -> None:
    assert not {(k.name, i.operands) for k in kernels for i in k.looped if i.calls}
    assert {k.name for k in kernels for i in k.looped if i.double} == DOUBLE


def test_loops_move_128_bits_at_a_time(kernels: list[Kernel]) -> None:
    found: dict[str, set[str]] = {}
    for k in kernels:
        narrow = {
            what
            for what in static.accesses(k.looped)
            if what[:3] in ("LDG", "STG") and what[4:] != "128"
        }
        if narrow:
            found.setdefault(k.name if k.name in NARROW else k.plain, set()).update(narrow)
    assert found == {name: set(why) for name, why in NARROW.items()}


def test_memory_leaves_time_for_every_instruction(kernels: list[Kernel]) -> None:
    budgets = {k.name: k.budget for k in kernels}
    assert not [(name, b.issue) for name, b in budgets.items() if b.issue > BUSY.get(name, ISSUE)]
    assert not [(name, b.special) for name, b in budgets.items() if b.special > SPECIAL]
    assert budgets["dropout.dropout"].issue * 48 / 32 <= DROPOUT_ALONE
    assert {name for name, b in budgets.items() if not b.streamed} == SMALL


def test_enough_is_asked_for_ahead(kernels: list[Kernel]) -> None:
    budgets = {k.name: k.budget.flying for k in kernels if k.name not in SMALL}
    limits = {name: WAITING.get(name, FLYING) for name in budgets}
    assert not [(name, flying) for name, flying in budgets.items() if flying < limits[name]]


@pytest.mark.grid
def test_exceptions_are_needed() -> None:
    assert set(BUSY) == {k.name for k in static.every() if k.budget.issue > ISSUE}
    waiting = {k.name for k in static.every() if k.budget.flying < FLYING}
    assert set(WAITING) == waiting - SMALL


def test_resources_are_those_of_the_table(kernels: list[Kernel]) -> None:
    if compiled.version() != static.PINNED:
        pytest.skip(f"the table is of nvcc {static.PINNED}, this is {compiled.version()}")
    (architecture,) = {k.architecture for k in kernels}
    assert static.table(kernels)[architecture] == static.committed()[architecture], (
        "python tests/cuda/static.py"
    )


PLANTED = """
#include <cstdint>
namespace {
__global__ void __launch_bounds__(128) narrow(float* x, int n) {
  for (int i = threadIdx.x; i < n; i += 128) x[i] *= 2.f;
}
__global__ void __launch_bounds__(128) precise(float* x, int n) {
#pragma unroll 1
  for (int i = threadIdx.x; i < n; i += 128) x[i] = float(double(x[i]) * 1.1);
}
__global__ void __launch_bounds__(128) divides(int64_t* x, int64_t by, int n) {
#pragma unroll 1
  for (int i = threadIdx.x; i < n; i += 128) x[i] /= by;
}
__global__ void __launch_bounds__(128) indexed(float* x, const int* at, int n) {
  float held[16] = {};
#pragma unroll 1
  for (int i = threadIdx.x; i < n; i += 128) held[at[i] & 15] += x[i];
  for (int i = 0; i < 16; i++) x[i] = held[i];
}
__global__ void __launch_bounds__(128) one_by_one(float4* x, float4* y, int n) {
#pragma unroll 1
  for (int i = threadIdx.x; i < n; i += 256) {
    float4 a = __ldcs(x + i);
    a.x += a.y * 2.f;
    __stcs(y + i, a);  // which may be what is read next
    float4 b = __ldcs(x + i + 128);
    __stcs(y + i + 128, make_float4(b.x * 2.f, b.y, b.z, b.w));
  }
}
}  // namespace
void all(float* x, int n) {
  narrow<<<1, 128>>>(x, n);
  precise<<<1, 128>>>(x, n);
  divides<<<1, 128>>>((int64_t*)x, n, n);
  indexed<<<1, 128>>>(x, (int*)x, n);
  one_by_one<<<1, 128>>>((float4*)x, (float4*)x, n);
}
"""


@pytest.mark.parametrize("architecture", compiled.ARCHITECTURES)
def test_planted_faults_are_seen(architecture: str, tmp_path: Path) -> None:
    source = tmp_path / "planted.cu"
    source.write_text(PLANTED)
    text = compiled.listing(source, architecture)
    found = {k.name.split(".")[1]: k for k in static.kernels("planted", architecture, text)}
    assert all(k.threads == 128 for k in found.values())
    assert set(static.accesses(found["narrow"].looped)) == {"LDG 32", "STG 32"}
    assert any(i.double for i in found["precise"].looped)
    assert any(i.calls for i in found["divides"].looped)
    assert found["indexed"].resources.stack == 64
    assert {"LDL", "STL"} <= {i.base for i in found["indexed"].looped}
    clean = found["one_by_one"]
    assert clean.budget.streamed == 64
    assert static.accesses(clean.looped) == {"LDG 128": 2, "STG 128": 2}
    assert clean.budget.flying == 16 * 128 * clean.blocks == 16 * 2048
    assert not [i for i in clean.looped if i.double or i.calls or i.base in sass.LOCAL]
