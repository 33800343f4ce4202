"""Layers through torch.compile: `--run.compile`."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from threed.config import ConfigError, RunConfig
from threed.layers.contract import contract


def compile_layers(layers: Iterable[nn.Module], model: Iterable[nn.Module], run: RunConfig) -> None:
    """Has this rank's layers compiled when they first run, each by itself and whole: those with `compilable = True`.

    model: all layers of it. Does nothing without `run.compile`; ConfigError where nothing can be compiled.
    """
    if not run.compile:
        return
    if not any(contract(layer).compilable for layer in model):
        fix = "give them the attribute `compilable = True`, or leave it out (docs/own_models.md)"
        raise ConfigError(
            [f"--run.compile: no layer of this model says that torch.compile can read it; {fix}"]
        )
    try:
        from threed.layers.compiled import compile_layer  # stands on a part of torch that is young
    except ImportError as error:
        raise ConfigError(
            [f"--run.compile needs torch 2.13, or a later one that is like it: {error}"]
        ) from None
    for layer in layers:
        if contract(layer).compilable:
            compile_layer(layer, run.compile_backend)
