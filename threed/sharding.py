"""The record a parameter carries: which slices of which global tensors it is.

    weight.spec = ShardSpec((Piece("blocks.0.mlp.up.weight", (4*h, h), start=(0, 0), size=(2*h, h)),))

Initial values, gradient reduction, gradient norm, checkpoints and conversion read only this record. One local tensor
may hold several global ones (query, key and value packed for one matmul): each is a `Piece`, a contiguous range of the
local tensor and a box of the global one. Global shapes are unpadded, and shards need not be equal; a local tensor may
have padding behind its pieces.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from threed import rng


class ModelError(ValueError):
    """A model that cannot be right in some topology: names the layer and the parameter, and says what to do."""


@dataclass(frozen=True)
class Init:
    """How a global tensor begins: normal with a standard deviation, or constant (std 0) at `value`."""

    std: float = 0.0
    value: float = 0.0


@dataclass(frozen=True)
class Piece:
    """A box of one global tensor, stored contiguously at `offset` (elements) of the local parameter."""

    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]
    offset: int = 0
    init: Init = Init()

    @property
    def numel(self) -> int:
        return math.prod(self.size)


@dataclass(frozen=True)
class ShardSpec:
    """What a parameter is.

    pieces: in storage order; together they fill the parameter, but for `padding` elements at its end.
    replicated: the axis whose ranks all hold these same values ("tp", or "tp/2" for blocks of two), or None.
    partial: the axis over which the gradient is only a part and must be summed, or None.
    decay: whether weight decay applies (matrices do, norms and biases do not).
    tile: (index, count) of a tile of a larger matrix, which is whole only while it is used; else (0, 1).
    padding: elements that belong to no global tensor. They are zero and stay so: whoever computes with them sees to it
    that their gradient is zero. No checkpoint has them.
    over: the axis of data ranks that each hold other pieces (`Topology.data_name`, or blocks of it such as "dp/2"), or
    None if all data ranks hold the same. The layer exchanges its inputs and outputs over that axis, so that the
    gradient of its pieces comes from the samples of all of these ranks.
    """

    pieces: tuple[Piece, ...]
    replicated: str | None = None
    partial: str | None = None
    decay: bool = True
    tile: tuple[int, int] = (0, 1)
    padding: int = 0
    over: str | None = None

    @property
    def numel(self) -> int:
        """Elements of global tensors in it."""
        return sum(piece.numel for piece in self.pieces)

    @property
    def name(self) -> str:
        """The name that tells this parameter from others on the same rank: its pieces' names, joined, and its tile."""
        name, (index, count) = "+".join(piece.name for piece in self.pieces), self.tile
        return name if count == 1 else f"{name}[{index}/{count}]"


def parameter(spec: ShardSpec, shape: Sequence[int]) -> nn.Parameter:
    """A parameter on the meta device with its record; it gets storage when its pipeline stage is built."""
    if spec.numel + spec.padding != math.prod(shape):
        raise ValueError(f"{spec.name}: pieces do not fill the local shape {tuple(shape)}")
    return attach(nn.Parameter(torch.empty(tuple(shape), device="meta")), spec)


def attach(param: nn.Parameter, spec: ShardSpec) -> nn.Parameter:
    """The same parameter, carrying `spec`."""
    param.spec = spec  # type: ignore[attr-defined]
    return param


def storage_of(tensor: Tensor | None) -> int:
    """Returns what identifies a tensor's storage; 0 if it has none."""
    if tensor is None:
        return 0
    try:
        with torch._C.DisableTorchFunctionSubclass():
            return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse tensors, wrappers of torch.func
        return 0


def is_managed(param: Tensor) -> bool:
    """Returns whether an engine holds the parameter's values (`threed.zero.access`)."""
    return hasattr(param, "access")


def check_dense(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raises ValueError naming sparse, quantized and nested tensors, which can be neither sent nor saved."""
    found = [
        f"{name} ({'quantized' if value.is_quantized else value.layout})" for name, value in named
        if value.layout is not torch.strided or value.is_quantized or value.is_nested
    ]  # fmt: skip
    if found:
        raise ValueError(
            f"not dense: {few(found)}; register the dense parts of a sparse, quantized or nested tensor (its indices"
            " and values) as buffers, and build the tensor from them in the forward"
        )


def few(names: Sequence[str]) -> str:
    """Returns the names as text; after the first five only the number of the others."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def spec_of(param: Tensor) -> ShardSpec:
    """The record of a parameter; TypeError when it has none."""
    spec = getattr(param, "spec", None)
    if spec is None:
        raise TypeError(
            "a parameter without a sharding record: build it with threed.layers or sharding.parameter"
        )
    return cast(ShardSpec, spec)


def initial(piece: Piece, seed: int) -> Tensor:
    """Returns the initial values of a piece, fp32 [*piece.size].

    Each is a function of (seed, global name, element index) alone.
    """
    if piece.init.std == 0:
        return torch.full(piece.size, piece.init.value)
    return rng.normal(seed, piece.name, piece.shape, piece.start, piece.size).mul_(piece.init.std)


def matrix(
    name: str, shape: tuple[int, int], dim: int, span: tuple[int, int], std: float, offset: int = 0
) -> Piece:
    """The piece of a matrix that is cut along `dim` to rows or columns [span[0], span[1])."""
    start, size = [0, 0], list(shape)
    start[dim], size[dim] = span[0], span[1] - span[0]
    return Piece(name, shape, (start[0], start[1]), (size[0], size[1]), offset, Init(std=std))


def vector(
    name: str, length: int, span: tuple[int, int] | None = None, value: float = 0.0, offset: int = 0
) -> Piece:
    """The piece of a vector in [span[0], span[1]), by default all of it."""
    first, last = span or (0, length)
    return Piece(name, (length,), (first,), (last - first,), offset, Init(value=value))


def split(piece: Piece, first: int, last: int, offset: int = 0) -> Iterator[Piece]:
    """Yields the elements [first, last) of a piece's storage as pieces that are contiguous there.

    A range of a tensor of n dimensions has at most 2n - 1 of them.

    Args:
        offset: the offset of element `first`; the offsets of the pieces follow from it.
    """
    origin = offset - first
    while first < last:
        block, dim = 1, len(piece.size)  # the largest box of whole dimensions that begins here
        while (
            dim and first % (larger := block * piece.size[dim - 1]) == 0 and first + larger <= last
        ):
            block, dim = larger, dim - 1
        inside = _coordinates(first, piece.size)
        size = list(piece.size)
        if dim:  # several of them, as far as they are side by side
            size[dim - 1] = min((last - first) // block, size[dim - 1] - inside[dim - 1])
            size[: dim - 1] = [1] * (dim - 1)
        start = tuple(p + i for p, i in zip(piece.start, inside, strict=True))
        yield Piece(piece.name, piece.shape, start, tuple(size), origin + first, piece.init)
        first += math.prod(size)


def _coordinates(element: int, shape: Sequence[int]) -> list[int]:
    """Returns the place of an element of a tensor, by its number in row-major order."""
    place = list[int]()
    for size in reversed(shape):
        element, index = divmod(element, size)
        place.insert(0, index)
    return place


def slices(
    start: Sequence[int], size: Sequence[int], origin: Sequence[int] = ()
) -> tuple[slice, ...]:
    """The index of a box, in a tensor that begins at `origin` (by default at zero)."""
    return tuple(
        slice(a - o, a - o + n)
        for a, n, o in zip(start, size, origin or [0] * len(start), strict=True)
    )


def intersect(a_start: Sequence[int], a_size: Sequence[int], b_start: Sequence[int], b_size: Sequence[int]) -> (
    tuple[tuple[int, ...], tuple[int, ...]] | None
):  # fmt: skip
    """The common part (start, size) of two boxes of one global tensor, or None."""
    start = tuple(max(a, b) for a, b in zip(a_start, b_start, strict=True))
    stop = tuple(
        min(a + n, b + m) for a, n, b, m in zip(a_start, a_size, b_start, b_size, strict=True)
    )
    if any(lo >= hi for lo, hi in zip(start, stop, strict=True)):
        return None
    return start, tuple(hi - lo for lo, hi in zip(start, stop, strict=True))
