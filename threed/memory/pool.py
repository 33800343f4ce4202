"""Host buffers for direct access by drives and GPUs: page-aligned, on huge pages; and how much host memory is free.

    buffer = host_buffer(64 * 2**20)            # uint8 [nbytes]; view it as any dtype

A direct transfer from 4 KiB pages is cut into one segment a page, which costs a drive half its speed; a huge page is
one segment. Torch's CPU allocator aligns to 64 bytes and guarantees no huge pages, hence `mmap`.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path

import torch
from torch import Tensor

from threed import device

HUGE = 2 * 2**20


class _Registered(mmap.mmap):
    """Memory that is page-locked for CUDA; a subclass, because it must be unlocked before it is unmapped."""

    address = 0

    def __del__(self) -> None:
        if self.address:
            device.page_unlock(self.address)


def host_buffer(nbytes: int) -> Tensor:
    """Returns zeros, uint8 [nbytes]: page-aligned, in 2 MiB pages where whole, resident, page-locked if CUDA is there.

    Raises:
        RuntimeError: CUDA refuses to page-lock it.
        OSError: there is no memory left to map.
    """
    if nbytes <= 0:
        raise ValueError(f"a buffer has at least one byte, not {nbytes}")
    memory = _Registered(-1, nbytes + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr() % HUGE
    whole = nbytes // HUGE * HUGE  # a huge page beyond it would make more resident than requested
    if whole and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages: slower, not wrong
            memory.madvise(mmap.MADV_HUGEPAGE, start, whole)
    # touches every page
    buffer = torch.frombuffer(memory, dtype=torch.uint8, offset=start, count=nbytes).zero_()
    if device.count():
        device.page_lock(buffer.data_ptr(), nbytes)
        memory.address = buffer.data_ptr()
    return buffer


def free_bytes() -> int:
    """Returns the bytes of host memory that this process could still take: of the machine, and of its control group."""
    free = [os.sysconf("SC_AVPHYS_PAGES") * mmap.PAGESIZE]
    with (
        contextlib.suppress(OSError, ValueError, StopIteration),
        open("/proc/meminfo", encoding="ascii") as lines,
    ):
        free[0] = 1024 * next(
            int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")
        )
    with contextlib.suppress(OSError, ValueError):  # version 2; "max" is no number
        group = Path("/sys/fs/cgroup")
        most, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        free.append(most - used + int(stat.get("inactive_file", 0)))  # a cache of files makes room
    return max(0, min(free))
