"""Explains why a file could not be written: disk full (bytes needed and free), quota, read-only.

except OSError as error:
    text = why(error, folder, needed)     # "No space left on device: needs 1.2 MiB, 310.0 KiB …"
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT)
ELSEWHERE = "point --run.dir elsewhere"


def in_units(nbytes: int) -> str:
    """Returns bytes as text in a suitable unit: 812 bytes, 4.0 KiB, 37.2 MiB, 1.5 TiB."""
    power = min(max(nbytes.bit_length() - 1, 0) // 10, 5)
    return (
        f"{nbytes / 2 ** (10 * power):,.1f} {'KMGTP'[power - 1]}iB" if power else f"{nbytes} bytes"
    )


def is_unwritable(error: BaseException) -> bool:
    """Returns whether an error means that a disk is full, over quota or read-only."""
    return isinstance(error, OSError) and error.errno in (*FULL, errno.EROFS)


def why(error: OSError, folder: Path, needed: int | None = None, elsewhere: str = ELSEWHERE) -> str:
    """Returns one line with the reason why a write failed, and a remedy.

    Args:
        error: the error of the write.
        folder: the folder that was written to.
        needed: bytes that were needed, if known.
        elsewhere: text that describes how to choose another folder.
    """
    if not is_unwritable(error):
        return str(error)
    if error.errno == errno.EROFS:
        what = "the file system is mounted read-only, or stopped after an error (see dmesg)"
        return f"{error.strerror}: {what}: mount it again, or {elsewhere}"
    need = "" if needed is None else f"needs {in_units(needed)}, "
    return f"{error.strerror}: {need}{free(folder, error)}: free some space, or {elsewhere}"


def free(folder: Path, error: OSError | None = None) -> str:
    """Returns a text about the free space on a folder's disk, such as "3.0 GiB are free at /data".

    If all inodes are used up, or if `error` reports an exceeded quota, the text reports that.

    Args:
        folder: the folder, which may not exist yet.
        error: the error of a write, if any.
    """
    existing = next(
        path for path in (folder.absolute(), *folder.absolute().parents) if path.exists()
    )
    stats = os.statvfs(existing)
    if error is not None and error.errno == errno.EDQUOT:
        return f"the quota on {existing} is used up"
    if stats.f_files and not stats.f_favail:
        return f"no more files can be made at {existing} (inodes)"
    return f"{in_units(shutil.disk_usage(existing).free)} are free at {existing}"
