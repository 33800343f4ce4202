"""Compiles `csrc` into shared libraries: at `pip install`, at first use, or by command.

    python -m threed.core.native.build            # compile all libraries into the cache
    python -m threed.core.native.build --check    # report the libraries; exit 1 if one is missing

This module uses only the standard library. The wheel's build hook (`hatch_build.py`) compiles into
the wheel. The command compiles into the cache, $XDG_CACHE_HOME/threed (~/.cache/threed);
`threed.core.native.library` does the same if the wheel has no library.

The name of a cached library contains a hash of its sources, flags, compiler and machine, so a stale
library is never loaded. A library is compiled under a temporary name and then renamed, under a lock
that the kernel releases if the process dies. Because the code in the cache is executed, the cache
folder must be owned by the user or root, and others must not be able to write to it; it is created
with mode 0700.

The environment variables CXX and NVCC select other compilers. THREED_NATIVE=0 disables native code;
plain torch operations run instead. Code is compiled for the baseline architecture, and faster
instructions are selected at run time, so a library can be moved to another machine. GPU code is
compiled for all `CUDA.architectures` that the compiler supports, and as PTX for later
architectures.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
FIX = "remove it, remove the write permission (chmod go-w), or set XDG_CACHE_HOME to another folder"
WARNINGS = ("-Wall", "-Wextra", "-Wno-unknown-pragmas")


class BuildError(RuntimeError):
    """Raised if a library cannot be compiled."""


class Unavailable(BuildError):
    """Raised if compiler or sources are missing.

    This is not a failure, because plain torch operations run instead.
    """


@dataclass(frozen=True)
class Library:
    """A shared library, compiled from all sources in one folder of `csrc`.

    Attributes:
        name: name of the folder and of the library.
        suffix: suffix of the sources.
        variable: environment variable that selects another compiler.
        compilers: default compilers, in order of preference.
        flags: compiler flags.
        architectures: compute capabilities of GPUs to compile for, without the point.
    """

    name: str
    suffix: str
    variable: str
    compilers: tuple[str, ...]
    flags: tuple[str, ...]
    architectures: tuple[str, ...] = ()

    @property
    def sources(self) -> list[Path]:
        """Paths of the sources."""
        return sorted((source_root() / self.name).glob(f"*{self.suffix}"))


# FMA contraction is turned off. Each product and each sum is rounded separately, so the results
# with all instruction sets are bit-identical.
CPU = Library(
    "cpu", ".cpp", "CXX", ("c++", "g++", "clang++"),
    ("-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
     *WARNINGS),
)  # fmt: skip
# Numbers below 1.2e-38 are flushed to zero. Otherwise each exponential, root and quotient would
# take three more instructions.
CUDA = Library(
    "cuda", ".cu", "NVCC", ("nvcc", "/usr/local/cuda/bin/nvcc"),
    ("-std=c++17", "-O3", "-ftz=true", "-shared", "-Xcompiler=-fPIC", "-cudart=static", "--threads=0",
     "-Werror=all-warnings"),
    ("80", "90", "100"),
)  # fmt: skip
LIBRARIES = {library.name: library for library in (CPU, CUDA)}


def source_root() -> Path:
    """Returns the folder `csrc`: inside the package in a wheel, otherwise in the checkout."""
    inside = HERE / "csrc"
    return inside if inside.is_dir() else HERE.parents[2] / "csrc"


def installed(library: Library) -> Path | None:
    """Returns the path of the library in the wheel, or None if the wheel has none."""
    path = HERE / "lib" / f"{library.name}.so"
    return path if path.is_file() else None


def cache() -> Path:
    """Returns the folder for libraries that are compiled at first use.

    Raises:
        BuildError: if XDG_CACHE_HOME is not an absolute path and the home folder is unknown.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "threed"
    except RuntimeError as error:
        raise BuildError(f"no folder to build in: {error} (set XDG_CACHE_HOME)") from error


def find_compiler(library: Library) -> list[str]:
    """Returns the compiler's command as a list of words.

    Raises:
        Unavailable: if no compiler is found.
        BuildError: if the environment variable cannot be parsed.
    """
    try:
        named = shlex.split(os.environ.get(library.variable, ""))
    except ValueError as error:
        raise BuildError(f"{library.variable} is not a valid command: {error}") from error
    for command in [named] if named else [[name] for name in library.compilers]:
        if path := shutil.which(command[0]):
            return [path, *command[1:]]
    wanted = " ".join(named) or ", ".join(library.compilers)
    raise Unavailable(f"no compiler: {wanted} not found (install one, or set {library.variable})")


def is_cached(library: Library) -> bool:
    """Returns whether the cache contains this library, so that `ensure` does not compile."""
    if not library.sources:
        return False
    return (cache() / f"{library.name}-{_key(library, find_compiler(library))}.so").exists()


def ensure(library: Library, folder: Path | None = None) -> Path:
    """Returns the library's path in `folder` (default: the cache); compiles it if it is missing.

    Raises:
        Unavailable: if the sources or a compiler are missing.
        BuildError: if the compiler fails or the folder is not writable.
    """
    if not library.sources:
        raise Unavailable(
            f"this version has no {library.suffix} sources in {source_root() / library.name}"
        )
    command, folder = find_compiler(library), folder or cache()
    path = folder / f"{library.name}-{_key(library, command)}.so"
    try:
        _make_private(folder)
        if not os.path.lexists(path):
            with _locked(path.with_suffix(".lock")):
                if not os.path.lexists(path):
                    _compile(library, command, path)
    except OSError as error:
        raise BuildError(
            f"cannot build in {folder}: {error} (set XDG_CACHE_HOME to another folder)"
        ) from error
    return path


def _make_private(folder: Path) -> None:
    """Creates a folder for this user only.

    Raises BuildError if another user owns the folder or can write to it, because the code in it is
    executed.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = folder.stat()
    if about.st_uid not in (os.geteuid(), 0) or about.st_mode & 0o022:
        raise BuildError(
            f"{folder} is owned or writable by other users, but its code is executed: {FIX}"
        )


def _key(library: Library, command: list[str]) -> str:
    """Returns a hash of all inputs that the machine code depends on."""
    try:
        version = subprocess.run([*command, "--version"], capture_output=True, check=False).stdout
    except OSError as error:
        raise BuildError(
            f"{shlex.join(command)} does not run: {error} (set {library.variable} to another compiler)"
        ) from error
    flags = (*command[1:], *library.flags, *library.architectures)
    parts = [platform.machine().encode(), shlex.join(flags).encode(), version]
    for path in sorted((source_root() / library.name).iterdir()):
        if path.suffix in (library.suffix, ".h", ".cuh"):
            parts += [path.name.encode(), path.read_bytes()]
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[
        :16
    ]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Context manager: holds a lock on a file. The file is not removed afterwards.

    If the process dies, the kernel releases the lock.
    """
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(library: Library, command: list[str], path: Path) -> None:
    """Compiles to a temporary file, then renames it to `path`.

    First removes temporary files of builds that were killed.
    """
    for stale in path.parent.glob(f"{path.name}.*.tmp"):
        stale.unlink(missing_ok=True)
    handle, name = tempfile.mkstemp(prefix=f"{path.name}.", suffix=".tmp", dir=path.parent)
    os.close(handle)
    try:
        sources = [str(source) for source in library.sources]
        done = subprocess.run(
            [*command, *library.flags, *targets(library, command), *sources, "-o", name],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise BuildError(f"{command[0]} failed:\n{first_errors(done.stderr or done.stdout)}")
        os.chmod(name, 0o755)
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)


def targets(library: Library, command: list[str]) -> list[str]:
    """Returns the flags for the GPUs that this compiler supports, and for PTX of the newest one.

    The drivers of later GPUs compile the PTX. Compile and link in a single command with these
    flags, because a separate link step without the flags would add code for a default GPU.
    """
    if not library.architectures:
        return []
    listed = subprocess.run(
        [*command, "--list-gpu-code"], capture_output=True, text=True, check=False
    ).stdout.split()
    known = [a for a in library.architectures if f"sm_{a}" in listed] or list(library.architectures)
    codes = [(a, f"sm_{a}") for a in known] + [(known[-1], f"compute_{known[-1]}")]
    return [f"-gencode=arch=compute_{a},code={code}" for a, code in codes]


def first_errors(output: str, lines: int = 6) -> str:
    """Returns up to `lines` lines of a compiler's output, starting with the first error."""
    found = output.splitlines()
    start = next((i for i, line in enumerate(found) if "error" in line), 0)
    return "\n".join(found[start : start + lines]) or "(no output)"


def load(library: Library) -> tuple[ctypes.CDLL | None, str]:
    """Returns (library, description), or (None, reason). Warns if a build fails."""
    if os.environ.get("THREED_NATIVE") == "0":
        return None, "none: switched off by THREED_NATIVE=0"
    try:
        path, loaded = _load(library)
    except Unavailable as reason:
        return None, f"none: {reason}"
    except BuildError as error:
        text = f"native library {library.name!r}: {error}\nThe portable torch path runs instead."
        warnings.warn(text, stacklevel=2)
        return None, f"none: {error}"
    return loaded, f"native ({_instructions(loaded)}): {path}"


def _load(library: Library) -> tuple[Path, ctypes.CDLL]:
    """Loads the wheel's library; if it is missing or does not load, the cached library."""
    wheel = installed(library)
    if wheel is not None:
        with contextlib.suppress(OSError):  # raised if the wheel was built for another system
            return wheel, ctypes.CDLL(str(wheel))
    path = ensure(library)
    with contextlib.suppress(OSError):
        return path, ctypes.CDLL(str(path))
    try:
        path.unlink(missing_ok=True)  # the cached file is damaged: compile it again
        return path, ctypes.CDLL(str(ensure(library)))
    except OSError as error:
        raise BuildError(f"{path} does not load: {error}") from error


def _instructions(loaded: ctypes.CDLL) -> str:
    """Returns the instruction set that the library selected for this processor."""
    pick = getattr(loaded, "threed_instructions", None)
    if pick is None:
        return "gpu"
    pick.restype = ctypes.c_char_p
    return str(pick().decode())


def main(argv: list[str] | None = None) -> int:
    """Compiles every library, or with --check reports which are in use. Returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if argv not in ([], ["--check"]):
        print(
            f"usage: python -m threed.core.native.build [--check], not {shlex.join(argv)}",
            file=sys.stderr,
        )
        return 2
    return _check() if argv else _build()


def _check() -> int:
    missing = 0
    for library in LIBRARIES.values():
        loaded, text = load(library)
        print(f"{library.name:<6} {text}")
        missing += loaded is None and bool(library.sources)
    return int(missing > 0)


def _build() -> int:
    code = 0
    for library in LIBRARIES.values():
        try:
            print(f"{library.name:<6} {ensure(library)}")
        except Unavailable as reason:
            print(f"{library.name:<6} left out: {reason}")
        except BuildError as error:
            print(f"{library.name:<6} {error}", file=sys.stderr)
            code = 1
    return code


if __name__ == "__main__":
    raise SystemExit(main())
