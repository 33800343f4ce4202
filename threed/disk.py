"""Why a file could not be written, in words: a full disk with the bytes that are needed and free, a read-only one.

except OSError as error:
    text = why(error, folder, needed)       # "No space left on device: needs 1.2 MiB, 310.0 KiB are free at …"
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT)
ELSEWHERE = "point --run.dir elsewhere"


def in_units(nbytes: int) -> str:
    """Returns a number of bytes in the unit that fits: 812 bytes, 4.0 KiB, 37.2 MiB, 1.5 TiB."""
    power = min(max(nbytes.bit_length() - 1, 0) // 10, 5)
    return (
        f"{nbytes / 2 ** (10 * power):,.1f} {'KMGTP'[power - 1]}iB" if power else f"{nbytes} bytes"
    )


def is_unwritable(error: BaseException) -> bool:
    """Whether an error says that a disk is full, or read-only."""
    return isinstance(error, OSError) and error.errno in (*FULL, errno.EROFS)


def why(error: OSError, folder: Path, needed: int | None = None, elsewhere: str = ELSEWHERE) -> str:
    """Returns why something under `folder`, which the caller names, could not be written, and what to do: one line.

    needed: bytes, where known. elsewhere: how to choose another place.
    """
    if not is_unwritable(error):
        return str(error)
    if error.errno == errno.EROFS:
        what = "its file system was mounted so, or found an error and stopped (see dmesg)"
        return f"{error.strerror}: {what}: mount it again, or {elsewhere}"
    need = "" if needed is None else f"needs {in_units(needed)}, "
    return f"{error.strerror}: {need}{free(folder, error)}: free some space, or {elsewhere}"


def free(folder: Path, error: OSError | None = None) -> str:
    """Returns how much is free on the disk of a folder that may not exist yet: bytes; files, or a quota, where those
    are what ran out."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    about = os.statvfs(there)
    if error is not None and error.errno == errno.EDQUOT:
        return f"the quota on {there} is used up"
    if about.f_files and not about.f_favail:
        return f"no more files can be made at {there} (inodes)"
    return f"{in_units(shutil.disk_usage(there).free)} are free at {there}"
