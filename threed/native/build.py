"""Compiles `csrc` into shared libraries: at `pip install`, at first use, or by hand. Standard library only.

    python -m threed.native.build            # compile what can be compiled, into the cache
    python -m threed.native.build --check    # say what is in use; exit code 1 unless every library is native

Three ways lead here: the wheel's build hook (`hatch_build.py`) compiles into the wheel, `threed.native.library` into
$XDG_CACHE_HOME/threed (~/.cache/threed) when the wheel has none, and this command. A cached library's name carries
the hash of its sources, flags, compiler and machine, so an old one is never loaded; it appears by one rename, under a
lock that the kernel drops when its holder dies. It is code, so the folder must belong to the user or to root, and nobody
else may write there: it is made with mode 0700.

CXX and NVCC name other compilers. THREED_NATIVE=0 switches native code off: the portable torch path runs.
Code is compiled for the plain architecture; faster instructions are picked at run time, so a library may be moved. For
GPUs it is compiled for every generation that the compiler knows of `CUDA.architectures`, and as PTX for later ones.
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
FIX = (
    "remove it, take away the right to write (chmod go-w), or name another folder in XDG_CACHE_HOME"
)
WARNINGS = ("-Wall", "-Wextra", "-Wno-unknown-pragmas")


class BuildError(RuntimeError):
    """Why a library could not be compiled."""


class Unavailable(BuildError):
    """There is nothing to compile with, or nothing to compile: no fault, the portable path is meant for it."""


@dataclass(frozen=True)
class Library:
    """A shared library: all sources of one folder of `csrc`. variable: the environment's name for its compiler.
    architectures: compute capabilities without the point, of GPUs to compile for."""

    name: str
    suffix: str
    variable: str
    compilers: tuple[str, ...]
    flags: tuple[str, ...]
    architectures: tuple[str, ...] = ()

    @property
    def sources(self) -> list[Path]:
        """What is compiled."""
        return sorted((source_root() / self.name).glob(f"*{self.suffix}"))


# No contraction: products and sums are rounded one by one on every path, so that all paths agree bit for bit.
CPU = Library(
    "cpu", ".cpp", "CXX", ("c++", "g++", "clang++"),
    ("-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
     *WARNINGS),
)  # fmt: skip
# Numbers below 1.2e-38 count as zero: without that, each exponential, root and quotient takes three instructions more.
CUDA = Library(
    "cuda", ".cu", "NVCC", ("nvcc", "/usr/local/cuda/bin/nvcc"),
    ("-std=c++17", "-O3", "-ftz=true", "-shared", "-Xcompiler=-fPIC", "-cudart=static", "--threads=0",
     "-Werror=all-warnings"),
    ("80", "90", "100"),
)  # fmt: skip
LIBRARIES = {library.name: library for library in (CPU, CUDA)}


def source_root() -> Path:
    """The folder `csrc`: inside the package when it was installed from a wheel, else beside it in the checkout."""
    inside = HERE / "csrc"
    return inside if inside.is_dir() else HERE.parent.parent / "csrc"


def installed(library: Library) -> Path | None:
    """The library that came with the wheel."""
    path = HERE / "lib" / f"{library.name}.so"
    return path if path.is_file() else None


def cache() -> Path:
    """Where libraries that are compiled at first use go; `BuildError` without a home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "threed"
    except RuntimeError as error:
        raise BuildError(f"nowhere to build: {error} (XDG_CACHE_HOME names a place)") from error


def find_compiler(library: Library) -> list[str]:
    """The compiler's command; `Unavailable` without one."""
    try:
        named = shlex.split(os.environ.get(library.variable, ""))
    except ValueError as error:
        raise BuildError(f"{library.variable} is no command: {error}") from error
    for command in [named] if named else [[name] for name in library.compilers]:
        if path := shutil.which(command[0]):
            return [path, *command[1:]]
    wanted = " ".join(named) or ", ".join(library.compilers)
    raise Unavailable(
        f"no compiler: {wanted} not found (install one, or name it in {library.variable})"
    )


def is_cached(library: Library) -> bool:
    """Returns whether the cache has this library: `ensure` compiles nothing then."""
    if not library.sources:
        return False
    return (cache() / f"{library.name}-{_key(library, find_compiler(library))}.so").exists()


def ensure(library: Library, folder: Path | None = None) -> Path:
    """The library's path in `folder` (default: the cache), compiled if it is not there yet.

    `Unavailable` without sources or a compiler; `BuildError` if the compiler refuses, or the folder cannot be written.
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
            f"cannot build in {folder}: {error} (XDG_CACHE_HOME names another place)"
        ) from error
    return path


def _make_private(folder: Path) -> None:
    """Makes a folder for this user alone; BuildError if others own or may write it, as its code will run."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = folder.stat()
    if about.st_uid not in (os.geteuid(), 0) or about.st_mode & 0o022:
        raise BuildError(f"others own or may write {folder}, and its code would run: {FIX}")


def _key(library: Library, command: list[str]) -> str:
    """A hash of all that the machine code depends on."""
    try:
        version = subprocess.run([*command, "--version"], capture_output=True, check=False).stdout
    except OSError as error:
        raise BuildError(
            f"{shlex.join(command)} does not run: {error} ({library.variable} names another)"
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
    """Holds a lock on a file; the kernel releases it with the process, so the file may stay behind."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(library: Library, command: list[str], path: Path) -> None:
    """Compiles under a name of its own beside `path`, then renames; sweeps what killed builders left."""
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
    """The flags for those GPUs that this compiler knows; of the newest also PTX, which later GPUs compile themselves.

    It is one command, so they go to the linker as well, which would else add a GPU of its own choice.
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
    """The first lines of a compiler's output from its first error on."""
    found = output.splitlines()
    start = next((i for i, line in enumerate(found) if "error" in line), 0)
    return "\n".join(found[start : start + lines]) or "(it said nothing)"


def load(library: Library) -> tuple[ctypes.CDLL | None, str]:
    """The library, loaded, and what it is; or None, and why. A build that fails is told of in a warning."""
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
    """The wheel's library; where it has none, or one that does not load here, that of the cache."""
    wheel = installed(library)
    if wheel is not None:
        with contextlib.suppress(OSError):  # built for another system: compile for this one
            return wheel, ctypes.CDLL(str(wheel))
    path = ensure(library)
    with contextlib.suppress(OSError):
        return path, ctypes.CDLL(str(path))
    try:
        path.unlink(missing_ok=True)  # damaged: compile it anew
        return path, ctypes.CDLL(str(ensure(library)))
    except OSError as error:
        raise BuildError(f"{path} does not load: {error}") from error


def _instructions(loaded: ctypes.CDLL) -> str:
    """The instruction set that the library picked for this processor."""
    pick = getattr(loaded, "threed_instructions", None)
    if pick is None:
        return "gpu"
    pick.restype = ctypes.c_char_p
    return str(pick().decode())


def main(argv: list[str] | None = None) -> int:
    """Compiles every library, or says what is in use."""
    argv = sys.argv[1:] if argv is None else argv
    if argv not in ([], ["--check"]):
        print(
            f"usage: python -m threed.native.build [--check], not {shlex.join(argv)}",
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
