"""Launches kernels of csrc/cuda, and checks that they are available.

    if launch.ready(x):                                     x is bf16 on a GPU that runs the kernels
        launch.start("swiglu", gate_up, out, rows, width)   threed_cuda_swiglu on the current stream

A launcher, a C function that launches a kernel, receives addresses and sizes only. Therefore the
caller of `start` has to check device, dtype, shape and strides.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from threed.core import device, native
from threed.distributed.topology import default_device

Argument = Tensor | int | float | None
Function = TypeVar("Function", bound=Callable[..., Any])

# Parameter types of each launcher in csrc/cuda, except the last parameter, the stream:
# P pointer, q int64, d double.
LAUNCHERS = {
    "swiglu": "PPqq", "swiglu_backward": "PPPqq", "geglu": "PPqq", "geglu_backward": "PPPqq", "gelu": "PPPqq",
    "gelu_backward": "PPPPPqqq", "squared_relu": "PPPqq", "squared_relu_backward": "PPPPPqqq",
    "adamw": "PPPPPqqPPPPddddqqqq", "lion": "PPPPqqPPPdddq", "scale": "PPqq",
    "cross_entropy": "PPPPqqqq", "cross_entropy_stats": "PPPqqqq", "cross_entropy_gradient": "PPPPPqqqqqq",
    "dropout": "PPPPPPqqqqqqqqd", "norm": "PPPPPPPPPqqd", "norm_backward": "PPPPPPPPPqqq", "quantize": "PPPqqq",
    "dequantize": "PPPqqqq", "rotary": "PPqqqqqd", "rotary_backward": "PPPPP" + 14 * "q",
    "head_norm": 5 * "P" + 6 * "q" + "dd", "head_norm_backward": 9 * "P" + 15 * "q" + "dd",
    "router": 6 * "P" + 8 * "q" + "dd", "router_losses": "PPPqqqd", "router_backward": 6 * "P" + 5 * "q" + 4 * "d",
    "sort_choices": 10 * "P" + 5 * "q",
    "add_parts": 3 * "PPqq" + "qq", "column_sums": "PPqqq",
    "square_sum": "PPPqq",
}  # fmt: skip


def available(x: Tensor) -> bool:
    """Returns whether x is on a GPU on which the native library's kernels run (see `problem`).

    Returns False while torch.compile traces, because inductor generates its own fused kernels. For
    a meta tensor, in a forecast for a GPU that this machine need not have, returns True.
    """
    if x.is_meta and device.assumed() is not None:
        return True
    if torch.compiler.is_compiling() or not on_gpu(x) or native.library("cuda") is None:
        return False
    return not problem(gpu_of(x))


def gpu_of(x: Tensor) -> torch.device:
    """Returns the GPU of x; for a meta tensor, the default device."""
    return default_device() if x.is_meta else x.device


@functools.cache
def problem(where: torch.device) -> str:
    """Returns why kernels of the native library do not run on a GPU; "" if they run.

    The first call for a device runs a test kernel, waits for its result, and warns if it fails. The
    test is needed because the library may have been compiled for a newer driver, or have no code
    for this GPU.
    """
    try:
        _probe(where)
    except RuntimeError as error:
        text = f"kernels of the native library do not run on {where}: {error}"
        warnings.warn(f"{text}; the plain torch operations run instead", stacklevel=2)
        return text
    return ""


def _probe(where: torch.device) -> None:
    """Doubles eight numbers on a device. Raises RuntimeError if the result is wrong."""
    # The kernel must really run, even if the caller is being traced. So the torch modes of the
    # trace are disabled.
    with _disable_current_modes(), torch.inference_mode():
        x = torch.ones(8, dtype=torch.bfloat16, device=where)
        factor = torch.full((), 2.0, device=where)
        start("scale", x, factor, x.numel(), 1)
        if x.tolist() != [2.0] * 8:
            raise RuntimeError(f"a kernel that doubles ones gave {x.tolist()}")


def on_gpu(x: Tensor) -> bool:
    """Returns whether x is on a GPU; for a meta tensor, whether the default device is a GPU."""
    return x.is_cuda or (x.is_meta and default_device().type == "cuda")


def ready(x: Tensor) -> bool:
    """Returns whether kernels support x: it is bf16, on a GPU that runs kernels (`available`)."""
    return x.dtype == torch.bfloat16 and available(x)


def start(name: str, *arguments: Argument) -> None:
    """Launches the kernel `threed_cuda_<name>` on the current stream of the tensors' device.

    Args:
        name: a key of LAUNCHERS.
        arguments: values of the types in LAUNCHERS. Tensors are passed as addresses, None as a null
            pointer.

    Raises:
        TypeError: if arguments are not of the launcher's types.
        RuntimeError: if CUDA rejects the launch. Later launches do not report this error again.
    """
    plain = check_types(name, arguments)
    where = next(a.device for a in arguments if isinstance(a, Tensor))
    launcher = _launcher(name)
    with device.made_current(where):
        code = launcher(*plain, device.stream_address(where))
    if code:
        raise RuntimeError(f"threed_cuda_{name}: CUDA error {code} ({_describe(arguments)})")


@dataclass(frozen=True)
class Operator:
    """A registered operator.

    Attributes:
        work: the function that implements it.
        launches: returns the number of kernels that `work` launches for the same arguments.
    """

    work: Callable[..., Any]
    launches: Callable[..., int]


# kept in a global variable, because freeing the library would unregister its operators
_LIBRARY = torch.library.Library("threed", "FRAGMENT")
OPERATORS: dict[str, Operator] = {}


def operator(
    schema: str, fake: Callable[..., Any], launches: int | Callable[..., int]
) -> Callable[[Function], Function]:
    """Registers the decorated function, which launches kernels, as torch.ops.threed.<name>.

    Args:
        schema: schema of the operator in torch's syntax, with the function's arguments.
        fake: returns outputs of the right shapes for meta tensors.
        launches: number of kernels that a call launches, or a function that returns this number for
            the arguments of a call.
    """
    name = schema.split("(")[0]

    def register(work: Function) -> Function:
        _LIBRARY.define(schema)
        _LIBRARY.impl(name, work, "CompositeExplicitAutograd")
        torch.library.register_fake(f"threed::{name}", fake, lib=_LIBRARY)
        count = (lambda *_, **__: launches) if isinstance(launches, int) else launches
        OPERATORS[f"threed::{name}"] = Operator(work, count)
        return cast(Function, getattr(torch.ops.threed, name).default)

    return register


@functools.cache
def _launcher(name: str) -> Any:
    library = native.library("cuda")
    if library is None:
        raise RuntimeError(
            "threed has no native library for GPUs here: `threed inspect` reports the reason"
        )
    return declare(library, name)


def declare(library: ctypes.CDLL, name: str) -> Any:
    """Returns a launcher of a library, with its argument types declared."""
    return native.declare(library, f"threed_cuda_{name}", f"i{LAUNCHERS[name]}P")


def check_types(name: str, arguments: tuple[Argument, ...]) -> list[int | float | None]:
    """Returns the arguments for ctypes, with tensors replaced by their addresses.

    Raises:
        TypeError: if the arguments are not of the launcher's types.
    """
    letters = LAUNCHERS[name]
    plain: list[int | float | None] = []
    for letter, argument in zip(letters, arguments, strict=False):
        if letter == "P" and argument is None:
            plain.append(None)
        elif letter == "P" and isinstance(argument, Tensor):
            plain.append(argument.data_ptr())
        elif letter != "P" and (
            isinstance(argument, int) or (letter == "d" and isinstance(argument, float))
        ):
            plain.append(argument)
        else:
            break
    if not len(plain) == len(letters) == len(arguments):
        raise TypeError(
            f"threed_cuda_{name} takes {letters} (pointers, int64 q, doubles), not {_describe(arguments)}"
        )
    return plain


def _describe(arguments: tuple[Argument, ...]) -> str:
    return ", ".join(
        f"{a.dtype} {list(a.shape)}" if isinstance(a, Tensor) else str(a) for a in arguments
    )


def check(fits: bool, name: str, wanted: str, *tensors: Tensor | None) -> None:
    """Raises ValueError unless `fits`; the message contains `wanted` and describes the tensors."""
    if not fits:
        given = [t for t in tensors if t is not None]
        got = [f"{t.dtype} {list(t.shape)} strides {t.stride()} on {t.device}" for t in given]
        raise ValueError(f"{name} takes {wanted}; got {', '.join(got)}")


def packed(x: Tensor) -> bool:
    """Returns whether a kernel can read x in packs of eight bf16 numbers."""
    return x.dtype == torch.bfloat16 and x.is_contiguous() and aligned(x)


def aligned(x: Tensor) -> bool:
    """Returns whether the address of x is a multiple of 16 bytes.

    Only x's offset in its storage is checked, because the storage's address is always a multiple of
    16 bytes.
    """
    return x.storage_offset() * x.element_size() % 16 == 0
