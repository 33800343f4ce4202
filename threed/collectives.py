"""Communication: the only caller of torch.distributed, and the bytes it moved, per axis.

Three kinds of things:
  plain        all_reduce, all_gather, reduce_scatter, send, receive ...; asynchronous ones give a `Pending`
  conjugate    copy_to / reduce_from / gather_from / scatter_to: autograd functions whose backward is the other one's
               forward (Megatron-LM, arXiv 1909.08053 section 3, and 2205.05198 section 4.2.2 for sequences)
  housekeeping barrier, exchange, problems_of_all, raise_together, leave

Everything takes an `Axis`; an axis of size 1 does nothing. Shards lie along dimension 0, so that gathering is
concatenation and needs no copy.

On gloo a sum is our own: every rank sends each peer that peer's part in one all-to-all and adds up what it gets in
rank order. gloo's reduce-scatter is an all-reduce underneath (twice the bytes), and its all-reduce is slower than the
exchange; ours is deterministic, and the same on every rank. Counted are the bytes that this rank sends.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from threed.device import count, current
from threed.topology import Axis, Link

T = TypeVar("T")

# `_single` is the new name of what older versions call `_tensor`.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Along = Callable[[Tensor, Axis], Tensor]


class Codec(Protocol):
    """Encodes rows of numbers [r n] as messages [r m] for a reduce-scatter or an all-gather.

    Every rank uses decoded numbers, the rank that has the originals included, so that results do
    not depend on which rank owns what.
    """

    def encode(self, rows: Tensor) -> Tensor:
        """Returns the messages [r m]."""

    def decode(self, messages: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        """Returns rows [r count] of a dtype from messages [r m]."""


@dataclass(frozen=True)
class Cast:
    """Sends numbers as another dtype; with None unchanged. A backend can sum such messages."""

    dtype: torch.dtype | None = None

    def encode(self, rows: Tensor) -> Tensor:
        return rows if self.dtype is None else rows.to(self.dtype)

    def decode(self, messages: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        return messages.to(dtype)


EXACT = Cast()


class Pending:
    """A result under way: `wait()` gives the tensor, finishing the local part of the work; waiting again is free."""

    def __init__(self, finish: Callable[[], Tensor], *works: dist.Work | None) -> None:
        self._finish: Callable[[], Tensor] | None = finish
        self._works = works
        self._result: Tensor | None = None

    def wait(self) -> Tensor:
        """The result, complete."""
        if self._finish is not None:
            for work in self._works:
                if work is not None:
                    work.wait()
            self._result = self._finish()
            self._finish, self._works = None, ()  # what they hold is free from here on
        assert self._result is not None
        return self._result


def done(tensor: Tensor, *works: dist.Work | None) -> Pending:
    """A result that needs no waiting but for these works."""
    return Pending(lambda: tensor, *works)


def split(size: int, parts: int, index: int) -> tuple[int, int]:
    """Where part `index` of `size` begins and ends when it is cut as evenly as can be; parts may differ by one."""
    return size * index // parts, size * (index + 1) // parts


def same_start(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors begin at the same place in memory."""
    return (
        a.untyped_storage()._cdata == b.untyped_storage()._cdata
        and a.storage_offset() == b.storage_offset()
    )


def _gloo(axis: Axis) -> bool:
    if axis.group is None:  # on paper
        return not (count() and dist.is_nccl_available())
    return dist.get_backend(axis.group) == "gloo"


def _start(
    collective: Callable[..., dist.Work | None], out: Tensor, *args: Any, axis: Axis
) -> dist.Work | None:
    """Begins a collective; on the meta device, where tensors have shapes only, nothing is sent."""
    return None if out.is_meta else collective(out, *args, group=axis.channel, async_op=True)


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


# ------------------------------------------------------------------------------------------------------------ plain


def start_all_gather(
    shard: Tensor, axis: Axis, out: Tensor | None = None, *, codec: Codec = EXACT
) -> Pending:
    """Begins to concatenate every rank's `shard` [n ...] to [size*n ...]; `shard` may be a part of `out` itself.

    Args:
        codec: encodes the shards; this rank's part of the result is decoded, too.
    """
    if axis.size == 1:
        return done(shard if out is None else out.copy_(shard))
    if codec != EXACT:
        return _start_encoded_gather(shard, axis, out, codec)
    shard = shard.contiguous()
    if out is None:
        out = shard.new_empty(axis.size * shard.shape[0], *shard.shape[1:])
    axis.count(_nbytes(shard) * (axis.size - 1))
    if axis.size == 2 and _gloo(axis):
        return _swap(shard, out, axis)
    return Pending(lambda: out, _start(_all_gather_single, out, shard, axis=axis))


def _start_encoded_gather(shard: Tensor, axis: Axis, out: Tensor | None, codec: Codec) -> Pending:
    shape = (axis.size * shard.shape[0], *shard.shape[1:])
    messages = start_all_gather(codec.encode(shard.reshape(1, -1)), axis)

    def finish() -> Tensor:
        result = shard.new_empty(shape) if out is None else out
        rows = codec.decode(messages.wait(), shard.numel(), shard.dtype)
        result.view(axis.size, -1).copy_(rows)
        return result

    return Pending(finish)


def _swap(shard: Tensor, out: Tensor, axis: Axis) -> Pending:
    """Two ranks give each other their shard: gloo's all-gather takes 3 to 5 times as long from 32 MiB on."""
    halves = out.view(2, -1)
    if not same_start(halves[axis.index], shard):
        halves[axis.index].copy_(shard.view(-1))
    return Pending(lambda: out, _start_swap(halves[1 - axis.index], shard.view(-1), axis))


def all_gather(shard: Tensor, axis: Axis) -> Tensor:
    """Every rank's `shard` [n ...], concatenated along dimension 0 to [size*n ...]."""
    return start_all_gather(shard, axis).wait()


def start_reduce_scatter(
    full: Tensor,
    axis: Axis,
    *,
    codec: Codec = EXACT,
    into: Tensor | None = None,
    add: bool = False,
) -> Pending:
    """Begins to sum `full` [size*n ...] over the axis; the result is this rank's part [n ...] of the sum.

    Args:
        codec: encodes the terms, this rank's own included; sums are made in the dtype of `full`.
        into: where the result goes, which may be this rank's part of `full`; `full` is undefined afterwards.
        add: add the result to `into`.
    """
    if axis.size == 1:
        return done(full if into is None else _store(full, into, add))
    if full.shape[0] % axis.size:
        raise ValueError(
            f"reduce-scatter of {tuple(full.shape)}: dimension 0 is no multiple of {axis.size} ranks"
        )
    if _gloo(axis) or not isinstance(codec, Cast):
        return _exchange_sum(full.contiguous(), axis, codec, into, add)
    moved = codec.encode(full.contiguous())
    axis.count(_nbytes(moved) // axis.size * (axis.size - 1))
    direct = into if into is not None and not add and into.dtype == moved.dtype else None
    out = moved.new_empty(full.shape[0] // axis.size, *full.shape[1:]) if direct is None else direct
    work = _start(_reduce_scatter_single, out, moved, axis=axis)
    return Pending(lambda: out.to(full.dtype) if into is None else _store(out, into, add), work)


def _store(value: Tensor, into: Tensor, add: bool) -> Tensor:
    if add:
        return into.add_(value)
    return into if same_start(into, value) else into.copy_(value)


def _exchange_sum(
    full: Tensor, axis: Axis, codec: Codec, into: Tensor | None, add: bool
) -> Pending:
    """Sends each peer its encoded part, and adds up the versions of this rank's part in rank order.

    More than two ranks send to themselves too, by a copy of one part here: else those in the middle would have to copy
    all other parts, to have them side by side.
    """
    dtype, shape = full.dtype, (full.shape[0] // axis.size, *full.shape[1:])
    messages = codec.encode(full.view(axis.size, -1))
    row, count = messages.shape[1], full.numel() // axis.size
    axis.count(_nbytes(messages) // axis.size * (axis.size - 1))
    splits, sent = [row] * axis.size, messages
    if axis.size == 2:
        splits[axis.index], sent = 0, messages[1 - axis.index]
    got = messages.new_empty(sum(splits))
    work = _start(dist.all_to_all_single, got, sent.reshape(-1), splits, splits, axis=axis)
    # Narrow numbers are added in fp32 and rounded once; a sum of two is rounded once anyway.
    narrow = dtype in (torch.bfloat16, torch.float16) and (axis.size > 2 or add)
    wide = torch.float32 if narrow else dtype
    direct = into.view(-1) if into is not None and not add and wide == into.dtype else None

    def add_up() -> Tensor:
        versions = list(got.view(max(1, axis.size * (axis.size > 2)), row).split(1))
        if axis.size == 2:
            versions.insert(axis.index, messages[axis.index : axis.index + 1])
        terms = (codec.decode(version, count, wide).view(-1) for version in versions)
        total = torch.add(next(terms), next(terms), out=direct)
        for term in itertools.islice(terms, 1 if got.is_meta else None):  # one shows the memory
            total += term
        if into is None:
            return total.to(dtype).view(shape)
        return _store(total.view(into.shape), into, add)

    return Pending(add_up, work)


def reduce_scatter(full: Tensor, axis: Axis) -> Tensor:
    """This rank's part [n ...] of the sum of `full` [size*n ...] over the axis."""
    return start_reduce_scatter(full, axis).wait()


def start_all_reduce(tensor: Tensor, axis: Axis, *, codec: Codec = EXACT) -> Pending:
    """Begins to sum `tensor` over the axis, in rank order; the result may or may not be `tensor` itself.

    Args:
        codec: encodes the terms. Of more than two ranks, casts encode the sums as well.
    """
    if axis.size == 1:
        return done(tensor)
    tensor, dtype = tensor.contiguous(), tensor.dtype
    if not isinstance(codec, Cast):
        return _start_scattered_all_reduce(tensor, axis, dtype, codec)
    moved = codec.encode(tensor)
    if not _gloo(axis):
        axis.count(2 * _nbytes(moved) * (axis.size - 1) // axis.size)
        return Pending(lambda: moved.to(dtype), _start(dist.all_reduce, moved, axis=axis))
    if axis.size == 2:  # the same bytes as reduce-scatter and all-gather, in one step
        return _swap_sum(moved, axis, dtype)
    return _start_scattered_all_reduce(moved, axis, dtype)


def _swap_sum(tensor: Tensor, axis: Axis, dtype: torch.dtype) -> Pending:
    other = torch.empty_like(tensor)
    axis.count(_nbytes(tensor))
    work = _start_swap(other.view(-1), tensor.view(-1), axis)
    # a + b == b + a bit for bit: both ranks get the same
    return Pending(lambda: other.to(dtype).add_(tensor), work)


def _start_swap(other: Tensor, own: Tensor, axis: Axis) -> dist.Work | None:
    """Begins to send `own` [n] to the other one of two ranks, and to receive `other` [n] from it."""
    splits = [0, own.numel()] if axis.index == 0 else [own.numel(), 0]
    return _start(dist.all_to_all_single, other, own, splits, splits, axis=axis)


def _start_scattered_all_reduce(
    tensor: Tensor, axis: Axis, dtype: torch.dtype, codec: Codec = EXACT
) -> Pending:
    """Reduce-scatter, then all-gather, of sums that are encoded again; padded to a multiple of the ranks."""
    flat = tensor.view(-1)
    padding = -flat.numel() % axis.size
    padded = torch.nn.functional.pad(flat, (0, padding)) if padding else flat
    part = start_reduce_scatter(padded, axis, codec=codec)

    def finish() -> Tensor:
        whole = start_all_gather(part.wait(), axis, codec=codec).wait()
        return whole[: flat.numel()].view_as(tensor).to(dtype)

    return Pending(finish)


def all_reduce(tensor: Tensor, axis: Axis) -> Tensor:
    """The sum of `tensor` over the axis, the same on every rank bit for bit."""
    return start_all_reduce(tensor, axis).wait()


def sum_of_scalars(values: Tensor, axis: Axis) -> Tensor:
    """The sum of a few numbers [k] over the axis, in an order of the backend's, the same bits on every rank.

    It is the backend's own all-reduce, whose memory does not grow with the ranks; nor, on NCCL's trees, its time by
    more than their depth. Ours in rank order is for many numbers.
    """
    return start_sum_of_scalars(values, axis).wait()


def start_sum_of_scalars(values: Tensor, axis: Axis) -> Pending:
    """Begins the same sum, with the same bits."""
    total = values.clone()
    if axis.size == 1:
        return done(total)
    axis.count(2 * _nbytes(total) * (axis.size - 1) // axis.size)
    return done(total, _start(dist.all_reduce, total, axis=axis))


def broadcast(tensor: Tensor, axis: Axis, source: int) -> Tensor:
    """`tensor` of the rank with index `source`, in place."""
    if axis.size > 1:
        if axis.index == source:
            axis.count(_nbytes(tensor) * (axis.size - 1))
        dist.broadcast(tensor, axis.ranks[source], group=axis.group)
    return tensor


def send(tensors: Sequence[Tensor], link: Link) -> list[Pending]:
    """Begins to send tensors over the link, in this order; they must stay unchanged until waited for."""
    tensors = [tensor.contiguous() for tensor in tensors]
    link.axis.count(sum(_nbytes(tensor) for tensor in tensors))
    return _begin(dist.isend, tensors, link)


def receive(outs: Sequence[Tensor], link: Link) -> list[Pending]:
    """Begins to receive into `outs` [any shapes, contiguous], in this order."""
    return _begin(dist.irecv, outs, link)


def _begin(
    message: Callable[..., dist.Work | None], tensors: Sequence[Tensor], link: Link
) -> list[Pending]:
    """Begins messages; several as one launch where the backend can, which then has one work for all of them."""
    peer, group = link.peer, link.axis.group
    if len(tensors) < 2:
        return [done(tensor, message(tensor, peer, group=group)) for tensor in tensors]
    works = dist.batch_isend_irecv([dist.P2POp(message, tensor, peer, group) for tensor in tensors])
    own = [[work] for work in works] if len(works) == len(tensors) else [works] * len(tensors)
    return [done(tensor, *each) for tensor, each in zip(tensors, own, strict=True)]


def gather_to_first(flat: Tensor, axis: Axis) -> list[Tensor]:
    """Every rank's flat tensor [n, its own] on the CPU of the axis's first rank, in order; an empty list elsewhere."""
    if axis.size == 1:
        return [flat.cpu()]
    sizes = exchange(flat.numel(), axis)
    if axis.index > 0:
        if flat.numel():
            axis.count(_nbytes(flat))
            dist.send(flat, axis.ranks[0], group=axis.group)
        return []
    parts = [flat.cpu()]
    for rank, size in list(zip(axis.ranks, sizes, strict=True))[1:]:
        part = flat.new_empty(size)
        if size:
            dist.recv(part, rank, group=axis.group)
        parts.append(part.cpu())
    return parts


# -------------------------------------------------------------------------------------------------------- conjugate


class _Conjugate(torch.autograd.Function):
    """Applies one function of a tensor and an axis in the forward, and another one in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, forward: Along, backward: Along) -> Tensor:
        ctx.axis, ctx.along = axis, backward
        return forward(x, axis)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.along(dy, ctx.axis), None, None, None


def _view(x: Tensor, axis: Axis) -> Tensor:
    return x.view_as(x)


def _same(dy: Tensor, axis: Axis) -> Tensor:
    return dy


def _all_reduce_copy(dy: Tensor, axis: Axis) -> Tensor:
    return all_reduce(dy.clone(), axis)  # NCCL sums in place, and dy may be another branch's too


def copy_to(x: Tensor, axis: Axis) -> Tensor:
    """f: the identity; its gradient is summed over the axis."""
    return x if axis.size == 1 else _Conjugate.apply(x, axis, _view, _all_reduce_copy)


def reduce_from(x: Tensor, axis: Axis) -> Tensor:
    """g: the sum over the axis; its gradient passes unchanged."""
    return x if axis.size == 1 else _Conjugate.apply(x, axis, all_reduce, _same)


def gather_from(x: Tensor, axis: Axis) -> Tensor:
    """[s/t ...] -> [s ...], concatenated over the axis; its gradient is summed and scattered."""
    return x if axis.size == 1 else _Conjugate.apply(x, axis, all_gather, reduce_scatter)


def scatter_to(x: Tensor, axis: Axis) -> Tensor:
    """[s ...] -> [s/t ...]: the sum over the axis, each rank keeping its part; its gradient is gathered."""
    return x if axis.size == 1 else _Conjugate.apply(x, axis, reduce_scatter, all_gather)


# ----------------------------------------------------------------------------------------------------- housekeeping


def barrier(axis: Axis) -> None:
    """Waits until every rank of the axis is here."""
    if axis.size > 1:
        dist.barrier(group=axis.group)


def exchange(value: Any, axis: Axis) -> list[Any]:
    """Every rank's `value` (anything JSON can say), in rank order; for control, never for bulk data.

    JSON rather than torch's object collectives, which unpickle what the network sends.
    """
    if axis.group is None:  # this rank alone; or on paper, where every rank is as this one
        return [value] * axis.size
    device = torch.device("cpu") if _gloo(axis) or not count() else current()
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    sizes = all_gather(torch.tensor([data.numel()], device=device), axis).tolist()
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    padded[: data.numel()] = data
    rows = all_gather(padded, axis).view(axis.size, -1).cpu()
    return [json.loads(row[:n].numpy().tobytes()) for row, n in zip(rows, sizes, strict=True)]


def problems_of_all(problems: Iterable[str | None], axis: Axis) -> list[str]:
    """Returns the different problems that the ranks of the axis found, in rank order. Collective.

    Args:
        problems: What this rank found; empty strings and None do not count.
    """
    everyone = exchange([problem for problem in problems if problem], axis)
    return list(dict.fromkeys(chain.from_iterable(everyone)))


def raise_together(
    problems: Iterable[str | None], axis: Axis, error: Callable[[str], Exception]
) -> None:
    """Raises one error on every rank of the axis if any of them found a problem. Collective.

    A rank that raised alone would leave the others waiting in their next collective.

    Args:
        problems: What this rank found; empty strings and None do not count.
        error: Makes the exception from all different problems, joined by "; ".
    """
    if found := problems_of_all(problems, axis):
        raise error("; ".join(found))


def attempt_together(
    act: Callable[[], T],
    axis: Axis,
    error: type[Exception],
    describe: Callable[[Any], str],
    catch: type[Exception] = OSError,
) -> T:
    """Returns `act()`; if it fails on any rank, raises on every rank of the axis. Collective.

    Args:
        act: Not collective.
        error: What is raised, with the problems of all ranks.
        describe: Returns the problem for an exception of type `catch`. An `error` describes itself.
        catch: Exceptions that count besides `error`.
    """
    found, problem = [], ""
    try:
        found.append(act())
    except error as own:
        problem = str(own)
    except catch as other:
        problem = describe(other)
    raise_together([problem], axis, error)
    return found[0]


def flight_record() -> bytes:
    """Returns torch's record of the recent collectives of this process, as JSON.

    It is kept if TORCH_FR_BUFFER_SIZE or TORCH_NCCL_TRACE_BUFFER_SIZE is not 0.
    """
    c10d: Any = torch._C._distributed_c10d
    nccl = dist.is_initialized() and dist.get_backend() == "nccl"
    record: bytes = (c10d._dump_nccl_trace_json if nccl else c10d._dump_fr_trace_json)()
    return record


def leave(code: int = 0) -> None:
    """Ends a program that made a process group with an exit code: in step with the others if it is 0, else at once.

    Without a process group nothing happens.
    """
    if not dist.is_initialized():
        return
    if code == 0:
        dist.barrier()
        dist.destroy_process_group()  # else it might wait for ranks that will never come
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
