"""Allocates host buffers for direct access by drives and GPUs, and measures free host memory.

    buffer = host_buffer(64 * 2**20)            # uint8 [nbytes]; view it as any dtype

The buffers are page-aligned and use huge pages (2 MiB). A transfer by direct I/O is split into one
segment per page of memory; with pages of 4 KiB, this halves a drive's throughput. This module uses
`mmap`, because torch's CPU allocator aligns to only 64 bytes and does not guarantee huge pages.
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
    """Mapped memory that may be page-locked for CUDA, and is unlocked before it is unmapped."""

    address = 0  # address of the page-locked memory; 0 if no memory is page-locked

    def __del__(self) -> None:
        if self.address:
            device.page_unlock(self.address)


def host_buffer(nbytes: int) -> Tensor:
    """Returns a zero-filled buffer, uint8 [nbytes], page-aligned and resident in memory.

    The buffer uses 2 MiB pages, except for a remainder of less than 2 MiB. It is page-locked if
    CUDA is available.

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
    # The remainder uses small pages, because a huge page would use more memory than needed.
    full_pages = nbytes // HUGE * HUGE
    if full_pages and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # without huge pages the buffer works, but is slower
            memory.madvise(mmap.MADV_HUGEPAGE, start, full_pages)
    # `zero_` touches every page, which makes the buffer resident.
    buffer = torch.frombuffer(memory, dtype=torch.uint8, offset=start, count=nbytes).zero_()
    if device.count():
        device.page_lock(buffer.data_ptr(), nbytes)
        memory.address = buffer.data_ptr()
    return buffer


def free_bytes() -> int:
    """Returns the host memory that this process can still allocate, in bytes.

    The result is the machine's available memory or the unused part of the cgroup's memory limit,
    whichever is smaller.
    """
    free = [os.sysconf("SC_AVPHYS_PAGES") * mmap.PAGESIZE]
    with (
        contextlib.suppress(OSError, ValueError, StopIteration),
        open("/proc/meminfo", encoding="ascii") as lines,
    ):
        free[0] = 1024 * next(
            int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")
        )
    # Limit of the cgroup (v2). A ValueError means that the limit is "max": memory is not limited.
    with contextlib.suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        most, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        # inactive page cache counts as free, because the kernel can reclaim it
        free.append(most - used + int(stat.get("inactive_file", 0)))
    return max(0, min(free))
