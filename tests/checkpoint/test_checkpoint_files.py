"""Files of tensors, folders that appear whole, and the boxes that checkpoints are made of."""

from __future__ import annotations

import errno
import hashlib
import itertools
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from tests.checkpoints import train
from tests.configs import Case, config_of, engine_of
from tests.harness import run_ranks
from threed.checkpoint import files, native
from threed.checkpoint.files import Hashes, checksum, publish, stream_tensors, tree_hash
from threed.distributed.sharding import Piece, intersect, split


def test_files_of_tensors_are_safetensors(tmp_path: Path) -> None:
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8)
    tensors = {str(dtype): (torch.randn(5, 3) * 10).to(dtype).t() for dtype in dtypes}
    tensors |= {"none": torch.empty(0, 4), "one": torch.tensor(2.5), "ünï": torch.ones(1)}
    about = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    hashes = stream_tensors(tmp_path / "f", about, tensors.values(), {"a": "b"})
    assert hashes == Hashes(tree_hash(tmp_path / "f"), checksum(tmp_path / "f"))
    assert (
        hashes.tree
        == hashlib.sha256(hashlib.sha256((tmp_path / "f").read_bytes()).digest()).hexdigest()
    )
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


def test_a_checkpoint_that_would_not_fit_is_refused(tmp_path: Path) -> None:
    files.check_space(tmp_path, 1)
    with pytest.raises(
        files.CheckpointError,
        match=r"needs 976\.6 TiB, [\d,.]+ [KMGT]iB are free at .*: free some space",
    ):
        files.check_space(tmp_path, 10**6 * 2**30)
    if sys.platform == "linux":
        with pytest.raises(
            files.CheckpointError, match=r"/proc is on no disk: point --run\.dir elsewhere"
        ):
            files.check_space(Path("/proc"), 1)


def fill_the_disk(out: Path, nbytes: int) -> None:
    """Writes a new folder that needs `nbytes` on a disk without space."""
    with files.new_folder(out, "mark", "checkpoint", nbytes):
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("nbytes", [0, 1 << 62])
def test_the_advice_for_a_new_folder_names_no_option_of_a_run(tmp_path: Path, nbytes: int) -> None:
    """`threed convert` has neither --checkpoint.keep nor --run.dir."""
    with pytest.raises(
        files.CheckpointError, match=r": free some space, or choose another folder$"
    ):
        fill_the_disk(tmp_path / "out", nbytes)
    with pytest.raises(files.CheckpointError, match=r"checkpoint\.keep, or point --run\.dir"):
        files.begin(tmp_path / "out", "mark", "checkpoint", 1 << 62)


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
def test_boxes_hold_every_element_of_a_range_once_and_in_order(
    drawn: tuple[Piece, int, int],
) -> None:
    piece, first, last = drawn
    number = torch.full(piece.shape, -1)
    inside = tuple(slice(s, s + n) for s, n in zip(piece.start, piece.size, strict=True))
    number[inside] = torch.arange(piece.numel).view(piece.size)
    found = list(split(piece, first, last))
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


# ------------------------------------------------------------------------------------------------------- durability


class Recorder:
    """The system calls that make a checkpoint durable, in order: written, synced, named; and whether it is there."""

    def __init__(self, path: Path, patch: pytest.MonkeyPatch) -> None:
        self.path, self.calls, self.absent = path, list[tuple[str, str]](), list[str]()
        self.fsync, self.recording = os.fsync, True
        patch.setattr(os, "fsync", self._fsync)
        sys.addaudithook(self._audit)  # cannot be taken away again: `recording` ends it

    def _fsync(self, handle: int) -> None:
        place = Path(os.readlink(f"/proc/self/fd/{handle}"))
        self._note("sync", place)
        if place.is_file():
            assert place.stat().st_size > 0  # flushed before
        self.fsync(handle)

    def _audit(self, event: str, about: tuple[Any, ...]) -> None:
        if not self.recording or not event.startswith(
            ("open", "os.rename", "os.remove", "os.rmdir", "ctypes.call")
        ):
            return
        if event == "open" and isinstance(about[0], str) and about[2] & (os.O_WRONLY | os.O_RDWR):
            self._note("write", Path(about[0]))
        elif event == "os.rename":
            self._note("rename", Path(about[0]))
        elif event != "open":
            self._look(event)

    def _note(self, what: str, place: Path) -> None:
        inside = place.is_relative_to(self.path.parent)
        if self.recording and inside:
            self.calls.append((what, place.relative_to(self.path.parent).as_posix()))
            self._look(f"{what} {place.name}")

    def _look(self, when: str) -> None:
        """Notes where a checkpoint that was there is not."""
        if not (self.path / native.MANIFEST).is_file():
            self.absent.append(when)


def saved_under_watch(path: Path) -> list[tuple[list[tuple[str, str]], list[str]]]:
    """The calls of a first save, and of one that replaces it; and when there was no manifest."""
    engine, out = engine_of(config_of(Case(layers=1, microbatches=-4))), []
    with pytest.MonkeyPatch.context() as patch:
        for _ in range(2):
            train(engine, 1)
            recorder = Recorder(path, patch)
            swap = files._swap

            def noted(a: Path, b: Path, recorder: Recorder = recorder, swap: Any = swap) -> bool:
                recorder._note("swap", a)
                return bool(swap(a, b))

            patch.setattr(files, "_swap", noted)
            engine.save(path)
            recorder._look("the end")
            recorder.recording = False
            out.append((recorder.calls, recorder.absent))
            patch.undo()
    return out


def test_what_a_checkpoint_is_made_of_is_on_the_disk_before_its_name(tmp_path: Path) -> None:
    path = tmp_path / "checkpoints" / "step-1"
    tensors = "step-1.tmp/rank-00000.safetensors"
    manifest = "step-1.tmp/manifest.json"
    building = "step-1.tmp"
    ((first, _), (second, absent)) = run_ranks(1, saved_under_watch, path)[0]
    written = [
        ("write", tensors), ("sync", tensors), ("write", manifest), ("sync", manifest), ("sync", building),
    ]  # fmt: skip
    first, second = (
        [(what, place) for what, place in calls if "/entry-" not in place]
        for calls in (first, second)
    )
    assert first == [*written, ("rename", building), ("sync", ".")]
    assert second[:6] == [*written, ("swap", building)]
    if ("rename", "step-1") in second:
        pytest.skip("no renameat2 here: a folder is replaced by two renames")
    assert second[6:] == [("sync", ".")]
    assert absent == []


@pytest.mark.parametrize(
    ("nbytes", "said"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.0 KiB"),
        (5 << 20, "5.0 MiB"),
        (3 << 29, "1.5 GiB"),
        (1 << 61, "2,048.0 PiB"),
    ],
)
def test_bytes_are_said_in_the_unit_that_fits(nbytes: int, said: str) -> None:
    assert files.in_units(nbytes) == said


def test_a_disk_that_is_full_is_said_with_both_sizes(tmp_path: Path) -> None:
    with pytest.raises(
        files.CheckpointError, match=r"needs 4,096\.0 PiB, \d[\d,.]* [KMGT]iB are free at"
    ):
        files.check_space(tmp_path, 1 << 62)
