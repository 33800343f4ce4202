"""Loads the shared libraries that are compiled from `csrc`.

    library("cpu")                         # the ctypes.CDLL of csrc/cpu, or None
    function("threed_normal", "vPPquui")   # one of its functions, with types, or None
    status()                               # {"cpu": "native (avx512): /dir/cpu-0123456789abcdef.so",
                                           #  "cuda": "none: ..."}

A library is compiled at first use (`threed.core.native.build`) and loaded by ctypes. It does not
depend on the ABI of torch or Python. Without a compiler, `library` returns None and callers use
plain torch operations. This package is internal.
"""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any

__all__: list[str] = []

_TYPES: dict[str, Any] = {
    "P": ctypes.c_void_p, "i": ctypes.c_int, "u": ctypes.c_uint32, "q": ctypes.c_int64, "d": ctypes.c_double,
    "s": ctypes.c_char_p, "v": None,
}  # fmt: skip


def library(name: str) -> ctypes.CDLL | None:
    """Returns the library of csrc/<name>, or None if unavailable. Warns once if compiling fails."""
    return _find(name)[0]


@functools.cache
def function(name: str, types: str) -> Any:
    """Returns a function of csrc/cpu with declared types; None if the library is unavailable.

    Args:
        name: name in C.
        types: one letter for the result, then one per argument: P pointer, i int, u uint32,
            q int64, d double, s string, v void.
    """
    if (loaded := library("cpu")) is None:
        return None
    return declare(loaded, name, types)


def call(name: str, types: str, *arguments: object) -> None:
    """Calls a function of csrc/cpu that returns an error number, or 0.

    Args:
        name: name in C.
        types: types of the result and of the arguments, as in `function`.
        arguments: arguments of the function. Bytes name the instructions to use.

    Raises:
        RuntimeError: if the library is not available, or the function returns an error.
    """
    run = function(name, types)
    if run is None:
        raise RuntimeError(
            "threed has no native library for the CPU here: `threed inspect` reports the reason"
        )
    if code := run(*arguments):
        asked = [argument.decode() for argument in arguments if isinstance(argument, bytes)]
        instructions = asked[0] if asked else "of this processor"
        raise RuntimeError(f"{name}: {os.strerror(code)} (instructions {instructions})")


def declare(loaded: ctypes.CDLL, name: str, types: str) -> Any:
    """Returns a library's function after setting its types, which are given as in `function`."""
    declared = getattr(loaded, name)
    declared.restype, *declared.argtypes = (_TYPES[letter] for letter in types)
    return declared


def status() -> dict[str, str]:
    """Returns, per library, "native (instruction set): path" or "none: reason".

    The instruction set of the CUDA library is given as "gpu".
    """
    from threed.core.native import build

    return {name: _find(name)[1] for name in build.LIBRARIES}


@functools.cache
def _find(name: str) -> tuple[ctypes.CDLL | None, str]:
    # imported here, because `python -m threed.core.native.build` imports this package first, and
    # Python warns if that import already loads the module to run
    from threed.core.native import build

    return build.load(build.LIBRARIES[name])
