"""Tensors that are read from pieces of files, a box at a time.

chain = Chain([place, place])                      one after the other, as flat elements
chain.cut(100, 200)                                a part of it
Spread((20, 5), chain.cut(100, 200)).box((4, 0), (8, 5))
"""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from threed.checkpoint.files import CheckpointError, plain
from threed.sharding import intersect, slices

Shape = tuple[int, ...]
CHUNK = 2**25  # bytes that are read at a time


class Elements(Protocol):
    """Flat elements that are read in ranges."""

    @property
    def dtype(self) -> torch.dtype:
        """Their format."""

    @property
    def numel(self) -> int:
        """How many there are."""

    def read(self, first: int, last: int) -> Tensor:
        """Returns elements [first, last), as [last - first]."""


class Boxes(Protocol):
    """A tensor that is read in boxes."""

    @property
    def dtype(self) -> torch.dtype:
        """Its format."""

    @property
    def shape(self) -> Shape:
        """Its shape."""

    def box(self, start: Shape, size: Shape) -> Tensor:
        """Returns a box [*size]."""


@dataclass(frozen=True, eq=False)
class FileTensor:
    """A tensor whose elements are read from a file on demand.

    Attributes:
        offset, stride: of its elements in the storage.
        first: the first byte of the storage in the file.
    """

    path: Path
    dtype: torch.dtype
    shape: Shape
    stride: tuple[int, ...]
    offset: int
    first: int

    def __setstate__(self, state: Any) -> None:
        """Ignores attributes, which a pickle may give a tensor."""

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    @property
    def contiguous(self) -> bool:
        """Whether its elements follow one another."""
        want = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != want:
                return False
            want *= size
        return True

    def read(self, first: int, last: int) -> Tensor:
        """Returns elements [first, last), in row-major order, as [last - first]; CheckpointError if it cannot."""
        if not 0 <= first <= last <= self.numel:
            raise CheckpointError(
                f"{self.path}: elements {first} to {last} of a tensor of {self.numel}"
            )
        if not self.contiguous:
            reach = 1 + sum(
                (size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True)
            )
            return self._bytes(0, reach).as_strided(self.shape, self.stride).reshape(-1)[first:last]
        return self._bytes(first, last)

    def _bytes(self, first: int, last: int) -> Tensor:
        out = torch.empty(last - first, dtype=self.dtype)
        if last == first:
            return out
        at, rest = (
            self.first + (self.offset + first) * self.dtype.itemsize,
            out.view(torch.uint8).numpy().data,
        )
        try:
            with self.path.open("rb", buffering=0) as file:
                while len(rest):
                    read = os.preadv(file.fileno(), [rest[: 2**30]], at)
                    if not read:
                        raise OSError("it ends too early")
                    at, rest = at + read, rest[read:]
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {plain(error)}") from None
        return out

    def whole(self) -> Tensor:
        """Returns the tensor."""
        return self.read(0, self.numel).view(self.shape)


class Chain:
    """Elements one after the other; cut: a part of them, that of another chain."""

    def __init__(self, parts: Sequence[Elements]) -> None:
        self.parts = [part for part in parts if part.numel] or list(parts[:1])
        self._ends = list(accumulate(part.numel for part in self.parts))
        if len({part.dtype for part in self.parts}) != 1:
            raise CheckpointError("pieces of a tensor are missing, or have several formats")

    @property
    def dtype(self) -> torch.dtype:
        """Their format."""
        return self.parts[0].dtype

    @property
    def numel(self) -> int:
        """How many there are."""
        return self._ends[-1]

    def cut(self, first: int, last: int) -> Elements:
        """Returns elements [first, last), to be read later; CheckpointError where there are fewer."""
        return Cut(self, first, last)

    def read(self, first: int, last: int) -> Tensor:
        """Returns elements [first, last), as [last - first]."""
        out = torch.empty(last - first, dtype=self.dtype)
        number, at = bisect_right(self._ends, first), first
        while at < last:
            begin = self._ends[number] - self.parts[number].numel
            end = min(last, self._ends[number])
            out[at - first : end - first] = self.parts[number].read(at - begin, end - begin)
            number, at = number + 1, end
        return out


class Cut:
    """A range of other elements."""

    def __init__(self, whole: Elements, first: int, last: int) -> None:
        if not 0 <= first <= last <= whole.numel:
            raise CheckpointError(
                f"elements {first} to {last} are needed, and there are {whole.numel}"
            )
        self.whole, self.first, self.last = whole, first, last

    @property
    def dtype(self) -> torch.dtype:
        """Their format."""
        return self.whole.dtype

    @property
    def numel(self) -> int:
        """How many there are."""
        return self.last - self.first

    def read(self, first: int, last: int) -> Tensor:
        """Returns elements [first, last), as [last - first]."""
        return self.whole.read(self.first + first, self.first + last)


class Spread:
    """A tensor of that shape, whose `elements`, in row-major order, are these."""

    def __init__(self, shape: Sequence[int], elements: Elements) -> None:
        self.shape, self.elements = tuple(shape), elements
        if math.prod(self.shape) != elements.numel:
            raise CheckpointError(f"a tensor of shape {list(shape)} has {elements.numel} elements")

    @property
    def dtype(self) -> torch.dtype:
        """Its format."""
        return self.elements.dtype

    def box(self, start: Shape, size: Shape) -> Tensor:
        """Returns a box [*size]; of rows that are not whole, some at a time are read."""
        if not self.shape:
            return self.elements.read(0, 1).view(())
        row = math.prod(self.shape[1:])
        if tuple(size[1:]) == self.shape[1:]:
            return self.elements.read(start[0] * row, (start[0] + size[0]) * row).view(size)
        out = torch.empty(tuple(size), dtype=self.dtype)
        inside = tuple(slice(a, a + n) for a, n in zip(start[1:], size[1:], strict=True))
        step = max(1, CHUNK // (row * self.dtype.itemsize))
        for first in range(0, size[0], step):
            last = min(first + step, size[0])
            rows = self.elements.read((start[0] + first) * row, (start[0] + last) * row)
            out[first:last] = rows.view(last - first, *self.shape[1:])[(slice(None), *inside)]
        return out


class Rows:
    """Ranges of rows (first, last) of tensors, one after the other, as one tensor."""

    def __init__(self, ranges: Sequence[tuple[Boxes, int, int]]) -> None:
        if len({(part.dtype, part.shape[1:]) for part, _, _ in ranges}) != 1 or not all(
            part.shape for part, *_ in ranges
        ):
            raise CheckpointError("what ranks hold of a tensor does not fit together")
        if any(not 0 <= first <= last <= part.shape[0] for part, first, last in ranges):
            raise CheckpointError("a tensor has fewer rows than its model says")
        self._ranges = list(ranges)
        self._ends = list(accumulate(last - first for _, first, last in ranges))

    @property
    def dtype(self) -> torch.dtype:
        """Its format."""
        return self._ranges[0][0].dtype

    @property
    def shape(self) -> Shape:
        """Its shape."""
        return (self._ends[-1], *self._ranges[0][0].shape[1:])

    def box(self, start: Shape, size: Shape) -> Tensor:
        """Returns a box [*size]."""
        found, at, last = [], start[0], start[0] + size[0]
        number = bisect_right(self._ends, at)
        while at < last:
            part, first, end = self._ranges[number]
            begin = self._ends[number] - (end - first)
            stop = min(last, self._ends[number])
            found.append(part.box((first + at - begin, *start[1:]), (stop - at, *size[1:])))
            number, at = number + 1, stop
        return found[0] if len(found) == 1 else torch.cat(found)


class Boxed:
    """A tensor of boxes (first element along every dimension, tensor), which must cover it."""

    def __init__(self, shape: Sequence[int], parts: Sequence[tuple[Shape, Boxes]]) -> None:
        self.shape, self._parts = tuple(shape), list(parts)
        if len({part.dtype for _, part in parts}) != 1:
            raise CheckpointError("pieces of a tensor are missing, or have several formats")

    @property
    def dtype(self) -> torch.dtype:
        """Its format."""
        return self._parts[0][1].dtype

    def box(self, start: Shape, size: Shape) -> Tensor:
        """Returns a box [*size]."""
        out = torch.empty(tuple(size), dtype=self.dtype)
        for origin, part in self._parts:
            if (common := intersect(start, size, origin, part.shape)) is not None:
                first = tuple(a - o for a, o in zip(common[0], origin, strict=True))
                out[slices(*common, start)] = part.box(first, common[1])
        return out


class At:
    """One of the tensors that are stacked along a first dimension."""

    def __init__(self, whole: Boxes, index: int) -> None:
        self._whole, self._index = whole, index

    @property
    def dtype(self) -> torch.dtype:
        """Its format."""
        return self._whole.dtype

    @property
    def shape(self) -> Shape:
        """Its shape."""
        return self._whole.shape[1:]

    def box(self, start: Shape, size: Shape) -> Tensor:
        """Returns a box [*size]."""
        return self._whole.box((self._index, *start), (1, *size))[0]


def stack(parts: Sequence[Boxes]) -> Boxes:
    """Returns tensors as one, along the rows."""
    return parts[0] if len(parts) == 1 else Rows([(part, 0, part.shape[0]) for part in parts])


def rows(whole: Boxes, *ranges: tuple[int, int]) -> Boxes:
    """Returns ranges of rows of a tensor as one."""
    return Rows([(whole, first, last) for first, last in ranges])
