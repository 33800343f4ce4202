"""Results of operations on fake tensors, from the shapes of their arguments.

`FakeTensorMode` takes up to a millisecond per operation. Here views are made by their meta kernels, and the forms of
other results are kept, so that each operation is computed once per form of its arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager

PLAIN = (
    type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
)  # fmt: skip
Form = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
# None: the results are not only new tensors of the device, so they are computed each time
_known: dict[Hashable, tuple[type, list[Form]] | None] = {}


def result(func: Any, args: Any, kwargs: Any, given: list[Tensor], device: torch.device) -> Any:
    """Returns what an operation on tensors returns, as `FakeTensorMode` does.

    Args:
        func: the operation; it changes none of its arguments.
        args: its arguments.
        kwargs: those that are given by name.
        given: the tensors among them.
        device: where results are kept by form.
    """
    if not given or not all(isinstance(t, FakeTensor) and t.fake_device == device for t in given):
        return func(*args, **kwargs)
    mode = given[0].fake_mode  # type: ignore[attr-defined]
    if func.is_view or func._opname == "_unsafe_view":
        with in_kernel_invocation_manager(mode):
            out = func(*args, **kwargs)
        wrap = functools.partial(FakeTensor, mode, device=device)
        return wrap(out) if isinstance(out, Tensor) else type(out)(map(wrap, out))
    if (key := key_of(func, args, kwargs)) is None:
        return func(*args, **kwargs)
    if (form := _known.get(key)) is not None:
        kind, parts = form
        with in_kernel_invocation_manager(mode):
            made = [
                torch.empty_strided(shape, strides, dtype=dtype, device="meta")
                for shape, strides, dtype in parts
            ]
        tensors = [FakeTensor(mode, x, device) for x in made]
        return tensors[0] if issubclass(kind, Tensor) else kind(tensors)
    out = func(*args, **kwargs)
    if key not in _known:
        _known[key] = _form(out, given, device)
    return out


def key_of(func: Any, args: Any, kwargs: Any) -> Hashable | None:
    """Returns what the forms of an operation's results depend on; None if they may depend on more."""
    try:
        return (func, _key(args), _key(tuple(kwargs)), _key(tuple(kwargs.values())))
    except TypeError:
        return None


def _key(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return (type(value), value.shape, value.stride(), value.dtype)
    if isinstance(value, list | tuple):
        return tuple(map(_key, value))
    if isinstance(value, PLAIN):
        return (type(value), value)
    raise TypeError(f"{type(value).__name__} is not a plain argument")


def _form(
    out: Any, given: Iterable[Tensor], device: torch.device
) -> tuple[type, list[Form]] | None:
    tensors = [out] if isinstance(out, Tensor) else out
    if not isinstance(tensors, list | tuple):
        return None
    used = {t.untyped_storage()._cdata for t in given}
    for t in tensors:
        if not isinstance(t, FakeTensor) or t.fake_device != device or t.layout != torch.strided:
            return None
        storage, last = (
            t.untyped_storage(),
            sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)),
        )
        whole = t.storage_offset() == 0 and storage.nbytes() == (
            (last + 1) * t.element_size() if t.numel() else 0
        )
        if not whole or storage._cdata in used:
            return None
        used.add(storage._cdata)
    return type(out), [(tuple(t.shape), tuple(t.stride()), t.dtype) for t in tensors]
