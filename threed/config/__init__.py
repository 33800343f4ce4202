"""Training configuration: typed groups of keys, and reading, checking and resolving them. Imports without torch.

    config = Config(parallel=ParallelConfig(tp=2), train=TrainConfig(steps=100))

`groups` defines the keys, `arguments` reads them from presets, TOML files and flags, `checks` finds
combinations that cannot work, and `resolution` computes derived values. The names of this package
are imported on first use, so that an import of `threed.config.architectures` does not import
pydantic.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from threed.config.groups import (
        CheckpointConfig as CheckpointConfig,
    )
    from threed.config.groups import (
        Config as Config,
    )
    from threed.config.groups import (
        ConfigError as ConfigError,
    )
    from threed.config.groups import (
        DataConfig as DataConfig,
    )
    from threed.config.groups import (
        LogConfig as LogConfig,
    )
    from threed.config.groups import (
        ModelConfig as ModelConfig,
    )
    from threed.config.groups import (
        OptimConfig as OptimConfig,
    )
    from threed.config.groups import (
        ParallelConfig as ParallelConfig,
    )
    from threed.config.groups import (
        ParamGroup as ParamGroup,
    )
    from threed.config.groups import (
        PrecisionConfig as PrecisionConfig,
    )
    from threed.config.groups import (
        RecomputeConfig as RecomputeConfig,
    )
    from threed.config.groups import (
        RunConfig as RunConfig,
    )
    from threed.config.groups import (
        TrainConfig as TrainConfig,
    )
    from threed.config.groups import (
        ZeroConfig as ZeroConfig,
    )

__all__ = [
    "CheckpointConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "LogConfig",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "ParamGroup",
    "PrecisionConfig",
    "RecomputeConfig",
    "RunConfig",
    "TrainConfig",
    "ZeroConfig",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'threed.config' has no attribute {name!r}")
    return getattr(importlib.import_module("threed.config.groups"), name)
