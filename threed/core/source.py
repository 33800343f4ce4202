"""Python files of the user: importing them, and finding a model in them by FILE.py:NAME."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any


def load(file: str) -> ModuleType:
    """Imports a file as a module and returns it, with its folder on `sys.path`.

    Standard output of the import goes to standard error. Raises ValueError if the import fails.
    """
    path = Path(file).resolve()
    name = f"threed_user_{path.stem}"
    if name in sys.modules and sys.modules[name].__file__ == str(path):
        return sys.modules[name]
    if not path.is_file():
        raise ValueError(f"{file}: no such file")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{file}: not a Python file")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        hint = (
            "; guard the code of the script with `if __name__ == '__main__':`"
            if isinstance(error, SystemExit)
            else ""
        )
        raise ValueError(
            f"{file} cannot be imported: {type(error).__name__}: {error}{hint}"
        ) from error
    return module


@dataclass(frozen=True)
class Source:
    """A callable object of a Python file, which is imported at the first call in a process.

    Attributes:
        file: path of the file.
        name: name of the object in it.
    """

    file: str
    name: str

    def __call__(self, *args: Any) -> Any:
        return getattr(load(self.file), self.name)(*args)


def names_model(text: str) -> bool:
    """Returns whether a text has the form FILE.py:NAME."""
    return text.rpartition(":")[0].endswith(".py")


def find_model(target: str) -> Source:
    """Finds a model in a file.

    Args:
        target: FILE.py:NAME, with NAME a class or function that is called with a ModelConfig and a Slicing.

    Raises:
        ValueError: if the file cannot be imported or the object does not exist.
    """
    file, _, name = target.rpartition(":")
    if not names_model(target):
        what = "NAME a model class called with a ModelConfig and a Slicing"
        raise ValueError(f"{target}: write FILE.py:NAME, {what}")
    module = load(file)
    if not callable(getattr(module, name, None)):
        classes = {n: v for n, v in vars(module).items() if inspect.isclass(v)}
        own = ", ".join(n for n, v in classes.items() if v.__module__ == module.__name__)
        raise ValueError(f"{file} has no {name!r} to call; its classes are {own or 'none'}")
    return Source(file, name)


def find_batch(target: str) -> Source | None:
    """Returns the function `batch` in the file of FILE.py:NAME, or None."""
    file = target.rpartition(":")[0]
    return Source(file, "batch") if callable(getattr(load(file), "batch", None)) else None
