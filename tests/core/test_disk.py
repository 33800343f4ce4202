"""What is said of a disk that could not be written."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from threed.core.disk import is_unwritable, why


def error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def test_a_full_disk_has_bytes_needed_and_free_and_what_to_do(tmp_path: Path) -> None:
    said = why(error(errno.ENOSPC), tmp_path / "not" / "yet", 1_300_000)
    assert said.startswith("No space left on device: needs 1.2 MiB, ")
    assert f"B are free at {tmp_path}: free some space, or point --run.dir elsewhere" in said
    assert "needs" not in why(error(errno.ENOSPC), tmp_path)


def test_what_ran_out_may_be_files_or_a_quota(tmp_path: Path) -> None:
    with mock.patch("os.statvfs", return_value=SimpleNamespace(f_files=100, f_favail=0)):
        assert f"no more files can be made at {tmp_path} (inodes)" in why(
            error(errno.ENOSPC), tmp_path
        )
    assert f"the quota on {tmp_path} is used up" in why(error(errno.EDQUOT), tmp_path)


def test_a_read_only_disk_and_other_errors(tmp_path: Path) -> None:
    said = why(error(errno.EROFS), tmp_path, elsewhere="use another folder")
    assert said.startswith(
        "Read-only file system: the file system is mounted read-only, or stopped"
    )
    assert said.endswith("mount it again, or use another folder")
    assert why(error(errno.EIO), tmp_path) == "[Errno 5] Input/output error"


@pytest.mark.parametrize(
    ("number", "is_disk"), [(errno.ENOSPC, True), (errno.EROFS, True), (errno.EIO, False)]
)
def test_which_errors_are_of_a_disk(number: int, is_disk: bool) -> None:
    assert is_unwritable(error(number)) == is_disk
    assert not is_unwritable(ValueError("full"))
