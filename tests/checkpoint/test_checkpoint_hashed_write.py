"""A file written with its hash has the bytes and the hash of its parts, is flushed, and keeps the limit."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.disks import ext4
from threed.checkpoint import files
from threed.checkpoint.files import write_hashed
from threed.checkpoint.saving import _share

PIECE = 2 * files.CHUNK


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has small files pass in many blocks."""
    monkeypatch.setattr(files, "BLOCK", PIECE)
    monkeypatch.setattr(files, "PIECE", files.CHUNK)


def parts_of(nbytes: int) -> list[Any]:
    """Bytes, and tensors of odd lengths."""
    draw = torch.Generator().manual_seed(nbytes)
    data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=draw)
    cuts = sorted(int(cut) for cut in torch.randint(0, nbytes + 1, (5,), generator=draw))
    parts: list[Any] = [data[a:b] for a, b in zip([0, *cuts], [*cuts, nbytes], strict=True)]
    return [parts[0].numpy().tobytes(), *parts[1:]]


def joined(parts: list[Any]) -> bytes:
    return b"".join(part if isinstance(part, bytes) else part.numpy().tobytes() for part in parts)


@pytest.mark.parametrize("off", [-PIECE + 1, -1, 0, 1, 4096, 9 * PIECE + 5])
def test_bytes_and_hash(off: int, tmp_path: Path) -> None:
    parts = parts_of(4 * PIECE + off)
    data, file = joined(parts), tmp_path / "file"
    file.write_bytes(b"older, and longer" * PIECE)
    hashes = write_hashed(file, parts)
    assert file.read_bytes() == data
    assert hashes == (files.tree_hash(file), files.checksum(file))


def test_a_file_is_flushed_before_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it is flushed for the last time, all bytes are there; a failing flush is an error."""
    fsync, sizes = os.fsync, list[int]()

    def flushed(fd: int) -> None:
        sizes.append(os.fstat(fd).st_size)
        fsync(fd)

    monkeypatch.setattr(files.os, "fsync", flushed)
    write_hashed(tmp_path / "file", parts_of(4 * PIECE + 5))
    assert sizes == [4 * PIECE + 5]
    monkeypatch.setattr(
        files.os, "fsync", mock.Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO)))
    )
    with pytest.raises(OSError, match="Input/output error"):
        write_hashed(tmp_path / "file", parts_of(PIECE))


def zeros(nbytes: int) -> list[Any]:
    return [bytes(PIECE)] * (nbytes // PIECE)


def test_a_drive_that_is_full(tmp_path: Path) -> None:
    """A real one: an error, and a file that was written before is complete."""
    with ext4(tmp_path / "drive", 8) as drive:
        write_hashed(drive / "first", zeros(8 * PIECE))
        with pytest.raises(OSError, match="No space left on device") as full:
            write_hashed(drive / "second", zeros(64 * PIECE))
        assert full.value.errno == errno.ENOSPC
        assert (drive / "first").read_bytes() == bytes(8 * PIECE)
        (drive / "second").unlink()
        write_hashed(drive / "second", zeros(16 * PIECE))


def test_an_error_of_the_caller_is_its_own(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        write_hashed(tmp_path / "file", [torch.zeros(5 * PIECE).byte(), torch, b""])  # type: ignore[list-item]


def on_a_clock_of_sleeps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Has time pass by sleeps alone; returns what the time is."""
    now = [0.0]
    monkeypatch.setattr(files.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(files.time, "sleep", lambda seconds: now.append(now.pop() + seconds))
    return now


def timed(now: list[float], count: int, seen: list[float]) -> Iterator[Tensor]:
    """Yields pieces, and notes the time when the next one is asked for."""
    for _ in range(count):
        yield torch.zeros(PIECE, dtype=torch.uint8)
        seen.append(now[0])


def test_a_limit_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, seen = on_a_clock_of_sleeps(monkeypatch), list[float]()
    synced = mock.Mock(wraps=os.fdatasync)
    monkeypatch.setattr(files.os, "fdatasync", synced)
    write_hashed(tmp_path / "file", timed(now, 10, seen), limit=2 * PIECE)
    assert seen == [(n + 1) / 2 for n in range(10)]
    assert (tmp_path / "file").stat().st_size == 10 * PIECE
    assert synced.call_count == 10


def test_a_limit_ends_when_the_run_is_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a wait, too."""
    now, seen = on_a_clock_of_sleeps(monkeypatch), list[float]()
    write_hashed(tmp_path / "file", timed(now, 10, seen), 2 * PIECE, lambda: now[0] >= 1.25)
    assert seen == [min((n + 1) / 2, 1.25) for n in range(10)]


def test_a_node_s_limit_is_shared_by_what_its_ranks_write(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [300, 100, 0, 0, 50, 50, 0, 100]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    mib = 2**20
    assert [_share(8.0, sizes, rank) for rank in (0, 1, 4, 7)] == [
        6 * mib,
        2 * mib,
        2 * mib,
        4 * mib,
    ]
    assert _share(8.0, sizes, 2) is None  # writes nothing
    assert _share(None, sizes, 0) is None
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert _share(8.0, [1, 3], 1) == 6 * mib
