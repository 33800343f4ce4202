"""The table of docs/internals/kernels.md: launches and bytes of every operator, as the emulator counts them.

The cells of the two columns are written from templates with the counted numbers, and must be the cells of the page.
The cases are those of the stage `kernels` of benchmarks/gpu.py, whose stated bytes are compared, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu_stages import kernel_cases
from tests.cuda.emulator import COMPILER, Launch, emulated
from threed.ops import cross_entropy, dropout, launch, router
from threed.ops.positions import Positions

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "internals" / "kernels.md"
SIZES = kernel_cases.Sizes(256, 2, 512, 256, 1024, 64, 1 << 14, 64)


@dataclass(frozen=True)
class Counted:
    """What one call of an operator did; prints as the page has it."""

    bytes: float
    launches: int

    def per(self, elements: int) -> Counted:
        """Returns the same with the bytes per element."""
        return replace(self, bytes=round(self.bytes / elements, 2))


def bytes_of(launches: list[Launch]) -> int:
    """Bytes read and written, without the vectors and the table of angles, which are read from caches."""
    large = max(t.size for ran in launches for t in ran.traffic.values()) / 10
    return sum(
        t.read + t.written for ran in launches for t in ran.traffic.values() if t.size >= large
    )


def count(prepare: Callable[[], Callable[[], Any]]) -> Counted:
    with emulated(torch_writes=True) as machine:
        work = prepare()
        before = len(machine.launches)
        work()
    done = machine.launches[before:]
    return Counted(bytes_of(done), sum(ran.kernels for ran in done))


def inputs_of(case: kernel_cases.Case) -> list[Any]:
    return [x.clone() if isinstance(x, torch.Tensor) else x for x in case.inputs]


@functools.cache
def cases_of_stage() -> list[tuple[kernel_cases.Case, Counted]]:
    """The cases of the stage, and what each did."""
    cases = [c for family in kernel_cases.FAMILIES for c in family(SIZES, torch.device("cpu"))]
    return [(case, count(lambda c=case: c.ours(*inputs_of(c)))) for case in cases]


def count_cases() -> dict[str, Counted]:
    """What the cases of the stage did, by name, per element of the operator's input or output."""
    s, found = SIZES, {}
    activation, both, gated = s.rows * s.h, 2 * s.rows * s.h, s.rows * s.f
    elements = {
        "cross entropy": s.rows * s.v, "cross entropy of a shard": s.rows * s.v, "AdamW": s.n, "Lion": s.n,
        "sum of squares": s.n, "sums over rows": s.rows * s.f, "SwiGLU, forward": gated, "SwiGLU, backward": gated,
        "GEGLU, forward": gated, "GEGLU, backward": gated, "GELU + bias, forward": gated, "GELU + bias, backward": gated,
        "squared ReLU + bias, forward": gated, "squared ReLU + bias, backward": gated,
        "rotary positions": both,
        "norms and rotary positions of heads": s.rows * 5 * s.h // 4,
        "norms and rotary positions of heads, backward": s.rows * 6 * s.h // 4,
        "rotary backward, packed": both + activation, "quantize to 8 bits": s.blocks * 256,
        "sum of 8 dequantized, 8 bits": s.blocks * 256, "choices sorted by expert": s.rows * 8,
        **dict.fromkeys(("router", "router, backward"), s.rows * 256),
    }  # fmt: skip
    for case, counted in cases_of_stage():
        number = elements.get(case.name, activation)
        found[case.name] = counted.per(number)
        wide = replace_gradient(case, inputs_of(case))
        if wide is not None:
            more = count(lambda c=case, x=wide: c.ours(*x))
            found[f"{case.name}, fp32"] = more.per(number)
    return found


def replace_gradient(case: kernel_cases.Case, inputs: list[Any]) -> list[Any] | None:
    """The inputs of an update with a gradient in fp32; None for other cases."""
    at = {"AdamW": 3, "Lion": 2}.get(case.name)
    return None if at is None else [*inputs[:at], inputs[at].float(), *inputs[at + 1 :]]


def count_dropout_backward() -> Counted:
    """Of a layer's dropout: no bias, no residual."""
    x, samples = torch.randn(128, 2, SIZES.h).bfloat16(), torch.arange(2)
    draw = dropout.Draw(1, "name", 2, samples, Positions.all(128), 0.1)
    return count(lambda: lambda: dropout.dropout(x, draw)).per(x.numel())


# The third and fourth cell of each row; the first cell is the key.
ROWS = {
    "cross entropy; overwrites the logits with their gradient": (
        ("{entropy.bytes:g} per logit (the end of a row of more than {columns:,} columns is read again, from the L2 cache);"
        " {shard.bytes:g} under tensor parallelism"),
        "{entropy.launches}; {shard.launches} under tensor parallelism",
    ),
    "residual + bias, then RMSNorm or LayerNorm": (
        ("forward {add.bytes:g}, backward {addback.bytes:g}; without the residual: forward {norm.bytes:g}, backward"
        " {normback.bytes:g}"),
        "forward {add.launches}, backward {addback.launches}",
    ),
    "SwiGLU, GEGLU": (
        "per output element: forward {swiglu.bytes:g}, backward {swigluback.bytes:g}",
        "forward {swiglu.launches}, backward {swigluback.launches}",
    ),
    "bias + GELU (tanh form), bias + squared ReLU": (
        "forward {gelu.bytes:g}, backward {geluback.bytes:g}",
        "forward {gelu.launches}, backward {geluback.launches}",
    ),
    "dropout + bias + residual": (
        "forward {dropout.bytes:g}, backward {dropoutback.bytes:g}",
        "forward {dropout.launches}, backward {dropoutback.launches}",
    ),
    "AdamW, Lion": (
        "{adamw.bytes:g} per parameter, Lion {lion.bytes:g} ({adamw32.bytes:g} and {lion32.bytes:g} with an fp32 gradient)",
        "{adamw.launches} per bucket",
    ),
    "rotary positions of queries and keys": (
        "forward {rotary.bytes:g} of queries and keys; backward {rotaryback.bytes:g} of queries, keys and values",
        "forward {rotary.launches}, backward {rotaryback.launches}",
    ),
    "RMSNorm and rotary positions of query and key heads": (
        ("forward {heads.bytes:g} of queries and keys; backward, per element of queries, keys and values,"
        " {headsback.bytes:g} with four query heads per key head"),
        "forward {heads.launches}, backward {headsback.launches}",
    ),
    "router of a mixture of experts": (
        ("per fp32 logit, with 8 of 256 experts and 8 tokens per block: forward {router.bytes:g}, backward"
        " {routerback.bytes:g}"),
        "forward {router.launches}, losses {routerlosses.launches}, backward {routerback.launches}",
    ),
    "choices of experts, sorted by expert": (
        "per choice: {sorted:g}, and each block reads the counts of all blocks", "{choices.launches}",
    ),
    "quantization of blocks of 256 elements": (
        "quantization to 8 bits: {quantize.bytes:g}; sum of 8-bit numbers of n ranks: n + {written:g}",
        "{quantize.launches}; {dequantize.launches}",
    ),
    "sums over rows (gradients of biases); sums of squares (the gradient norm)": (
        "{sums.bytes:g}; {squares.bytes:g} per fp32 element",
        "{sums.launches}; {squares.launches}",
    ),
}  # fmt: skip


def test_the_table_of_operators_states_counted_launches_and_bytes() -> None:
    cases = count_cases()
    numbers = {
        "entropy": cases["cross entropy"], "shard": cases["cross entropy of a shard"],
        "columns": ((227 << 10) - cross_entropy.OF_WARPS) // 2,  # sm_90
        "add": same(cases, "RMSNorm + residual, forward", "LayerNorm + residual, forward"),
        "addback": same(cases, "RMSNorm + residual, backward", "LayerNorm + residual, backward"),
        "norm": same(cases, "RMSNorm, forward", "LayerNorm, forward"),
        "normback": same(cases, "RMSNorm, backward", "LayerNorm, backward"),
        "swiglu": same(cases, "SwiGLU, forward", "GEGLU, forward"),
        "swigluback": same(cases, "SwiGLU, backward", "GEGLU, backward"),
        "gelu": same(cases, "GELU + bias, forward", "squared ReLU + bias, forward"),
        "geluback": same(cases, "GELU + bias, backward", "squared ReLU + bias, backward"),
        "dropout": cases["dropout + bias + residual"], "dropoutback": count_dropout_backward(),
        "adamw": cases["AdamW"], "adamw32": cases["AdamW, fp32"],
        "lion": cases["Lion"], "lion32": cases["Lion, fp32"],
        "rotary": cases["rotary positions"], "rotaryback": cases["rotary backward, packed"],
        "heads": cases["norms and rotary positions of heads"],
        "headsback": cases["norms and rotary positions of heads, backward"],
        "router": cases["router"], "routerback": cases["router, backward"],
        "routerlosses": cases["losses of the router"], "choices": cases["choices sorted by expert"],
        "sorted": cases["choices sorted by expert"].bytes - counts_per_choice(),
        "quantize": cases["quantize to 8 bits"], "dequantize": cases["sum of 8 dequantized, 8 bits"],
        "written": cases["sum of 8 dequantized, 8 bits"].bytes - 8,
        "sums": cases["sums over rows"], "squares": cases["sum of squares"],
    }  # fmt: skip
    expected = [
        (name, *(text.format(**numbers) for text in templates)) for name, templates in ROWS.items()
    ]
    assert table() == expected


def counts_per_choice() -> float:
    """The bytes of the counts that all blocks of csrc/cuda/choices.cu read, per choice."""
    blocks = router.chunks(SIZES.rows // SIZES.sequences, SIZES.sequences)
    return blocks * blocks * SIZES.sequences * 256 * 4 / (SIZES.rows * 8)


def same(cases: dict[str, Counted], one: str, other: str) -> Counted:
    """The count of two cases that share a number in the table."""
    assert cases[one] == cases[other]
    return cases[one]


def table() -> list[tuple[str, str, str]]:
    """The beginning of the operator's cell, the bytes, and the launches of each row of the page."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith("| operator |"))
    rows = []
    for line in lines[first + 2 :]:
        if not line.startswith("|"):
            break
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        name = next((known for known in ROWS if cells[0].startswith(known)), cells[0])
        rows.append((name, cells[2], cells[3]))
    return rows


def test_the_benchmark_states_the_bytes_that_its_kernels_move() -> None:
    """`Case.nbytes`, by which the stage `kernels` computes bandwidths."""
    for case, found in cases_of_stage():
        assert found.bytes == pytest.approx(case.nbytes, rel=0.02), case.name


class Declared(TorchDispatchMode):
    """Adds up the launches that operators state, by which the simulated accelerator counts."""

    def __init__(self) -> None:
        super().__init__()
        self.called: set[str] = set()
        self.launches = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket._qualified_op_name
        operator = launch.OPERATORS.get(name)
        if operator is not None:
            self.called.add(name)
            self.launches += operator.launches(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def test_operators_state_the_kernels_that_they_launch() -> None:
    """Some cases call no operator, but the function that it runs."""
    called: set[str] = set()
    for family in kernel_cases.FAMILIES:
        for case in family(kernel_cases.SMALL, torch.device("cpu")):
            with emulated(torch_writes=True) as machine:
                work = case.ours(*inputs_of(case))
                before = len(machine.launches)
                with Declared() as declared:
                    work()
            launched = sum(ran.kernels for ran in machine.launches[before:])
            assert declared.launches == (launched if declared.called else 0), case.name
            called |= declared.called
    updates = {f"threed::{name}_" for name in ("adamw", "adamw_cuda", "lion_cuda")}
    assert called == launch.OPERATORS.keys() - updates
