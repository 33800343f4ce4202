"""deepspeed.accelerator: the device of this process, in terms of torch's functions for it."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from threed.distributed import topology
from threed.interop.deepspeed.names import not_offered

# functions of torch's module of a GPU -> their function for a CPU
_RANDOM: dict[str, Callable[..., Any]] = {
    "manual_seed": torch.manual_seed, "manual_seed_all": torch.manual_seed,
    "initial_seed": torch.initial_seed, "get_rng_state": lambda *_: torch.get_rng_state(),
    "set_rng_state": lambda state, *_: torch.set_rng_state(state),
}  # fmt: skip
# functions of torch's module of a GPU that have no effect on a CPU -> result on a CPU
_ON_CPU: dict[str, Any] = dict.fromkeys(
    "empty_cache reset_peak_memory_stats reset_max_memory_allocated reset_max_memory_cached"
    " ipc_collect".split()
) | dict.fromkeys(
    "memory_allocated max_memory_allocated memory_reserved max_memory_reserved memory_cached"
    " max_memory_cached".split(),
    0,
)


class DeepSpeedAccelerator:
    """The device of this process: the GPU of its local rank, or the CPU.

    Methods that this class does not define are functions of `torch.get_device_module`. On a CPU,
    functions of memory have no effect, and functions of random numbers use torch's generator.
    """

    @property
    def _device(self) -> torch.device:
        return topology.default_device()

    @property
    def _module(self) -> Any:
        return torch.get_device_module(self._device)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if self._device.type == "cpu" and name in _RANDOM:
            return _RANDOM[name]
        if self._device.type == "cpu" and name in _ON_CPU:
            return lambda *_, **__: _ON_CPU[name]
        if hasattr(self._module, name):
            return getattr(self._module, name)
        instead = f"use a function of {self._module.__name__}"
        raise AttributeError(not_offered(f"get_accelerator().{name}", instead))

    def device_name(self, device_index: int | str | None = None) -> str:
        """Returns "cuda", "cuda:N" if an index is given, or "cpu"."""
        kind = self._device.type
        return kind if device_index is None or kind == "cpu" else f"{kind}:{device_index}"

    def device(self, device_index: int | None = None) -> AbstractContextManager[Any]:
        """Returns a context manager that makes a device the current one."""
        if self._device.type == "cpu":
            return nullcontext()
        return self._module.device(device_index)

    def current_device(self) -> int:
        """Returns the index of the current GPU; on a CPU, the local rank."""
        if self._device.type == "cpu":
            return int(os.environ.get("LOCAL_RANK", "0"))
        return int(self._module.current_device())

    def current_device_name(self) -> str:
        """Returns the name of the current device, such as "cuda:1" or "cpu"."""
        return self.device_name(self.current_device())

    def device_count(self) -> int:
        """Returns the number of GPUs.

        On a CPU, returns the number of ranks on this machine: LOCAL_SIZE, which DeepSpeed's launcher
        sets, or LOCAL_WORLD_SIZE, or 1.
        """
        if self._device.type == "cpu":
            return int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return int(self._module.device_count())

    def is_available(self) -> bool:
        """Returns True."""
        return True

    def communication_backend_name(self) -> str:
        """Returns "nccl" for a GPU and "gloo" for a CPU."""
        return "gloo" if self._device.type == "cpu" else "nccl"

    def is_synchronized_device(self) -> bool:
        """Returns whether every operation has ended when its function returns: True for a CPU."""
        return self._device.type == "cpu"

    def is_bf16_supported(self) -> bool:
        """Returns whether the device computes in bf16; True for a CPU."""
        return self._device.type == "cpu" or bool(self._module.is_bf16_supported())

    def is_fp16_supported(self) -> bool:
        """Returns True."""
        return True

    def is_triton_supported(self) -> bool:
        """Returns whether Triton runs on the device: False for a CPU."""
        return self._device.type != "cpu"

    def supported_dtypes(self) -> list[torch.dtype]:
        """Returns the dtypes in which the engine can train."""
        bf16 = [torch.bfloat16] if self.is_bf16_supported() else []
        return [torch.float32, torch.float16, *bf16]

    def on_accelerator(self, tensor: Tensor) -> bool:
        """Returns whether a tensor is on the device."""
        return tensor.device.type == self._device.type

    def random(self) -> Any:
        """Returns the module `torch.random`."""
        return torch.random

    def pin_memory(self, tensor: Tensor, align_bytes: int = 1) -> Tensor:
        """Returns a copy of a tensor in page-locked memory; on a CPU, the tensor itself."""
        return tensor if self._device.type == "cpu" else tensor.pin_memory()

    def is_pinned(self, tensor: Tensor) -> bool:
        """Returns whether a tensor is in page-locked memory."""
        return tensor.is_pinned()


@functools.cache
def get_accelerator() -> DeepSpeedAccelerator:
    """Returns the device of this process, with DeepSpeed's methods."""
    return DeepSpeedAccelerator()
