"""Allocates slots of equal size from one contiguous buffer, to avoid memory fragmentation.

    arena = Arena(count=24, device=device)
    slot = arena.take(numel, dtype)         # [numel], undefined values
    arena.give(slot)

See ZeRO, arXiv 1910.02054, section 6.3 (memory defragmentation, M_D). The first `take` allocates a
buffer for `count` slots of the requested size. If more slots or larger slots are needed later, a
larger buffer replaces the old buffer. The memory of the old buffer is freed once no tensor uses it.
So a run allocates only one buffer if it never uses more than `count` slots at a time, and no slot
is larger than the first one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from threed.memory.pool import host_buffer

ALIGN = 64  # alignment of slots in bytes; torch's CPU allocator uses the same alignment


class Arena:
    """A pool of memory slots of equal size in one buffer.

    Args:
        count: number of slots in the first buffer.
        device: device of the buffer.
        pinned: whether to use page-locked host memory, for copies to and from a GPU; `device` is
            then ignored.

    Attributes:
        allocations: number of buffers allocated so far.
        nbytes: bytes per slot; 0 before the first call of `take`.
    """

    def __init__(self, count: int, device: torch.device, *, pinned: bool = False) -> None:
        self.count, self.device, self.pinned = max(count, 1), device, pinned
        self.allocations = 0
        self.nbytes = 0  # bytes per slot; 0 before the first `take`
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._free: list[int] = []

    @property
    def data_ptr(self) -> int:
        """The address of the buffer; 0 before the first call of `take`."""
        return self._buffer.data_ptr()

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns a free slot as a tensor [numel] with undefined values.

        If no slot is free, or the slots are too small, allocates a larger buffer first.
        """
        nbytes = numel * dtype.itemsize
        if nbytes > self.nbytes:
            self._allocate(self.count, -(-nbytes // ALIGN) * ALIGN)
        elif not self._free:
            self._allocate(2 * self.count, self.nbytes)
        first = self._free.pop() * self.nbytes
        return self._buffer[first : first + nbytes].view(dtype)

    def give(self, slot: Tensor) -> None:
        """Gives a slot back for reuse. A slot of a buffer that was replaced is not reused."""
        at = slot.data_ptr() - self._buffer.data_ptr()
        if 0 <= at < self._buffer.numel():
            self._free.append(at // self.nbytes)

    def _allocate(self, count: int, nbytes: int) -> None:
        self.count, self.nbytes = count, nbytes
        self.allocations += 1
        size = count * nbytes
        self._buffer = (
            host_buffer(size)
            if self.pinned
            else torch.empty(size, dtype=torch.uint8, device=self.device)
        )
        self._free = list(range(count))[::-1]
