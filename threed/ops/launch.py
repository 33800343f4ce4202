"""Starts kernels of csrc/cuda, and says whether there are any.

    if launch.ready(x):                                     x lies on a GPU, and the library was compiled
        launch.start("swiglu", gate_up, out, rows, width)   threed_cuda_swiglu on the current stream

A launcher in C sees addresses and sizes only: who calls `start` has checked device, dtype, shape and strides.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from threed import device, native
from threed.topology import default_device

Argument = Tensor | int | float | None

_KINDS: dict[type, Any] = {int: ctypes.c_int64, bool: ctypes.c_int64, float: ctypes.c_double}
_launchers: dict[str, Any] = {}


def available(x: Tensor) -> bool:
    """Returns whether kernels work on this tensor's device: a GPU, where this installation has them. Not in a function
    that torch.compile reads, which fuses by itself."""
    return not torch.compiler.is_compiling() and on_gpu(x) and native.library("cuda") is not None


def on_gpu(x: Tensor) -> bool:
    """Returns whether x is on a GPU; on the meta device, where a step is only looked at, whether it would be."""
    return x.is_cuda or (x.is_meta and default_device().type == "cuda")


def ready(x: Tensor) -> bool:
    """Returns whether kernels work on this activation: they know bf16 alone."""
    return x.dtype == torch.bfloat16 and available(x)


def start(name: str, *arguments: Argument) -> None:
    """Starts the kernel `threed_cuda_<name>` on the current stream of the tensors' device.

    Tensors go as addresses, None as a null pointer, whole numbers as int64_t, others as double. RuntimeError where CUDA
    refuses the launch.
    """
    where = next(a.device for a in arguments if isinstance(a, Tensor))
    launcher = _launchers.get(name) or _declare(name, arguments)
    with device.made_current(where):
        code = launcher(*map(_plain, arguments), device.stream_address(where))
    if code:
        raise RuntimeError(f"threed_cuda_{name}: CUDA error {code} ({_words(arguments)})")


@dataclass(frozen=True)
class Operator:
    """A registered operator: the function behind it, and how many kernels that starts for its arguments."""

    work: Callable[..., Any]
    launches: Callable[..., int]


_LIBRARY = torch.library.Library("threed", "FRAGMENT")  # registrations last as long as it
OPERATORS: dict[str, Operator] = {}


def define(schema: str, work: Callable[..., Any], fake: Callable[..., Any], launches: int | Callable[..., int]) -> Any:
    """Registers torch.ops.threed.<name>, which starts kernels by `work`; returns it. fake: its shapes alone."""
    name = schema.split("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, work, "CompositeExplicitAutograd")
    torch.library.register_fake(f"threed::{name}", fake, lib=_LIBRARY)
    OPERATORS[f"threed::{name}"] = Operator(work, (lambda *_: launches) if isinstance(launches, int) else launches)
    return getattr(torch.ops.threed, name).default


def _declare(name: str, arguments: tuple[Argument, ...]) -> Any:
    library = native.library("cuda")
    if library is None:
        raise RuntimeError("threed has no native library for GPUs here: `threed inspect` says why")
    launcher = getattr(library, f"threed_cuda_{name}")
    launcher.restype = ctypes.c_int
    launcher.argtypes = [*(_KINDS.get(type(a), ctypes.c_void_p) for a in arguments), ctypes.c_void_p]
    _launchers[name] = launcher
    return launcher


def _plain(argument: Argument) -> int | float | None:
    return argument.data_ptr() if isinstance(argument, Tensor) else argument


def _words(arguments: tuple[Argument, ...]) -> str:
    return ", ".join(f"{a.dtype} {list(a.shape)}" if isinstance(a, Tensor) else str(a) for a in arguments)


def check(fits: bool, name: str, wanted: str, *tensors: Tensor | None) -> None:
    """ValueError unless `fits`: a launcher would misread what it is given."""
    if not fits:
        got = ", ".join(
            f"{t.dtype} {list(t.shape)} strides {t.stride()} on {t.device}" for t in tensors if t is not None
        )
        raise ValueError(f"{name} takes {wanted}; got {got}")


def packed(x: Tensor) -> bool:
    """Returns whether a kernel can read x in packs of eight bf16 numbers."""
    return x.dtype == torch.bfloat16 and x.is_contiguous() and aligned(x)


def aligned(x: Tensor) -> bool:
    """Returns whether x begins at a multiple of 16 bytes, as every storage does."""
    return x.storage_offset() * x.element_size() % 16 == 0
