"""The device's work in a traced forward or backward: matrix products, attention, other kernels and
collectives, in order.

    recorder = Recorder(journal)
    recorder.add(func, args, kwargs, out)       # after every operation, from a TorchDispatchMode
    recorder.take()                             # the operations since the last call

A kernel of `csrc/cuda` or of torch that is neither a product nor attention is counted by its bytes:
it reads each of its arguments once and writes each of its results once. An argument that it changes
in place is read and written.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from threed.distributed.journal import Journal, Pattern
from threed.ops import attention_costs, grouped, launch

# Operations that launch no kernel, in addition to views.
_FREE = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "_reshape_alias",
    "detach", "detach_", "alias", "lift_fresh", "set_", "resize_", "record_stream", "is_pinned", "_pin_memory",
}  # fmt: skip
_OVERWRITING = {"copy_", "fill_", "zero_"}  # do not read the argument that they change
_LOOKUPS = {"embedding", "index_select", "index_add_"}  # touch some rows of their first argument
_UNREAD = {"scale_"}  # a kernel that ends at once if its factor is 1, as without loss scaling
# -> position of the first matrix
_PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1, "_grouped_mm": 0}


@dataclass(frozen=True)
class Operation:
    """An operation of the device.

    Attributes:
        kind: "product", "attention" (a forward or a backward), "memory" (any other kernel),
            "message" (the start of a collective), or "wait" (for a collective).
        flops: FLOPs that the device executes, without the masked half of causal attention; 0 for
            memory, message and wait.
        nbytes: bytes read and written; for a message, the bytes that this rank sends.
        shape: m, n and k of a product, the rows of which include the batch; length and head size of
            attention. Of a grouped product, those of one group, if all groups have equally many rows.
        groups: number of groups of a grouped product; else 1.
        backward: whether it is the backward of attention, or a product that is added to the
            gradient of a weight.
        wide: whether a product of 16-bit matrices is added in fp32.
        launches: number of kernels; those of a message run on another stream and do not count.
        axis: axis of a message.
        ranks: ranks between which a message is sent.
        pattern: to whom each rank sends in a message.
        read: of a wait: whether the host reads the result.
        number: number of a message among those of a forward or backward, from 0; the wait for it
            has the same number.
    """

    kind: Literal["product", "attention", "memory", "message", "wait"]
    flops: int = 0
    nbytes: int = 0
    shape: tuple[int, ...] = ()
    backward: bool = False
    wide: bool = False
    launches: int = 1
    axis: str = ""
    number: int = 0
    groups: int = 1
    ranks: tuple[int, ...] = ()
    pattern: Pattern = "group"
    read: bool = False


class Recorder:
    """Records the operations of a trace.

    Args:
        journal: the collectives of the rank. Those between two operations are recorded before the
            second one.
    """

    def __init__(self, journal: Journal | None = None) -> None:
        self._journal = Journal() if journal is None else journal
        self._read = len(self._journal.entries)
        self._first = self._journal.started + 1
        self._found: list[Operation] = []
        self._constants = set[int]()  # storages with constants, see `_is_constant`

    def add(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """Records an operation that has run.

        Args:
            func: the overload, as in `__torch_dispatch__`.
            args: its positional arguments.
            kwargs: its keyword arguments.
            out: its result.
        """
        name = func._opname
        if func.is_view:
            return
        if name in _FREE:
            self._constants -= set(map(_key, tensors_in(out)))
            return
        if self._is_constant(args, kwargs, out):
            return
        self._add_messages()
        plain = name.removesuffix("_")
        if plain in _PRODUCTS:
            made = _grouped if plain == "_grouped_mm" else _product
            self._found.append(made(func, args[_PRODUCTS[plain] :], out))
        elif name.startswith("_scaled_dot_product"):
            self._found.append(_attention(_by_name(func, args, kwargs), "backward" in name))
        else:
            ours = launch.OPERATORS.get(f"{func.namespace}::{name}")
            count = 1 if ours is None else ours.launches(*args)
            nbytes = 0 if name in _UNREAD else _nbytes(func, name, args, kwargs, out)
            self._found.append(Operation("memory", nbytes=nbytes, launches=count))

    def _is_constant(self, args: Any, kwargs: Mapping[str, Any], out: Any) -> bool:
        """Returns whether a result depends on no tensor, such as a part of a table of angles.

        Layers create such tensors once and keep them, so they take no time in a step.
        """
        given = list(tensors_in(*args, *kwargs.values()))
        found = all(_key(tensor) in self._constants for tensor in given)
        keys = set(map(_key, tensors_in(out)))
        self._constants = self._constants | keys if found else self._constants - keys
        return found

    def take(self) -> tuple[Operation, ...]:
        """Returns the operations since the last call."""
        self._add_messages()
        found, self._found = tuple(self._found), []
        self._first = self._journal.started + 1
        return found

    def _add_messages(self) -> None:
        entries = self._journal.entries
        for entry in entries[self._read :]:
            number, axis, ranks = entry.number - self._first, entry.axis, entry.ranks
            if entry.sent is not None:
                found = Operation(
                    "message", 0, entry.sent, launches=0, axis=axis, number=number, ranks=ranks,
                    pattern=entry.pattern,
                )  # fmt: skip
                self._found.append(found)
            elif number >= 0:  # otherwise it waits for a message before the last `take`
                self._found.append(
                    Operation("wait", launches=0, axis=axis, number=number, read=entry.counts)
                )
        self._read = len(entries)


def _product(func: Any, args: Sequence[Any], out: Tensor) -> Operation:
    """Returns the record of a product.

    A product that writes to an existing tensor adds to the gradient of a weight.
    """
    a, b = args[0], args[1]
    rows, inner, columns = a.numel() // a.shape[-1], a.shape[-1], b.shape[-1]
    nbytes = a.nbytes + b.nbytes + out.nbytes
    return Operation(
        "product", 2 * rows * inner * columns, nbytes, (rows, columns, inner),
        func._schema.is_mutable, out.dtype.itemsize > a.dtype.itemsize,
    )  # fmt: skip


def _grouped(func: Any, args: Sequence[Any], out: Tensor) -> Operation:
    """Returns the record of a grouped product; see `ops.grouped` for its two kinds."""
    a, b = args[0], args[1]
    nbytes, (rows, inner) = a.nbytes + b.nbytes + out.nbytes, a.shape
    groups, columns = (b if b.dim() == 3 else out).shape[0], b.shape[-1]
    parts = (rows, inner / groups) if b.dim() == 2 else (rows / groups, inner)
    shape = math.ceil(parts[0]), columns, math.ceil(parts[1])
    flops, weights = grouped.kernel_flops(a, b), b.dim() == 2
    return Operation("product", flops, nbytes, shape, weights, groups=groups)


def _attention(given: Mapping[str, Any], backward: bool) -> Operation:
    """Returns the record of fused attention.

    A backward has five products, a forward two. With `is_causal`, half of the pairs are computed.

    Args:
        given: arguments by name.
        backward: whether it is the backward.
    """
    q, k, v = (given[name] for name in ("query", "key", "value"))
    flops = attention_costs.kernel_flops(q, k, v) * (5 if backward else 2) // 2
    nbytes = (2 * q.nbytes + k.nbytes + v.nbytes) * (2 if backward else 1)
    shape = (k.shape[-2], q.shape[-1])
    return Operation(
        "attention", flops // (2 if given.get("is_causal") else 1), nbytes, shape, backward
    )


def _by_name(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {**dict(zip((a.name for a in func._schema.arguments), args, strict=False)), **kwargs}


def _nbytes(func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """Returns the bytes that a kernel reads and writes, see the head of this file."""
    if name in _LOOKUPS:
        rows = args[-1] if name == "index_add_" else out
        return sum(map(_size, tensors_in(rows))) * (3 if name == "index_add_" else 2)
    total, changed = 0, set[int]()
    given = _by_name(func, args, kwargs)
    for argument in func._schema.arguments:
        written = argument.alias_info is not None and argument.alias_info.is_write
        for tensor in tensors_in(given.get(argument.name)):
            total += _size(tensor) * (2 if written and name not in _OVERWRITING else 1)
            changed |= {id(tensor)} if written else set()
    return total + sum(_size(tensor) for tensor in tensors_in(out) if id(tensor) not in changed)


def tensors_in(*values: Any) -> Iterator[Tensor]:
    """Yields the tensors in arguments of an operation, which may contain lists and tuples."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(*value)


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _size(tensor: Tensor) -> int:
    """Returns the bytes of a tensor. An expanded dimension counts once: caches serve the rest."""
    sizes = [n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    return math.prod(sizes) * tensor.element_size()
