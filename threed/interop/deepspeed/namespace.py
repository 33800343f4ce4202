"""The module `deepspeed` as threed provides it, and the import of it.

    threed.install_as_deepspeed()          # before transformers, accelerate or deepspeed
    import deepspeed                       # threed's implementation
    engine, *_ = deepspeed.initialize(model=model, config="ds_config.json")

The module `names` lists the names. A name is imported on its first use, so `import deepspeed` does not
import torch.

A refused name raises AttributeError, and in `from deepspeed.x import name` ImportError, both with
the text "threed does not offer deepspeed.x.name: use ...". A refused module raises ImportError, so
programs can use `try: import deepspeed.x`.

`importlib.metadata.version("deepspeed")` is `VERSION`, the version of DeepSpeed whose API is
provided. accelerate and transformers regard a package without such metadata as missing.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import os
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

from threed.interop.deepspeed.names import ALIASES, OFFERED, VERSION, refusal

_HERE = "threed.interop.deepspeed"
# Modules that read at their import whether deepspeed is present. If it is, they import
# `_IMPORTED_IF_PRESENT`.
_DECIDE_AT_IMPORT = ("accelerate.utils", "transformers.integrations.deepspeed")
_IMPORTED_IF_PRESENT = "accelerate.utils.deepspeed"


class Namespace(types.ModuleType):
    """A module of deepspeed, whose names are imported on their first use.

    Args:
        name: name of the module in deepspeed.
        targets: name -> (module that defines it, its name there).
        children: name of a submodule -> full name.
    """

    def __init__(
        self, name: str, targets: Mapping[str, tuple[str, str]], children: Mapping[str, str]
    ) -> None:
        super().__init__(name, f"threed's implementation of {name}.")
        self.__path__: list[str] = []
        self._targets, self._children = targets, children

    def __getattr__(self, name: str) -> Any:
        if name in self._targets:
            module, attribute = self._targets[name]
            value = getattr(importlib.import_module(module), attribute)
        elif name in self._children:
            value = modules()[self._children[name]]
        elif name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        else:
            raise AttributeError(refusal(f"{self.__name__}.{name}"))
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._targets, *self._children})


@functools.cache
def modules() -> Mapping[str, Namespace]:
    """Returns all modules of deepspeed that threed provides, by full name."""
    names = {**{name: name for name in OFFERED}, **ALIASES}
    children: dict[str, dict[str, str]] = {name: {} for name in names}
    for name, target in names.items():
        parent, _, child = name.rpartition(".")
        if parent:
            children[parent][child] = target
    made = {
        name: Namespace(name, dict(_targets(rows)), children[name])
        for name, rows in OFFERED.items()
    }
    return made | {name: made[target] for name, target in ALIASES.items()}


def _targets(rows: Mapping[str, str]) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yields (name, (module that defines it, its name there)) for the rows of a module."""
    for module, names in rows.items():
        home = module if module.startswith("torch") else f"{_HERE}.{module}"
        for entry in names.split():
            name, _, other = entry.partition("=")
            yield name, (home, other or name)


class _Metadata(importlib.metadata.Distribution):
    """The metadata of a distribution `deepspeed` of version `VERSION`."""

    def read_text(self, filename: str) -> str | None:
        texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: deepspeed\nVersion: {VERSION}\n"
            "Summary: DeepSpeed's API, implemented by threed\n",
            "top_level.txt": "deepspeed\n",
        }
        return texts.get(filename)

    def locate_file(self, path: str | os.PathLike[str]) -> Any:
        return path


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of `deepspeed`, and its distribution."""

    def find_spec(
        self, fullname: str, path: object = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != "deepspeed":
            return None
        if fullname not in modules():
            # Without the argument `name`: if the error has the name of the module, the statement
            # `from deepspeed.x import y` replaces the error by one with another text.
            raise ModuleNotFoundError(refusal(fullname))
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return modules()[spec.name]

    def exec_module(self, module: types.ModuleType) -> None:
        """Has no effect, because names are imported on their first use."""

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterator[importlib.metadata.Distribution]:
        """Yields the distribution `deepspeed` if `context` asks for it, or for all."""
        if context is None or context.name in (None, "deepspeed"):
            yield _Metadata()


def install_as_deepspeed() -> None:
    """Makes `import deepspeed` import threed's implementation of DeepSpeed's API.

    Call this function before transformers, accelerate, trl or deepspeed are imported. Afterwards,
    programs that use DeepSpeed, also through these libraries, train with threed. Only the current
    process is affected. `python -m threed.interop.deepspeed script.py` calls this function, and then
    runs an unchanged script. A second call has no effect.

    `importlib.metadata.version("deepspeed")` is the version of DeepSpeed whose API is provided.

    Raises:
        RuntimeError: if DeepSpeed has been imported; or if accelerate or transformers have been
            imported, and have found no DeepSpeed.

    Example:

        import threed

        threed.install_as_deepspeed()

        from transformers import Trainer, TrainingArguments

        trainer = Trainer(model, TrainingArguments(deepspeed="ds_config.json"), ...)
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    fix = "call threed.install_as_deepspeed() first, before the import of"
    if "deepspeed" in sys.modules:
        raise RuntimeError(f"DeepSpeed itself has been imported: {fix} deepspeed")
    late = [name.partition(".")[0] for name in _DECIDE_AT_IMPORT if name in sys.modules]
    if late and _IMPORTED_IF_PRESENT not in sys.modules:
        raise RuntimeError(f"{late[0]} has been imported and found no deepspeed: {fix} {late[0]}")
    sys.meta_path.insert(0, _Finder())
