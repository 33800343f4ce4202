"""The emulator finds every fault that is planted, in every order of threads, and none where there is none."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.cuda import emulator
from tests.cuda.emulator import COMPILER, ORDERS, Fault, Order, emulated
from threed.ops import launch

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

# What is said of each planted kernel; None where the launch itself is refused.
EARLY = "race|unwritten"  # which of the two, the order of threads decides
NOT_GIVEN = "memory that it was not given"
FAULTS = {
    "no_barrier": EARLY, "no_barrier_in_a_warp": EARLY, "shuffle_for_a_barrier": EARLY,
    "barrier_of_other_lanes": EARLY, "barrier_of_the_warp": EARLY, "written_while_read": "race",
    "read_by_several": "race", "divergent": "divergent barrier", "half_at_the_barrier": "waits for lanes",
    "left_early": "waits for lanes", "lane_not_in_the_mask": "not in the mask",
    "not_in_its_own_mask": "not in the mask",
    "mask_beyond_the_block": "lanes beyond the block", "beyond_the_end": r"out\[256\] of 256|" + NOT_GIVEN,
    "before_the_start": NOT_GIVEN, "beyond_shared_memory": NOT_GIVEN,
    "misaligned": "misaligned", "misaligned_load": "misaligned", "unwritten_output": r"unwritten: .* out\[",
    "unwritten_shared_memory": r"unwritten: .* shared memory\[", "shared_memory_of_the_last_block": "unwritten",
    "blocks_that_write": "race", "blocks_that_read": EARLY, "constant_written": NOT_GIVEN + "|unwritten",
    "empty_grid": None, "empty_block": None, "large_block": None, "large_shared_memory": None,
}  # fmt: skip


@functools.cache
def library() -> Path:
    return emulator.build(
        {"planted.cu": (Path(__file__).parent / "planted.cu").read_text()}, only=["planted.cu"]
    )


def names() -> list[str]:
    name = ctypes.CDLL(str(library())).planted_name
    name.restype = ctypes.c_char_p
    found = []
    while text := name(len(found)):
        found.append(text.decode())
    return found


def run(
    name: str, order: Order, seed: int = 1
) -> tuple[torch.Tensor, torch.Tensor, emulator.Launch]:
    planted = mock.patch.dict(launch.LAUNCHERS, planted="PPq")
    with planted, emulated(order, seed, library=library()) as machine:
        machine.parameters = {"planted": ["in", "out", "which"]}
        given, out = torch.randn(64), torch.empty(64)
        machine.start("planted", given, out, names().index(name))
    return given, out, machine.launches[0]


def test_every_planted_kernel_is_listed() -> None:
    assert sorted(n for n in names() if not n.startswith("right")) == sorted(FAULTS)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str, order: Order) -> None:
    said = FAULTS[name]
    with (
        pytest.raises(ValueError, match="refused")
        if said is None
        else pytest.raises(Fault, match=said)
    ):
        run(name, order)


def test_a_fault_names_the_lines_of_the_kernel() -> None:
    lines = (Path(__file__).parent / "planted.cu").read_text().splitlines()
    start = next(n for n, line in enumerate(lines, 1) if "void written_while_read(" in line)
    with pytest.raises(
        Fault, match=rf"\(line ({start + 3}|{start + 5})\).*\(line ({start + 3}|{start + 5})\)"
    ):
        run("written_while_read", "random")


@pytest.mark.parametrize("order", ORDERS)
def test_what_is_right_passes(order: Order) -> None:
    for seed in range(10 if order == "random" else 1):
        given, out, done = run("right", order, seed)
        assert torch.equal(out, given.flip(0))
        assert done.traffic["in"].times == done.traffic["out"].times[::-1] == (1.0, 0.0)
        given, out, _ = run("right_in_a_warp", order, seed)
        assert torch.equal(out, given.view(32, 2).flip(1).flatten())
        given, out, _ = run("right_by_way_of_another", order, seed)
        assert out[2] == given[0]
        run("right_without_some", order, seed)
        given, out, _ = run("right_sum", order, seed)
        assert torch.allclose(out, given.sum().expand(64), atol=1e-5)


def test_sectors_and_bank_passes_are_counted() -> None:
    _, _, done = run("right", "random")
    assert (done.sectors, done.used) == (16, 512)  # 64 floats read, 64 written
    assert done.bank_passes == done.least_bank_passes == 4
    assert done.barriers == 1
