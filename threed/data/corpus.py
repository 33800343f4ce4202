"""The default corpus: the sources of this Python's own standard library, so that nothing is shipped or downloaded.

Use: `source = standard_library()`. Which files: every .py under the standard library's folder except tests and
installed packages, sorted by path. They differ between Python versions, so runs record the corpus' sha256.
"""

from __future__ import annotations

import os
import platform
import sysconfig
from pathlib import Path

from threed.data.sources import TextFile, TextSource

# Third-party code and tests are no part of the corpus; the folders of compiled files hold no sources.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
# A whole standard library has about 12 MB. Less than this is a stripped one, too little to learn from.
ENOUGH_BYTES = 1_000_000


def standard_library(folder: Path | None = None) -> TextSource:
    """Returns the .py files of the standard library in `folder` (default: this Python's).

    Raises ValueError, saying what to do, where there are no sources: in a zipped or stripped Python.
    """
    root = folder or Path(sysconfig.get_path("stdlib"))
    files = tuple(TextFile(name, root / name) for name in _python_files(root))
    source = TextSource(
        f"Python {platform.python_version()} standard library, {len(files)} files", files, "path"
    )
    if source.size < ENOUGH_BYTES:
        raise ValueError(
            f"{root} has no Python sources, which are the default corpus. Give text by --data.path: a .txt, a .jsonl, "
            "a folder of them, or a Megatron .bin/.idx pair"
        )
    return source


def _python_files(root: Path) -> list[str]:
    names: list[str] = []
    for here, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in LEFT_OUT]
        names += [
            Path(here, name).relative_to(root).as_posix() for name in files if name.endswith(".py")
        ]
    return sorted(
        name for name in names if (root / name).is_file() and os.access(root / name, os.R_OK)
    )
