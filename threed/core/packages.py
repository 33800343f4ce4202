"""Imports optional packages, or raises an error that contains the command to install them."""

from __future__ import annotations

import importlib
from types import ModuleType


class MissingPackageError(ModuleNotFoundError):
    """Raised if a required package is not installed or is too old."""


def needed(package: str, purpose: str) -> ModuleType:
    """Imports an optional package.

    Args:
        package: name of the package, both in `import` and in `pip install`.
        purpose: feature that needs the package. The error message begins with it.

    Raises:
        MissingPackageError: if the package cannot be imported.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise missing(package, purpose, error) from error


def missing(package: str, purpose: str, error: ImportError) -> MissingPackageError:
    """Returns the error to raise instead of an ImportError.

    Args:
        package: name of the package, optionally with a minimum version: "pydantic>=2.7".
        purpose: feature that needs the package. The message begins with it.
        error: the original error.
    """
    name = package.partition(">")[0]
    # quoted, because a shell reads ">" as a redirection
    shown = package if package == name else f"'{package}'"
    what = f"{purpose} needs the package {name}, which cannot be imported here ({error})"
    return MissingPackageError(f"{what}: pip install {shown}", name=name)
