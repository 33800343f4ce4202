"""Where in the flat buffers of Megatron's distributed optimizer each parameter is: found by the layout, then by values.

    starts = positions(weights, Buffer(masters, buckets))        None where they cannot be known

A buffer has a rank's parameters last one first. In a bucket each begins at a multiple of 64 values; a bucket ends
behind a parameter, and what is behind it up to the next one is not saved (megatron/core/optimizer/distrib_optimizer.py,
_compute_per_buffer_param_layout and get_parameter_state_dp_zero; in core 0.14 and before megatron/core/distributed/
param_and_grad_buffer.py; NVIDIA/Megatron-LM, commit d98e8a64). Sizes of buckets are in some files only.

Nothing says whose the values are. But a weight is its master, rounded: so of each parameter the first and the last
16,384 values are compared, and a layout is taken only if all fit, and no other does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from threed.foreign.spread import Boxes, Elements

ALIGNED = 64
SAMPLE = 2**14
MOST_WAYS = 1000
Way = tuple[int, "Way | None"]  # the first element of a parameter, and the way to it


class Buffer(NamedTuple):
    """Masters as flat elements, without what is behind buckets; buckets: how many each has, or None: not known."""

    masters: Elements
    buckets: Sequence[int] | None = None


def positions(weights: Sequence[Boxes], buffer: Buffer) -> list[int] | None:
    """Returns the first element of each of these parameters, in the order of the model; None: it is not certain."""
    backward = list(reversed(weights))
    sizes = [numel(weight) for weight in backward]
    if buffer.buckets is not None:
        starts = _in_buckets(sizes, buffer.buckets)
        if starts is None or not all(
            fits(w, buffer.masters, at) for w, at in zip(backward, starts, strict=True)
        ):
            return None
        return starts[::-1]
    return _searched(backward, sizes, buffer.masters)


def numel(tensor: Boxes) -> int:
    """Returns how many elements a tensor has."""
    return torch.Size(tensor.shape).numel()


def _in_buckets(sizes: Sequence[int], buckets: Sequence[int]) -> list[int] | None:
    """Returns where parameters begin, of which buckets have that many elements."""
    starts: list[int] = []
    first, at, left = 0, 0, list(buckets)
    for size in sizes:
        at += -at % ALIGNED
        if not left or at + size > left[0]:
            return None
        starts.append(first + at)
        at += size
        if at + -at % ALIGNED >= left[0]:
            first, at = first + left.pop(0), 0
    return None if left else starts


def _searched(
    weights: Sequence[Boxes], sizes: Sequence[int], masters: Elements
) -> list[int] | None:
    """Returns where parameters begin if only one layout fits; after each, a bucket may end or not.

    Ways are kept by where they are, and where the bucket began, modulo the alignment; two to the same place are none.
    """
    ways: dict[tuple[int, int], Way | None] = {(0, 0): None}
    for weight, size in zip(weights, sizes, strict=True):
        found: dict[tuple[int, int], Way | None] = {}
        for (end, phase), way in ways.items():
            for at, new in {(end + (phase - end) % ALIGNED, phase), (end, end % ALIGNED)}:
                if at + size > masters.numel or not fits(weight, masters, at):
                    continue
                if (at + size, new) in found:
                    return None
                found[at + size, new] = (at, way)
        ways = found
        if not 0 < len(ways) < MOST_WAYS:
            return None
    whole = [
        way
        for (end, phase), way in ways.items()
        if end <= masters.numel <= end + (phase - end) % ALIGNED
    ]
    different = {tuple(_steps(way)) for way in whole}
    return list(different.pop()) if len(different) == 1 else None


def _steps(way: Way | None) -> list[int]:
    """Returns where parameters begin, the last one of the way first: so in the order of the model."""
    steps = []
    while way is not None:
        steps.append(way[0])
        way = way[1]
    return steps


def fits(weight: Boxes, masters: Elements, at: int = 0) -> bool:
    """Returns whether a weight is what its master rounds to, from element `at` on: by its first and last values."""
    if not weight.shape:
        return torch.equal(weight.box((), ()), masters.read(at, at + 1).to(weight.dtype).view(()))
    count, row = weight.shape[0], numel(weight) // max(1, weight.shape[0])
    some = min(count, max(1, SAMPLE // max(1, row)))
    rest = tuple(weight.shape[1:])
    for first in {0, count - some}:
        values = weight.box((first, *(0 for _ in rest)), (some, *rest)).reshape(-1)
        if not torch.equal(
            values, masters.read(at + first * row, at + (first + some) * row).to(values.dtype)
        ):
            return False
    return True
