"""A user's Python file as a module, imported by path: `load("mine.py")`.

For what a command line names as FILE.py:NAME: a model of `threed verify`, a schedule of `--parallel.schedule`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def load(file: str) -> ModuleType:
    """The module that a file is, its folder on the path for the modules beside it. ValueError where that fails."""
    path = Path(file).resolve()
    name = f"threed_user_{path.stem}"
    if name in sys.modules and sys.modules[name].__file__ == str(path):
        return sys.modules[name]
    if not path.is_file():
        raise ValueError(f"{file}: no such file")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{file}: no Python file")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        hint = "; guard what runs with `if __name__ == '__main__':`" if isinstance(error, SystemExit) else ""
        raise ValueError(f"{file} cannot be imported: {type(error).__name__}: {error}{hint}") from error
    return module
