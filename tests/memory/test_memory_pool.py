"""Host buffers: aligned, advised for huge pages, exactly as large as asked; the pool gives each out once."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from threed.memory.pool import HUGE, host_buffer


def mappings() -> list[tuple[int, int, list[str]]]:
    """Of every mapping of this process: first address, last, and the kernel's flags for it."""
    found: list[tuple[int, int, list[str]]] = []
    start = end = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            start, end = (int(number, 16) for number in words[0].split("-"))
        elif words[0] == "VmFlags:":
            found.append((start, end, words[1:]))
    return found


def flags_at(address: int) -> list[str]:
    """The kernel's flags for the mapping that holds `address`; none where nothing is mapped."""
    return next((flags for start, end, flags in mappings() if start <= address < end), [])


@pytest.mark.parametrize(
    "nbytes", [1, 4095, 4096, HUGE - 1, HUGE, HUGE + 1, 3 * HUGE, 5 * HUGE // 2]
)
def test_a_buffer_is_aligned_zeroed_and_as_large_as_asked(nbytes: int) -> None:
    buffer = host_buffer(nbytes)
    assert buffer.dtype == torch.uint8
    assert buffer.shape == (nbytes,)
    assert buffer.data_ptr() % HUGE == 0
    assert buffer.count_nonzero() == 0
    buffer.fill_(7)
    assert bool((buffer == 7).all())


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a kernel without huge pages"
)
def test_whole_huge_pages_are_advised_and_nothing_beyond_them() -> None:
    buffer = host_buffer(5 * HUGE // 2)
    start = buffer.data_ptr()
    assert "hg" in flags_at(start)
    assert "hg" in flags_at(start + 2 * HUGE - 1)
    assert "hg" not in flags_at(start + 2 * HUGE)
    assert "hg" not in flags_at(host_buffer(HUGE - 1).data_ptr())


def test_memory_goes_back_with_the_last_tensor() -> None:
    buffer = host_buffer(3 * HUGE)
    address, view = buffer.data_ptr(), buffer[HUGE:].view(torch.bfloat16)
    del buffer
    gc.collect()
    view.fill_(1.5)
    assert flags_at(address)
    del view
    gc.collect()
    assert not flags_at(address)


@pytest.mark.parametrize("nbytes", [0, -1])
def test_a_buffer_of_nothing_is_refused(nbytes: int) -> None:
    with pytest.raises(ValueError, match="at least one byte"):
        host_buffer(nbytes)


@pytest.mark.gpu
def test_buffers_are_page_locked_for_cuda() -> None:
    buffer = host_buffer(3 * HUGE + 5).fill_(3)
    assert buffer.is_pinned()
    assert bool((buffer.to("cuda", non_blocking=True).cpu() == 3).all())
