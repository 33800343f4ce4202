"""Tensors in a temporary file that is mapped into memory, so that the kernel can page them out.

    file = MappedFile(fd, folder, ranks=(0, 1))     rank 0 writes, rank 1 maps the same file later
    region = file.allocate(nbytes)                  reserves space in the file
    values = region.tensor(dtype, shape, stride)    a plain tensor on the CPU

The rank that writes the file maps it shared. Other ranks map it privately: they read its values, and
their own changes stay in their memory until `Region.drop_pages` discards them.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from threed.core.disk import why

# bytes of the first mapping; each further mapping is twice as large as the one before, up to 2^36
FIRST_MAPPING = 2**26
ELSEWHERE = "set the environment variable TMPDIR, or zero.Init(folder=...), to another folder"


class MappedFile:
    """A temporary file that contains the values of parameters.

    The file consists of a few mappings, because a mapping keeps a file descriptor open. A mapping
    ends when the last tensor in it is freed.

    Args:
        fd: descriptor of the file, which may be unlinked; `close` closes it.
        folder: the folder of the file, for messages.
        ranks: global ranks that map the file; the first of them writes it.
        writes: whether this rank's changes are written to the file.
        lengths: lengths of the mappings in bytes, if another rank has written the file.
    """

    def __init__(
        self, fd: int, folder: Path, ranks: Sequence[int], writes: bool, lengths: Sequence[int] = ()
    ) -> None:
        self.fd, self.folder, self.ranks, self.writes = fd, folder, tuple(ranks), writes
        # (offset in the file, mapping, address of the mapping)
        self._mappings: list[tuple[int, mmap.mmap, int]] = []
        self._end = self._mapped = 0
        for length in lengths:
            self._map(length)

    @property
    def lengths(self) -> list[int]:
        """Lengths of the mappings in bytes."""
        return [len(mapping) for _, mapping, _ in self._mappings]

    def allocate(self, nbytes: int) -> Region:
        """Reserves space for a tensor.

        Args:
            nbytes: bytes of the tensor.

        Raises:
            OSError: if the disk is full or the file cannot grow.
        """
        size = max(1, -(-nbytes // mmap.PAGESIZE)) * mmap.PAGESIZE
        try:
            if self._end + size > self._mapped:
                self._end = self._mapped  # a tensor is in one mapping
                length = max(size, FIRST_MAPPING << min(len(self._mappings), 10))
                os.ftruncate(self.fd, self._mapped + length)
                self._map(length)
            # Without reserved space, a write to the mapping would kill the process if the disk is full.
            os.posix_fallocate(self.fd, self._end, size)
        except OSError as error:
            text = why(error, self.folder, self._end + size, ELSEWHERE)
            raise OSError(
                error.errno, f"the file of the parameters of zero.Init: {text}"
            ) from error
        self._end += size
        return self.region(self._end - size, size)

    def region(self, offset: int, nbytes: int) -> Region:
        """Returns the region of `nbytes` bytes at `offset`; both are multiples of the page size."""
        first, mapping, address = next(
            found for found in reversed(self._mappings) if found[0] <= offset
        )
        start = offset - first
        return Region(self, mapping, offset, start, nbytes, address + start)

    def close(self) -> None:
        """Closes the file. Existing tensors stay valid; no further space can be reserved."""
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1

    def _map(self, length: int) -> None:
        kind = mmap.MAP_SHARED if self.writes else mmap.MAP_PRIVATE
        mapping = mmap.mmap(self.fd, length, flags=kind, offset=self._mapped)
        address = torch.frombuffer(mapping, dtype=torch.uint8, count=1).data_ptr()
        self._mappings.append((self._mapped, mapping, address))
        self._mapped += length


@dataclass(frozen=True, eq=False)
class Region:
    """The space of one tensor in a mapped file.

    Attributes:
        file: the file.
        mapping: the mapping that contains the region.
        offset: offset in the file, in bytes.
        start: offset in the mapping, in bytes.
        nbytes: length in bytes.
        address: address in memory.
    """

    file: MappedFile
    mapping: mmap.mmap
    offset: int
    start: int
    nbytes: int
    address: int

    def tensor(self, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
        """Returns a tensor that uses the memory of the region.

        Args:
            dtype: dtype of the tensor.
            shape: shape of the tensor, with at least one element.
            stride: strides of the tensor, without gaps between elements.
        """
        count = self.nbytes // dtype.itemsize
        flat = torch.frombuffer(self.mapping, dtype=dtype, count=count, offset=self.start)
        return flat.as_strided(tuple(shape), tuple(stride))

    def drop_pages(self) -> None:
        """Frees the memory of the region; later reads get the values in the file.

        If this rank does not write the file, its own changes are lost.
        """
        self.mapping.madvise(mmap.MADV_DONTNEED, self.start, self.nbytes)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # a copy of a parameter is in ordinary memory


def place(param: nn.Parameter, values: Tensor, region: Region) -> None:
    """Makes a parameter use the memory of a region; the parameter stays the same object.

    Args:
        param: the parameter.
        values: the tensor of the region (`Region.tensor`).
        region: the region.
    """
    param.data = values
    param.region = region  # type: ignore[attr-defined]


def region_of(param: Tensor) -> Region | None:
    """Returns the region whose memory a parameter uses; None if it is in ordinary memory."""
    region: Region | None = getattr(param, "region", None)
    if region is None or param.data_ptr() != region.address:
        return None
    return region


def leave_file(param: nn.Parameter) -> None:
    """Removes a parameter's record of its region, when the parameter has got other memory."""
    if hasattr(param, "region"):
        del param.region
