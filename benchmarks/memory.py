"""Bytes of tensors in this process: those alive now, and the most alive at once during a step.

    live_mib()                     # every storage that Python can reach, gradients included
    peak_mib(step)                 # the same at its highest while step() runs

A walk over Python's objects misses buffers that C++ alone holds; the allocator's record, which the peak adds, has the
allocations of the calling thread (backward runs there on a CPU). Resident memory (`benchmarks.host`) misses nothing,
but counts libraries, thread stacks and what the allocator keeps too. DeepSpeed reserves large buffers and touches
little of them: they count here and not there.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch._subclasses.functional_tensor import FunctionalTensor


def live_mib() -> float:
    """The storages of all tensors that Python can reach."""
    # type(): wakes no lazy proxy
    found = [value for value in gc.get_objects() if issubclass(type(value), Tensor)]
    found += [t.grad for t in found if t.is_leaf and t.grad is not None]
    storages: dict[int, int] = {}
    for tensor in found:
        tensor = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
        if tensor.device.type == "cpu" and not _is_traced(tensor):
            with torch._C.DisableTorchFunctionSubclass():  # a sharded parameter has one number
                storage = tensor.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values()) / 2**20


def _is_traced(tensor: Tensor) -> bool:
    """Whether a tensor has no memory; torch.compile leaves such behind."""
    return (
        is_fake(tensor)
        or isinstance(tensor, FunctionalTensor)
        or torch._is_functional_tensor(tensor)
    )


def peak_mib(step: Callable[[], object]) -> float:
    """The most bytes of tensors alive at once during step()."""
    before = live_mib()
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        step()
    records = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
    records.sort(key=lambda event: event.start_ns())
    return (
        before + max(itertools.accumulate((event.nbytes() for event in records), initial=0)) / 2**20
    )
