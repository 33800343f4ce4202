"""Models as lists of pipeline layers: decoders by architecture, and wrapped modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

from torch import Tensor, nn

from threed.config import ConfigError, ModelConfig
from threed.core.source import find_model, names_model
from threed.distributed import collectives
from threed.distributed.topology import Topology
from threed.layers import Slicing
from threed.models.decoder import Decoder
from threed.models.wrapped import Wrapped

__all__ = ["Model", "ModelOptions", "Decoder", "Wrapped", "build"]


class Model(Protocol):
    """The interface of a model to an engine.

    The layers are `layers.PipelineLayer`s, or modules with the same forward. A model may also have
    the attributes of `ModelOptions`.

    Attributes:
        hidden: width of the activations between layers.
        slicing: how layers are sharded over tensor ranks.
    """

    hidden: int
    slicing: Slicing

    def layers(self) -> list[nn.Module]:
        """Returns the pipeline layers in order, on the meta device, each with a globally unique
        `name`."""


@dataclass(frozen=True)
class ModelOptions:
    """Optional attributes of a model, with their defaults.

    Attributes:
        boundaries_replicated: whether, without sequence parallelism, layers return the same tensors
            on all tensor ranks. If so, each rank sends only a slice of them to the next stage.
        boundaries_vary: whether the shapes of layer outputs may differ between micro-batches of the
            same shape.
        costs: `costs(micro_batch)` returns the cost of each layer, in any unit, for balancing the
            stages; `micro_batch` is the number of rows of a micro-batch. None: the cost is the
            FLOPs of the forward, counted by running the layers on the meta device.
        example: `example(micro_batch)` returns a batch with that many rows. Required if the model
            reads other entries of a batch than 'tokens' and 'labels'.
    """

    boundaries_replicated: bool = False
    boundaries_vary: bool = False
    costs: Callable[[int], Sequence[float]] | None = None
    example: Callable[[int], Mapping[str, Tensor]] | None = None


def options_of(model: Model) -> ModelOptions:
    """Returns the optional attributes of a model."""
    given = {f.name: getattr(model, f.name) for f in fields(ModelOptions) if hasattr(model, f.name)}
    return ModelOptions(**given)


def is_layered(model: object) -> bool:
    """Returns whether a model consists of pipeline layers. If not, it is a module to be wrapped."""
    has_slicing = isinstance(getattr(model, "slicing", None), Slicing)
    return has_slicing and not isinstance(model, Wrapped)


def wrap(model: object, topology: Topology) -> Wrapped:
    """Returns an `nn.Module` as a `Wrapped` model. Collective.

    Raises:
        TypeError: if `model` is not an `nn.Module`.
        ConfigError: if pp or tp is above 1.
        ValueError: on every rank, if some rank cannot wrap its module.
    """
    if isinstance(model, Wrapped):
        return model
    if not isinstance(model, nn.Module):
        fix = "pass an nn.Module, or layers with their `slicing`, a layers.Slicing (examples/custom_model.py)"
        raise TypeError(f"{type(model).__name__} is not a model: {fix}")
    if topology.pp * topology.tp > 1:
        sizes = f"pp {topology.pp} or tp {topology.tp}"
        fix = "build it from threed.layers (examples/custom_model.py), or use pp 1 and tp 1"
        raise ConfigError([f"{type(model).__name__} cannot be split by {sizes}: {fix}"])
    problem = ""
    try:
        wrapped = Wrapped(model)
    except ValueError as error:
        problem = str(error)
    collectives.raise_together([problem], topology.axis("world"), ValueError)
    return wrapped


def build(config: ModelConfig, slicing: Slicing) -> Model:
    """Returns the model of `config.arch`: a decoder, or the model of FILE.py:NAME.

    Args:
        config: the model configuration.
        slicing: parallel layout.

    Raises:
        ConfigError: if the object of the file does not return a model of pipeline layers.
    """
    if not names_model(config.arch):
        return Decoder(config, slicing)
    model: Model = find_model(config.arch)(config, slicing)
    if not is_layered(model):
        fix = "return an object with `layers()`, `hidden` and `slicing` (docs/guide/own_models.md)"
        raise ConfigError([f"{config.arch} returned a {type(model).__name__}: {fix}"])
    return model
