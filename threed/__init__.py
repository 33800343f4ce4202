"""Train transformer language models on many devices: pipeline x tensor x ZeRO data parallelism, in any combination.

    import threed
    topo   = threed.Topology(pp=2, tp=2)
    engine = threed.Engine(model, topo, config)
    metrics = engine.step(batch)
    engine = threed.load("runs/tiny")             # of a run, a checkpoint or a Hugging Face folder

Names load on first use, so that `threed.schedules` and `threed.config` come without torch.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "Config": "threed.config",
    "Engine": "threed.engine",
    "Slicing": "threed.layers",
    "StepMetrics": "threed.engine",
    "Topology": "threed.topology",
    "initialize": "threed.interop.deepspeed.initialize",
    "load": "threed.loading",
}
_ROOMS = (
    "checkpoint",
    "config",
    "data",
    "interop",
    "layers",
    "models",
    "monitor",
    "planner",
    "schedules",
    "testing",
)
__all__ = [*_HOMES, *_ROOMS]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _ROOMS:
        return importlib.import_module(f"threed.{name}")
    raise AttributeError(f"module 'threed' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
