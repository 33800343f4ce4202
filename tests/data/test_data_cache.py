"""Cache entries appear whole, once, and survive killed builders, damage, races and unwritable folders."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from threed.data import cache
from threed.data.cache import build_once, cache_folder

FORK = multiprocessing.get_context("fork")


def write_hello(scratch: Path) -> dict[str, Any]:
    (scratch / "hello.txt").write_text("hello")
    return {"answer": 42}


def refuse(scratch: Path) -> dict[str, Any]:
    raise AssertionError("built again")


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if ".building-" in path.name]


def test_builds_once_and_reads_back(tmp_path: Path) -> None:
    first = build_once(tmp_path, "entry", write_hello)
    again = build_once(tmp_path, "entry", refuse)
    assert first == again
    assert again.record == {"answer": 42}
    assert (again.folder / "hello.txt").read_text() == "hello"
    assert leftovers(tmp_path) == []


def cut_file(entry: Path) -> None:
    (entry / "hello.txt").write_text("hell")


def remove_file(entry: Path) -> None:
    (entry / "hello.txt").unlink()


def break_meta(entry: Path) -> None:
    (entry / "meta.json").write_text('{"record": {}')


def strange_meta(entry: Path) -> None:
    (entry / "meta.json").write_text("[1]")


def become_a_file(entry: Path) -> None:
    for path in entry.iterdir():
        path.unlink()
    entry.rmdir()
    entry.write_text("in the way")


@pytest.mark.parametrize("damage", [cut_file, remove_file, break_meta, strange_meta, become_a_file])
def test_a_damaged_entry_is_built_again(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    damage(build_once(tmp_path, "entry", write_hello).folder)
    entry = build_once(tmp_path, "entry", write_hello)
    assert entry.record == {"answer": 42}
    assert (entry.folder / "hello.txt").read_text() == "hello"
    assert leftovers(tmp_path) == []


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def fail(scratch: Path) -> dict[str, Any]:
        (scratch / "half").write_text("half")
        raise ValueError("line 3 is no JSON")

    with pytest.raises(ValueError, match="line 3"):
        build_once(tmp_path, "entry", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["entry.lock"]
    assert build_once(tmp_path, "entry", write_hello).record == {"answer": 42}


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_named_with_advice(tmp_path: Path) -> None:
    def fill(scratch: Path) -> dict[str, Any]:
        with open("/dev/full", "wb", buffering=0) as file:
            file.write(b"x")
        return {}

    with pytest.raises(
        OSError,
        match=r"No disk space for the token cache: .* [KMGT]iB free; make room or point THREED_CACHE",
    ):
        build_once(tmp_path, "entry", fill)
    assert leftovers(tmp_path) == []


def run_at_once(work: Callable[[int], None], count: int = 4) -> None:
    """Run `work` in `count` forked processes; each must end within two minutes."""
    processes = [FORK.Process(target=work, args=(rank,)) for rank in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=120)
        assert process.exitcode == 0


def logged_build(log: Path, wait: Callable[[], object], scratch: Path) -> dict[str, Any]:
    with log.open("a") as file:
        file.write("built\n")
    wait()
    (scratch / "data").write_bytes(b"x" * 1000)
    return {"answer": 42}


def test_four_processes_build_one_entry_once(tmp_path: Path) -> None:
    log, begun = tmp_path / "log", FORK.Barrier(4)

    def work(rank: int) -> None:
        begun.wait(120)
        entry = build_once(
            tmp_path, "entry", lambda scratch: logged_build(log, lambda: time.sleep(0.2), scratch)
        )
        assert entry.record == {"answer": 42}
        assert (entry.folder / "data").read_bytes() == b"x" * 1000

    run_at_once(work)
    assert log.read_text() == "built\n"
    assert leftovers(tmp_path) == []


def test_without_file_locks_all_build_and_one_rename_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    log, building = tmp_path / "log", FORK.Barrier(4)

    def work(rank: int) -> None:  # none is done before all have begun, however busy the machine
        entry = build_once(
            tmp_path,
            "entry",
            lambda scratch: logged_build(log, lambda: building.wait(120), scratch),
        )
        assert (entry.folder / "data").read_bytes() == b"x" * 1000

    run_at_once(work)
    assert log.read_text() == "built\n" * 4
    assert leftovers(tmp_path) == []


def test_a_killed_builder_blocks_nobody(tmp_path: Path) -> None:
    def hang(scratch: Path) -> dict[str, Any]:
        (scratch / "half").write_text("half")
        time.sleep(60)
        return {}

    process = FORK.Process(target=lambda: build_once(tmp_path, "entry", hang))
    process.start()
    end = time.monotonic() + 120
    while not list(tmp_path.glob("*.building-*/half")):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert build_once(tmp_path, "entry", write_hello).record == {"answer": 42}
    # it may belong to a builder on another machine, so it stays a day
    (left,) = leftovers(tmp_path)
    old = time.time() - 2 * cache.ABANDONED_S
    os.utime(tmp_path / left, (old, old))
    (tmp_path / "entry" / "meta.json").unlink()
    build_once(tmp_path, "entry", write_hello)
    assert leftovers(tmp_path) == []


def test_the_folder_is_the_argument_then_the_environment_then_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("THREED_CACHE", raising=False)
    assert cache_folder() == (tmp_path / "home" / ".cache" / "threed", "")
    monkeypatch.setenv("THREED_CACHE", str(tmp_path / "environment"))
    assert cache_folder() == (tmp_path / "environment", "")
    assert cache_folder(tmp_path / "argument") == (tmp_path / "argument", "")
    assert (tmp_path / "argument").is_dir()


def test_an_unwritable_folder_falls_back_with_a_notice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder, notice = cache_folder(tmp_path / "file" / "cache")
    assert folder == tmp_path / f"threed-{os.getuid()}"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert "not writable" in notice
    assert "THREED_CACHE" in notice
    assert cache_folder(tmp_path / "file" / "cache")[0] == folder  # the next rank finds the same


@pytest.mark.parametrize("trap", ["link", "file", "open to all"])
def test_the_fallback_trusts_no_name_that_others_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trap: str
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    taken = tmp_path / f"threed-{os.getuid()}"
    if trap == "link":
        (tmp_path / "elsewhere").mkdir()
        taken.symlink_to(tmp_path / "elsewhere")
    elif trap == "file":
        taken.write_text("")
    else:
        taken.mkdir()
        taken.chmod(0o777)
    (tmp_path / "file").write_text("no folder")
    folder, _ = cache_folder(tmp_path / "file" / "cache")
    with contextlib.suppress(FileNotFoundError):
        assert folder.resolve() != taken.resolve()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
