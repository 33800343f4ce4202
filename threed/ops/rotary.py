"""Rotary positions (arXiv 2104.09864).

As in Hugging Face, element i of a head's first half forms a pair with element i of its second half,
and each pair is rotated. In `rotate`, neighboring elements can form the pairs instead. There are
two implementations: plain operations, and an in-place kernel on GPUs (csrc/cuda/rotary.cu). In all
functions `theta` is the base of the frequencies, or a result of `ops.frequencies.frequencies`.
"""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
from torch import Tensor

from threed.ops import launch
from threed.ops.frequencies import Frequencies, Theta, inverse, rotated_size, scale_of
from threed.ops.positions import Positions, in_documents


def angles(positions: Positions, size: int, theta: Theta, device: torch.device) -> Tensor:
    """Returns the angle of every position and pair of elements, fp32 [s d/2]."""
    each = inverse(theta, size, positions.length, device)
    return torch.outer(positions.indices(device, torch.float32), each)


@functools.lru_cache(maxsize=16)
def plain_table(
    positions: Positions, size: int, theta: Theta, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines [s 1 1 d] for `rotate`."""
    angle = angles(positions, size, theta, device)
    angle = torch.cat((angle, angle), dim=-1).view(-1, 1, 1, rotated_size(theta, size))
    cos, sin = angle.cos(), angle.sin()
    if (scale := scale_of(theta)) != 1.0:
        cos, sin = cos * scale, sin * scale
    return cos.to(dtype), sin.to(dtype)


def rotate(
    x: Tensor, theta: Theta, positions: Positions | None = None, documents: Tensor | None = None,
    *, interleaved: bool = False,
) -> Tensor:  # fmt: skip
    """Applies rotary positions to heads x [s b a d], in plain operations.

    Args:
        x: heads [s b a d].
        theta: base of the frequencies, or a result of `ops.frequencies.frequencies`.
        positions: positions of the rows of x. Default: x is a full sequence.
        documents: number of the document of every position of the full sequences, int64 [b s], not
            decreasing along s. Positions begin at 0 in each document. Default: each sequence is one
            document.
        interleaved: whether elements 2i and 2i + 1 form a pair. In the result, the first elements
            of all pairs precede the second elements; scores do not depend on this order.

    Returns:
        The rotated heads [s b a d].
    """
    positions = positions or Positions.all(x.shape[0])
    rest = None
    if (turned := rotated_size(theta, size := x.shape[-1])) < size:
        x, rest = x[..., :turned], x[..., turned:]
    if interleaved:
        x = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    if documents is None:
        y = _turn(x, *_table(positions, size, theta, x))
    else:
        y = cast(Tensor, _RotateInDocuments.apply(x, documents, positions, size, theta))
    return y if rest is None else torch.cat((y, rest), dim=-1)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


def _table(positions: Positions, size: int, theta: Theta, x: Tensor) -> tuple[Tensor, Tensor]:
    make = plain_table.__wrapped__ if torch.compiler.is_compiling() else plain_table
    return make(positions, size, theta, x.device, x.dtype)


class _RotateInDocuments(torch.autograd.Function):
    """Rotates heads x [s b a d] by the angles of positions that begin at 0 in each document.

    The backward computes the cosines and sines [s b 1 d] again, so layers do not save them.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, documents: Tensor, positions: Positions, size: int, theta: Theta
    ) -> Tensor:
        ctx.save_for_backward(documents)
        ctx.arguments = positions, size, theta
        return _turn(x, *_tables_of_documents(x, documents, positions, size, theta))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (documents,) = ctx.saved_tensors
        cos, sin = _tables_of_documents(dy, documents, *ctx.arguments)
        return _turn(dy, cos, -sin), None, None, None, None


def _tables_of_documents(
    x: Tensor, documents: Tensor, positions: Positions, size: int, theta: Theta
) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines [s b 1 d] for the rows of x.

    As for any other sequence, the factors of longrope depend on the length of the document.
    """
    place, length = (positions.rows(part) for part in in_documents(documents))
    cos, sin = (t[place, 0] for t in _table(Positions.all(positions.length), size, theta, x))
    original = theta.original if isinstance(theta, Frequencies) and theta.short else 0
    if not 0 < original < positions.length:
        return cos, sin
    is_long, place = (length > original)[..., None, None], place.clamp_max(original - 1)
    short_cos, short_sin = (t[place, 0] for t in _table(Positions.all(original), size, theta, x))
    return torch.where(is_long, cos, short_cos), torch.where(is_long, sin, short_sin)


@functools.lru_cache(maxsize=16)
def table(positions: Positions, size: int, theta: Theta, device: torch.device) -> Tensor:
    """Returns cosines and sines for the kernel, fp32 [s 2 2 d/16 4].

    Eight consecutive pairs form a pack. The dimensions are: position; cosine or sine; half of a
    pack (first or second); pack; the four numbers in this half of the pack. So the first halves of
    all packs are contiguous.
    """
    angle = angles(positions, size, theta, device)
    cos_sin = torch.stack((angle.cos(), angle.sin()), 1)
    cos_sin = cos_sin if scale_of(theta) == 1.0 else cos_sin * scale_of(theta)
    return cos_sin.view(-1, 2, size // 16, 2, 4).transpose(2, 3).contiguous()


def fits(x: Tensor, size: int, theta: Theta = 0.0) -> bool:
    """Returns whether the kernel (`rotate_`) supports these arguments.

    The kernel rotates all elements of a head, so a `theta` that rotates only some of them is not
    supported.

    Args:
        x: rows of heads, [s b width] or [(s b) width].
        size: head's size d.
        theta: base of the frequencies, or a result of `ops.frequencies.frequencies`.
    """
    supported = size > 0 and size % 16 == 0 and rotated_size(theta, size) == size
    return supported and x.shape[-1] % 8 == 0 and launch.ready(x) and launch.packed(x)


def rotate_(
    x: Tensor, positions: Positions, heads: int, size: int, theta: Theta, *, back: bool = False
) -> None:
    """Rotates the first `heads` heads in every row of x in place. Launches one kernel.

    Per element of these heads, reads 2 bytes of memory and writes 2 bytes.

    Args:
        x: rows of heads, bf16 [(s b) width].
        positions: the s positions.
        heads: number of heads to rotate.
        size: head's size d.
        theta: base of the frequencies, or a result of `ops.frequencies.frequencies`.
        back: whether to apply the inverse rotation.
    """
    (rows, width), table_rows = x.shape, sum(last - first for first, last in positions.ranges)
    fits = size > 0 and size % 16 == 0 and heads * size <= width and width % 8 == 0
    fits = fits and (rows % table_rows == 0 if table_rows else not rows)
    fits = fits and rotated_size(theta, size) == size and launch.packed(x) and rows < 2**31
    wanted = "bf16 [(s b) width], contiguous and 16-byte aligned, heads of a multiple of 16"
    launch.check(fits, "rotary", wanted, x)
    if rows and heads:
        cos_sin = table(positions, size, theta, x.device)
        _start(x, cos_sin, rows // table_rows, heads, size, -1.0 if back else 1.0)


@launch.operator(
    "rotary_(Tensor(a!) x, Tensor cos_sin, int sequences, int heads, int size, float direction) -> ()",
    lambda *args: None, launches=1,
)  # fmt: skip
def _start(
    x: Tensor, cos_sin: Tensor, sequences: int, heads: int, size: int, direction: float
) -> None:
    launch.start("rotary", x, cos_sin, *x.shape, sequences, heads, size, direction)


def pack_back(
    gradients: tuple[Tensor, Tensor, Tensor], positions: Positions, theta: Theta
) -> Tensor:
    """Rotates gradients of queries and keys back, and packs them with the values' gradient.

    Launches one kernel. Per element, reads 2 bytes of memory and writes 2 bytes.

    Args:
        gradients: of queries [s b a d], keys and values [s b k d], bf16. They may have any strides
            that are multiples of 8, with contiguous heads; others are copied first.
        positions: the s positions.
        theta: base of the frequencies, or a result of `ops.frequencies.frequencies`.

    Returns:
        The gradient of the packed rows, [s b (a+2k)d].
    """
    dq, dk, dv = map(in_packs, gradients)
    length, _, _heads, size = dq.shape
    fits = size % 16 == 0 and rotated_size(theta, size) == size and length * dq.shape[1] < 2**31
    fits = fits and length == sum(last - first for first, last in positions.ranges)
    fits = fits and dk.shape == dv.shape == (*dq.shape[:2], dk.shape[2], size)
    wanted = "bf16 [s b n d], heads of a multiple of 16, as many positions as given"
    launch.check(fits and all(map(_has_packs, (dq, dk, dv))), "rotary_backward", wanted, dq, dk, dv)
    return _start_backward(dq, dk, dv, table(positions, size, theta, dq.device))


def in_packs(x: Tensor) -> Tensor:
    """Returns heads x [s b n d], copied if a kernel cannot read them in packs."""
    # clone also changes strides of dimensions of size 1
    return x if _has_packs(x) else x.clone(memory_format=torch.contiguous_format)


def _has_packs(x: Tensor) -> bool:
    """Returns whether a kernel can read the heads x [s b n d] in packs of eight bf16 numbers."""
    packs = x.dtype == torch.bfloat16 and x.stride(3) == 1 and launch.aligned(x)
    return packs and all(stride % 8 == 0 for stride in x.stride()[:3])


def _packed(dq: Tensor, dk: Tensor, dv: Tensor, cos_sin: Tensor) -> Tensor:
    s, b, heads, size = dq.shape
    return dq.new_empty(s, b, (heads + 2 * dk.shape[2]) * size)


@launch.operator(
    "rotary_backward(Tensor dq, Tensor dk, Tensor dv, Tensor cos_sin) -> Tensor",
    _packed,
    launches=1,
)
def _start_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos_sin: Tensor) -> Tensor:
    dx = _packed(dq, dk, dv, cos_sin)
    s, b, heads, size = dq.shape
    strides = (stride for g in (dq, dk, dv) for stride in g.stride()[:3])
    if dx.numel():
        launch.start(
            "rotary_backward", dq, dk, dv, dx, cos_sin, *strides, s * b, b, heads, dk.shape[2], size
        )
    return dx


class _SplitAndRotate(torch.autograd.Function):
    """Splits x [s b width] into queries, keys and values; rotates queries and keys in place.

    Returns a tensor [s b n d] for each n in `heads`. The tensors are views of x's memory.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, heads: tuple[int, int, int], size: int, theta: Theta,
        positions: Positions,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.arguments = (positions, theta)
        rotate_(x.view(-1, x.shape[-1]), positions, sum(heads[:2]), size, theta)
        # Autograd does not see that the kernel changed x in place. With a new version number of x,
        # autograd raises an error if an earlier operation saved x for its backward.
        torch.autograd.graph.increment_version((x,))
        parts = x.split([size * n for n in heads], -1)
        return tuple(part.unflatten(-1, (-1, size)) for part in parts)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        return pack_back((dq, dk, dv), *ctx.arguments), None, None, None, None


def split_and_rotate(
    x: Tensor, heads: tuple[int, int, int], size: int, theta: Theta, positions: Positions
) -> tuple[Tensor, ...]:
    """Splits x [s b width] into queries, keys and values, and rotates queries and keys.

    Args:
        x: packed heads [s b width].
        heads: number of heads of queries, keys and values.
        size: head's size d.
        theta: base of the frequencies, or a result of `ops.frequencies.frequencies`.
        positions: positions of the rows of x.

    Returns:
        One tensor [s b n d] for each n in `heads`. They share x's memory, in which the rotation was
        done, so x must not be read afterwards.
    """
    return _SplitAndRotate.apply(x, heads, size, theta, positions)
