"""Compares the names and shapes of tensors between a checkpoint and the model of an engine.

A load makes this comparison before it overwrites any tensor of the engine. `take_full` sets the
weights and buffers of an engine from full tensors.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from threed.distributed.sharding import Piece, slices
from threed.distributed.topology import Topology
from threed.models.buffers import Buffers
from threed.zero.agreement import tensors_of_model
from threed.zero.optimizer import Optimizer
from threed.zero.state import WEIGHT, fill_states

Shape = tuple[int, ...]
MOST = 10  # maximum number of names that a message lists


@dataclass(frozen=True)
class Expected:
    """The global tensors of a model.

    Attributes:
        weights: shape of each weight, by name.
        trained: names of the weights that are trained.
        with_moments: names of the weights whose update rule keeps moments.
        buffers: shape of each persistent buffer, by name; None for a buffer that has no value yet.
    """

    weights: dict[str, Shape]
    trained: frozenset[str]
    with_moments: frozenset[str]
    buffers: dict[str, Shape | None]


def expected(optimizer: Optimizer, buffers: Buffers, topology: Topology) -> Expected:
    """Returns the tensors of an engine's model, over all pipeline stages. Collective."""
    found = tensors_of_model(optimizer.layout, topology)
    return Expected(
        {name: tensor.shape for name, tensor in found.items()},
        frozenset(name for name, tensor in found.items() if tensor.trained),
        frozenset(name for name, tensor in found.items() if tensor.has_moments),
        buffers.shapes(),
    )


def listed(names: Iterable[str]) -> str:
    """Returns the first `MOST` names in sorted order as text, and the number of omitted names.

    An example of a text with 12 names: "a, b, c, d, e, f, g, h, i, j and 2 more".
    """
    some = sorted(names)
    return ", ".join(some[:MOST]) + (f" and {len(some) - MOST} more" if len(some) > MOST else "")


def differences(
    found: Mapping[str, Shape], wanted: Mapping[str, Shape | None], what: str
) -> list[str]:
    """Compares tensors by name and shape.

    Args:
        found: shapes in the checkpoint, by name.
        wanted: shapes in the model, by name. The shape of a buffer without a value yet is None: the
            checkpoint may omit this buffer, or have it in any shape.
        what: kind of tensor, "weights" or "buffers", for the message.

    Returns:
        At most three lines: one that lists missing tensors, one that lists unexpected tensors, and
        one that lists tensors whose shapes differ. A line without tensors is omitted.
    """
    missing = [name for name, shape in wanted.items() if name not in found and shape is not None]
    unknown = [name for name in found if name not in wanted]
    mismatched = [
        f"{name} is {list(shape)} in the checkpoint and {list(here)} in the model"
        for name, shape in found.items()
        if (here := wanted.get(name)) is not None and tuple(shape) != tuple(here)
    ]
    lines = [f"the checkpoint has no {what} {listed(missing)}"] if missing else []
    lines += (
        [f"the model has no {what} {listed(unknown)}, which the checkpoint has"] if unknown else []
    )
    return lines + (
        [f"{what} of other shapes: {'; '.join(sorted(mismatched)[:MOST])}"] if mismatched else []
    )


def tell(rank: int, text: str, names: Collection[str]) -> None:
    """Issues a warning on rank 0, unless `names` is empty; the names replace {} in `text`."""
    if names and rank == 0:
        warnings.warn(text.format(listed(names)), stacklevel=4)


def take_full(
    optimizer: Optimizer, buffers: Buffers, topology: Topology, given: Mapping[str, Tensor]
) -> None:
    """Sets weights and persistent buffers from full tensors by global name. Collective.

    All names and shapes are checked before the first tensor is overwritten.

    Args:
        optimizer: the optimizer, whose weights are overwritten.
        buffers: buffers of the model.
        topology: the parallel axes of the run, and this rank's position on them.
        given: full tensors by global name.

    Raises:
        KeyError: if a tensor of the model is missing, or the model does not have a given tensor.
        TypeError: if a value is not a tensor, such as a NumPy array.
        ValueError: if the shape of a tensor differs from the model's.
    """
    here = expected(optimizer, buffers, topology)
    wanted: dict[str, Shape | None] = {**here.weights, **here.buffers}
    needed = {name for name, shape in wanted.items() if shape is not None}
    for what, wrong in (
        ("are missing", needed - set(given)),
        ("the model does not have", set(given) - set(wanted)),
    ):
        if wrong:
            raise KeyError(f"weights {what}: {listed(wrong)}")
    for name, shape in wanted.items():
        if shape is not None and not isinstance(given[name], Tensor):
            raise TypeError(f"{name}: pass a torch.Tensor, not {type(given[name]).__name__}")
        if shape is not None and tuple(given[name].shape) != shape:
            raise ValueError(f"{name}: shape {tuple(given[name].shape)}, the model has {shape}")

    def write(part: str, piece: Piece, out: Tensor) -> None:
        out.copy_(given[piece.name][slices(piece.start, piece.size)])

    fill_states(optimizer, write, (WEIGHT,))
    buffers.restore(set(given) & set(here.buffers), given.__getitem__)
