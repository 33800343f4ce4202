"""The cache folder: entries that are built once, appear whole or not at all, and are never changed afterwards.

Use: `folder, notice = cache_folder()`; `entry = build_once(folder, name, build)`, where `build(scratch)` writes files
into an empty folder and returns a JSON-able record; then `entry.record` and `entry.folder / "tokens.bin"`.

Phases of a build: scratch folder with a name of its own -> fsync -> one atomic rename. That rename alone makes it safe
for any number of processes, and a killed one leaves nothing that is taken for an entry. A kernel file lock, which dies
with its holder, only spares the others the same work; where a file system has none, they all build and one rename wins.
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

from threed.atomic import cache_folder as cache_folder
from threed.atomic import sync
from threed.disk import FULL, in_units

ABANDONED_S = 86400.0


@dataclass(frozen=True)
class Entry:
    """One finished entry: its folder, and the record its builder returned."""

    folder: Path
    record: dict[str, Any]


def build_once(folder: Path, name: str, build: Callable[[Path], dict[str, Any]]) -> Entry:
    """Returns the entry `name`, building it if it is not there or is damaged.

    Raises what `build` raises; a full disk as OSError that names the folder.
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
    # Read-only, so that users who share a cache can lock files that others made.
    descriptor = os.open(path, os.O_RDONLY | os.O_CREAT, 0o666)
    try:
        # OSError: a file system without locks. Entries stay right without one.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _scratch(folder: Path, name: str) -> Path:
    """Makes a folder with a name of its own; unlike tempfile's, others may read it as far as the umask lets them."""
    path = folder / f"{name}.building-{secrets.token_hex(8)}"
    path.mkdir()
    return path


def _read(folder: Path) -> Entry | None:
    """Returns the entry in `folder` if it is whole: every file has the size that was written."""
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
    """Renames `scratch` to `folder`, unless another process was first; returns what is there then."""
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
        # What is there is damaged. Moving it aside is atomic too, so nobody sees half of it go.
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
    """Removes scratch folders that killed builders of this entry left more than a day before this new one was made, by
    the file system's clock: that of another machine may be days off."""
    now = scratch.stat().st_mtime
    for path in scratch.parent.glob(f"{name}.building-*"):
        with contextlib.suppress(OSError):
            if now - path.stat().st_mtime > ABANDONED_S:
                shutil.rmtree(path)
