"""The shared libraries that `csrc` is compiled into, loaded by ctypes; they know neither torch's nor Python's ABI.

    library("cpu")     # the ctypes.CDLL of csrc/cpu, compiled at first use; None where there is none (no compiler)
    function("threed_normal", "vPPquui")   # a function of it, with its types; None where there is no library
    status()           # {"cpu": "native (avx512): /home/me/.cache/threed/cpu-0123456789abcdef.so", "cuda": "none: ..."}

Where `library` gives None, the callers' portable torch path runs. See `threed.native.build` for where they come from.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

_TYPES: dict[str, Any] = {
    "P": ctypes.c_void_p, "i": ctypes.c_int, "u": ctypes.c_uint32, "q": ctypes.c_int64, "d": ctypes.c_double,
    "s": ctypes.c_char_p, "v": None,
}  # fmt: skip


def library(name: str) -> ctypes.CDLL | None:
    """The library of csrc/<name>, or None; a compiler that fails is told of once, as a warning."""
    return _find(name)[0]


@functools.cache
def function(name: str, types: str) -> Any:
    """A function of csrc/cpu, declared; None where there is no library.

    types: a letter for its result, then one for each argument: Pointer, int, uint32, int64 (q), double, string, void.
    """
    if (loaded := library("cpu")) is None:
        return None
    return declare(loaded, name, types)


def declare(loaded: ctypes.CDLL, name: str, types: str) -> Any:
    """Returns a function of a library, declared; types: as in `function`."""
    declared = getattr(loaded, name)
    declared.restype, *declared.argtypes = (_TYPES[letter] for letter in types)
    return declared


def status() -> dict[str, str]:
    """Of every library: "native (instructions): path", or "none: why"."""
    from threed.native import build

    return {name: _find(name)[1] for name in build.LIBRARIES}


@functools.cache
def _find(name: str) -> tuple[ctypes.CDLL | None, str]:
    # not above: `python -m threed.native.build` must be the first to import it
    from threed.native import build

    return build.load(build.LIBRARIES[name])
