"""Measures the bytes of tensors in this process: now, and the peak of a step.

    live_mib()                     # every storage that Python can reach, gradients included
    peak_mib(step)                 # the peak while step() runs

`live_mib` visits Python's objects, so it misses buffers that only C++ holds. The peak adds the
allocator's record of the calling thread, in which a backward on a CPU runs. Resident memory
(`benchmarks.host`) misses nothing, but includes libraries, thread stacks and unused memory of the
allocator. DeepSpeed reserves large buffers and uses only a small part of them: they count here, but
not in resident memory.
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
    """Returns the size of the storages of all tensors that Python can reach, in MiB."""
    # type(), because isinstance would load lazy modules
    found = [value for value in gc.get_objects() if issubclass(type(value), Tensor)]
    found += [t.grad for t in found if t.is_leaf and t.grad is not None]
    storages: dict[int, int] = {}
    for tensor in found:
        tensor = getattr(tensor, "_local_tensor", tensor)  # if it is a DTensor
        if tensor.device.type == "cpu" and not _is_traced(tensor):
            with (
                torch._C.DisableTorchFunctionSubclass()
            ):  # for sharded parameters, whose storage has only one element
                storage = tensor.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values()) / 2**20


def _is_traced(tensor: Tensor) -> bool:
    """Returns whether a tensor has no memory, like those that torch.compile leaves behind."""
    return (
        is_fake(tensor)
        or isinstance(tensor, FunctionalTensor)
        or torch._is_functional_tensor(tensor)
    )


def peak_mib(step: Callable[[], object]) -> float:
    """Returns the largest size of all live tensors during step(), in MiB."""
    before = live_mib()
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        step()
    records = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
    records.sort(key=lambda event: event.start_ns())
    return (
        before + max(itertools.accumulate((event.nbytes() for event in records), initial=0)) / 2**20
    )
