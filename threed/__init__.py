"""Trains transformers on many devices, with pipeline, tensor and ZeRO parallelism combined.

    import threed
    topo   = threed.Topology(pp=2, tp=2)
    engine = threed.Engine(model, topo, config)
    metrics = engine.step(batch)
    engine = threed.load("runs/tiny")             # a run, a checkpoint or a Hugging Face folder

The public API consists of the names below and of the packages `layers`, `models`, `schedules`,
`data`, `checkpoint`, `testing`, `config` and `interop`. All other packages are internal. Names are
imported on first use, so that `threed.schedules` and `threed.config` do not import torch.
"""

from threed.core.exports import lazy

TYPE_CHECKING = False

__version__ = "0.1.0"

__all__ = [
    "Config", "Topology", "Engine", "LayeredEngine", "ModuleEngine", "StepMetrics", "Trainer", "load", "Slicing",
    "MicroBatch", "initialize", "install_as_deepspeed", "from_transformers",
    "layers", "models", "schedules", "data", "checkpoint", "training", "testing", "config", "interop",
]  # fmt: skip

if TYPE_CHECKING:
    from threed import (
        checkpoint,
        config,
        data,
        interop,
        layers,
        models,
        schedules,
        testing,
        training,
    )
    from threed.config.groups import Config
    from threed.distributed.topology import Topology
    from threed.engine.base import Engine
    from threed.engine.layered import LayeredEngine
    from threed.engine.module import ModuleEngine
    from threed.interop.deepspeed.initialization import initialize
    from threed.interop.deepspeed.namespace import install_as_deepspeed
    from threed.interop.huggingface.from_transformers import from_transformers
    from threed.interop.loading import load
    from threed.layers.slicing import MicroBatch, Slicing
    from threed.trainer import Trainer
    from threed.zero.step_metrics import StepMetrics
else:
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "Config": "threed.config.groups",
            "Topology": "threed.distributed.topology",
            "Engine": "threed.engine.base",
            "LayeredEngine": "threed.engine.layered",
            "ModuleEngine": "threed.engine.module",
            "StepMetrics": "threed.zero.step_metrics",
            "Trainer": "threed.trainer",
            "load": "threed.interop.loading",
            "from_transformers": "threed.interop.huggingface.from_transformers",
            "Slicing": "threed.layers.slicing",
            "MicroBatch": "threed.layers.slicing",
            "initialize": "threed.interop.deepspeed.initialization",
            "install_as_deepspeed": "threed.interop.deepspeed.namespace",
        },
        (
            "layers",
            "models",
            "schedules",
            "data",
            "checkpoint",
            "training",
            "testing",
            "config",
            "interop",
        ),
    )
