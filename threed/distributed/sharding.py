"""The sharding record of a parameter: which slices of which global tensors it contains.

    weight.spec = ShardSpec((Piece("blocks.0.mlp.up.weight", (4*h, h), start=(0, 0), size=(2*h, h)),))

The code for initial values, gradient reduction, gradient norm, checkpoints and conversion reads
only this record. A local tensor may contain parts of several global tensors (query, key and value
packed for one matmul). Each part is a `Piece`: it is stored as a contiguous range of the local
tensor, and is a box of the global tensor. Global shapes are unpadded, and shards may differ in
size. A local tensor may have padding after its pieces.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from threed.core import rng


class ModelError(ValueError):
    """Raised for a model that would give wrong results in some topology.

    The message names the layer and a fix.
    """


@dataclass(frozen=True)
class Init:
    """Initial values of a global tensor: normally distributed, or constant if `std` is 0.

    Attributes:
        std: standard deviation of the normal distribution with mean 0.
        value: value of every element if `std` is 0.
    """

    std: float = 0.0
    value: float = 0.0


@dataclass(frozen=True)
class Piece:
    """A box of one global tensor, stored contiguously in a local parameter.

    Attributes:
        name: name of the global tensor.
        shape: shape of the global tensor.
        start: first index of the box, per dimension.
        size: size of the box, per dimension.
        offset: start of the piece in the local parameter, in elements.
        init: initial values of the global tensor.
    """

    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]
    offset: int = 0
    init: Init = Init()

    @property
    def numel(self) -> int:
        """The number of elements of the piece."""
        return math.prod(self.size)


@dataclass(frozen=True)
class ShardSpec:
    """The sharding record of a parameter.

    Attributes:
        pieces: pieces in storage order; they fill the parameter except for the padding at its end.
        replicated: axis whose ranks all have the same values of this parameter ("tp", or "tp/2" for
            blocks of two tensor ranks), or None.
        partial: axis over which the gradient is a partial sum and must be all-reduced, or None.
        decay: whether weight decay applies (true for matrices, false for norms and biases).
        tile: (index, count): the index of this tile, and the number of tiles of the matrix, if the
            parameter is a tile of a larger matrix (`layers.tiled`); otherwise (0, 1).
        padding: number of elements that belong to no global tensor. They must stay zero: code that
            computes with them must give them zero gradients. Checkpoints omit them.
        over: axis of ranks with different tokens that have different pieces: `Topology.data_name`
            or its product with "tp", or blocks of them such as "dp/2"; None if all data ranks have
            the same pieces. The layer exchanges its inputs and outputs over that axis, so the
            gradient on each rank already includes the tokens of all ranks of the axis.
        rule: name of the update rule ("balance", see `ops.balance`); None for the optimizer's. A
            parameter with such a rule is kept in fp32 at least, and its gradient neither
            counts in the gradient norm nor is clipped.
        resident: whether the parameter stays unsharded under ZeRO stage 3.
    """

    pieces: tuple[Piece, ...]
    replicated: str | None = None
    partial: str | None = None
    decay: bool = True
    tile: tuple[int, int] = (0, 1)
    padding: int = 0
    over: str | None = None
    rule: str | None = None
    resident: bool = False

    @property
    def numel(self) -> int:
        """Number of elements that belong to global tensors."""
        return sum(piece.numel for piece in self.pieces)

    @property
    def name(self) -> str:
        """The name of this parameter, unique per rank: the names of its pieces, and its tile."""
        name, (index, count) = "+".join(piece.name for piece in self.pieces), self.tile
        return name if count == 1 else f"{name}[{index}/{count}]"


def parameter(spec: ShardSpec, shape: Sequence[int]) -> nn.Parameter:
    """Returns a parameter with its record, on the meta device.

    The engine allocates the parameter's storage on the ranks that have its pipeline stage.

    Args:
        spec: the record.
        shape: the local shape.

    Raises:
        ValueError: if the pieces and the padding do not fill the shape.
    """
    if spec.numel + spec.padding != math.prod(shape):
        raise ValueError(f"{spec.name}: pieces do not fill the local shape {tuple(shape)}")
    return attach(nn.Parameter(torch.empty(tuple(shape), device="meta")), spec)


def attach(param: nn.Parameter, spec: ShardSpec) -> nn.Parameter:
    """Sets the sharding record of a parameter that was created without one.

    Args:
        param: this rank's shard.
        spec: its sharding record.

    Returns:
        `param`.
    """
    param.spec = spec  # type: ignore[attr-defined]
    return param


def detach(param: nn.Parameter) -> None:
    """Removes the sharding record of a parameter."""
    del param.spec  # type: ignore[attr-defined]


def point(param: nn.Parameter, values: Tensor) -> None:
    """Makes a parameter use the memory of `values`.

    The parameter stays the same object and keeps its autograd history. `__torch_function__` is not
    called, because it would first gather a sharded parameter.
    """
    with torch._C.DisableTorchFunctionSubclass():
        Tensor.data.__set__(param, values.data)  # type: ignore[attr-defined]


def storage_of(tensor: Tensor | None) -> int:
    """Returns an id of a tensor's storage; 0 for None and for a tensor without a storage."""
    if tensor is None:
        return 0
    try:
        with torch._C.DisableTorchFunctionSubclass():
            return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # raised for sparse tensors and torch.func wrappers
        return 0


def is_managed(param: Tensor) -> bool:
    """Returns whether an engine owns the parameter's values (`threed.zero.parameter_access`)."""
    return hasattr(param, "access")


def check_dense(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raises ValueError if a tensor is sparse, quantized or nested.

    Such a tensor cannot be sent or saved.

    Args:
        named: (name, tensor) pairs; the message lists the names of the tensors that are not dense.
    """
    found = [
        f"{name} ({'quantized' if value.is_quantized else value.layout})" for name, value in named
        if value.layout is not torch.strided or value.is_quantized or value.is_nested
    ]  # fmt: skip
    if found:
        raise ValueError(
            f"not dense: {few(found)}; register the dense parts of a sparse, quantized or nested tensor (its indices"
            " and values) as buffers, and build the tensor from them in the forward"
        )


def check_separate(params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
    """Raises ValueError if a trained parameter shares elements with another parameter or a buffer.

    An engine moves each parameter to other memory, so the two tensors would no longer be equal.

    Args:
        params: distinct parameters by name; a tied parameter has one name.
        buffers: distinct buffers by name.
    """
    tensors = [*params.items(), *buffers.items()]
    spans = sorted(
        (span, name, tensor) for name, tensor in tensors if (span := _span(tensor)) is not None
    )
    before: list[tuple[tuple[int, int], str, Tensor]] = []
    for span, name, tensor in spans:
        before = [entry for entry in before if entry[0][1] > span[0]]
        for _, other, earlier in before:
            trained = any(
                t.requires_grad and n in params for n, t in ((name, tensor), (other, earlier))
            )
            if trained and _share_elements(earlier, tensor):
                raise ValueError(
                    f"{other} and {name} share memory, but are different tensors: the engine moves each parameter to"
                    " other memory, so they would no longer be equal; to tie parameters, assign the object itself"
                    " (module.b.weight = module.a.weight), otherwise give one of them a clone()"
                )
        before.append((span, name, tensor))


def _span(tensor: Tensor) -> tuple[int, int] | None:
    """Returns the addresses of a tensor's first byte and last byte + 1; None if it has none."""
    if tensor.device.type == "meta" or not tensor.numel() or not storage_of(tensor):
        return None
    try:
        first = tensor.data_ptr()
    except RuntimeError:  # raised for fake tensors
        return None
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (last + 1) * tensor.element_size()


def _share_elements(first: Tensor, second: Tensor) -> bool:
    """Returns whether two tensors whose spans overlap share an element, unlike two columns."""
    if first.dtype != second.dtype:
        return True
    spans = [span for tensor in (first, second) if (span := _span(tensor)) is not None]
    start, end = min(a for a, _ in spans), max(b for _, b in spans)
    used = torch.zeros((end - start) // first.element_size(), dtype=torch.bool, device="cpu")
    views = [
        used.as_strided(t.shape, t.stride(), (span[0] - start) // t.element_size())
        for t, span in zip((first, second), spans, strict=True)
    ]
    views[0].fill_(True)
    return bool(views[1].any())


def few(names: Sequence[str]) -> str:
    """Returns a text with the first five names, and the number of names that are left out."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def spec_of(param: Tensor) -> ShardSpec:
    """Returns the record of a parameter; raises TypeError if it has none."""
    spec = getattr(param, "spec", None)
    if spec is None:
        raise TypeError(
            "a parameter without a sharding record: build it with threed.layers or layers.parameter"
        )
    return cast(ShardSpec, spec)


def dtype_of(param: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of a parameter in a training whose parameters have dtype `dtype`."""
    own_rule = hasattr(param, "spec") and spec_of(param).rule is not None
    return torch.promote_types(dtype, torch.float32) if own_rule else dtype


def initial(piece: Piece, seed: int) -> Tensor:
    """Returns the initial values of a piece, fp32 [*piece.size].

    Each value depends only on (seed, global name, element index), so all topologies start from the
    same weights.
    """
    if piece.init.std == 0:
        return torch.full(piece.size, piece.init.value)
    return rng.normal(seed, piece.name, piece.shape, piece.start, piece.size).mul_(piece.init.std)


def matrix(
    name: str, shape: tuple[int, int], dim: int, span: tuple[int, int], std: float, offset: int = 0
) -> Piece:
    """Returns rows or columns span[0] to span[1] - 1 of a matrix as a piece.

    Args:
        name: global name of the matrix.
        shape: shape of the full matrix.
        dim: 0 for rows, 1 for columns.
        span: (first, stop): index of the first row or column, and index of the last one plus 1.
        std: standard deviation of the initial values.
        offset: start of the piece in the local parameter, in elements.
    """
    start, size = [0, 0], list(shape)
    start[dim], size[dim] = span[0], span[1] - span[0]
    return Piece(name, shape, (start[0], start[1]), (size[0], size[1]), offset, Init(std=std))


def vector(
    name: str, length: int, span: tuple[int, int] | None = None, value: float = 0.0, offset: int = 0
) -> Piece:
    """Returns the elements span[0] to span[1] - 1 of a vector as a piece.

    Args:
        name: global name of the vector.
        length: number of elements of the full vector.
        span: (first, stop): index of the first element, and index of the last one plus 1; None:
            all elements.
        value: initial value of every element.
        offset: start of the piece in the local parameter, in elements.
    """
    first, last = span or (0, length)
    return Piece(name, (length,), (first,), (last - first,), offset, Init(value=value))


def split(piece: Piece, first: int, last: int, offset: int = 0) -> Iterator[Piece]:
    """Splits the elements [first, last) of a piece into boxes of the global tensor.

    Each box is yielded as a `Piece`. A range of a tensor with n dimensions gives at most 2n - 1
    boxes.

    Args:
        piece: the piece to split.
        first: number of the first element, in row-major order of the piece.
        last: number of the last element plus 1.
        offset: offset of element `first` in the local parameter, in elements.
    """
    origin = offset - first
    while first < last:
        # `block` is the number of elements of a box that begins with element `first` and spans
        # dimension `dim` and all later dimensions in full. It is the largest such box that has only
        # elements before `last`.
        block, dim = 1, len(piece.size)
        while (
            dim and first % (larger := block * piece.size[dim - 1]) == 0 and first + larger <= last
        ):
            block, dim = larger, dim - 1
        inside = _coordinates(first, piece.size)
        size = list(piece.size)
        if dim:
            # The piece that is yielded consists of several boxes of `block` elements. They follow
            # each other in dimension `dim - 1`.
            size[dim - 1] = min((last - first) // block, size[dim - 1] - inside[dim - 1])
            size[: dim - 1] = [1] * (dim - 1)
        start = tuple(p + i for p, i in zip(piece.start, inside, strict=True))
        yield Piece(piece.name, piece.shape, start, tuple(size), origin + first, piece.init)
        first += math.prod(size)


def _coordinates(element: int, shape: Sequence[int]) -> list[int]:
    """Converts the flat (row-major) index of an element to one index per dimension."""
    place = list[int]()
    for size in reversed(shape):
        element, index = divmod(element, size)
        place.insert(0, index)
    return place


def slices(
    start: Sequence[int], size: Sequence[int], origin: Sequence[int] = ()
) -> tuple[slice, ...]:
    """Returns the slices that select a box from a tensor.

    Args:
        start: first index of the box in the global tensor, per dimension.
        size: size of the box, per dimension.
        origin: index of the tensor's first element in the global tensor, per dimension; by default
            0 in every dimension.
    """
    return tuple(
        slice(a - o, a - o + n)
        for a, n, o in zip(start, size, origin or [0] * len(start), strict=True)
    )


def intersect(a_start: Sequence[int], a_size: Sequence[int], b_start: Sequence[int], b_size: Sequence[int]) -> (
    tuple[tuple[int, ...], tuple[int, ...]] | None
):  # fmt: skip
    """Returns the intersection (start, size) of two boxes of one tensor; None if it is empty."""
    start = tuple(max(a, b) for a, b in zip(a_start, b_start, strict=True))
    stop = tuple(
        min(a + n, b + m) for a, n, b, m in zip(a_start, a_size, b_start, b_size, strict=True)
    )
    if any(lo >= hi for lo, hi in zip(start, stop, strict=True)):
        return None
    return start, tuple(hi - lo for lo, hi in zip(start, stop, strict=True))
