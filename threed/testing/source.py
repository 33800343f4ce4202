"""What a user's file calls by name, imported by path in every process: `threed verify FILE.py:NAME`."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from threed.schedules.from_file import load


@dataclass(frozen=True)
class Source:
    """The object `name` of a Python file; a call of it imports the file, if this process has not yet."""

    file: str
    name: str

    def __call__(self, *args: Any) -> Any:
        return getattr(load(self.file), self.name)(*args)


def find(target: str) -> tuple[Source, Source | None]:
    """The model that FILE.py:NAME is, and the file's own `batch`, if it has one. ValueError for what is not there."""
    file, colon, name = target.rpartition(":")
    if not colon or not file.endswith(".py"):
        raise ValueError(
            f"{target}: write FILE.py:NAME, NAME a model class called with a ModelConfig and a Slicing"
        )
    module = load(file)
    if not callable(getattr(module, name, None)):
        own = [
            n
            for n, v in vars(module).items()
            if inspect.isclass(v) and v.__module__ == module.__name__
        ]
        raise ValueError(
            f"{file} has no {name!r} to call; its classes are {', '.join(own) or 'none'}"
        )
    return Source(file, name), Source(file, "batch") if callable(
        getattr(module, "batch", None)
    ) else None
