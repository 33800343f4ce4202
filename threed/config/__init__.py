"""Training configuration: typed groups of keys, and reading, checking and resolving them. Imports without torch.

    config = Config(parallel=ParallelConfig(tp=2), train=TrainConfig(steps=100))

`groups` defines the keys, `arguments` reads them from presets, TOML files and flags, `checks` finds combinations that
cannot work, and `resolution` computes derived values.
"""

from __future__ import annotations

from threed.config.groups import (
    CheckpointConfig,
    Config,
    ConfigError,
    DataConfig,
    LogConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    ParamGroup,
    PrecisionConfig,
    RecomputeConfig,
    RunConfig,
    TrainConfig,
    ZeroConfig,
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
