"""Compiles layers with torch.compile, for `--run.compile`."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from threed.config import ConfigError, RunConfig
from threed.layers.contract import contract


def compile_layers(layers: Iterable[nn.Module], model: Iterable[nn.Module], run: RunConfig) -> None:
    """Marks this rank's layers that have `compilable = True` for compilation by `torch.compile`.

    Each of these layers is compiled as one graph when it first runs. Has no effect without
    `run.compile`.

    Args:
        layers: the layers of this rank.
        model: all layers of the model; at least one of them must be compilable.
        run: the section `run` of the configuration.

    Raises:
        ConfigError: if no layer of the model is compilable, or torch lacks the required API.
    """
    if not run.compile:
        return
    if not any(contract(layer).compilable for layer in model):
        fix = "give them the attribute `compilable = True`, or leave it out (docs/guide/own_models.md)"
        raise ConfigError([f"--run.compile: no layer of this model is marked as compilable; {fix}"])
    try:
        from threed.layers.compiled import compile_layer  # fails if torch lacks the required API
    except ImportError as error:
        raise ConfigError(
            [f"--run.compile needs torch 2.13, or a later version with the same API: {error}"]
        ) from None
    for layer in layers:
        if contract(layer).compilable:
            compile_layer(layer, run.compile_backend)
