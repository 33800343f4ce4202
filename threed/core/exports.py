"""Exports of a package that are imported on first use.

    __all__ = ["Config"]

    if TYPE_CHECKING:
        from threed.config.groups import Config
    else:
        __getattr__, __dir__ = lazy(__name__, {"Config": "threed.config.groups"})

With this pattern an import of the package does not import torch or pydantic, but type checkers and
editors still find the names. tests/test_public_api.py checks that the three lists (`__all__`, the
imports, and the argument of `lazy`) have the same names.
"""

import importlib

TYPE_CHECKING = False  # not imported from `typing`, because that import takes longer than the rest
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any


def lazy(
    package: str, module_of: "Mapping[str, str]", submodules: "Sequence[str]" = ()
) -> "tuple[Callable[[str], Any], Callable[[], list[str]]]":
    """Returns the functions `__getattr__` and `__dir__` of a package with lazy exports.

    Args:
        package: name of the package.
        module_of: the module that defines each exported name.
        submodules: names of submodules that are imported on first use.
    """

    def getattr_(name: str) -> "Any":
        if name in module_of:
            return getattr(importlib.import_module(module_of[name]), name)
        if name in submodules:
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def dir_() -> list[str]:
        return sorted({*vars(importlib.import_module(package)), *module_of, *submodules})

    return getattr_, dir_
