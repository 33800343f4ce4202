"""Results of operations on fake tensors, computed once per shapes of the arguments.

As `threed.pipeline.meta_results`, for tensors of `FakeTensorMode`, which takes up to a millisecond per operation.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager

from threed.pipeline.meta_results import Known, key_of, known_result

_known: dict[Hashable, Known | None] = {}  # None: computed each time


def result(func: Any, args: Any, kwargs: Any, given: list[Tensor], device: torch.device) -> Any:
    """Returns what an operation on tensors returns, as `FakeTensorMode` does.

    Args:
        func: the operation; it changes none of its arguments.
        args: its arguments.
        kwargs: those that are given by name.
        given: the tensors among them.
        device: where results are kept by form.
    """

    def takes(tensor: Tensor) -> bool:
        strided = tensor.layout == torch.strided
        return isinstance(tensor, FakeTensor) and tensor.fake_device == device and strided

    if not given or not all(map(takes, given)):
        return func(*args, **kwargs)
    mode = given[0].fake_mode  # type: ignore[attr-defined]
    if func.is_view or func._opname == "_unsafe_view":
        with in_kernel_invocation_manager(mode):
            out = func(*args, **kwargs)
        wrap = functools.partial(FakeTensor, mode, device=device)
        return wrap(out) if isinstance(out, Tensor) else type(out)(map(wrap, out))
    key = key_of(func, args, kwargs, takes)
    known = _known.get(key)
    if known is not None and known.tensors is not None:
        with in_kernel_invocation_manager(mode):
            made = [tensor.make() for tensor in known.tensors]
        tensors = [FakeTensor(mode, x, device) for x in made]
        return tensors[0] if known.kind is Tensor else known.kind(tensors)
    out = func(*args, **kwargs)
    if key is not None and key not in _known:
        _known[key] = known_result(func, args, kwargs, out, takes)
    return out
