"""The one door to the GPU: `torch.accelerator`, and what CUDA (or ROCm) has beyond it. On a CPU nothing happens.

    with beside(copy_stream(device, "out")):      copies in here run beside what the device computes
    current_stream(device).wait_event(event)      ... until something waits for them

Devices are looked for only where CUDA is: the collectives off the CPU are NCCL's. A device of another kind may be given
to a `Topology`: `is_accelerator` tells it from the host, and what only CUDA has is left out for it.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

current_stream = torch.accelerator.current_stream
synchronize = torch.accelerator.synchronize


def is_accelerator(device: torch.device) -> bool:
    """Whether tensors there have values, in memory that is not the host's."""
    return device.type not in ("cpu", "meta")


def count() -> int:
    """GPUs that this process sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def current() -> torch.device:
    """The GPU that this process works on."""
    return torch.device("cuda", torch.accelerator.current_device_index())


def use(device: torch.device) -> None:
    """Makes a GPU the one that this process works on."""
    if is_accelerator(device):
        torch.accelerator.set_device_index(device)


def name(device: torch.device) -> str | None:
    """What its maker calls a GPU; None for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def processor(device: torch.device) -> str:
    """The name of a GPU, or of this machine's CPU as its kernel has it; empty where that says nothing."""
    if (gpu := name(device)) is not None:
        return gpu
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        return next(
            (line.partition(":")[2].strip() for line in file if line.startswith("model name")), ""
        )
    return ""


def memory_bytes(device: torch.device) -> int | None:
    """The memory of a GPU; None for a CPU."""
    return (
        int(torch.cuda.get_device_properties(device).total_memory)
        if device.type == "cuda"
        else None
    )


def peak_bytes(device: torch.device) -> int:
    """The most bytes that tensors had on a GPU at once, since `reset_peak` or the start; 0 for a CPU."""
    return torch.accelerator.max_memory_allocated(device) if device.type == "cuda" else 0


def reset_peak(device: torch.device) -> None:
    """Has `peak_bytes` begin anew."""
    if device.type == "cuda":
        torch.accelerator.reset_peak_memory_stats(device)


def rng_states(device: torch.device) -> dict[str, Tensor]:
    """The states of torch's generators that work on this device draws from, uint8 [n] each, on the CPU."""
    cuda = {"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {}
    return {"cpu": torch.get_rng_state(), **cuda}


def set_rng_states(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Sets the generators to what `rng_states` gave."""
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


@contextmanager
def beside(stream: torch.Stream) -> Iterator[None]:
    """What a GPU is told in here comes after what it was told before, and runs beside what it is told later, which has
    to wait for it where it uses it. So memory of this stream may be let go once its last use was told."""
    before = current_stream(stream.device)
    stream.wait_stream(before)
    # not `with stream`, which one thread at a time may enter, and once
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


def mark(device: torch.device) -> torch.Event:
    """An event in what a GPU is told, which knows its time once it was reached."""
    event = torch.Event(device, enable_timing=True)
    event.record(current_stream(device))
    return event


class Clock:
    """Moments in a device's work. Where that is a GPU's they are events: the host waits for none of them before it asks
    for their seconds (of `time.perf_counter`, as well as one wait tells the two clocks' difference)."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._first = device, mark(device) if is_accelerator(device) else None
        if self._first is not None:
            self._first.synchronize()
        self._began = time.perf_counter()

    def now(self) -> Moment:
        """This moment: for a GPU the one when it has done what it was told so far."""
        return time.perf_counter() if self._first is None else mark(self._device)

    def seconds(self, moment: Moment) -> float:
        """When a moment was; waits until it is over."""
        if isinstance(moment, float):
            return moment
        assert self._first is not None
        moment.synchronize()
        return self._began + self._first.elapsed_time(moment) / 1e3


Moment = float | torch.Event


@functools.cache
def copy_stream(device: torch.device, direction: str) -> torch.Stream:
    """The stream of copies between the host and a GPU, one for each direction."""
    return torch.Stream(device)


def made_current(device: torch.device) -> AbstractContextManager[object]:
    """Makes a GPU the one that kernels are started on; nothing where it is so already."""
    return (
        nullcontext()
        if device.index in (None, torch.accelerator.current_device_index())
        else torch.cuda.device(device)
    )


@functools.cache
def processors(device: torch.device) -> int:
    """The multiprocessors of a GPU."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Returns the largest shared memory of a block on a GPU, in bytes."""
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)  # type: ignore[attr-defined]


def start_copy_in(values: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Returns values on a device, in a dtype (by default theirs); the host does not wait for a copy to a GPU.

    Values that are not page-locked are copied to page-locked memory first, which torch keeps until it was read; those
    that are must not change before the GPU has read them.
    """
    if values.device.type == "cpu" and is_accelerator(device):
        values = values.pin_memory()
    return values.to(device, dtype or values.dtype, non_blocking=True)


def stream_address(device: torch.device) -> int | None:
    """What CUDA calls the stream that this process works on; None on a CPU."""
    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else None


def page_lock(address: int, nbytes: int) -> None:
    """Page-locks host memory, so that a GPU reaches it directly. RuntimeError where CUDA refuses."""
    torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))


def page_unlock(address: int) -> None:
    """Undoes `page_lock`."""
    torch.cuda.cudart().cudaHostUnregister(address)
