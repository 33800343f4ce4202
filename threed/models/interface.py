"""The interface of models of pipeline layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

from torch import Tensor, nn

from threed.distributed.sharding import Piece
from threed.layers import Slicing
from threed.models.wrapped import Wrapped


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
