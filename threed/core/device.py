"""The interface to GPUs: `torch.accelerator`, and functions of CUDA or ROCm.

    with on_stream(copy_stream(device, "out")):      # copies in the block overlap with computation
        ...
    current_stream(device).wait_event(event)      # the computation waits for a copy

For a CPU a function has no effect, or returns the value that its docstring documents. `count` and
`current` find only CUDA devices, because collectives between GPUs use NCCL. A `Topology` also
accepts accelerators without CUDA. For these `is_accelerator` returns True, but functions that need
CUDA treat them like a CPU.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

current_stream = torch.accelerator.current_stream
synchronize = torch.accelerator.synchronize


@dataclass(frozen=True)
class Specification:
    """Properties of a GPU that a forecast assumes.

    Attributes:
        name: product name, as `name` returns it.
        memory: bytes of memory.
        shared_memory: largest shared memory that a thread block can use, in bytes.
    """

    name: str
    memory: int
    shared_memory: int


_assumed: ContextVar[Specification | None] = ContextVar("assumed", default=None)


@contextmanager
def assume(gpu: Specification | None) -> Iterator[None]:
    """Context manager: functions of this module describe `gpu` instead of this machine's GPU.

    A forecast in the block, which runs on the meta device, is for a machine with such GPUs.

    Args:
        gpu: the GPU; None for this machine's device.
    """
    token = _assumed.set(gpu)
    try:
        yield
    finally:
        _assumed.reset(token)


def assumed() -> Specification | None:
    """Returns the GPU that `assume` has set, or None."""
    return _assumed.get()


def is_accelerator(device: torch.device) -> bool:
    """Returns whether the device has its own memory; False for the CPU and the meta device."""
    return device.type not in ("cpu", "meta")


def count() -> int:
    """Returns the number of GPUs visible to this process."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def current() -> torch.device:
    """Returns the current GPU of this process."""
    return torch.device("cuda", torch.accelerator.current_device_index())


def use(device: torch.device) -> None:
    """Sets the current accelerator of this process; does nothing for a CPU."""
    if is_accelerator(device):
        torch.accelerator.set_device_index(device)


def name(device: torch.device) -> str | None:
    """Returns the product name of a GPU; None for a CPU."""
    if device.type != "cuda":
        return None
    gpu = assumed()
    return torch.cuda.get_device_name(device) if gpu is None else gpu.name


def processor(device: torch.device) -> str:
    """Returns the product name of a GPU or of this machine's CPU; empty if unknown."""
    if (gpu := name(device)) is not None:
        return gpu
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        return next(
            (line.partition(":")[2].strip() for line in file if line.startswith("model name")), ""
        )
    return ""


def memory_bytes(device: torch.device) -> int | None:
    """Returns the memory of a GPU in bytes; None for a CPU."""
    if device.type != "cuda":
        return None
    gpu = assumed()
    return int(torch.cuda.get_device_properties(device).total_memory) if gpu is None else gpu.memory


def peak_bytes(device: torch.device) -> int:
    """Returns the peak of allocated tensor memory in bytes; 0 for a CPU.

    The peak is counted from the last call of `reset_peak`, or from the start of the process.
    """
    return torch.accelerator.max_memory_allocated(device) if device.type == "cuda" else 0


def reset_peak(device: torch.device) -> None:
    """Resets `peak_bytes` to the memory that is allocated now."""
    if device.type == "cuda":
        torch.accelerator.reset_peak_memory_stats(device)


def rng_states(device: torch.device) -> dict[str, Tensor]:
    """Returns the states of torch's generators for the device: uint8 [n] tensors on the CPU."""
    cuda = {"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {}
    return {"cpu": torch.get_rng_state(), **cuda}


def set_rng_states(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Restores the generator states that `rng_states` returned for the device."""
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


@contextmanager
def on_stream(stream: torch.Stream) -> Iterator[None]:
    """Context manager: runs the block on `stream`.

    `stream` first waits for work that is already queued on the current stream. The block overlaps
    with work that is queued on the current stream later. Other streams that use the block's results
    must wait for `stream` (`wait_stream` or an event). A tensor allocated in the block may be freed
    once its last use is enqueued on `stream`.
    """
    before = current_stream(stream.device)
    stream.wait_stream(before)
    # set_stream is called directly, because `with stream` is not reentrant and not thread-safe
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


def mark(device: torch.device) -> torch.Event:
    """Records and returns a timing event on the current stream of the device."""
    event = torch.Event(device, enable_timing=True)
    event.record(current_stream(device))
    return event


class Clock:
    """Timestamps of a device's work.

    On an accelerator a timestamp is an event. The host does not wait when `now` records an event.
    It waits in `seconds`, which converts the time of the event to seconds of `time.perf_counter`.
    The constructor waits for an event once, to relate the two scales. This limits the accuracy.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._first = device, mark(device) if is_accelerator(device) else None
        if self._first is not None:
            self._first.synchronize()
        self._began = time.perf_counter()

    def now(self) -> Moment:
        """Returns a timestamp: a recorded event, or `time.perf_counter()` on a CPU."""
        return time.perf_counter() if self._first is None else mark(self._device)

    def seconds(self, moment: Moment) -> float:
        """Returns a timestamp as seconds of `time.perf_counter`; waits for its event."""
        if isinstance(moment, float):
            return moment
        assert self._first is not None
        moment.synchronize()
        return self._began + self._first.elapsed_time(moment) / 1e3


Moment = float | torch.Event


@functools.cache
def copy_stream(device: torch.device, purpose: str) -> torch.Stream:
    """Returns the device's side stream for a purpose, such as "in" or "out"; creates it once."""
    return torch.Stream(device)


def made_current(device: torch.device) -> AbstractContextManager[object]:
    """Context manager: makes a GPU the current one for kernel launches."""
    if device.index in (None, torch.accelerator.current_device_index()):
        return nullcontext()
    return torch.cuda.device(device)


@functools.cache
def processors(device: torch.device) -> int:
    """Returns the number of multiprocessors of a GPU."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def can_access(device: torch.device, other: int) -> bool:
    """Returns whether a GPU can read the memory of another GPU of this machine.

    Args:
        device: the GPU that reads.
        other: index of the other GPU.
    """
    return torch.cuda.can_device_access_peer(device, other)


def shared_memory(device: torch.device) -> int:
    """Returns the largest shared memory that a thread block can use on a GPU, in bytes."""
    gpu = assumed()
    return _shared_memory(device) if gpu is None else gpu.shared_memory


def multiplies_groups(device: torch.device) -> bool:
    """Returns whether torch multiplies groups of rows in one kernel on a GPU (`torch._grouped_mm`).

    The kernel is for GPUs with the shared memory of Hopper and of Blackwell for data centers.
    """
    return shared_memory(device) >= 227 << 10


@functools.cache
def _shared_memory(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)  # type: ignore[attr-defined]


def start_copy_in(values: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Copies values to a device asynchronously, optionally with a different dtype.

    If `values` are in pageable host memory, they are first copied to page-locked memory, which
    torch keeps until the GPU has read it. If `values` are page-locked, the GPU reads them directly,
    so do not change them before the copy has finished.

    Args:
        values: the source tensor.
        device: the target device.
        dtype: dtype of the result, by default `values.dtype`.
    """
    if values.device.type == "cpu" and is_accelerator(device):
        values = values.pin_memory()
    return values.to(device, dtype or values.dtype, non_blocking=True)


def start_copy_out(values: Tensor) -> Callable[[], Tensor]:
    """Starts to copy values to the host; returns a function that waits for the copy and returns it.

    The function waits only for work that was queued on the current stream before the copy.

    Args:
        values: a tensor on any device. If it is on the CPU, it is returned itself.
    """
    if not is_accelerator(values.device):
        return lambda: values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    event = current_stream(values.device).record_event()

    def read() -> Tensor:
        event.synchronize()
        return host

    return read


def stream_address(device: torch.device) -> int | None:
    """Returns the CUDA handle of the current stream; None on a CPU.

    Called at every launch, so it does not create a `torch.cuda.Stream`; the code that inductor
    generates calls the same function.

    Args:
        device: the device, with an index if it is a GPU.
    """
    if device.type != "cuda":
        return None
    return int(torch._C._cuda_getCurrentRawStream(device.index))


def can_capture(device: torch.device) -> bool:
    """Returns whether `DeviceGraph` works on a device: True for GPUs."""
    return device.type == "cuda"


def is_capturing(device: torch.device) -> bool:
    """Returns whether the current stream of a device captures kernels for a `DeviceGraph`."""
    return can_capture(device) and torch.cuda.is_current_stream_capturing()


def graph_pool() -> Any:
    """Returns a new memory pool of the current GPU for `DeviceGraph`s, which may share a pool."""
    return torch.cuda.graph_pool_handle()


class DeviceGraph:
    """Kernels that are captured once and replayed by one launch (`torch.cuda.CUDAGraph`).

    A replay runs the same kernels at the same addresses, but draws new random numbers.

    Args:
        pool: memory pool for tensors that are allocated during the capture (`graph_pool`).
        generators: generators that the kernels draw from, except the device's default generator,
            which torch registers itself.
    """

    def __init__(self, pool: Any, generators: Iterable[torch.Generator] = ()) -> None:
        self._pool, self._graph = pool, torch.cuda.CUDAGraph()
        for generator in generators:
            self._graph.register_generator_state(generator)

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Context manager: kernels of the block are captured, and do not run.

        Other threads may use the GPU meanwhile, for example to page-lock the next batch.

        Raises:
            RuntimeError: the block called a function that CUDA does not allow in a capture.
        """
        with torch.cuda.graph(self._graph, pool=self._pool, capture_error_mode="thread_local"):
            yield

    def replay(self) -> None:
        """Runs the captured kernels on the current stream."""
        self._graph.replay()


def page_lock(address: int, nbytes: int) -> None:
    """Page-locks host memory for direct GPU access; raises RuntimeError if CUDA refuses."""
    torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))


def page_unlock(address: int) -> None:
    """Ends the page lock of host memory at an address that was passed to `page_lock`."""
    torch.cuda.cudart().cudaHostUnregister(address)
