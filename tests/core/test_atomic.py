"""Files that appear whole, together, or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from threed.core.atomic import building


def test_files_get_their_names_in_order_when_all_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace

    def synced(handle: int) -> None:
        calls.append("sync " + Path(os.readlink(f"/proc/self/fd/{handle}")).name.partition(".")[0])
        fsync(handle)

    def renamed(path: Path, final: Path) -> None:
        calls.append(f"rename {Path(final).name}")
        replace(path, final)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    place = tmp_path / "new"
    with building(place / "a", place / "b") as (a, b):
        a.write_text("one")
        b.write_text("two")
        assert {a.parent, b.parent} == {place}
        assert not (place / "a").exists()
    assert calls == ["sync a", "rename a", "sync new", "sync b", "rename b", "sync new"]
    assert {path.name: path.read_text() for path in place.iterdir()} == {"a": "one", "b": "two"}


def test_after_an_error_nothing_is_left_and_what_was_there_stays(tmp_path: Path) -> None:
    def fill() -> None:
        with building(tmp_path / "a", tmp_path / "b") as (a, _):
            a.write_text("half")
            raise OSError("the disk is full")

    (tmp_path / "a").write_text("old")
    with pytest.raises(OSError, match="full"):
        fill()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_text() == "old"
