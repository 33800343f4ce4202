"""Lazy tensors, whose values are read from files on demand, and compositions of lazy tensors.

    joined = concatenate([first, second])        a `Boxed`: the rows of `first`, then of `second`
    part = rows(joined, (100, 200))              a `Slice`: rows 100 to 199
    matrix = Reshaped((20, 5), part)             if `part` is a vector of 100 elements
    read_box(matrix, start=(4, 0), size=(8, 5))  reads rows 4 to 11

A box is a block of a tensor, with a start and a size in each dimension. The rows of a tensor are
its slices along the first dimension.

All checkpoints that can be read implement `TensorSource`: native checkpoints (`reading.Reader`),
Hugging Face folders, and checkpoints of other programs (`threed.interop`).
"""

from __future__ import annotations

import functools
import itertools
import math
import mmap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from threed.checkpoint.files import CheckpointError, fill, reading
from threed.core.messages import counted
from threed.distributed.sharding import intersect, slices
from threed.zero.state import PREVIOUS, WEIGHT

Shape = tuple[int, ...]
SLAB_BYTES = 2**24  # maximum size of the slabs of `read_slabs`, in bytes
MOST_BYTES = 2**25  # Maximum size of a single read, in bytes.
# If the contiguous runs of a box are shorter than this number of bytes, they are read together with
# the gaps between them, because many short reads would be slower. Runs whose starts are at least 16
# times this number of bytes apart are read separately.
SHORT_BYTES = 2**12


class LazyTensor(Protocol):
    """A tensor whose values are read on demand."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the stored values."""

    @property
    def shape(self) -> Shape:
        """The shape of the tensor."""

    def read(self, start: Shape, out: Tensor) -> None:
        """Copies the box of shape `out.shape` that begins at `start` to `out`.

        Args:
            start: index of the box's first element, per dimension.
            out: destination, of any dtype and device.
        """


class TensorSource(Protocol):
    """The tensors of a checkpoint, by their global names in threed.

    A tensor has one or more parts: the weight, and moments such as exp_avg.

    Attributes:
        shapes: shape of each tensor, by name; all parts of a tensor have this shape.
        parts: names of the saved parts of each tensor, by name of the tensor.
    """

    @property
    def shapes(self) -> Mapping[str, Shape]: ...

    @property
    def parts(self) -> Mapping[str, Collection[str]]: ...

    def tensor(self, part: str, name: str) -> LazyTensor:
        """Returns one part of a tensor.

        Args:
            part: name of the part: weight, exp_avg, ...
            name: global name of the tensor.

        Raises:
            CheckpointError: if the checkpoint does not have this part.
        """


def saved_part(part: str, saved: Collection[str]) -> str | None:
    """Returns the name of the saved part from which to load a part of the state.

    This is `part` itself, or None if `part` was not saved. The previous weights are an exception:
    they are saved only if they differ from the newest weights. If they were not saved, they are
    loaded from the newest weights, so the result is "weight".

    Args:
        part: part of the state to load: weight, exp_avg, ...
        saved: names of the parts that the checkpoint has of the tensor.
    """
    part = WEIGHT if part == PREVIOUS and PREVIOUS not in saved else part
    return part if part in saved else None


# ---------------------------------------------------------------------------------------------------------- reading


def read_box(tensor: LazyTensor, start: Sequence[int], size: Sequence[int]) -> Tensor:
    """Returns the box of shape `size` that begins at `start`, in the tensor's dtype."""
    out = torch.empty(tuple(size), dtype=tensor.dtype)
    tensor.read(tuple(start), out)
    return out


def read_all(tensor: LazyTensor) -> Tensor:
    """Returns the full tensor."""
    return read_box(tensor, (0,) * len(tensor.shape), tensor.shape)


def read_slabs(tensor: LazyTensor, itemsize: int = 4) -> Iterator[Tensor]:
    """Yields the rows of a tensor in slabs: tensors of consecutive rows.

    A slab has at most `SLAB_BYTES`, or one row if a row is larger. It is valid only until the next
    slab is yielded, because all slabs use the same memory.

    Args:
        tensor: tensor of at least one dimension.
        itemsize: bytes per element of the dtype to which the caller converts slabs. If this dtype
            is wider than the tensor's dtype, slabs have fewer rows, so that a converted slab has at
            most `SLAB_BYTES`, too.
    """
    count, *rest = tensor.shape
    row = math.prod(rest) * max(itemsize, tensor.dtype.itemsize)
    step = max(1, SLAB_BYTES // max(row, 1))
    shape = (min(step, count), *rest)
    numel = math.prod(shape)
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    # Unlike memory from malloc, a mapping is returned to the system when it is freed.
    memory = mmap.mmap(-1, max(1, numel) * tensor.dtype.itemsize, private)
    buffer = torch.frombuffer(memory, dtype=tensor.dtype)[:numel].view(shape)
    for first in range(0, count, step):
        values = buffer[: count - first]
        tensor.read((first, *(0 for _ in rest)), values)
        yield values


def read_strided(
    shape: Sequence[int],
    dtype: torch.dtype,
    elements: Callable[[int, Tensor], None],
    start: Shape,
    out: Tensor,
) -> None:
    """Copies a box of a row-major tensor to `out`.

    A single read has at most `MOST_BYTES`, or one row if a row is larger.

    Args:
        shape: shape of the tensor.
        dtype: dtype of the tensor.
        elements: function that reads n consecutive elements. It is called as `elements(first,
            values)`, where `first` is the index of the first element, and `values` is the
            destination: a contiguous tensor [n] on the CPU.
        start: index of the first element of the box, per dimension.
        out: destination of the shape of the box, of any dtype and device.
    """
    if not shape:
        shape, start, out = (1,), (0,), out.view(1)
    size, strides = out.shape, _strides(shape)
    if not out.numel():
        return
    # In the dimensions after `along`, the box spans the full tensor. So rows along the dimension
    # `along` are contiguous, and can be read together.
    along = max((d for d, n in enumerate(size) if n < shape[d]), default=0)
    run, between = size[along] * strides[along], strides[max(0, along - 1)]
    if along and run * dtype.itemsize < SHORT_BYTES and between * dtype.itemsize < 16 * SHORT_BYTES:
        along -= 1
    rows = max(1, MOST_BYTES // (strides[along] * dtype.itemsize))
    for before in itertools.product(*map(range, size[:along])):
        for first in range(0, size[along], rows):
            target = out[before][first : first + rows]
            inside = (*before, first, *(0 for _ in size[along + 1 :]))
            at = sum((a + b) * stride for a, b, stride in zip(start, inside, strides, strict=True))
            count = _span(target.shape, strides[along:])
            direct = count == target.numel() and target.is_contiguous()
            if direct and target.dtype == dtype and target.is_cpu:
                elements(at, target.view(-1))
            else:
                values = torch.empty(count, dtype=dtype)
                elements(at, values)
                target.copy_(values.as_strided(target.shape, strides[along:]))


def _strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[d + 1 :]) for d in range(len(shape))]


def _span(size: Sequence[int], strides: Sequence[int]) -> int:
    """Returns the number of elements from the first to the last element of a strided box."""
    return 1 + sum((n - 1) * stride for n, stride in zip(size, strides, strict=True))


# ------------------------------------------------------------------------------------------------------ composition


def _promoted(tensors: Iterable[LazyTensor]) -> torch.dtype:
    return functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))


T = TypeVar("T", bound=LazyTensor)


@dataclass(frozen=True, eq=False)
class Boxed(Generic[T]):
    """A tensor that is assembled from boxes, which together cover the full tensor.

    Attributes:
        shape: shape of the tensor.
        boxes: (start of the box, tensor with the values of the box) for each box.
    """

    shape: Shape
    boxes: Sequence[tuple[Shape, T]]

    @property
    def dtype(self) -> torch.dtype:
        """The common dtype to which torch promotes the dtypes of all boxes."""
        return _promoted(tensor for _, tensor in self.boxes)

    def read(self, start: Shape, out: Tensor) -> None:
        """Copies the box of shape `out.shape` that begins at `start` to `out`."""
        for tensor, inside, at, size in self.meeting(start, out.shape):
            tensor.read(inside, out[slices(at, size, start)])

    def meeting(self, start: Shape, size: Shape) -> Iterator[tuple[T, Shape, Shape, Shape]]:
        """Yields the boxes of this tensor that intersect a requested box.

        Args:
            start: index of the first element of the requested box, per dimension.
            size: size of the requested box, per dimension.

        Yields:
            (tensor, inside, at, size) for each box of this tensor that intersects the requested
            box. `tensor` has the values of this tensor's box. The intersection of both boxes has
            the size `size`, and begins at `inside` in `tensor` and at `at` in this tensor.
        """
        for origin, tensor in self.boxes:
            if (common := intersect(start, size, origin, tensor.shape)) is not None:
                at, extent = common
                yield tensor, tuple(a - o for a, o in zip(at, origin, strict=True)), at, extent


@dataclass(frozen=True, eq=False)
class _OfTensor:
    """A part or another form of a tensor, of the same dtype."""

    whole: LazyTensor

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tensor."""
        return self.whole.dtype


@dataclass(frozen=True, eq=False)
class _OfTensors:
    """A tensor composed of others, which are its parts."""

    parts: Sequence[LazyTensor]

    @property
    def dtype(self) -> torch.dtype:
        """The common dtype to which torch promotes the dtypes of all parts."""
        return _promoted(self.parts)


@dataclass(frozen=True, eq=False)
class Slice(_OfTensor):
    """The box of a tensor that begins at `start` and has the given shape.

    `shape` may omit leading dimensions. The box has size 1 in the omitted dimensions.

    Raises:
        CheckpointError: if the box is not inside the tensor.
    """

    start: Shape
    shape: Shape

    def __post_init__(self) -> None:
        have, start, size = self.whole.shape, self.start, self._padded(self.shape, 1)
        if len(start) != len(have) or any(
            not 0 <= a <= a + n <= m for a, n, m in zip(start, size, have, strict=True)
        ):
            raise CheckpointError(
                f"a tensor has fewer rows than its model requires: its shape is {list(have)}, and"
                f" {list(size)} at {list(start)} is needed"
            )

    def _padded(self, values: Sequence[int], by: int) -> Shape:
        """Returns a start or a size of `whole`, with `by` for each omitted leading dimension."""
        return (by,) * (len(self.start) - len(values)) + tuple(values)

    def read(self, start: Shape, out: Tensor) -> None:
        """Copies the box of shape `out.shape` that begins at `start` to `out`."""
        inside = zip(self.start, self._padded(start, 0), strict=True)
        self.whole.read(tuple(a + b for a, b in inside), out.view(self._padded(out.shape, 1)))


@dataclass(frozen=True, eq=False)
class Reshaped:
    """A one-dimensional tensor, viewed in another shape in row-major order.

    Raises:
        CheckpointError: if `shape` does not have as many elements as `flat`.
    """

    shape: Shape
    flat: LazyTensor

    def __post_init__(self) -> None:
        if (math.prod(self.shape),) != self.flat.shape:
            numel = math.prod(self.flat.shape)
            raise CheckpointError(
                f"a tensor of shape {list(self.shape)} has {counted(numel, 'element')}"
            )

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the elements."""
        return self.flat.dtype

    def read(self, start: Shape, out: Tensor) -> None:
        """Copies the box of shape `out.shape` that begins at `start` to `out`."""
        read_strided(self.shape, self.dtype, self._elements, start, out)

    def _elements(self, first: int, values: Tensor) -> None:
        self.flat.read((first,), values)


@dataclass(frozen=True, eq=False)
class Transposed(_OfTensor):
    """The transpose of a matrix; a vector is unchanged."""

    @property
    def shape(self) -> Shape:
        """The reversed shape of the matrix."""
        return self.whole.shape[::-1]

    def read(self, start: Shape, out: Tensor) -> None:
        """Copies the box of shape `out.shape` that begins at `start` to `out`."""
        out.copy_(read_box(self.whole, start[::-1], out.shape[::-1]).t())


@dataclass(frozen=True, eq=False)
class Stacked(_OfTensors):
    """Tensors of one shape, along a new first dimension."""

    @property
    def shape(self) -> Shape:
        """The number of parts, and the shape of a part."""
        return len(self.parts), *self.parts[0].shape

    def read(self, start: Shape, out: Tensor) -> None:
        """Copies the box of shape `out.shape` that begins at `start` to `out`."""
        for part, values in zip(self.parts[start[0] :], out, strict=False):
            part.read(start[1:], values)


@dataclass(frozen=True, eq=False)
class Interleaved(_OfTensors):
    """Tensors of one shape, whose rows alternate: the first row of each part, then the second."""

    @property
    def shape(self) -> Shape:
        """The shape of a part, with the rows of all parts."""
        first, *rest = self.parts[0].shape
        return first * len(self.parts), *rest

    def read(self, start: Shape, out: Tensor) -> None:
        """Copies the box of shape `out.shape` that begins at `start` to `out`."""
        n = len(self.parts)
        for i, part in enumerate(self.parts):
            skipped = (i - start[0]) % n  # rows of the box before the first one of this part
            if len(values := out[skipped::n]):
                part.read(((start[0] + skipped) // n, *start[1:]), values)


@dataclass(frozen=True, eq=False)
class EveryNth(_OfTensor):
    """Rows `first`, `first` + n, `first` + 2n, ... of a tensor; the inverse of `Interleaved`."""

    first: int
    n: int

    @property
    def shape(self) -> Shape:
        """The shape of the tensor, with only the chosen rows."""
        rows, *rest = self.whole.shape
        return len(range(self.first, rows, self.n)), *rest

    def read(self, start: Shape, out: Tensor) -> None:
        """Copies the box of shape `out.shape` that begins at `start` to `out`."""
        if len(out):
            size = ((len(out) - 1) * self.n + 1, *out.shape[1:])
            at = (self.first + start[0] * self.n, *start[1:])
            out.copy_(read_box(self.whole, at, size)[:: self.n])


def concatenate(parts: Sequence[LazyTensor]) -> LazyTensor:
    """Returns the concatenation of tensors along the first dimension.

    Raises:
        CheckpointError: if `parts` is empty, a part is a scalar, or parts differ in a dimension
            other than the first.
    """
    parts = [part for part in parts if 0 not in part.shape] or parts[:1]
    if len({part.shape[1:] for part in parts}) != 1 or not all(part.shape for part in parts):
        raise CheckpointError("pieces of a tensor are missing, or do not fit together")
    if len(parts) == 1:
        return parts[0]
    firsts = list(itertools.accumulate((part.shape[0] for part in parts), initial=0))
    rest = parts[0].shape[1:]
    at = [(first, *(0 for _ in rest)) for first in firsts]
    return Boxed((firsts[-1], *rest), list(zip(at, parts, strict=False)))


def rows(whole: LazyTensor, *ranges: tuple[int, int]) -> LazyTensor:
    """Returns the concatenation of ranges [first, last) of the rows of a tensor."""
    rest = whole.shape[1:]
    zeros = tuple(0 for _ in rest)
    return concatenate([Slice(whole, (a, *zeros), (b - a, *rest)) for a, b in ranges])


# ----------------------------------------------------------------------------------------------------------- leaves


@dataclass(frozen=True, eq=False)
class MemoryTensor:
    """A tensor in memory."""

    values: Tensor

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return self.values.dtype

    @property
    def shape(self) -> Shape:
        """The shape of the values."""
        return tuple(self.values.shape)

    def read(self, start: Shape, out: Tensor) -> None:
        """Copies the box of shape `out.shape` that begins at `start` to `out`."""
        out.copy_(self.values[slices(start, out.shape)])


@dataclass(frozen=True, eq=False)
class FileTensor:
    """A strided tensor in a file: a view of a storage, as torch.save writes it.

    Attributes:
        path: path of the file.
        dtype: dtype of the elements.
        shape: shape of the tensor.
        stride: stride of each dimension in the storage, in elements.
        offset: offset of the tensor's first element in the storage, in elements.
        first: offset of the storage in the file, in bytes.
    """

    path: Path
    dtype: torch.dtype
    shape: Shape
    stride: tuple[int, ...]
    offset: int
    first: int

    def read(self, start: Shape, out: Tensor) -> None:
        """Copies the box of shape `out.shape` that begins at `start` to `out`.

        Raises:
            CheckpointError: if the file cannot be read, or the box is not inside the tensor.
        """
        if any(a + n > m for a, n, m in zip(start, out.shape, self.shape, strict=True)):
            raise CheckpointError(
                f"{self.path}: {list(out.shape)} at {list(start)} of a tensor of shape"
                f" {list(self.shape)}"
            )
        strides = zip(self.shape, self.stride, _strides(self.shape), strict=True)
        if all(size == 1 or stride == want for size, stride, want in strides):
            read_strided(self.shape, self.dtype, self._elements, start, out)
        elif out.numel():
            values = torch.empty(_span(self.shape, self.stride), dtype=self.dtype)
            self._elements(0, values)
            out.copy_(values.as_strided(self.shape, self.stride)[slices(start, out.shape)])

    def _elements(self, first: int, values: Tensor) -> None:
        at = self.first + (self.offset + first) * self.dtype.itemsize
        with reading(self.path), self.path.open("rb", buffering=0) as file:
            fill(file.fileno(), values.view(torch.uint8).numpy().data, at)
