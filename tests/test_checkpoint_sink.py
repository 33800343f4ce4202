"""A file written past the page cache has the bytes, and the hash, of what was written; and errors are errors."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.disks import ext4
from threed.checkpoint import checksum, sink
from threed.checkpoint.sink import Sink
from threed.checkpoint.writing import _share

PIECE = 2 * checksum.CHUNK


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has small files pass through the threads, in many pieces."""
    monkeypatch.setattr(sink, "PIECE", PIECE)
    monkeypatch.setattr(checksum, "BLOCK", PIECE)
    monkeypatch.setattr(checksum, "PIECE", checksum.CHUNK)
    monkeypatch.setattr(sink, "SMALL", 2 * PIECE)


def parts_of(nbytes: int) -> list[Any]:
    """Bytes, and tensors of odd lengths."""
    draw = torch.Generator().manual_seed(nbytes)
    data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=draw)
    cuts = sorted(int(cut) for cut in torch.randint(0, nbytes + 1, (5,), generator=draw))
    parts: list[Any] = [data[a:b] for a, b in zip([0, *cuts], [*cuts, nbytes], strict=True)]
    return [parts[0].numpy().tobytes(), *parts[1:]]


def joined(parts: list[Any]) -> bytes:
    return b"".join(part if isinstance(part, bytes) else part.numpy().tobytes() for part in parts)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("off", [-PIECE + 1, -1, 0, 1, sink.BLOCK, 9 * PIECE + 5])
def test_bytes_and_hash(
    off: int, direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not direct:
        monkeypatch.delattr(os, "O_DIRECT")
    parts = parts_of(4 * PIECE + off)
    data, file = joined(parts), tmp_path / "file"
    file.write_bytes(b"older, and longer" * PIECE)
    with Sink(file, len(data) - 100) as out:  # the size is a hint: headers come on top
        for part in parts:
            out.write(part)
    assert file.read_bytes() == data
    assert out.hashes == (checksum.tree_hash(file), checksum.checksum(file))
    assert not any(thread.name == "sink" for thread in threading.enumerate())


@pytest.mark.parametrize("after", [0, 2])
def test_a_drive_that_gets_full(
    after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a thread: told by the next part, or at the end; the threads are gone then."""
    pwrite, calls = os.pwrite, iter(range(after + 1))  # the first one tries direct I/O

    def full(fd: int, data: Any, at: int) -> int:
        if next(calls, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(fd, data, at)

    monkeypatch.setattr(sink.os, "pwrite", full)
    parts = parts_of(9 * PIECE)
    with pytest.raises(OSError, match="No space left"):
        write_all(tmp_path / "file", parts)
    assert not any(thread.name == "sink" for thread in threading.enumerate())


def write_all(file: Path, parts: list[Any]) -> None:
    with Sink(file, 9 * PIECE) as out:
        for part in parts:
            out.write(part)


def write_zeros(path: Path, nbytes: int) -> None:
    with Sink(path, nbytes) as sunk:
        for _ in range(nbytes // PIECE):
            sunk.write(bytes(PIECE))


@pytest.mark.parametrize("direct", [True, False])
def test_a_drive_that_is_full(
    direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real one: an error of the write or before it, and what was written earlier is whole."""
    monkeypatch.setattr(sink, "SMALL", 2 * PIECE if direct else 2**40)
    with ext4(tmp_path / "drive", 8) as drive:
        write_zeros(drive / "first", 8 * PIECE)
        with pytest.raises(OSError, match="No space left on device") as full:
            write_zeros(drive / "second", 64 * PIECE)
        assert full.value.errno == errno.ENOSPC
        assert (drive / "first").read_bytes() == bytes(8 * PIECE)
        (drive / "second").unlink()
        write_zeros(drive / "second", 16 * PIECE)
    assert not [thread for thread in threading.enumerate() if thread.name == "sink"]


def test_an_error_of_the_caller_is_its_own(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        write_all(tmp_path / "file", [torch.zeros(5 * PIECE, dtype=torch.uint8), torch, b""])
    assert not any(thread.name == "sink" for thread in threading.enumerate())


@pytest.mark.parametrize("direct", [True, False])
def test_a_limit_is_kept(direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the sleeps that it asks for: on a clock that stands still but for these."""
    if not direct:
        monkeypatch.delattr(os, "O_DIRECT")
    now, synced = [0.0], mock.Mock(wraps=os.fdatasync)
    monkeypatch.setattr(sink.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(sink.time, "sleep", lambda seconds: now.append(now.pop() + seconds))
    monkeypatch.setattr(sink.os, "fdatasync", synced)
    with Sink(tmp_path / "file", 10 * PIECE, limit=2 * PIECE) as out:
        for n in range(10):
            out.write(torch.zeros(PIECE, dtype=torch.uint8))
            assert now[0] == (n + 1) / 2
    assert (tmp_path / "file").stat().st_size == 10 * PIECE
    assert synced.call_count == (0 if direct else 10)


def test_a_limit_ends_when_the_run_is_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a wait, too."""
    now = [0.0]
    monkeypatch.setattr(sink.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(sink.time, "sleep", lambda seconds: now.append(now.pop() + seconds))
    with Sink(
        tmp_path / "file", 10 * PIECE, limit=2 * PIECE, hurries=lambda: now[0] >= 1.25
    ) as out:
        for n in range(10):
            out.write(torch.zeros(PIECE, dtype=torch.uint8))
            assert now[0] == min((n + 1) / 2, 1.25)


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
