"""The shared libraries that `csrc` is compiled into, loaded by ctypes; they know neither torch's nor Python's ABI.

    library("cpu")     # the ctypes.CDLL of csrc/cpu, compiled at first use; None where there is none (no compiler)
    status()           # {"cpu": "native (avx512): /home/me/.cache/threed/cpu-0123456789abcdef.so", "cuda": "none: ..."}

Where `library` gives None, the callers' portable torch path runs. See `threed.native.build` for where they come from.
"""

from __future__ import annotations

import ctypes
import functools


def library(name: str) -> ctypes.CDLL | None:
    """The library of csrc/<name>, or None; a compiler that fails is told of once, as a warning."""
    return _find(name)[0]


def status() -> dict[str, str]:
    """Of every library: "native (instructions): path", or "none: why"."""
    from threed.native import build

    return {name: _find(name)[1] for name in build.LIBRARIES}


@functools.cache
def _find(name: str) -> tuple[ctypes.CDLL | None, str]:
    from threed.native import build  # not above: `python -m threed.native.build` must be the first to import it

    return build.load(build.LIBRARIES[name])
