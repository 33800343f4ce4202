"""A cache of tokenized data, shared by all processes: each entry is a folder of files.

    folder, notice = cache_folder()
    entry = build_once(folder, name, build)     `build(scratch)` writes files into an empty folder
    entry.record                                the result of `build`, which is saved as JSON
    entry.folder / "tokens.bin"                 a file that `build` wrote

An entry is built once, appears atomically, and never changes afterwards. A build writes into a
scratch folder with a unique name, calls fsync, and renames the folder. The atomic rename makes a
build safe for any number of processes, and a killed process leaves no invalid entry. In addition, a
file lock avoids duplicate work; the kernel releases it when the process exits. On a file system
without locks, every process builds the entry, and the first rename succeeds.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from threed.core.atomic import cache_folder as cache_folder
from threed.core.atomic import sync
from threed.core.disk import FULL, in_units

ABANDONED_S = 86400.0  # age in seconds above which a scratch folder is removed


@dataclass(frozen=True)
class Entry:
    """A complete entry of the cache.

    Attributes:
        folder: the folder with the files of the entry.
        record: the result of the `build` function that wrote the entry.
    """

    folder: Path
    record: dict[str, Any]


def build_once(folder: Path, name: str, build: Callable[[Path], dict[str, Any]]) -> Entry:
    """Returns the entry `name`. Builds it if it is missing or damaged.

    Args:
        folder: the cache folder.
        name: the name of the entry.
        build: function that writes the files of the entry into the empty folder that it is given,
            and returns the record of the entry.

    Raises:
        OSError: if the disk is full; the message names the folder.
        Exception: any error that `build` raises.
    """
    with _lock(folder / f"{name}.lock"):
        entry = _read(folder / name)
        if entry is not None:
            return entry
        scratch = _scratch(folder, name)
        _remove_abandoned(scratch, name)
        try:
            _fill(scratch, build)
            return _publish(scratch, folder / name)
        except OSError as error:
            if error.errno not in FULL:
                raise
            advice = f"{in_units(shutil.disk_usage(folder).free)} free; make room or point THREED_CACHE at another disk"
            raise OSError(
                error.errno, f"No disk space for the token cache: {advice}", str(folder)
            ) from error
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    # The file is opened read-only, so that users who share a cache can lock each other's files.
    descriptor = os.open(path, os.O_RDONLY | os.O_CREAT, 0o666)
    try:
        # A file system without locks raises OSError. The error is ignored, because entries are
        # valid without a lock, too.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _scratch(folder: Path, name: str) -> Path:
    """Creates a folder with a unique name and, unlike tempfile, with permissions from the umask."""
    path = folder / f"{name}.building-{secrets.token_hex(8)}"
    path.mkdir()
    return path


def _read(folder: Path) -> Entry | None:
    """Returns the entry in `folder`, or None if a file is missing or has the wrong size."""
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        sizes = {name: (folder / name).stat().st_size for name in meta["sizes"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Entry(folder, meta["record"]) if sizes == meta["sizes"] else None


def _fill(scratch: Path, build: Callable[[Path], dict[str, Any]]) -> None:
    record = build(scratch)
    meta = {
        "record": record,
        "sizes": {path.name: path.stat().st_size for path in sorted(scratch.iterdir())},
    }
    (scratch / "meta.json").write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
    for path in [*scratch.iterdir(), scratch]:
        sync(path)


def _publish(scratch: Path, folder: Path) -> Entry:
    """Renames `scratch` to `folder` and returns the entry.

    If another process has already published a valid entry in `folder`, returns that entry. A
    damaged entry in `folder` is replaced. Raises OSError if the entry cannot be published.
    """
    for _ in range(2):
        try:
            scratch.rename(folder)
            sync(folder.parent)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
        entry = _read(folder)
        if entry is not None:
            return entry
        # The entry is damaged. Rename it atomically before its removal, so that no process reads
        # a partly removed entry.
        aside = _scratch(folder.parent, folder.name)
        with contextlib.suppress(OSError):
            folder.rename(aside / "damaged")
        shutil.rmtree(aside, ignore_errors=True)
    raise OSError(
        errno.EIO,
        "The cache entry cannot be written or read back; remove it and start again",
        str(folder),
    )


def _remove_abandoned(scratch: Path, name: str) -> None:
    """Removes scratch folders of this entry that are more than a day older than `scratch`.

    Killed processes leave such folders. Their modification times are compared with the modification
    time of `scratch`, not with this machine's clock, which may differ from the file system's.
    """
    now = scratch.stat().st_mtime
    for path in scratch.parent.glob(f"{name}.building-*"):
        with contextlib.suppress(OSError):
            if now - path.stat().st_mtime > ABANDONED_S:
                shutil.rmtree(path)
