"""Swap files: every byte arrives, from any memory, at any length; and what fails says so, always."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import nvme
from tests import programs
from threed.memory import io
from threed.memory.io import BLOCK, Disk, SwapError, Transfer
from threed.memory.pool import host_buffer

Maker = Callable[..., Disk]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Maker]:
    """Makes Disks, and closes those that a test leaves open."""
    made: list[Disk] = []

    def disk(folder: Path = tmp_path, name: str = "states") -> Disk:
        made.append(Disk(folder, name))
        return made[-1]

    yield disk
    for each in made:
        each.close()


def noise(nbytes: int, seed: int = 0) -> Tensor:
    return torch.randint(
        0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


def placed(nbytes: int, shift: int) -> tuple[Tensor, Tensor]:
    """Memory of `nbytes` that starts `shift` bytes after a page, and all that lies around it, filled with 0xAA."""
    around = host_buffer(nbytes + 2 * BLOCK).fill_(0xAA)
    return around[BLOCK + shift : BLOCK + shift + nbytes], around


def file_bytes(disk: Disk) -> bytes:
    return Path(f"/proc/self/fd/{disk._fd}").read_bytes()


@pytest.mark.parametrize("shift", [0, 1, 64, BLOCK - 1])
def test_every_length_from_any_address(
    make: Maker, monkeypatch: pytest.MonkeyPatch, shift: int
) -> None:
    monkeypatch.setattr(io, "PIECE", 4 * BLOCK)
    disk = make()
    before, offset, after = disk.reserve(BLOCK), disk.reserve(64 * BLOCK), disk.reserve(BLOCK)
    guard = noise(BLOCK, seed=9)
    for place in (before, after):
        disk.write(place, guard).wait()
    lengths = [
        1,
        2,
        511,
        512,
        513,
        *(k * BLOCK + d for k in (1, 2, 3, 4, 5, 8, 9, 31, 64) for d in (-1, 0, 1)),
    ]
    for length in (n for n in lengths if n <= 64 * BLOCK):
        values, _ = placed(length, shift)
        values.copy_(noise(length, seed=length))
        into, around = placed(length, shift)
        disk.write(offset, values).wait()
        disk.read(offset, into).wait()
        assert torch.equal(into, values), length
        around[BLOCK + shift : BLOCK + shift + length] = 0xAA
        assert bool((around == 0xAA).all()), f"reading {length} bytes wrote beside the tensor"
    for place in (before, after):
        found = torch.empty_like(guard)
        disk.read(place, found).wait()
        assert torch.equal(found, guard), "a neighbor in the file was overwritten"


def test_the_rest_of_the_last_block_is_zero(make: Maker) -> None:
    disk = make()
    offset = disk.reserve(2 * BLOCK)
    disk.write(offset, noise(2 * BLOCK)).wait()
    disk.write(offset, noise(BLOCK + 5, seed=1)).wait()
    if disk.direct:
        assert file_bytes(disk)[BLOCK + 5 : 2 * BLOCK] == bytes(BLOCK - 5)


DTYPES = [
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64,
    torch.int64, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (7, 11, 13), (5000,)], ids=str)
def test_any_dtype_and_shape(make: Maker, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    disk = make()
    values = torch.randn(shape).mul(50).to(dtype)
    offset = disk.reserve(values.nbytes)
    disk.write(offset, values).wait()
    into = torch.zeros_like(values)
    disk.read(offset, into).wait()
    assert torch.equal(into.reshape(-1).view(torch.uint8), values.reshape(-1).view(torch.uint8))


def test_many_transfers_are_under_way_and_waited_for_in_any_order(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(io, "PIECE", 8 * BLOCK)
    shuffle = random.Random(1).shuffle
    disk, values, places = make(), [], []
    for number in range(60):
        length = 1 + number * 3011
        memory, _ = placed(length, shift=number % 3 * 7)
        values.append(memory.copy_(noise(length, seed=number)))
        places.append(disk.reserve(length))
    for _ in range(3):
        writes = [disk.write(offset, memory) for offset, memory in zip(places, values, strict=True)]
        shuffle(writes)
        for transfer in writes:
            transfer.wait()
        into = [torch.zeros_like(memory) for memory in values]
        reads = [disk.read(offset, memory) for offset, memory in zip(places, into, strict=True)]
        shuffle(reads)
        for transfer in reads:
            transfer.wait()
            assert transfer.done()
        assert all(torch.equal(a, b) for a, b in zip(into, values, strict=True))
    assert not disk._in_flight


def test_a_tensor_that_nobody_holds_stays_until_its_bytes_are_out(make: Maker) -> None:
    disk = make()
    offsets = [disk.reserve(300_000) for _ in range(20)]
    for number, offset in enumerate(offsets):
        disk.write(offset, noise(300_000, seed=number))
    gc.collect()
    last = disk.write(offsets[-1], noise(300_000, seed=19))
    while not last.done():  # also ends without anyone waiting
        time.sleep(1e-4)
    while disk._in_flight:
        disk._drop_finished()
    for number, offset in enumerate(offsets):
        into = torch.empty(300_000, dtype=torch.uint8)
        disk.read(offset, into).wait()
        assert torch.equal(into, noise(300_000, seed=number))
    assert not disk._in_flight


def test_a_transfer_holds_its_tensor_until_it_is_done_and_no_longer(make: Maker) -> None:
    disk = make()
    offset = disk.reserve(10_000)
    values = noise(10_000)
    held = weakref.ref(values)
    transfer = disk.write(offset, values)
    del values
    transfer.wait()
    transfer.wait()  # again: nothing new
    end = time.monotonic() + 60
    while held() is not None:  # the thread drops it just after it says so
        assert time.monotonic() < end
        time.sleep(1e-3)


def test_nothing_to_move_is_done_at_once(make: Maker) -> None:
    disk = make()
    offset = disk.reserve(0)
    for transfer in (disk.write(offset, torch.empty(0)), disk.read(offset, torch.empty(0, 3))):
        assert transfer.done()
        transfer.wait()
    assert disk.reserve(1) > offset


def test_disks_and_threads_do_not_disturb_one_another(make: Maker, tmp_path: Path) -> None:
    disks = [make(tmp_path, "states"), make(tmp_path, "states"), make(tmp_path / "other")]
    failures: list[BaseException] = []

    def work(disk: Disk, seed: int) -> None:
        try:
            offset = disk.reserve(100_001)
            for turn in range(10):
                values = noise(100_001, seed=100 * seed + turn)
                into = torch.empty(100_001, dtype=torch.uint8)
                disk.write(offset, values).wait()
                disk.read(offset, into).wait()
                assert torch.equal(values, into)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(disks[n % 3], n)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_regions_are_blocks_apart_and_released_ones_come_back(make: Maker) -> None:
    disk = make()
    first, second, third = disk.reserve(1), disk.reserve(BLOCK + 1), disk.reserve(BLOCK)
    assert [first, second, third] == [0, BLOCK, 3 * BLOCK]
    disk.release(second, BLOCK + 1)
    assert disk.reserve(BLOCK) == 4 * BLOCK
    assert disk.reserve(2 * BLOCK) == second
    assert disk.reserve(2 * BLOCK) == 5 * BLOCK
    assert os.fstat(disk._fd).st_blocks * 512 >= 7 * BLOCK
    with pytest.raises(ValueError, match="cannot have -1 bytes"):
        disk.reserve(-1)


@pytest.mark.parametrize("offset", [-BLOCK, 1, 512, 2 * BLOCK])
def test_offsets_outside_and_between_blocks_are_refused(make: Maker, offset: int) -> None:
    disk = make()
    disk.reserve(2 * BLOCK)
    for begin in (disk.read, disk.write):
        with pytest.raises(
            ValueError, match=rf"at {offset}: offsets are multiples of 4096.* 8192 bytes"
        ):
            begin(offset, torch.zeros(5))


def test_tensors_that_are_not_plain_memory_are_refused(make: Maker) -> None:
    disk = make()
    disk.reserve(BLOCK)
    for tensor in (torch.zeros(4, 4).t(), torch.zeros(4, device="meta"), torch.zeros(8)[::2]):
        with pytest.raises(ValueError, match="contiguous CPU tensor"):
            disk.write(0, tensor[:, :2] if tensor.ndim == 2 else tensor)


def failing(transfer: Transfer, *words: str) -> SwapError:
    """The error of a transfer that must fail, each time it is waited for, with all these words in its message."""
    for _ in range(2):
        with pytest.raises(SwapError) as caught:
            transfer.wait()
        for word in words:
            assert word in str(caught.value)
    assert transfer.done()
    return caught.value


@pytest.mark.parametrize("left", [0, 1000, BLOCK, 5 * BLOCK, 5 * BLOCK + 77])
def test_a_file_that_ends_too_soon_is_an_error(
    make: Maker, monkeypatch: pytest.MonkeyPatch, left: int
) -> None:
    monkeypatch.setattr(io, "PIECE", 2 * BLOCK)
    monkeypatch.setenv("RANK", "3")
    disk = make()
    start, offset = disk.reserve(BLOCK), disk.reserve(9 * BLOCK)
    disk.write(offset, noise(9 * BLOCK)).wait()
    os.ftruncate(disk._fd, offset + left)
    buffer = host_buffer(9 * BLOCK)
    transfer = disk.read(offset, buffer)
    error = failing(
        transfer,
        "rank 3: reading 36864 bytes",
        f"at offset {offset}",
        disk.path,
        "the file ends before",
        "truncate",
    )
    assert error.errno == errno.EIO
    failing(
        disk.read(offset, torch.empty(9 * BLOCK - 3, dtype=torch.uint8)), "the file ends before"
    )
    disk.write(start, buffer[:BLOCK]).wait()  # the Disk goes on working


@contextlib.contextmanager
def file_limit(nbytes: int) -> Iterator[None]:
    """For a while, the largest size of a file: a write across it is cut short, one beyond it fails. Only for a while:
    pytest's own output may go to a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("limit", [0, 3 * BLOCK])
def test_a_short_write_is_an_error(make: Maker, limit: int) -> None:
    disk = make()
    offset = disk.reserve(8 * BLOCK)
    with file_limit(limit):
        error = failing(
            disk.write(offset, host_buffer(8 * BLOCK)),
            "rank 0: writing 32768 bytes",
            disk.path,
            "ulimit -f",
        )
        assert error.errno == errno.EFBIG
        assert failing(disk.write(offset, noise(8 * BLOCK - 1)[1:])).errno == errno.EFBIG
        with pytest.raises(SwapError, match="cannot reserve 4096 bytes beyond the 32768"):
            disk.reserve(1)
    with file_limit(limit + 100):  # between blocks
        failing(disk.write(offset, host_buffer(8 * BLOCK)), "writing 32768 bytes")


def test_a_failure_that_nobody_waited_for_is_told_when_the_disk_closes(make: Maker) -> None:
    disk = make()
    other, offset = disk.reserve(BLOCK), disk.reserve(4 * BLOCK)
    os.ftruncate(disk._fd, offset)
    disk.read(offset, host_buffer(4 * BLOCK))
    disk.write(other, noise(BLOCK))
    with pytest.raises(SwapError, match=r"reading 16384 bytes at offset 4096 of .*states\.rank0"):
        disk.close()
    disk.close()


def test_one_failed_transfer_leaves_the_others_whole(make: Maker) -> None:
    disk = make()
    good, bad = disk.reserve(50_000), disk.reserve(50_000)
    disk.write(good, noise(50_000)).wait()
    os.ftruncate(disk._fd, bad)
    into = torch.zeros(50_000, dtype=torch.uint8)
    transfers = [disk.read(place, torch.empty_like(into)) for place in (bad, bad)] + [
        disk.read(good, into)
    ]
    transfers[2].wait()
    assert torch.equal(into, noise(50_000))
    failing(transfers[1])
    failing(transfers[0])


def test_a_closed_disk_refuses_and_finishes_what_was_under_way(make: Maker) -> None:
    disk = make()
    offset = disk.reserve(200_000)
    disk.write(offset, noise(200_000)).wait()
    into = torch.zeros(200_000, dtype=torch.uint8)
    transfer = disk.read(offset, into)
    disk.close()
    assert torch.equal(into, noise(200_000))
    assert transfer.done()
    transfer.wait()
    for call in (lambda: disk.read(0, into), lambda: disk.write(0, into), lambda: disk.reserve(1)):
        with pytest.raises(SwapError, match="is closed; create a new Disk") as caught:
            call()
        assert caught.value.errno == errno.EBADF


def test_a_dropped_disk_finishes_before_its_tensors_go(tmp_path: Path) -> None:
    count = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        disk = Disk(tmp_path, "states")
        disk.read(disk.reserve(2**20), torch.empty(2**20, dtype=torch.uint8))
        del disk
        gc.collect()
    end = time.monotonic() + 60
    while len(os.listdir("/proc/self/fd")) > count and time.monotonic() < end:
        time.sleep(1e-3)  # until the last transfer is done
    assert len(os.listdir("/proc/self/fd")) == count


def test_a_dropped_disk_waits_for_no_thread(tmp_path: Path) -> None:
    """A thread that is being started holds this lock, and may collect garbage; threads that end take it. Python 3.13 has
    no such lock.
    """
    code = f"""
import contextlib, gc, threading, torch
from threed.memory.io import Disk
disk = Disk({str(tmp_path)!r}, "states")
disk.read(disk.reserve(2**20), torch.empty(2**20, dtype=torch.uint8))
with getattr(threading, "_shutdown_locks_lock", contextlib.nullcontext()):
    del disk
    gc.collect()
"""
    done = programs.run(["-c", code], tmp_path, os.environ, timeout=60)
    assert done.returncode == 0, done.stderr


def forked(work: Callable[[], object]) -> int:
    """The exit status of a child that runs `work`: 0 when it returned, 1 when it raised."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(120)
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_is_refused_and_makes_its_own(make: Maker) -> None:
    disk, values = make(), noise(300_000)
    offset = disk.reserve(300_000)
    transfer = disk.write(offset, values)

    def child() -> None:
        for call in (
            transfer.wait,
            transfer.done,
            lambda: disk.read(offset, values),
            lambda: disk.reserve(1),
        ):
            with pytest.raises(SwapError, match="not to its forked child"):
                call()
        disk.close()
        own, into = make(), torch.empty_like(values)
        place = own.reserve(300_000)
        own.write(place, values.flip(0)).wait()
        own.read(place, into).wait()
        assert torch.equal(into, values.flip(0))

    assert forked(child) == 0
    transfer.wait()
    into = torch.empty_like(values)
    disk.read(offset, into).wait()
    assert torch.equal(into, values)


def test_a_killed_process_leaves_nothing_on_the_drive(make: Maker, tmp_path: Path) -> None:
    folder = tmp_path / "swap"

    def child() -> None:
        disk = make(folder)
        disk.write(disk.reserve(2**22), noise(2**22))
        os.kill(os.getpid(), signal.SIGKILL)

    assert forked(child) == -signal.SIGKILL
    assert os.listdir(folder) == []


def test_a_full_drive_is_told_before_anything_is_written(make: Maker, tmp_path: Path) -> None:
    disk = make()
    disk.reserve(BLOCK)
    free = shutil.disk_usage(tmp_path).free
    with pytest.raises(
        SwapError, match=rf"cannot reserve {2**60} bytes beyond the 4096 of .*No space left"
    ) as caught:
        disk.reserve(2**60)
    assert caught.value.errno == errno.ENOSPC
    assert "bytes are free; free space there, or name a folder on a larger drive" in str(
        caught.value
    )
    assert os.fstat(disk._fd).st_size == BLOCK
    assert abs(shutil.disk_usage(tmp_path).free - free) < 2**30
    assert disk.reserve(1) == BLOCK


@pytest.fixture
def small_drive(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system of its own; `request.param` is what mount takes."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", *request.param, "none", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a file system")
    yield folder
    gc.collect()
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("small_drive", [("tmpfs", "-o", "size=1m")], indirect=True)
def test_a_drive_that_fills_up_later_fails_the_write(make: Maker, small_drive: Path) -> None:
    disk = make(small_drive)
    assert disk.reserve(2**19) == 0
    with pytest.raises(
        SwapError, match=rf"cannot reserve {2**20} bytes beyond the 524288 .* 524288 bytes are free"
    ):
        disk.reserve(2**20)
    os.ftruncate(disk._fd, 0)  # gives back what was set aside, and another program takes it
    other = os.open(small_drive / "other", os.O_WRONLY | os.O_CREAT)
    while os.write(other, bytes(min(2**16, shutil.disk_usage(small_drive).free))):
        pass
    os.close(other)
    error = failing(
        disk.write(0, host_buffer(2**19)), "writing 524288 bytes", "No space left", "a larger drive"
    )
    assert error.errno == errno.ENOSPC
    with pytest.raises(SwapError, match=r"cannot create .*No space left on device"):
        make(small_drive)
    assert os.listdir(small_drive) == ["other"]


@pytest.mark.parametrize("small_drive", [("ramfs",)], indirect=True)
def test_a_file_system_without_direct_io_is_used_through_the_page_cache(small_drive: Path) -> None:
    disk = Disk(small_drive, "states")
    assert not disk.direct
    for length in (1, 4095, 4097, 300_001):
        values, _ = placed(length, shift=3)
        values.copy_(noise(length))
        into, offset = torch.empty_like(values), disk.reserve(length)
        disk.write(offset, values).wait()
        disk.read(offset, into).wait()
        assert torch.equal(into, values)
    disk.close()
    assert os.listdir(small_drive) == []


def test_a_folder_that_cannot_be_used_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RANK", "5")
    with pytest.raises(
        SwapError, match=rf"rank 5: cannot create {tmp_path}/file/x\.rank5.*: .*name another folder"
    ):
        Disk(tmp_path / "file", "x")
    with pytest.raises(SwapError, match=r"cannot create /proc/nowhere/x"):
        Disk("/proc/nowhere", "x")


@pytest.mark.slow
def test_the_benchmark_measures_every_way_that_needs_nothing_installed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--dir", str(tmp_path), "--rounds", "2", "--tensors", "2", "--mib", "1", "--fresh"]
    nvme.main([*options, "--only", "threed", "o_direct"])
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [r["contender"] for r in records[:2]] == ["threed", "o_direct_hugepages_1thread_8MiB"]
    assert [(r["operation"], r["contender"]) for r in records[2:]] == [
        ("write", "threed"),
        ("read", "threed"),
    ]
    for record in records[2:]:
        assert record["best_peer"]
        assert 0 < record["interval"][0] <= record["ratio"] <= record["interval"][1]
    assert os.listdir(tmp_path) == []


def test_a_folder_that_is_made_is_reported(tmp_path: Path) -> None:
    with pytest.warns(
        UserWarning,
        match=f"{tmp_path}/drive/swap did not exist and was created on the file system mounted",
    ):
        Disk(tmp_path / "drive" / "swap", "states").close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Disk(tmp_path / "drive" / "swap", "states").close()
