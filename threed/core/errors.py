"""A base class of errors that can be pickled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class PicklableError(Exception):
    """An error that can be pickled even if its constructor's parameters differ from `args`.

    By default, unpickling an error would call its constructor with `args`.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self), self.args, vars(self))


def _restore(
    cls: type[PicklableError], args: tuple[Any, ...], attributes: Mapping[str, Any]
) -> PicklableError:
    """Returns an error with these arguments and attributes, without calling its constructor."""
    error = cls.__new__(cls, *args)
    vars(error).update(attributes)
    return error
