"""Communication over an `Axis`, with a count of the bytes that this rank sends.

- Plain: all_reduce, all_gather, reduce_scatter, send, receive. Functions named `start_…` are
  asynchronous and return a `Pending`.
- Control: barrier, exchange, problems_of_all, raise_together, attempt_together, leave.

All training communication calls torch.distributed through this module. `conjugate` has the
functions for autograd. On an axis of size 1 every
function returns at once. Shards are along dimension 0, so that a gather is a concatenation without
a copy.

With gloo, reduce-scatter and all-reduce of tensors do not use gloo's reductions. Each rank owns one
part of the sum. In one all-to-all, every rank sends to each peer its terms of the peer's part. Then
every rank adds the terms that it received, in rank order. The result is deterministic and the same
on every rank. gloo's own reduce-scatter sends twice the bytes, because it is an all-reduce
internally. gloo's all-reduce is slower than the all-to-all.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from threed.core.device import count, current
from threed.distributed.codecs import EXACT, Cast, Codec
from threed.distributed.purposes import DATA, Purpose, UnequalCallsError, check
from threed.distributed.topology import Axis, Link, default_device

T = TypeVar("T")

# In newer versions of torch, the names of these functions end in `_single`, not in `_tensor`.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_FIRST = 120  # bytes of a value's JSON in the first message of `exchange`


_LOST = (
    "This rank could not communicate with another rank, which may have failed or been killed: see the output of the"
    " other ranks, and the list of failures that torchrun prints (exit code -9: killed)"
)


class Pending:
    """The result of an asynchronous operation.

    Args:
        finish: function that does the local work after communication and returns the result.
        works: operations to wait for, each a `dist.Work` or `journal.Started`; None entries are
            ignored.
    """

    def __init__(self, finish: Callable[[], Tensor], *works: Any) -> None:
        self._finish: Callable[[], Tensor] | None = finish
        self._works = works
        self._result: Tensor | None = None

    def wait(self) -> Tensor:
        """Waits for communication, finishes the local work and returns the result."""
        if self._finish is not None:
            try:
                for work in filter(None, self._works):
                    work.wait()
            except RuntimeError as error:
                error.add_note(_LOST)
                raise
            self._result = self._finish()
            self._finish, self._works = None, ()  # frees the buffers that they refer to
        assert self._result is not None
        return self._result


def done(tensor: Tensor, *works: Any) -> Pending:
    """Returns a `Pending` that waits for `works`, and whose result is `tensor`."""
    return Pending(lambda: tensor, *works)


def split(size: int, parts: int, index: int) -> tuple[int, int]:
    """Returns the range [start, stop) of one of several parts whose sizes differ by at most one.

    Args:
        size: number of elements to divide.
        parts: number of parts.
        index: number of the part.
    """
    return size * index // parts, size * (index + 1) // parts


def same_start(a: Tensor, b: Tensor) -> bool:
    """Returns whether two tensors start at the same address of the same storage."""
    return (
        a.untyped_storage()._cdata == b.untyped_storage()._cdata
        and a.storage_offset() == b.storage_offset()
    )


def _gloo(axis: Axis) -> bool:
    if axis.group is None:  # meta device: returns whether a real run would use gloo
        return default_device().type == "cpu"
    return dist.get_backend(axis.group) == "gloo"


def overlaps_kernels(axis: Axis) -> bool:
    """Returns whether collectives over an axis run on the device at the same time as kernels.

    With gloo they do not: they use the processors that compute.
    """
    return axis.size > 1 and not _gloo(axis)


def _start(collective: Callable[..., Any], axis: Axis, sent: int, out: Tensor, *args: Any) -> Any:
    """Launches a collective asynchronously; on the meta device, only records it.

    Args:
        collective: function of torch.distributed.
        axis: the ranks.
        sent: bytes that this rank sends.
        out: first argument of the function.
        args: its other arguments.

    Returns:
        A `dist.Work` or `journal.Started`, or None.
    """
    axis.count(sent)
    if out.is_meta:
        return axis.journal and axis.journal.start(axis.label, sent, axis.ranks, out, *args)
    return collective(out, *args, group=axis.channel, async_op=True)


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


# ------------------------------------------------------------------------------------------------------------ plain


def start_all_gather(
    shard: Tensor, axis: Axis, out: Tensor | None = None, *, codec: Codec = EXACT
) -> Pending:
    """Starts to gather the `shard` of every rank, concatenated to [size*n ...]. Collective.

    Args:
        shard: this rank's shard [n ...]. It may be a view of this rank's part of `out`.
        axis: the ranks.
        out: output [size*n ...]; by default a new tensor.
        codec: encodes the shards. All parts of the result are decoded messages, even the part of
            this rank.
    """
    if axis.size == 1:
        return done(shard if out is None else out.copy_(shard))
    if codec != EXACT:
        return _start_encoded_gather(shard, axis, out, codec)
    shard = shard.contiguous()
    if out is None:
        out = shard.new_empty(axis.size * shard.shape[0], *shard.shape[1:])
    if axis.size == 2 and _gloo(axis):
        return _swap(shard, out, axis)
    sent = _nbytes(shard) * (axis.size - 1)
    return Pending(lambda: out, _start(_all_gather_single, axis, sent, out, shard))


def start_all_gathers(
    shards: Iterable[Tensor], axis: Axis, outs: Sequence[Tensor], *, codec: Codec = EXACT
) -> Pending:
    """Starts several all-gathers, which NCCL runs as one operation. Collective.

    Args:
        shards: this rank's shards, each [n ...]; at least one. With gloo, each gather starts before
            the next shard is requested.
        axis: the ranks.
        outs: outputs, each [size*n ...].
        codec: encodes the shards.

    Returns:
        A `Pending` that waits for all of the gathers; its result is the last output.
    """
    single = axis.size == 1 or codec != EXACT or outs[0].is_meta or _gloo(axis)
    # torch has no public function for this; its FSDP and Megatron-LM also use this one
    together = nullcontext() if single else dist._coalescing_manager(axis.channel, async_ops=True)
    with together as work:
        gathers = [
            start_all_gather(shard, axis, out, codec=codec)
            for shard, out in zip(shards, outs, strict=True)
        ]
    if work is not None:
        return done(outs[-1], work)
    return Pending(lambda: [gather.wait() for gather in gathers][-1])


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
    """All-gathers between two ranks by exchanging the shards.

    For 32 MiB and more, gloo's all-gather takes 3 to 5 times as long as this exchange.
    """
    halves = out.view(2, -1)
    if not same_start(halves[axis.index], shard):
        halves[axis.index].copy_(shard.view(-1))
    return Pending(lambda: out, _start_swap(halves[1 - axis.index], shard.view(-1), axis))


def all_gather(shard: Tensor, axis: Axis) -> Tensor:
    """Returns the shards [n ...] of all ranks, concatenated to [size*n ...]. Collective."""
    return start_all_gather(shard, axis).wait()


def start_reduce_scatter(
    full: Tensor,
    axis: Axis,
    *,
    codec: Codec = EXACT,
    into: Tensor | None = None,
    add: bool = False,
) -> Pending:
    """Starts to sum `full` over ranks; the result is this rank's part of the sum. Collective.

    Args:
        full: this rank's terms, [size*n ...]. Its values are undefined after the call.
        axis: the ranks.
        codec: encodes the terms, including this rank's own. The decoded terms are summed in the
            dtype of `full`. Exception: NCCL itself sums the messages of a `Cast`, in the dtype of
            the `Cast`.
        into: output [n ...], by default a new tensor. It may be this rank's part of `full`.
        add: whether to add the result to `into`, instead of overwriting `into`.

    Raises:
        ValueError: if dimension 0 is not a multiple of the number of ranks.
    """
    if axis.size == 1:
        return done(full if into is None else _store(full, into, add))
    if full.shape[0] % axis.size:
        raise ValueError(
            f"reduce-scatter of {tuple(full.shape)}: dimension 0 is not a multiple of {axis.size} ranks"
        )
    if _gloo(axis) or not isinstance(codec, Cast):
        return _exchange_sum(full.contiguous(), axis, codec, into, add)
    moved = codec.encode(full.contiguous())
    sent = _nbytes(moved) // axis.size * (axis.size - 1)
    direct = into if into is not None and not add and into.dtype == moved.dtype else None
    out = moved.new_empty(full.shape[0] // axis.size, *full.shape[1:]) if direct is None else direct
    work = _start(_reduce_scatter_single, axis, sent, out, moved)
    return Pending(lambda: out.to(full.dtype) if into is None else _store(out, into, add), work)


def _store(value: Tensor, into: Tensor, add: bool) -> Tensor:
    if add:
        return into.add_(value)
    return into if same_start(into, value) else into.copy_(value)


def _exchange_sum(
    full: Tensor, axis: Axis, codec: Codec, into: Tensor | None, add: bool
) -> Pending:
    """Starts a reduce-scatter by one all-to-all; the received terms are added in rank order.

    Each rank encodes its terms of all parts, and sends each peer the terms of the peer's part. With
    more than two ranks, it also sends its own part to itself, which copies one part. The
    alternative would copy more: without a rank's own part, the remaining parts are contiguous only
    on the first and the last rank, so all other ranks would have to copy all remaining parts.
    """
    dtype, shape = full.dtype, (full.shape[0] // axis.size, *full.shape[1:])
    messages = codec.encode(full.view(axis.size, -1))
    row, count = messages.shape[1], full.numel() // axis.size
    splits, outgoing = [row] * axis.size, messages
    if axis.size == 2:
        splits[axis.index], outgoing = 0, messages[1 - axis.index]
    got = messages.new_empty(sum(splits))
    sent = _nbytes(messages) // axis.size * (axis.size - 1)
    work = _start(dist.all_to_all_single, axis, sent, got, outgoing.reshape(-1), splits, splits)
    # Terms in bf16 and fp16 are added in fp32, and the sum is rounded once. A sum of only two terms
    # is rounded once in any dtype.
    narrow = dtype in (torch.bfloat16, torch.float16) and (axis.size > 2 or add)
    wide = torch.float32 if narrow else dtype
    direct = into.view(-1) if into is not None and not add and wide == into.dtype else None

    def add_up() -> Tensor:
        versions = list(got.view(max(1, axis.size * (axis.size > 2)), row).split(1))
        if axis.size == 2:
            versions.insert(axis.index, messages[axis.index : axis.index + 1])
        terms = (codec.decode(version, count, wide).view(-1) for version in versions)
        total = torch.add(next(terms), next(terms), out=direct)
        # On the meta device one addition is enough to measure memory.
        for term in itertools.islice(terms, 1 if got.is_meta else None):
            total += term
        if into is None:
            return total.to(dtype).view(shape)
        return _store(total.view(into.shape), into, add)

    return Pending(add_up, work)


def reduce_scatter(full: Tensor, axis: Axis) -> Tensor:
    """Returns this rank's part [n ...] of the sum of `full` [size*n ...]. Collective."""
    return start_reduce_scatter(full, axis).wait()


def start_all_reduce(tensor: Tensor, axis: Axis, *, codec: Codec = EXACT) -> Pending:
    """Starts to sum `tensor` over the axis. Collective.

    On gloo the terms are added in rank order.

    Args:
        tensor: this rank's term. Its values are undefined after the call, because the result may
            overwrite them.
        axis: the ranks.
        codec: encodes the terms, and also the sums. Exception: on two ranks with gloo, a `Cast`
            encodes only the terms.

    Returns:
        A `Pending`, whose result is the sum in the shape and dtype of `tensor`.
    """
    if axis.size == 1:
        return done(tensor)
    tensor, dtype = tensor.contiguous(), tensor.dtype
    if not isinstance(codec, Cast):
        return _start_scattered_all_reduce(tensor, axis, dtype, codec)
    moved = codec.encode(tensor)
    if not _gloo(axis):
        sent = 2 * _nbytes(moved) * (axis.size - 1) // axis.size
        work = _start(dist.all_reduce, axis, sent, moved)
        return Pending(lambda: moved.to(dtype), work)
    # On two ranks, an exchange of the full tensors sends as many bytes as a reduce-scatter and an
    # all-gather together.
    if axis.size == 2:
        return _swap_sum(moved, axis, dtype)
    return _start_scattered_all_reduce(moved, axis, dtype)


def _swap_sum(tensor: Tensor, axis: Axis, dtype: torch.dtype) -> Pending:
    other = torch.empty_like(tensor)
    work = _start_swap(other.view(-1), tensor.view(-1), axis)
    # a + b == b + a bit for bit, so both ranks get the same result.
    return Pending(lambda: other.to(dtype).add_(tensor), work)


def _start_swap(other: Tensor, own: Tensor, axis: Axis) -> Any:
    """Starts to exchange tensors between two ranks: sends `own` [n], receives `other` [n]."""
    splits = [0, own.numel()] if axis.index == 0 else [own.numel(), 0]
    return _start(dist.all_to_all_single, axis, _nbytes(own), other, own, splits, splits)


def _start_scattered_all_reduce(
    tensor: Tensor, axis: Axis, dtype: torch.dtype, codec: Codec = EXACT
) -> Pending:
    """Starts an all-reduce that consists of a reduce-scatter and an all-gather.

    The tensor is padded to a multiple of the number of ranks. The sums are encoded again for the
    all-gather.
    """
    flat = tensor.view(-1)
    padding = -flat.numel() % axis.size
    padded = torch.nn.functional.pad(flat, (0, padding)) if padding else flat
    part = start_reduce_scatter(padded, axis, codec=codec)

    def finish() -> Tensor:
        full = start_all_gather(part.wait(), axis, codec=codec).wait()
        return full[: flat.numel()].view_as(tensor).to(dtype)

    return Pending(finish)


def all_reduce(tensor: Tensor, axis: Axis) -> Tensor:
    """Returns the sum of `tensor` over the axis, bit-identical on all ranks. Collective."""
    return start_all_reduce(tensor, axis).wait()


def all_to_all(parts: Tensor, axis: Axis) -> Tensor:
    """Sends part i of `parts` to rank i of the axis. Collective.

    Args:
        parts: one part per rank, [size ...].
        axis: the ranks.

    Returns:
        The parts that the ranks sent to this rank, in rank order, [size ...].
    """
    return start_exchange(parts, axis, each := [1] * axis.size, each).wait()


def start_exchange(
    x: Tensor, axis: Axis, sends: Sequence[int], receives: Sequence[int], out: Tensor | None = None
) -> Pending:
    """Starts to send a different number of rows to each rank of an axis. Collective.

    Args:
        x: the rows for each rank, in rank order, [n ...]. They must not change until `wait`.
        axis: the ranks.
        sends: number of rows for each rank.
        receives: number of rows that each rank sends to this one.
        out: memory of the received rows, [m ...]; not used if the axis has size 1. Default: new memory.

    Returns:
        A `Pending`, whose result are the received rows, in rank order, [m ...].
    """
    if axis.size == 1:
        return done(x)
    x, row = x.contiguous(), x.shape[1:].numel()
    out = x.new_empty(sum(receives), *x.shape[1:]) if out is None else out
    sent = (sum(sends) - sends[axis.index]) * row * x.element_size()
    sizes = [[rows * row for rows in per_rank] for per_rank in (receives, sends)]
    return done(out, _start(dist.all_to_all_single, axis, sent, out.view(-1), x.view(-1), *sizes))


def start_shift(x: Tensor, axis: Axis) -> Pending:
    """Starts to send x to the next rank of a ring, and to receive from the previous one. Collective.

    Args:
        x: tensor to send, in the same shape on all ranks. It must not change until `wait`.
        axis: the ranks of the ring, at least two.

    Returns:
        A `Pending`, whose result is the previous rank's tensor.
    """
    sends, receives = [0] * axis.size, [0] * axis.size
    sends[(axis.index + 1) % axis.size] = receives[axis.index - 1] = len(x)
    return start_exchange(x, axis, sends, receives)


def sum_of_scalars(values: Tensor, axis: Axis) -> Tensor:
    """Returns the sum of a few numbers [k] over the axis, bit-identical on all ranks. Collective.

    NCCL's all-reduce chooses the order of summation. Its required memory does not grow with the
    number of ranks. If NCCL uses a tree, the time grows only with the depth of the tree. With gloo,
    each rank sends its numbers to every other rank, and adds the numbers of all ranks.
    """
    return start_sum_of_scalars(values, axis).wait()


def start_sum_of_scalars(values: Tensor, axis: Axis) -> Pending:
    """Asynchronous variant of `sum_of_scalars`, with a bit-identical result. Collective."""
    if axis.size == 1:
        return done(values.clone())
    if _gloo(axis):
        terms = _start_small_gather(values.reshape(-1), axis)
        rows = (axis.size, *values.shape)
        return Pending(lambda: terms.wait().view(rows).sum(0, dtype=values.dtype))
    total = values.clone()
    sent = 2 * _nbytes(total) * (axis.size - 1) // axis.size
    return done(total, _start(dist.all_reduce, axis, sent, total))


def _start_small_gather(tensor: Tensor, axis: Axis) -> Pending:
    """Starts to gather a small tensor [n] of every rank, concatenated to [size*n]. Collective.

    With gloo, every rank sends a copy to each peer in one all-to-all. gloo's all-gather and
    all-reduce pass messages around a ring: on 4 ranks of one core, they take 2 and 10 times as long.
    """
    if not _gloo(axis):
        return start_all_gather(tensor, axis)
    out, copies = tensor.new_empty(axis.size * tensor.numel()), tensor.repeat(axis.size)
    sent = _nbytes(tensor) * (axis.size - 1)
    return done(out, _start(dist.all_to_all_single, axis, sent, out, copies))


def broadcast(tensor: Tensor, axis: Axis, source: int) -> Tensor:
    """Overwrites `tensor` with the tensor of the rank at index `source`; returns it. Collective."""
    if axis.size > 1:
        if axis.index == source:
            axis.count(_nbytes(tensor) * (axis.size - 1))
        dist.broadcast(tensor, axis.ranks[source], group=axis.group)
    return tensor


def send(tensors: Sequence[Tensor], link: Link) -> list[Pending]:
    """Starts to send tensors over a link, in order; do not change a tensor before its `wait`."""
    tensors = [tensor.contiguous() for tensor in tensors]
    link.axis.count(sum(_nbytes(tensor) for tensor in tensors))
    return _begin(dist.isend, tensors, link)


def receive(outs: Sequence[Tensor], link: Link) -> list[Pending]:
    """Starts to receive into `outs` (contiguous, any shapes) over a link, in order."""
    return _begin(dist.irecv, outs, link)


def _begin(
    message: Callable[..., dist.Work | None], tensors: Sequence[Tensor], link: Link
) -> list[Pending]:
    """Starts sends or receives. Several messages are launched as one batch.

    The backend may return a single work object for a batch. Every `Pending` then waits for it.
    """
    peer, group = link.peer, link.axis.group
    if len(tensors) < 2:
        return [done(tensor, message(tensor, peer, group=group)) for tensor in tensors]
    works = dist.batch_isend_irecv([dist.P2POp(message, tensor, peer, group) for tensor in tensors])
    own = [[work] for work in works] if len(works) == len(tensors) else [works] * len(tensors)
    return [done(tensor, *each) for tensor, each in zip(tensors, own, strict=True)]


def gather_to_first(flat: Tensor, axis: Axis) -> list[Tensor]:
    """Gathers flat tensors [n] in host memory of the first rank. Collective.

    The lengths n may differ between ranks.

    Returns:
        On the first rank, the tensors in rank order; on other ranks, an empty list.
    """
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


# ----------------------------------------------------------------------------------------------------- housekeeping


def device_of(axis: Axis) -> torch.device:
    """Returns the device of the tensors that the collectives of an axis send."""
    return torch.device("cpu") if _gloo(axis) or not count() else current()


def barrier(axis: Axis) -> None:
    """Waits until every rank of the axis has called this function. Collective."""
    if axis.size > 1:
        dist.barrier(group=axis.group)


def exchange(value: Any, axis: Axis, purpose: Purpose = DATA) -> list[Any]:
    """Returns the `value` of every rank, in rank order. Collective.

    It is intended for small control data. Values are sent as JSON, because torch's object
    collectives would unpickle data from the network. The first message has the length of the JSON,
    the number of the purpose, and the first bytes of the JSON. A second message follows only if a
    rank has a longer text.

    Args:
        value: a value that JSON can represent.
        axis: the ranks. If the axis has no process group (meta device), the result has this rank's
            value for every rank.
        purpose: purpose of the call; compared between the ranks.

    Raises:
        UnequalCallsError: the ranks call it for different purposes.
    """
    if axis.group is None:  # one rank, or the meta device
        return [value] * axis.size
    text = json.dumps(value).encode()
    first, rest = text[:_FIRST], text[_FIRST:]
    head = len(text).to_bytes(7, "little") + bytes([purpose.number])
    rows = _gather_bytes(head + first, 8 + _FIRST, axis)
    check([row[7] for row in rows], axis.ranks)
    sizes = [int.from_bytes(row[:7], "little") for row in rows]
    texts = [row[8:] for row in rows]
    if max(sizes) > _FIRST:
        rests = _gather_bytes(rest, max(sizes) - _FIRST, axis)
        texts = [start + end for start, end in zip(texts, rests, strict=True)]
    return [json.loads(row[:size]) for row, size in zip(texts, sizes, strict=True)]


def _gather_bytes(data: bytes, length: int, axis: Axis) -> list[bytes]:
    """Returns the `data` of every rank in rank order, padded to `length` bytes. Collective."""
    padded = torch.frombuffer(bytearray(data.ljust(length, b"\0")), dtype=torch.uint8)
    padded = padded.to(device_of(axis))
    rows = _start_small_gather(padded, axis).wait().view(axis.size, length).cpu()
    return [row.numpy().tobytes() for row in rows]


def problems_of_all(problems: Iterable[str | None], axis: Axis) -> list[str]:
    """Returns the distinct problems that the ranks of the axis found, in rank order. Collective.

    Args:
        problems: problems of this rank; empty strings and None are ignored.
        axis: the ranks.
    """
    everyone = exchange([problem for problem in problems if problem], axis)
    return list(dict.fromkeys(chain.from_iterable(everyone)))


def raise_together(
    problems: Iterable[str | None], axis: Axis, error: Callable[[str], Exception]
) -> None:
    """Raises the same error on every rank of the axis if any rank found a problem. Collective.

    If only one rank raised an error, the other ranks would hang in their next collective.

    Args:
        problems: problems of this rank; empty strings and None are ignored.
        axis: the ranks.
        error: creates the exception from all distinct problems, joined by "; ".
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
        act: function without arguments; must not be collective.
        axis: the ranks.
        error: type of the exception that is raised. Its message contains the problems of all ranks.
            `act` may also raise exceptions of this type; then their `str` is the problem.
        describe: function from an exception of type `catch` to the text of the problem.
        catch: a second type of exceptions of `act` that count as failures. If `act` raises an
            exception of any other type, it is raised on this rank only.
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


@contextmanager
def failing_together(axis: Axis, what: str) -> Iterator[None]:
    """Context manager: if the block raises an error on one rank, it does on all ranks. Collective.

    Args:
        axis: the ranks.
        what: name of the block, for the error on the other ranks.

    Raises:
        RuntimeError: if the block has raised an error on another rank.
    """
    try:
        yield
    except UnequalCallsError:  # raised on all ranks, some of which may have left this block already
        raise
    except BaseException:
        exchange(True, axis)
        raise
    failed = exchange(False, axis)
    if True in failed:
        raise RuntimeError(f"{what} raised an error on rank {axis.ranks[failed.index(True)]}")


def flight_record() -> bytes:
    """Returns torch's record of this process's recent collectives, as JSON.

    torch keeps this record if TORCH_FR_BUFFER_SIZE or TORCH_NCCL_TRACE_BUFFER_SIZE is not 0.
    """
    c10d: Any = torch._C._distributed_c10d
    nccl = dist.is_initialized() and dist.get_backend() == "nccl"
    record: bytes = (c10d._dump_nccl_trace_json if nccl else c10d._dump_fr_trace_json)()
    return record


def leave(code: int = 0) -> None:
    """Exits the process with `code`; without a process group, returns instead.

    If `code` is 0, the function first waits for the other ranks, so it is collective. With another
    code it exits at once.
    """
    if not dist.is_initialized():
        return
    if code == 0:
        # Destroying the group may wait for other ranks. After the barrier, all ranks are about to
        # destroy it.
        dist.barrier()
        dist.destroy_process_group()

    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
