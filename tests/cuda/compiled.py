"""What nvcc and nvdisasm say of the sources in csrc/cuda: registers and memory of each kernel, and its machine code.

    text = listing(source, "sm_90")       from $XDG_CACHE_HOME/threed/static where nothing has changed
    resources(text), sass.kernels(text), sass.threads(text)

nvdisasm comes from the package index (nvidia-cuda-nvdisasm); one on the PATH will do as well.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import re
import resource
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from threed.core.native.build import CUDA, Unavailable, cache, find_compiler, targets

ARCHITECTURES = {f"sm_{a}": f"-gencode=arch=compute_{a},code=sm_{a}" for a in CUDA.architectures}
FLAGS = tuple(
    f for f in CUDA.flags if not f.startswith(("-shared", "-cudart", "--threads", "-Xcompiler"))
)
CHECKED = (*FLAGS, "-cubin", "-Xptxas=-v")


@dataclass(frozen=True)
class Resources:
    """What a kernel takes: registers of a thread, bytes of static shared memory of a block, of stack and of spills."""

    registers: int
    shared: int
    stack: int
    spills: int


def missing() -> str:
    """Why kernels cannot be looked at here; nothing where they can."""
    try:
        find_compiler(CUDA)
    except Unavailable as reason:
        return str(reason)
    if tuple(map(int, version().split("."))) < (12, 8):
        return f"nvcc {version()} does not know sm_100: 12.8 does"
    return "" if disassembler() else "no nvdisasm: pip install nvidia-cuda-nvdisasm"


@functools.cache
def disassembler() -> str | None:
    """nvdisasm of the package nvidia-cuda-nvdisasm, else of the PATH."""
    try:
        files = importlib.metadata.files("nvidia-cuda-nvdisasm") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    inside = [str(file.locate()) for file in files if file.name == "nvdisasm"]
    return next((path for path in inside if os.access(path, os.X_OK)), shutil.which("nvdisasm"))


@functools.cache
def version() -> str:
    """nvcc's version: 13.0.88."""
    found = re.search(r"V(\d+\.\d+\.\d+)", _run([*find_compiler(CUDA), "--version"]))
    assert found, "nvcc says no version"
    return found[1]


def listing(source: Path, architecture: str) -> str:
    """What ptxas says of a source, and its machine code; from the cache if nothing has changed."""
    command, tool = find_compiler(CUDA), disassembler()
    assert tool is not None
    target = ARCHITECTURES[architecture]
    texts = [path.read_text() for path in (source, *sorted(source.parent.glob("*.cuh")))]
    # not the paths of the tools, which are others in each virtual environment
    parts = [*command[1:], *CHECKED, target, version(), str(Path(tool).stat().st_size), *texts]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    path = cache() / "static" / f"{source.stem}-{architecture}-{key}.sass"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            cubin, out = Path(folder) / "cubin", Path(folder) / "sass"
            said = _run([*command, *CHECKED, target, str(source), "-o", str(cubin)])
            out.write_text(said + _run([tool, str(cubin)]))
            os.replace(out, path)
    return path.read_text()


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr or done.stdout
    return done.stderr + done.stdout


def resources(text: str) -> dict[str, Resources]:
    """What ptxas reports of each kernel."""
    found = {}
    for part in text.split("Compiling entry function '")[1:]:
        numbers = {
            what: sum(map(int, re.findall(pattern, part.split("\n\t")[0])))
            for what, pattern in (
                ("registers", r"Used (\d+) registers"),
                ("shared", r"(\d+) bytes smem"),
                ("stack", r"(\d+) bytes stack frame"),
                ("spills", r"(\d+) bytes spill"),
            )
        }
        found[part.split("'")[0]] = Resources(**numbers)
    return found


def compile_seconds() -> float:
    """CPU time of compiling the whole library."""
    before, command = resource.getrusage(resource.RUSAGE_CHILDREN), find_compiler(CUDA)
    with tempfile.TemporaryDirectory() as folder:
        _run(
            [
                *command,
                *CUDA.flags,
                *targets(CUDA, command),
                *map(str, CUDA.sources),
                "-o",
                f"{folder}/cuda.so",
            ]
        )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
