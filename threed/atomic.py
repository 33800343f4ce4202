"""Files and folders that appear whole, or not at all: written beside their place, flushed to the disk, then renamed.

with building(path) as (scratch,):       # files get their names when the block ends without an error
    scratch.write_text(text)
publish(building_place(path), path)      # a finished folder, also in place of an older one
folder, notice = cache_folder()          # where files lie that a later run may use
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # Linux's fcntl.h and linux/fs.h


def sync(path: Path) -> None:
    """Flushes a file, or a folder's list of names, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Writes a small file of a folder that is not published yet, flushed to the disk."""
    path.write_text(text, encoding="utf-8")
    sync(path)


@contextlib.contextmanager
def building(*finals: Path) -> Iterator[list[Path]]:
    """Returns a free name beside each of `finals`, in folders that are made where they are missing.

    At the end the files are flushed and get their final names in this order; after an error they are removed.
    """
    mark = secrets.token_hex(8)
    scratch = [final.with_name(f"{final.name}.{mark}.tmp") for final in finals]
    try:
        for path in scratch:
            path.parent.mkdir(parents=True, exist_ok=True)
        yield scratch
        for path, final in zip(scratch, finals, strict=True):
            sync(path)
            path.replace(final)
            sync(final.parent)
    finally:
        for path in scratch:
            path.unlink(missing_ok=True)


def building_place(path: Path) -> Path:
    """Where the folder `path` is built before it gets its name: beside it, so that a rename is enough."""
    return path.with_name(path.name + ".tmp")


def publish(building: Path, path: Path) -> None:
    """Renames a finished folder to its final name, durably; replaces a folder of that name. OSError if it cannot.

    Where the system can swap two names in one step, `path` is a whole folder at every moment.
    """
    sync(building)
    if not path.exists():
        building.rename(path)
    elif _swap(building, path):
        shutil.rmtree(building, ignore_errors=True)
    else:
        old = path.with_name(path.name + ".old")
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
        building.rename(path)
        shutil.rmtree(old, ignore_errors=True)
    sync(path.parent)


def _swap(a: Path, b: Path) -> bool:
    """Exchanges two names by Linux's renameat2(2); False where there is no such call, or not on this file system."""
    call = getattr(ctypes.CDLL(None), "renameat2", None)
    return (
        call is not None
        and call(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0
    )


def cache_folder(wanted: Path | None = None) -> tuple[Path, str]:
    """Returns a writable cache folder and a notice, empty unless it had to be another than the wanted one.

    Wanted is the argument, else $THREED_CACHE, else ~/.cache/threed; the fallback lies in the temporary folder.
    """
    if wanted is None:
        wanted = Path(os.environ.get("THREED_CACHE") or "~/.cache/threed")
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: no home folder to expand ~ to
        wanted = wanted.expanduser().absolute()
        wanted.parent.mkdir(parents=True, exist_ok=True)
        # compiled code may lie there too, which nobody else may write
        wanted.mkdir(mode=0o700, exist_ok=True)
        with tempfile.TemporaryFile(dir=wanted):
            return wanted, ""
    fallback = _private_temporary_folder()
    return (
        fallback,
        f"The cache folder {wanted} is not writable; using {fallback}. Set THREED_CACHE to choose another.",
    )


def _private_temporary_folder() -> Path:
    """Returns this user's folder in the temporary folder, or a new one if somebody else has taken that name."""
    folder = Path(tempfile.gettempdir()) / f"threed-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022:
        return folder
    return Path(tempfile.mkdtemp(prefix="threed-"))
