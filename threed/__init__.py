"""Trains transformers on many devices, with pipeline, tensor and ZeRO parallelism combined.

    import threed
    topo   = threed.Topology(pp=2, tp=2)
    engine = threed.Engine(model, topo, config)
    metrics = engine.step(batch)
    engine = threed.load("runs/tiny")             # a run, a checkpoint or a Hugging Face folder

Names are imported on first use, so that `threed.schedules` and `threed.config` do not import torch.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_MODULE_OF = {
    "Config": "threed.config",
    "Engine": "threed.engine",
    "MicroBatch": "threed.layers",
    "Slicing": "threed.layers",
    "StepMetrics": "threed.engine",
    "Topology": "threed.distributed.topology",
    "Trainer": "threed.trainer",
    "initialize": "threed.interop.deepspeed.initialize",
    "load": "threed.interop.loading",
}
_SUBMODULES = (
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
    "training",
)
__all__ = [*_MODULE_OF, *_SUBMODULES]


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(_MODULE_OF[name]), name)
    if name in _SUBMODULES:
        return importlib.import_module(f"threed.{name}")
    raise AttributeError(f"module 'threed' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
