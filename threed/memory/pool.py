"""Allocates host buffers for direct access by drives and GPUs, and measures free host memory.

    buffer = host_buffer(64 * 2**20)            # uint8 [nbytes]; view it as any dtype

The buffers are page-aligned and use huge pages. Direct I/O from 4 KiB pages is split into one
segment per page, which halves a drive's throughput; a huge page is one segment. Torch's CPU
allocator aligns to 64 bytes and does not guarantee huge pages, so this module uses `mmap`.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path

import torch
from torch import Tensor

from threed.core import device

HUGE = 2 * 2**20


class _Registered(mmap.mmap):
    """Memory that is page-locked for CUDA, and unlocked before it is unmapped."""

    address = 0

    def __del__(self) -> None:
        if self.address:
            device.page_unlock(self.address)


def host_buffer(nbytes: int) -> Tensor:
    """Returns a zero-filled buffer, uint8 [nbytes], page-aligned and resident.

    It uses 2 MiB pages, except for a remainder below 2 MiB, and is page-locked if CUDA is
    available.

    Args:
        nbytes: size in bytes, at least 1.

    Raises:
        ValueError: if `nbytes` is not positive.
        RuntimeError: if CUDA cannot page-lock the memory.
        OSError: if there is not enough memory to map.
    """
    if nbytes <= 0:
        raise ValueError(f"a buffer needs at least one byte, not {nbytes}")
    memory = _Registered(-1, nbytes + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr() % HUGE
    full_pages = nbytes // HUGE * HUGE  # a huge page for the remainder would use extra memory
    if full_pages and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages is only slower
            memory.madvise(mmap.MADV_HUGEPAGE, start, full_pages)
    # `zero_` touches every page
    buffer = torch.frombuffer(memory, dtype=torch.uint8, offset=start, count=nbytes).zero_()
    if device.count():
        device.page_lock(buffer.data_ptr(), nbytes)
        memory.address = buffer.data_ptr()
    return buffer


def free_bytes() -> int:
    """Returns the host memory that this process can still allocate, in bytes.

    This is the smaller of the machine's available memory and the remainder of the cgroup's limit.
    """
    free = [os.sysconf("SC_AVPHYS_PAGES") * mmap.PAGESIZE]
    with (
        contextlib.suppress(OSError, ValueError, StopIteration),
        open("/proc/meminfo", encoding="ascii") as lines,
    ):
        free[0] = 1024 * next(
            int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")
        )
    with contextlib.suppress(OSError, ValueError):  # cgroup v2; "max" is not a number
        group = Path("/sys/fs/cgroup")
        most, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        free.append(most - used + int(stat.get("inactive_file", 0)))  # page cache is reclaimable
    return max(0, min(free))
