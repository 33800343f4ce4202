"""Host memory that drives and GPUs can reach directly: page-aligned, on huge pages, made once and lent again and again.

    pool = Pool(nbytes=64 * 2**20, count=3)
    buffer = pool.take()            # uint8 [nbytes]; view it as any dtype
    pool.give(buffer)

A direct transfer from 4 KiB pages is cut into a segment a page, which costs a drive half its speed; a huge page is one
segment. Torch's CPU allocator aligns to 64 bytes and promises no huge pages, hence `mmap`.
"""

from __future__ import annotations

import mmap
from typing import Any

import torch
from torch import Tensor

from threed import device

HUGE = 2 * 2**20


class _Registered(mmap.mmap):
    """Memory that CUDA knows as page-locked; a subclass, because it must be forgotten before it is unmapped."""

    address = 0

    def __del__(self) -> None:
        if self.address:
            device.page_unlock(self.address)


def host_buffer(nbytes: int) -> Tensor:
    """Zeros, uint8 [nbytes]: page-aligned, its whole 2 MiB pieces on huge pages, resident, page-locked for CUDA if any.

    Raises:
        RuntimeError: CUDA refuses to page-lock it.
        OSError: there is no memory left to map.
    """
    if nbytes <= 0:
        raise ValueError(f"a buffer has at least one byte, not {nbytes}")
    memory = _Registered(-1, nbytes + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr() % HUGE
    whole = nbytes // HUGE * HUGE  # beyond it a huge page would make more resident than was asked for
    if whole and hasattr(mmap, "MADV_HUGEPAGE"):
        _advise(memory, mmap.MADV_HUGEPAGE, start, whole)
    buffer = torch.frombuffer(memory, dtype=torch.uint8, offset=start, count=nbytes).zero_()  # touches every page
    if device.count():
        device.page_lock(buffer.data_ptr(), nbytes)
        memory.address = buffer.data_ptr()
    return buffer


def _advise(memory: Any, advice: int, start: int, nbytes: int) -> None:
    try:
        memory.madvise(advice, start, nbytes)
    except OSError:  # a kernel without huge pages: slower, not wrong
        return


class Pool:
    """`count` buffers of `nbytes` each, all made now: what they hold does not grow with what passes through them."""

    def __init__(self, nbytes: int, count: int) -> None:
        self.nbytes, self.count = nbytes, count
        self._free = [host_buffer(nbytes) for _ in range(count)]
        self._lent: dict[int, Tensor] = {}

    @property
    def lent(self) -> int:
        """Buffers that are out."""
        return len(self._lent)

    def take(self) -> Tensor:
        """A buffer, uint8 [nbytes], with whatever its last user left; RuntimeError when all are lent."""
        try:
            buffer = self._free.pop()
        except IndexError:
            raise RuntimeError(
                f"all {self.count} buffers of {self.nbytes} bytes are lent: give one back before taking another, "
                "or make the pool with a larger count"
            ) from None
        self._lent[buffer.data_ptr()] = buffer
        return buffer

    def give(self, buffer: Tensor) -> None:
        """Takes back a buffer, or a view of one from its start; ValueError when it was not lent by this pool."""
        ours = self._lent.pop(buffer.data_ptr(), None)
        if ours is None:
            raise ValueError(
                f"a tensor of {buffer.nbytes} bytes that this pool did not lend, or that was given back before"
            )
        self._free.append(ours)
