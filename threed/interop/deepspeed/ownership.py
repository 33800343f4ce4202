"""Records which DeepSpeed-compatible engine a module and its parameters belong to."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn

from threed.engine import ModuleEngine

OWNER = "_deepspeed_engine"  # key of the record in the `__dict__` of a module or parameter


class Owner(Protocol):
    """An engine of DeepSpeed's API; see `DeepSpeedEngine`.

    Attributes:
        module: the module of the engine.
        engine: the engine that trains the module.
    """

    module: nn.Module
    engine: ModuleEngine

    def destroy(self) -> None:
        """Ends the engine and gives the module back. Collective."""


class NotCopied:
    """Base class of records in modules: copies and unpickled objects have no attributes."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return type(self).__new__(type(self))

    def __getstate__(self) -> dict[str, Any]:
        return {}


class _Record(NotCopied):
    """The engine of a module. A copy of the module, or an unpickled module, has no engine."""

    engine: Owner | None = None

    def __init__(self, engine: Owner) -> None:
        self.engine = engine


def take(module: nn.Module, engine: Owner) -> None:
    """Records that a module and its parameters belong to an engine."""
    record = _Record(engine)
    for part in (module, *module.parameters()):
        vars(part)[OWNER] = record


def owner(part: nn.Module | Tensor) -> Owner | None:
    """Returns the engine of a module or of a parameter, or None."""
    found = vars(part).get(OWNER)
    engine = found.engine if isinstance(found, _Record) else None
    copied = isinstance(part, nn.Module) and engine is not None and engine.module is not part
    return None if copied else engine


def release(module: nn.Module) -> None:
    """Removes the records of a module's engine."""
    for part in (module, *module.parameters()):
        vars(part).pop(OWNER, None)
