"""Models as lists of pipeline layers: decoders by the name of their architecture, and any module, wrapped."""

from __future__ import annotations

from typing import Protocol, cast

from torch import nn

from threed import collectives
from threed.config import ConfigError, ModelConfig
from threed.layers import Slicing
from threed.models.decoder import Decoder as Decoder
from threed.models.wrapped import Wrapped as Wrapped
from threed.topology import Topology


class Model(Protocol):
    """What an engine needs of a model: its pipeline layers, the width of what passes between them, and the slicing.

    A layer maps (x, micro) to x; the first gets None, the last returns the micro-batch's weighted loss, or logits when
    the micro-batch has no labels. What stages are balanced by, the forward FLOPs of each layer, is found by running
    the layers on the meta device. A model whose layers cannot be run there has a method `costs(micro_batch)`, which
    gives each layer's cost in any unit; one that reads more of a batch than 'tokens' and 'labels' has a method
    `example(micro_batch)`, which gives a batch of so many rows. `boundaries_replicated = True` says that without
    sequence parallelism all tensor ranks hand on the same tensors: then each sends a slice of them to the next stage.
    """

    hidden: int
    slicing: Slicing

    def layers(self) -> list[nn.Module]:
        """The pipeline layers in order, on the meta device, each with a global `name`."""


def as_model(model: Model | nn.Module, topology: Topology) -> Model:
    """Returns a `Model`, or an `nn.Module` as a `Wrapped` model. Collective.

    Raises:
        TypeError: `model` is neither.
        ConfigError: a module with pp or tp above 1.
        ValueError: on every rank, if some rank cannot wrap its module.
    """
    if isinstance(getattr(model, "slicing", None), Slicing):  # of threed.layers, or wrapped already
        return cast(Model, model)
    if not isinstance(model, nn.Module):
        fix = "pass an nn.Module, or layers with their `slicing`, a layers.Slicing (examples/custom_model.py)"
        raise TypeError(f"{type(model).__name__} is no model: {fix}")
    if topology.pp * topology.tp > 1:
        sizes = f"pp {topology.pp} or tp {topology.tp}"
        fix = "build it from threed.layers (examples/custom_model.py), or use pp 1 and tp 1"
        raise ConfigError([f"{type(model).__name__} cannot be cut by {sizes}: {fix}"])
    problem = ""
    try:
        wrapped = Wrapped(model)
    except ValueError as error:
        problem = str(error)
    collectives.raise_together([problem], topology.axis("world"), ValueError)
    return wrapped


def build(config: ModelConfig, slicing: Slicing) -> Model:
    """The model that `config.arch` names."""
    return Decoder(config, slicing)
