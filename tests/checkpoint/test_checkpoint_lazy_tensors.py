"""Boxes of tensors that are composed of others, and of files, are those of the tensor in memory."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from threed.checkpoint import lazy_tensors
from threed.checkpoint.files import CheckpointError
from threed.checkpoint.lazy_tensors import (
    Boxed,
    EveryNth,
    FileTensor,
    Interleaved,
    LazyTensor,
    MemoryTensor,
    Reshaped,
    Slice,
    Stacked,
    Transposed,
    concatenate,
    read_all,
    read_box,
    read_slabs,
    rows,
)
from threed.distributed.sharding import slices

Shape = tuple[int, ...]


def counted(shape: Shape, dtype: torch.dtype = torch.float64) -> Tensor:
    """A tensor whose elements differ."""
    return torch.arange(math.prod(shape), dtype=dtype).view(shape)


@st.composite
def boxes(draw: st.DrawFn, least: int = 0, most: int = 4) -> tuple[Shape, Shape, Shape]:
    """A shape, and start and size of a box in it."""
    shape = draw(st.lists(st.integers(1, 6), min_size=least, max_size=most).map(tuple))
    start = tuple(draw(st.integers(0, n - 1)) for n in shape)
    return (
        shape,
        start,
        tuple(draw(st.integers(1, n - a)) for n, a in zip(shape, start, strict=True)),
    )


def check(lazy: LazyTensor, want: Tensor, start: Shape, size: Shape) -> None:
    """In its own dtype and in another one, at once and in slabs."""
    assert (lazy.shape, lazy.dtype) == (tuple(want.shape), want.dtype)
    assert torch.equal(read_box(lazy, start, size), want[slices(start, size)])
    assert torch.equal(read_all(lazy), want)
    out = torch.empty(size[::-1], dtype=torch.bfloat16).permute(tuple(range(len(size)))[::-1])
    lazy.read(start, out)
    assert torch.equal(out, want[slices(start, size)].bfloat16())
    if want.dim():
        assert torch.equal(torch.cat([values.clone() for values in read_slabs(lazy)]), want)


@given(boxes(), st.sampled_from([1, 16, 2**25]), st.sampled_from([0, 2**12]))
def test_elements_in_row_major_order(
    box: tuple[Shape, Shape, Shape], most: int, short: int
) -> None:
    shape, start, size = box
    want = counted(shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lazy_tensors, "MOST_BYTES", most)
        patch.setattr(lazy_tensors, "SHORT_BYTES", short)
        patch.setattr(lazy_tensors, "SLAB_BYTES", most)
        check(Reshaped(shape, MemoryTensor(want.view(-1))), want, start, size)


def test_short_rows_are_read_together() -> None:
    values, lengths = torch.arange(6400.0), list[int]()

    def elements(first: int, out: Tensor) -> None:
        lengths.append(len(out))
        out.copy_(values[first : first + len(out)])

    out = torch.empty(100, 32)
    lazy_tensors.read_strided((100, 64), torch.float32, elements, (0, 16), out)
    assert torch.equal(out, values.view(100, 64)[:, 16:48])
    assert lengths == [99 * 64 + 32]


@given(boxes(1), st.integers(0, 6), st.integers(0, 6))
def test_rows_of_tensors(box: tuple[Shape, Shape, Shape], a: int, b: int) -> None:
    shape, start, size = box
    want = counted(shape)
    first, last = sorted((min(a, shape[0]), min(b, shape[0])))
    whole = MemoryTensor(want)
    check(
        concatenate([rows(whole, (0, first)), rows(whole, (first, last), (last, shape[0]))]),
        want,
        start,
        size,
    )
    check(Slice(whole, (first % shape[0], *start[1:]), size[1:]),
          want[first % shape[0]][slices(start[1:], size[1:])], (0,) * (len(shape) - 1), size[1:])  # fmt: skip


@given(boxes(2, 2), st.integers(1, 5), st.integers(1, 5))
def test_boxes_of_a_matrix(box: tuple[Shape, Shape, Shape], a: int, b: int) -> None:
    (n, m), start, size = box
    want, a, b = counted((n, m)), min(a, n), min(b, m)
    at = [
        ((r, c), want[slices((r, c), (h, w))])
        for r, h in ((0, a), (a, n - a))
        for c, w in ((0, b), (b, m - b))
    ]
    check(Boxed((n, m), [(first, MemoryTensor(part)) for first, part in at]), want, start, size)
    check(Transposed(MemoryTensor(want.t())), want, start, size)


@given(boxes(1), st.integers(1, 4))
def test_stacks_and_rows_that_alternate(box: tuple[Shape, Shape, Shape], n: int) -> None:
    shape, start, size = box
    want = counted(shape)
    check(Stacked([MemoryTensor(part) for part in want]), want, start, size)
    parts = [MemoryTensor(want[i::n]) for i in range(n)]
    for i, part in enumerate(parts):
        every = EveryNth(MemoryTensor(want), i, n)
        assert torch.equal(read_all(every), part.values)
        if len(part.values) > start[0]:
            some = (min(size[0], len(part.values) - start[0]), *size[1:])
            check(every, part.values, start, some)
    if shape[0] % n == 0:
        check(Interleaved(parts), want, start, size)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64])
def test_files(dtype: torch.dtype, tmp_path: Path) -> None:
    """Contiguous and strided, not at the beginning."""
    path, want = tmp_path / "file", counted((4, 5, 6), dtype)
    path.write_bytes(b"head" + want.view(-1).view(torch.uint8).numpy().tobytes())
    check(FileTensor(path, dtype, (4, 5, 6), (30, 6, 1), 0, 4), want, (1, 2, 3), (2, 2, 2))
    check(FileTensor(path, dtype, (3, 6), (6, 1), 30, 4), want[1, :3], (1, 2), (2, 3))
    check(FileTensor(path, dtype, (6, 5), (1, 6), 60, 4), want[2].t(), (1, 2), (3, 2))
    short = FileTensor(path, dtype, (4, 5, 7), (35, 7, 1), 0, 4)
    with pytest.raises(CheckpointError, match="ends too early"):
        read_all(short)
    with pytest.raises(CheckpointError, match=r"\[4, 1, 1\] at \[1, 0, 0\] of a tensor of shape"):
        read_box(short, (1, 0, 0), (4, 1, 1))


def test_parts_that_do_not_fit_are_refused() -> None:
    flat, matrix = MemoryTensor(torch.zeros(6)), MemoryTensor(torch.zeros(2, 3))
    for make, text in (
        (lambda: concatenate([]), "missing"),
        (lambda: concatenate([flat, matrix]), "do not fit together"),
        (lambda: concatenate([MemoryTensor(torch.zeros(()))]), "do not fit together"),
        (lambda: rows(matrix, (1, 3)), "fewer rows than its model requires"),
        (lambda: rows(matrix, (-1, 1)), "fewer rows than its model requires"),
        (lambda: Slice(flat, (0, 0), (1, 1)), "fewer rows than its model requires"),
        (lambda: Reshaped((2, 4), flat), "has 6 elements"),
        (lambda: Reshaped((2, 3), matrix), "has 6 elements"),
    ):
        with pytest.raises(CheckpointError, match=text):
            make()


def test_several_dtypes_are_promoted() -> None:
    both = concatenate([MemoryTensor(torch.ones(2).bfloat16()), MemoryTensor(torch.ones(3))])
    assert both.dtype == torch.float32
    assert read_all(both).tolist() == [1.0] * 5
