"""Atomic files: written under a temporary name, flushed to disk, then renamed.

with building(path) as (scratch,):     # renames scratch to path if the block ends without error
    scratch.write_text(text)
folder, notice = cache_folder()        # a folder for files that later runs can reuse
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path


def sync(path: Path) -> None:
    """Flushes a file, or the directory entries of a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def building(*finals: Path) -> Iterator[list[Path]]:
    """Context manager: yields a temporary path next to each of `finals`; creates missing folders.

    At the end of the block, each temporary file is flushed and renamed, in the order of `finals`.
    After an error the temporary files are removed.
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


def cache_folder(wanted: Path | None = None) -> tuple[Path, str]:
    """Returns a writable cache folder and a notice.

    Args:
        wanted: the preferred folder; by default $THREED_CACHE or ~/.cache/threed.

    Returns:
        The folder and a notice. If the preferred folder is not writable, the folder is a fallback
        in the system's temporary folder, and the notice reports this; otherwise the notice is
        empty.
    """
    if wanted is None:
        wanted = Path(os.environ.get("THREED_CACHE") or "~/.cache/threed")
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: no home folder to expand ~ to
        wanted = wanted.expanduser().absolute()
        wanted.parent.mkdir(parents=True, exist_ok=True)
        # private, because the cache may contain compiled code
        wanted.mkdir(mode=0o700, exist_ok=True)
        with tempfile.TemporaryFile(dir=wanted):
            return wanted, ""
    fallback = _private_temporary_folder()
    return (
        fallback,
        f"The cache folder {wanted} is not writable; using {fallback}. Set THREED_CACHE to choose another.",
    )


def _private_temporary_folder() -> Path:
    """Returns this user's folder in the system's temporary folder; creates it if it is missing.

    If another user owns the folder with the usual name, or can write to it, a folder with a new
    random name is created.
    """
    folder = Path(tempfile.gettempdir()) / f"threed-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022:
        return folder
    return Path(tempfile.mkdtemp(prefix="threed-"))
