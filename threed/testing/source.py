"""Finds a model in a user's file by name, for `threed verify FILE.py:NAME`."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from threed.schedules.from_file import load


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


def find(target: str) -> tuple[Source, Source | None]:
    """Finds a model and the function `batch` in a file.

    Args:
        target: FILE.py:NAME.

    Returns:
        The model, and `batch` of the same file or None.

    Raises:
        ValueError: if the file or the object does not exist.
    """
    file, colon, name = target.rpartition(":")
    if not colon or not file.endswith(".py"):
        what = "NAME a model class called with a ModelConfig and a Slicing"
        raise ValueError(f"{target}: write FILE.py:NAME, {what}")
    module = load(file)
    if not callable(getattr(module, name, None)):
        classes = {n: v for n, v in vars(module).items() if inspect.isclass(v)}
        own = ", ".join(n for n, v in classes.items() if v.__module__ == module.__name__)
        raise ValueError(f"{file} has no {name!r} to call; its classes are {own or 'none'}")
    has_batch = callable(getattr(module, "batch", None))
    return Source(file, name), Source(file, "batch") if has_batch else None
