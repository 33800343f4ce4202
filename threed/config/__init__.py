"""Training configuration: typed groups of keys, and reading, checking and resolving them. Imports without torch.

    config = Config(parallel=ParallelConfig(tp=2), train=TrainConfig(steps=100))

`groups` defines the keys, `arguments` reads them from presets, TOML files and flags, `checks` finds
combinations that cannot work, and `resolution` computes derived values. The names of this package
are imported on first use, so that an import of `threed.config.architectures` does not import
pydantic.
"""

from threed.core.exports import lazy

TYPE_CHECKING = False
__all__ = [
    "Config",
    "ParallelConfig",
    "ZeroConfig",
    "RecomputeConfig",
    "PrecisionConfig",
    "ModelConfig",
    "TrainConfig",
    "OptimConfig",
    "ParamGroup",
    "DataConfig",
    "CheckpointConfig",
    "LogConfig",
    "RunConfig",
    "ConfigError",
    "program_config",
    "find_problems",
    "resolve",
    "to_toml",
]

if TYPE_CHECKING:
    from threed.config.arguments import to_toml
    from threed.config.base import ConfigError
    from threed.config.checks import find_problems
    from threed.config.groups import (
        CheckpointConfig,
        Config,
        DataConfig,
        LogConfig,
        OptimConfig,
        ParallelConfig,
        PrecisionConfig,
        RecomputeConfig,
        RunConfig,
        TrainConfig,
        ZeroConfig,
    )
    from threed.config.model import ModelConfig
    from threed.config.program import program_config
    from threed.config.resolution import resolve
    from threed.config.values import ParamGroup
else:
    __getattr__, __dir__ = lazy(
        __name__,
        {
            **dict.fromkeys(__all__, "threed.config.groups"),
            "ConfigError": "threed.config.base",
            "ModelConfig": "threed.config.model",
            "ParamGroup": "threed.config.values",
            "program_config": "threed.config.program",
            "find_problems": "threed.config.checks",
            "resolve": "threed.config.resolution",
            "to_toml": "threed.config.arguments",
        },
    )
