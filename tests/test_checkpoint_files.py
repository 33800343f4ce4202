"""Files of tensors, folders that appear whole, and the boxes that checkpoints are made of."""

from __future__ import annotations

import hashlib
import itertools
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from threed.checkpoint.files import publish, sha256, stream_tensors
from threed.sharding import Piece, boxes, intersect


def test_files_of_tensors_are_safetensors(tmp_path: Path) -> None:
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8)
    tensors = {str(dtype): (torch.randn(5, 3) * 10).to(dtype).t() for dtype in dtypes}
    tensors |= {"none": torch.empty(0, 4), "one": torch.tensor(2.5), "ünï": torch.ones(1)}
    about = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    digest = stream_tensors(tmp_path / "f", about, tensors.values(), {"a": "b"})
    assert digest == sha256(tmp_path / "f") == hashlib.sha256((tmp_path / "f").read_bytes()).hexdigest()
    header = int.from_bytes((tmp_path / "f").read_bytes()[:8], "little")
    assert header % 8 == 0  # so that readers may map the tensors: the format asks for it
    with safe_open(tmp_path / "f", framework="pt") as file:
        assert file.metadata() == {"a": "b"}
        assert set(file.keys()) == set(tensors)
        for name, tensor in tensors.items():
            assert torch.equal(file.get_tensor(name), tensor)
            assert file.get_tensor(name).dtype == tensor.dtype


def test_a_stream_that_is_not_what_was_announced_is_an_error(tmp_path: Path) -> None:
    about = {"a": (torch.float32, (2,)), "b": (torch.float32, (2,))}
    with pytest.raises(ValueError, match=r"b is torch\.float32 \(3,\), announced as"):
        stream_tensors(tmp_path / "f", about, iter([torch.zeros(2), torch.zeros(3)]))
    with pytest.raises(ValueError, match="shorter"):
        stream_tensors(tmp_path / "f", about, iter([torch.zeros(2)]))


def test_publish_replaces_a_folder_whole(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / "new").mkdir()
        (tmp_path / "new" / f"file-{number}").touch()
        publish(tmp_path / "new", tmp_path / "name")
        assert [path.name for path in tmp_path.iterdir()] == ["name"]
        assert [path.name for path in (tmp_path / "name").iterdir()] == [f"file-{number}"]


@st.composite
def ranges(draw: st.DrawFn) -> tuple[Piece, int, int]:
    """A piece of a global tensor of 1 to 4 dimensions, and a range of its elements."""
    size = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    start = tuple(draw(st.integers(0, 3)) for _ in size)
    shape = tuple(s + n + draw(st.integers(0, 2)) for s, n in zip(start, size, strict=True))
    first = draw(st.integers(0, math.prod(size)))
    return Piece("name", shape, start, size), first, draw(st.integers(first, math.prod(size)))


@given(ranges())
def test_boxes_hold_every_element_of_a_range_once_and_in_order(drawn: tuple[Piece, int, int]) -> None:
    piece, first, last = drawn
    number = torch.full(piece.shape, -1)
    inside = tuple(slice(s, s + n) for s, n in zip(piece.start, piece.size, strict=True))
    number[inside] = torch.arange(piece.numel).view(piece.size)
    found = list(boxes(piece, first, last))
    assert len(found) <= 2 * len(piece.size) - 1
    flat = torch.full((last - first,), -1)
    for box in found:
        part = number[tuple(slice(s, s + n) for s, n in zip(box.start, box.size, strict=True))]
        assert part.shape == box.size  # inside the global tensor
        assert (flat[box.offset : box.offset + box.numel] == -1).all()
        flat[box.offset : box.offset + box.numel] = part.reshape(-1)
    assert flat.tolist() == list(range(first, last))


@st.composite
def pairs_of_boxes(draw: st.DrawFn) -> list[list[tuple[int, ...]]]:
    """Start and size of two boxes in one space."""
    dimensions = draw(st.integers(1, 3))
    return [
        [tuple(draw(st.integers(low, 4)) for _ in range(dimensions)) for low in (0, 1)]
        for _ in range(2)
    ]  # fmt: skip


@given(pairs_of_boxes())
def test_the_common_part_of_two_boxes_is_what_both_hold(pair: list[list[tuple[int, ...]]]) -> None:
    def cells(start: tuple[int, ...], size: tuple[int, ...]) -> set[tuple[int, ...]]:
        return set(itertools.product(*(range(s, s + n) for s, n in zip(start, size, strict=True))))

    (one, other), common = pair, intersect(*pair[0], *pair[1])
    assert (cells(*common) if common else set()) == cells(*one) & cells(*other)
    assert intersect(*other, *one) == common
