"""What a user's file calls by name, imported by path in every process: `threed verify FILE.py:NAME`."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class Source:
    """The object `name` of a Python file; a call of it imports the file, if this process has not yet."""

    file: str
    name: str

    def __call__(self, *args: Any) -> Any:
        return getattr(load(self.file), self.name)(*args)


def load(file: str) -> ModuleType:
    """The module that a file is, its folder on the path for the modules beside it. ValueError where that fails."""
    path = Path(file).resolve()
    name = f"threed_verified_{path.stem}"
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


def find(target: str) -> tuple[Source, Source | None]:
    """The model that FILE.py:NAME is, and the file's own `batch`, if it has one. ValueError for what is not there."""
    file, colon, name = target.rpartition(":")
    if not colon or not file.endswith(".py"):
        raise ValueError(f"{target}: write FILE.py:NAME, NAME a model class called with a ModelConfig and a Slicing")
    module = load(file)
    if not callable(getattr(module, name, None)):
        own = [n for n, v in vars(module).items() if inspect.isclass(v) and v.__module__ == module.__name__]
        raise ValueError(f"{file} has no {name!r} to call; its classes are {', '.join(own) or 'none'}")
    return Source(file, name), Source(file, "batch") if callable(getattr(module, "batch", None)) else None
