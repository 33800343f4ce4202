"""Functions of DeepSpeed's API with a fixed result, and without effect; `names` has their names."""

from typing import Any


def none(*_: Any, **__: Any) -> None:
    """Has no effect."""


def false(*_: Any, **__: Any) -> bool:
    """Returns False."""
    return False


def true(*_: Any, **__: Any) -> bool:
    """Returns True."""
    return True


def zero(*_: Any, **__: Any) -> int:
    """Returns 0."""
    return 0


def one(*_: Any, **__: Any) -> int:
    """Returns 1."""
    return 1


def empty(*_: Any, **__: Any) -> list[Any]:
    """Returns an empty list."""
    return []
