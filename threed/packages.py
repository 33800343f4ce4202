"""The error for a package that is not installed: its name, its purpose, and the command that installs it."""

from __future__ import annotations

import importlib
from types import ModuleType


class MissingPackageError(ModuleNotFoundError):
    """Raised for a required package that is not installed, or too old."""


def needed(package: str, purpose: str) -> ModuleType:
    """Imports an optional package.

    Args:
        package: its name, for import and for pip.
        purpose: the feature that needs the package; the subject of the error message.

    Raises:
        MissingPackageError: the package is not installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise missing(package, purpose, error) from error


def missing(package: str, purpose: str, error: ImportError) -> MissingPackageError:
    """Returns the error to raise instead of an ImportError; `package` may have a version, such as "pydantic>=2.7"."""
    name = package.partition(">")[0]
    # a shell would take ">" for a redirection
    shown = package if package == name else f"'{package}'"
    what = f"{purpose} needs the package {name}, which cannot be imported here ({error})"
    return MissingPackageError(f"{what}: pip install {shown}", name=name)
