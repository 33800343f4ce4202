"""Small file systems for tests of full and failing disks; they need the permission to mount.

with tmpfs(folder, "2m"): ...
with ext4(folder, 8): ...           # in an image file next to the folder, through a loop device
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def _command(*words: str) -> None:
    try:
        done = subprocess.run(words, capture_output=True, text=True)
        problem = "" if done.returncode == 0 else done.stderr.strip()
    except FileNotFoundError as error:
        problem = str(error)
    if problem:
        pytest.skip(
            f"no small disk can be mounted here, so this fault is only tested by an injected error: {problem}"
        )


def _release(place: Path, image: Path | None = None) -> None:
    """Unmounts a file system after its last use.

    It waits for the last use, because a file system that is still in use would be mounted again by
    the next test.
    """
    end = time.monotonic() + 60
    while (
        subprocess.run(["umount", str(place)], capture_output=True).returncode
        and time.monotonic() < end
    ):
        time.sleep(0.2)
    if place.is_mount():
        subprocess.run(["umount", "-l", str(place)], check=True)
    while image is not None and _is_used(image) and time.monotonic() < end:
        time.sleep(0.2)


def _is_used(image: Path) -> bool:
    return bool(subprocess.run(["losetup", "-j", str(image)], capture_output=True).stdout)


@contextmanager
def tmpfs(place: Path, size: str) -> Iterator[Path]:
    """Context manager: a file system in memory, mounted at `place`."""
    place.mkdir(parents=True)
    _command("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place))
    try:
        yield place
    finally:
        _release(place)


@contextmanager
def ext4(place: Path, mib: int, *, made: bool = False) -> Iterator[Path]:
    """Context manager: an ext4 on a loop device, mounted at `place`.

    After an error the file system becomes read-only.

    Args:
        place: mount point.
        mib: size in MiB.
        made: whether the image file already exists; the file system is then checked and repaired.
    """
    place.mkdir(parents=True, exist_ok=True)
    image = place.with_name(place.name + ".img")
    if made:
        subprocess.run(["e2fsck", "-fy", str(image)], capture_output=True)
    else:
        with image.open("wb") as file:
            file.truncate(mib * 2**20)
        _command("mkfs.ext4", "-q", "-m", "0", str(image))
    _command("mount", "-o", "loop,errors=remount-ro", str(image), str(place))
    try:
        yield place
    finally:
        _release(place, image)
