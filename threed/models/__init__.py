"""Models as lists of pipeline layers: decoders by architecture, and wrapped modules."""

from __future__ import annotations

from contextlib import ExitStack

from torch import nn

from threed.config import ConfigError
from threed.distributed import collectives
from threed.distributed.topology import Topology
from threed.models.custom import TokenModule as TokenModule
from threed.models.custom import build
from threed.models.custom import call_custom as call_custom
from threed.models.custom import for_tokens as for_tokens
from threed.models.decoder import Decoder
from threed.models.interface import Model, ModelOptions
from threed.models.interface import is_layered as is_layered
from threed.models.interface import options_of as options_of
from threed.models.wrapped import Wrapped

__all__ = ["Model", "ModelOptions", "Decoder", "Wrapped", "build"]


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
