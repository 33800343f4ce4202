"""Measures the peak of live storage bytes in a training step, on real ranks."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.live import Peak
from threed import models
from threed.config import Config
from threed.config.resolution import resolve
from threed.distributed.topology import Topology
from threed.engine import Engine
from threed.layers import Slicing


def config_of(world: int, **groups: dict[str, Any]) -> Config:
    """Returns the configuration of a small model.

    Args:
        world: number of ranks.
        groups: keys that differ from the defaults, by group.
    """
    base: dict[str, dict[str, Any]] = {
        "model": {"layers": 8, "hidden": 256, "heads": 8, "seq": 128, "vocab": 1000},
        "train": {"micro_batch": 2, "steps": 10},
        "zero": {"bucket_mib": 1.0},
    }
    for name, values in groups.items():
        base[name] = {**base.get(name, {}), **values}
    return resolve(Config.model_validate(base), 1000, world)


def measure(config: Config, change: Callable[[nn.Module], None] | None = None) -> int:
    """Returns this rank's peak in its second or third step, whichever is lower, in bytes.

    A measured peak includes messages that gloo has not released yet, which a busy machine delays.

    Args:
        config: the configuration.
        change: function that changes each layer before the first step.
    """
    p = config.parallel
    with Peak() as peak:
        topology = Topology(pp=p.pp, tp=p.tp, cp=p.cp)
        engine = Engine(models.build(config.model, Slicing.of(topology, config)), topology, config)
        for layer in engine.blueprint.layers if change else ():
            change(layer)
        rows = config.train.global_batch // topology.dp
        found = []
        for _ in range(3):
            gc.collect()
            peak.most = 0
            tokens = torch.randint(0, 1000, (rows, config.model.seq))
            engine.step({"tokens": tokens, "labels": tokens.clone()})
            engine.optimizer.wait()
            found.append(peak.most)
    return min(found[1:])


def measure_all(configs: list[Config]) -> list[int]:
    """Returns this rank's peaks for several configurations, in bytes."""
    return [measure(config) for config in configs]
