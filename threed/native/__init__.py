"""The shared libraries that `csrc` is compiled into, loaded by ctypes; they know neither torch's nor Python's ABI.

    library("cpu")     # the ctypes.CDLL of csrc/cpu, compiled at first use; None where there is none (no compiler)
    status()           # {"cpu": "native (avx512): /home/me/.cache/threed/cpu-0123456789abcdef.so", "cuda": "none: ..."}

Where `library` gives None, the callers' portable torch path runs. See `threed.native.build` for where they come from.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import warnings
from pathlib import Path


def library(name: str) -> ctypes.CDLL | None:
    """The library of csrc/<name>, or None; a compiler that fails is told of once, as a warning."""
    return _find(name)[0]


def status() -> dict[str, str]:
    """Of every library: "native (instructions): path", or "none: why"."""
    from threed.native import build

    return {name: _find(name)[1] for name in build.LIBRARIES}


@functools.cache
def _find(name: str) -> tuple[ctypes.CDLL | None, str]:
    from threed.native import build  # not above: `python -m threed.native.build` wants to be the first to import it

    if os.environ.get("THREED_NATIVE") == "0":
        return None, "none: switched off by THREED_NATIVE=0"
    try:
        path, loaded = _load(name)
    except build.Unavailable as reason:
        return None, f"none: {reason}"
    except build.BuildError as error:
        warnings.warn(f"native library {name!r}: {error}\nThe portable torch path runs instead.", stacklevel=3)
        return None, f"none: {error}"
    return loaded, f"native ({_instructions(loaded)}): {path}"


def _load(name: str) -> tuple[Path, ctypes.CDLL]:
    """The wheel's library; where it has none, or one that does not load here, that of the cache."""
    from threed.native import build

    wheel = build.installed(build.LIBRARIES[name])
    if wheel is not None:
        with contextlib.suppress(OSError):  # built for another system: compile for this one
            return wheel, ctypes.CDLL(str(wheel))
    path = build.ensure(build.LIBRARIES[name])
    try:
        return path, ctypes.CDLL(str(path))
    except OSError as error:
        raise build.BuildError(f"{path} does not load: {error}") from error


def _instructions(loaded: ctypes.CDLL) -> str:
    """The instruction set that the library picked for this processor."""
    pick = getattr(loaded, "threed_instructions", None)
    if pick is None:
        return "gpu"
    pick.restype = ctypes.c_char_p
    return str(pick().decode())
