"""Packages that are not installed: an error with the package, what needs it, and the command that installs it."""

from __future__ import annotations

import importlib
from types import ModuleType


class MissingPackageError(ModuleNotFoundError):
    """A package that threed was asked to use is not installed, or is too old."""


def needed(package: str, purpose: str) -> ModuleType:
    """Imports a package that only some uses of threed need.

    Args:
        package: its name, which is also the name that pip installs it by.
        purpose: the subject of the error message: what needs the package.

    Raises:
        MissingPackageError: the package is not installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise missing(package, purpose, error) from error


def missing(package: str, purpose: str, error: ImportError) -> MissingPackageError:
    """Returns the error to raise in place of an ImportError; `package` may have a version, as in "pydantic>=2.7"."""
    name = package.partition(">")[0]
    shown = package if package == name else f"'{package}'"  # a shell would take ">" for a redirection
    what = f"{purpose} needs the package {name}, which cannot be imported here ({error})"
    return MissingPackageError(f"{what}: pip install {shown}", name=name)
