"""Makes the names of deepspeed that threed does not offer importable, for DeepSpeed's own unit tests.

A test file and its helpers import more names than a test uses. This module replaces the missing names
by classes that raise NotImplementedError when they are used, with threed's own text. It is imported at
the start of every process of `deepspeed_unit`.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

import threed
from threed.interop.deepspeed import namespace
from threed.interop.deepspeed.names import refusal


class _Refused(type):
    """A class in place of a name that is not offered."""

    def __call__(cls, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(refusal(cls.__module__ + "." + cls.__name__))

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{cls.__module__}.{cls.__name__}.{name}"
        raise NotImplementedError(refusal(full))


class _RefusedModule(types.ModuleType):
    """A module that is not offered."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Refused(name, (), {"__module__": self.__name__})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of deepspeed that threed does not offer."""

    def find_spec(
        self, fullname: str, path: object = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != "deepspeed" or fullname in namespace.modules():
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _RefusedModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Has no effect: every attribute is created on its first use."""


threed.install_as_deepspeed()
sys.meta_path.insert(0, _Finder())
