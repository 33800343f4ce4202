"""Records which DeepSpeed-compatible engine a module belongs to, so that `initialize` can end it."""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn

OWNER = "_deepspeed_engine"  # key of the record in the `__dict__` of a module


class Destroyable(Protocol):
    """An engine that can be ended; see `DeepSpeedEngine.destroy`.

    Attributes:
        module: the module of the engine.
    """

    module: nn.Module

    def destroy(self) -> None:
        """Ends the engine and gives the module back. Collective."""


class _Owner:
    """The engine of a module. A copy of the module, or an unpickled module, has no engine."""

    engine: Destroyable | None = None

    def __init__(self, engine: Destroyable) -> None:
        self.engine = engine

    def __deepcopy__(self, memo: dict[int, Any]) -> _Owner:
        return _Owner.__new__(_Owner)

    def __getstate__(self) -> dict[str, Any]:
        return {}


def take(module: nn.Module, engine: Destroyable) -> None:
    """Records that a module belongs to an engine."""
    vars(module)[OWNER] = _Owner(engine)


def owner(module: nn.Module) -> Destroyable | None:
    """Returns the engine of a module, or None."""
    found = vars(module).get(OWNER)
    engine = found.engine if isinstance(found, _Owner) else None
    return engine if engine is not None and engine.module is module else None


def release(module: nn.Module) -> None:
    """Removes the record of a module's engine."""
    vars(module).pop(OWNER, None)
