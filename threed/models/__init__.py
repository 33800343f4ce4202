"""Models as lists of pipeline layers: decoders by architecture, and wrapped modules."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from threed.config import ConfigError, ModelConfig
from threed.core.source import MODEL, count_arguments, find_model, names_model
from threed.distributed import collectives
from threed.distributed.sharding import Piece
from threed.distributed.topology import Topology
from threed.layers import Slicing
from threed.models.decoder import Decoder
from threed.models.token_module import TokenModule
from threed.models.wrapped import Wrapped

__all__ = ["Model", "ModelOptions", "Decoder", "Wrapped", "build"]


class Model(Protocol):
    """The interface that an engine requires of a model.

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
        initial: `initial(piece, seed)` returns the initial values of a piece of a global tensor,
            [*piece.size]; `seed` is `train.seed`. None: the values that the pieces describe
            (`Piece.init`).
    """

    boundaries_replicated: bool = False
    boundaries_vary: bool = False
    costs: Callable[[int], Sequence[float]] | None = None
    example: Callable[[int], Mapping[str, Tensor]] | None = None
    initial: Callable[[Piece, int], Tensor] | None = None


def options_of(model: Model) -> ModelOptions:
    """Returns the optional attributes of a model."""
    given = {f.name: getattr(model, f.name) for f in fields(ModelOptions) if hasattr(model, f.name)}
    return ModelOptions(**given)


def is_layered(model: object) -> bool:
    """Returns whether a model consists of pipeline layers; other models must be wrapped."""
    has_slicing = isinstance(getattr(model, "slicing", None), Slicing)
    return has_slicing and not isinstance(model, Wrapped)


def find_split_problems(model: object, pp: int, tp: int, cp: int) -> list[str]:
    """Returns the reason why an `nn.Module` cannot be split over pipeline, tensor or context ranks.

    The result is a list with one message, which includes a fix. It is empty if pp = tp = cp = 1.

    Args:
        model: a wrapped module, or an `nn.Module` that will be wrapped.
        pp: number of pipeline ranks.
        tp: number of tensor ranks.
        cp: number of context ranks.
    """
    if pp * tp * cp == 1:
        return []
    name = type(model.module if isinstance(model, Wrapped) else model).__name__
    sizes = f"pp {pp} or tp {tp}" if pp * tp > 1 else f"cp {cp}"
    fix = (
        "build it from threed.layers (examples/custom_model.py), by threed.from_transformers if it is a decoder of"
        f" transformers, or use {'pp 1 and tp 1' if pp * tp > 1 else 'cp 1'}"
    )
    return [f"{name} cannot be split by {sizes}: {fix}"]


def wrap(model: object, topology: Topology, *, cast_buffers: bool = True) -> Wrapped:
    """Returns an `nn.Module` as a `Wrapped` model. Collective.

    Args:
        model: the module, or a `Wrapped` model, which is returned.
        topology: the topology of the engine.
        cast_buffers: see `Wrapped`.

    Raises:
        TypeError: if `model` is not an `nn.Module`.
        ConfigError: if pp, tp or cp is above 1.
        ValueError: on every rank, if some rank cannot wrap its module.
    """
    if not isinstance(model, nn.Module):
        fix = "pass an nn.Module, or layers with their `slicing`, a layers.Slicing (examples/custom_model.py)"
        raise TypeError(f"{type(model).__name__} is not a model: {fix}")
    if problems := find_split_problems(model, topology.pp, topology.tp, topology.cp):
        raise ConfigError(problems)
    with ExitStack() as undo:
        problem = ""
        try:
            wrapped = (
                model if isinstance(model, Wrapped) else Wrapped(model, cast_buffers=cast_buffers)
            )
            wrapped.claim()
            undo.callback(wrapped.remove)
        except ValueError as error:
            problem = str(error)
        collectives.raise_together([problem], topology.axis("world"), ValueError)
        undo.pop_all()
    return wrapped


def build(
    config: ModelConfig, slicing: Slicing, custom: Callable[..., object] | None = None
) -> Model:
    """Returns the model that `config.arch` names: a decoder, or a custom model (FILE.py:NAME).

    Args:
        config: the model configuration.
        slicing: how layers are sharded over tensor ranks.
        custom: the user's class or function that builds the model, for batches of tokens; by
            default `config.arch` names it.

    Raises:
        ConfigError: if a custom model needs other arguments (see `call_custom`), or is neither a
            model of pipeline layers nor an `nn.Module` that reads token ids.
    """
    name = config.arch if custom is None else getattr(custom, "__name__", type(custom).__name__)
    if custom is None:
        if not names_model(name):
            return Decoder(config, slicing)
        custom = find_model(name).found
    model = call_custom(custom, config, slicing)
    return for_tokens(model, config.vocab or 0, name)


def call_custom(custom: Callable[..., object], config: ModelConfig, slicing: Slicing) -> object:
    """Returns the object that the user's class or function builds.

    Before the user's code runs, torch's random generator on the CPU is seeded with `slicing.seed`.
    Afterwards the generator gets its previous state back.

    Args:
        custom: called with (config, slicing), (config) or (), depending on its parameters.
        config: the configuration of the model.
        slicing: how layers are sharded over tensor ranks.

    Raises:
        ConfigError: if `custom` needs other arguments.
    """
    try:
        count = count_arguments(custom, MODEL)
    except ValueError as error:
        raise ConfigError([str(error)]) from None
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(slicing.seed)
        try:
            return custom(*(config, slicing)[:count])
        except Exception as error:
            given = ", ".join(("config, a ModelConfig", "slicing, a Slicing")[:count])
            if count:
                error.add_note(
                    f"threed called {getattr(custom, '__name__', custom)} with {given} (docs/guide/own_models.md): for"
                    " other arguments, name a function without arguments that returns the module"
                )
            raise


def for_tokens(model: object, vocab: int, name: str) -> Model:
    """Returns a model that reads a batch of tokens and labels.

    Args:
        model: a model of pipeline layers, which is returned unchanged, or an `nn.Module`, which is
            wrapped.
        vocab: number of token ids in the data.
        name: name of the class or function that returned the model, for messages.

    Raises:
        ConfigError: if `model` is neither a model of pipeline layers nor an `nn.Module`, or if the
            module cannot be wrapped.
    """
    if is_layered(model):
        return cast(Model, model)
    if not isinstance(model, nn.Module) or inspect.ismethod(getattr(model, "layers", None)):
        missing = [key for key in ("layers", "hidden", "slicing") if not hasattr(model, key)]
        lacks = f" without `{'`, `'.join(missing)}`" if missing else ""
        fix = (
            "return an object with `layers()`, `hidden` and `slicing`, or an nn.Module that reads token ids"
            " (docs/guide/own_models.md)"
        )
        raise ConfigError([f"{name} returned a {type(model).__name__}{lacks}: {fix}"])
    try:
        return TokenModule(model, vocab, type(model).__name__)
    except ValueError as error:
        raise ConfigError([f"{name}: {error}"]) from None
