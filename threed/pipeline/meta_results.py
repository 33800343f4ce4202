"""Results of operations on the meta device, computed once per shapes of the arguments.

    out = run(torch.ops.aten.add.Tensor, (a, b), {})

torch computes the shapes of most results in Python, which takes up to a millisecond per operation.
A trace of a model runs the same operations on the same shapes many times.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

# number of operations whose results are known, of about 1 KB each; when it is reached, all are forgotten
LIMIT = 50_000
_PLAIN = (
    type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
)  # fmt: skip


class NewTensor(NamedTuple):
    """Describes a tensor that is the only view of its storage, and covers it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def make(self) -> Tensor:
        """Returns such a tensor on the meta device."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


class Known(NamedTuple):
    """Describes what an operation returns, if it is not computed each time.

    Attributes:
        kind: type of the sequence of tensors that is returned; Tensor if it is one tensor.
        tensors: the new tensors. None: the first argument, which is changed in place, is returned.
    """

    kind: type
    tensors: tuple[NewTensor, ...] | None


# by operation and arguments; None: computed each time
_known: dict[Hashable, Known | None] = {}


def run(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Returns what an operation returns.

    Args:
        func: the operation.
        args: its arguments. If a tensor is not on the meta device, or of a subclass, the operation
            is computed each time.
        kwargs: its keyword arguments.
    """
    # torch computes views in C++
    key = None if func.is_view else key_of(func, args, kwargs, _is_plain)
    known = _known.get(key) if key is not None else None
    if known is not None:
        if known.tensors is None:
            return args[0]
        made = [tensor.make() for tensor in known.tensors]
        return made[0] if known.kind is Tensor else known.kind(made)
    out = func(*args, **kwargs)
    if key is not None and key not in _known:
        if len(_known) >= LIMIT:
            _known.clear()
        _known[key] = known_result(func, args, kwargs, out, _is_plain)
    return out


def key_of(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], takes: Callable[[Tensor], bool]
) -> Hashable | None:
    """Returns what the result of an operation depends on; None if it may depend on more.

    Args:
        func: the operation.
        args: its arguments.
        kwargs: its keyword arguments.
        takes: whether shape, strides and dtype of a tensor are all that a result depends on.
    """
    try:
        named = [(name, _key(value, takes)) for name, value in kwargs.items()]
        # the default dtype is that of, for example, a quotient of integers
        return (func, torch.get_default_dtype(), *named, *[_key(value, takes) for value in args])
    except TypeError:
        return None


def _key(value: Any, takes: Callable[[Tensor], bool]) -> Hashable:
    if isinstance(value, Tensor):
        if takes(value):
            return (value.shape, value.stride(), value.dtype)
    elif isinstance(value, list | tuple):
        return tuple([_key(item, takes) for item in value])
    elif isinstance(value, _PLAIN):
        return (type(value), value)
    raise TypeError(f"unknown kind of argument: {type(value).__name__}")


def known_result(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, takes: Callable[[Tensor], bool]
) -> Known | None:  # fmt: skip
    """Returns the description of an operation's result; None if it must be computed each time.

    Args:
        func: the operation.
        args: its arguments.
        kwargs: its keyword arguments.
        out: its result.
        takes: whether a tensor is described by its shape, strides and dtype.
    """
    if func._schema.is_mutable:
        first, *others = (a.alias_info and a.alias_info.is_write for a in func._schema.arguments)
        reshapes = torch.Tag.inplace_view in func.tags  # such as `transpose_`
        changed = first and not any(others) and not reshapes and args and out is args[0]
        return Known(Tensor, None) if changed else None
    tensors = [out] if isinstance(out, Tensor) else out
    if not isinstance(tensors, list | tuple):
        return None
    given = [*args, *kwargs.values()]
    given += [item for value in given if isinstance(value, list | tuple) for item in value]
    used = {t.untyped_storage()._cdata for t in given if isinstance(t, Tensor)}
    for tensor in tensors:
        if not (isinstance(tensor, Tensor) and takes(tensor) and _covers_its_storage(tensor)):
            return None
        if (storage := tensor.untyped_storage()._cdata) in used:
            return None
        used.add(storage)
    kind = Tensor if isinstance(out, Tensor) else type(out)
    return Known(kind, tuple(NewTensor(tuple(t.shape), t.stride(), t.dtype) for t in tensors))


def _is_plain(tensor: Tensor) -> bool:
    return (
        tensor.is_meta
        and type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
    )


def _covers_its_storage(tensor: Tensor) -> bool:
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    nbytes = (last + 1) * tensor.element_size() if tensor.numel() else 0
    return tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == nbytes
