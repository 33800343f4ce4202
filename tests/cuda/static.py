"""What compiled kernels say about their speed, without a GPU: registers, access widths, and the work for a byte.

    python tests/cuda/static.py        prints a table of every kernel, rewrites static.toml, and times the compiler

nvcc compiles each source of csrc/cuda for each architecture, nvdisasm (from the package index) prints the machine code,
and sass.py finds the loops in it. A kernel's main loop, on the way through it that moves the most, gives for one warp

    memory    clocks that an H200's memory needs for the bytes that an iteration streams, of a multiprocessor's share
    issue     instructions / 4, what a multiprocessor issues in a clock, as a share of these clocks
    special   exponentials, roots, quotients and conversions times 2 clocks, as a share of them
    flying    bytes that all resident threads ask for before they use the first of them

This is a budget and no measurement: a kernel within it can be as fast as memory, one outside cannot. An iteration has
all that a kernel can be given (a residual, a bias); a call without them moves less, in nearly as many instructions.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import math
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))  # as a script

from tests.cuda import sass  # noqa: E402
from threed.native.build import CUDA, Unavailable, cache, find_compiler  # noqa: E402

TABLE = HERE / "static.toml"
PINNED = "13.0.88"  # the nvcc that made the table
# What the library has machine code for, and what a driver would make of its PTX.
ARCHITECTURES = {"sm_80": "compute_80", "sm_90": "compute_90", "sm_100": "compute_90"}
FLAGS = tuple(f for f in CUDA.flags if not f.startswith(("-shared", "-cudart", "-gencode", "-Xcompiler")))
CHECKED = (*FLAGS, "-cubin", "-Xptxas=-v", "-Werror=all-warnings")
COMPILE_SECONDS = 60  # of CPU, for all sources and architectures

REGISTERS, THREADS, BLOCKS, PARTITIONS = 65536, 2048, 32, 4  # of a multiprocessor
SHARED = {"sm_80": 164 << 10, "sm_90": 228 << 10, "sm_100": 228 << 10}
DYNAMIC = {"cross_entropy.whole": 50304 * 2}  # bytes of dynamic shared memory: GPT-2's vocabulary
# An H200: 4.8 TB/s for 132 multiprocessors of 1.755 GHz.
BYTES_A_CLOCK = 4.8e12 / 132 / 1.755e9
SPECIAL_CLOCKS = 2  # 32 lanes at 16 a clock


@dataclass(frozen=True)
class Resources:
    """What a kernel takes: registers of a thread, bytes of static shared memory of a block, of stack and of spills."""

    registers: int
    shared: int
    stack: int
    spills: int


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel. name: source.kernel<template arguments>; threads: of a block."""

    name: str
    architecture: str
    threads: int
    resources: Resources
    code: sass.Code

    @property
    def plain(self) -> str:
        """The name without template arguments."""
        return self.name.split("<")[0]

    @property
    def blocks(self) -> int:
        """Blocks that a multiprocessor has at a time."""
        warps = self.threads // 32
        of_warp = math.ceil(self.resources.registers * 32 / 256) * 256
        by_registers = REGISTERS // of_warp // PARTITIONS * PARTITIONS // warps
        shared = self.resources.shared + DYNAMIC.get(self.plain, 0) + 1024  # the system's own
        return min(by_registers, SHARED[self.architecture] // shared, THREADS // self.threads, BLOCKS)

    @property
    def looped(self) -> list[sass.Instruction]:
        """All instructions in loops; of a kernel that streams outside of loops, all."""
        everything = range(len(self.code.blocks)) if self._main == [None] else ()
        return list(self.code.instructions({*everything, *(b for loop in self.code.loops for b in loop.blocks)}))

    @functools.cached_property
    def _main(self) -> list[sass.Loop | None]:
        """The longest loop that reads and writes; where reading and writing have loops of their own, these two; where
        nothing is streamed in a loop, the kernel."""
        found: dict[tuple[bool, bool], tuple[int, sass.Loop]] = {}
        for loop in self.code.outer_loops:
            path = self.code.path(loop)
            bases = {i.base for i in self.code.instructions(path.blocks) if i.streamed}
            kind = ("LDG" in bases, "STG" in bases)
            if bases and (kind not in found or path.size > found[kind][0]):
                found[kind] = path.size, loop
        kinds = [(True, True)] if (True, True) in found else [(True, False), (False, True)]
        return [found[kind][1] for kind in kinds if kind in found] or [None]

    @functools.cached_property
    def budget(self) -> Budget:
        """What the main loop's iteration costs; two loops make as many iterations as move the same bytes."""
        paths = [self.code.path(loop) for loop in self._main]
        most = max(path.streamed for path in paths)
        times = [most / max(path.streamed, 1) for path in paths]
        codes = [list(self.code.instructions(path.blocks)) for path in paths]
        special = [sum(i.base in sass.SPECIAL for i in code) for code in codes]
        memory = 32 * most * len(paths) / BYTES_A_CLOCK
        return Budget(
            most * len(paths),
            _share(sum(p.size * t for p, t in zip(paths, times, strict=True)) / PARTITIONS, memory),
            _share(sum(n * t for n, t in zip(special, times, strict=True)) * SPECIAL_CLOCKS, memory),
            max(sass.in_flight(code) for code in codes) * self.threads * self.blocks,
        )


@dataclass(frozen=True)
class Budget:
    """streamed: bytes of a thread in an iteration; issue, special, flying: see above."""

    streamed: int
    issue: float
    special: float
    flying: int


def _share(clocks: float, of: float) -> float:
    return clocks / of if of else 0.0


def accesses(code: Iterable[sass.Instruction]) -> Counter[str]:
    """Loads and stores by space and width: {"LDG 128": 4, "STS 32": 1}, bits."""
    return Counter(f"{i.base} {8 * i.width}" for i in code if i.width)


# ------------------------------------------------------------------------------------------------------------ compiling


def missing() -> str:
    """Why kernels cannot be looked at here; nothing where they can."""
    try:
        find_compiler(CUDA)
    except Unavailable as reason:
        return str(reason)
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


@functools.cache
def every() -> list[Kernel]:
    """All kernels of csrc/cuda for all architectures."""
    wanted = [(source, architecture) for architecture in ARCHITECTURES for source in CUDA.sources]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        texts = list(pool.map(lambda one: listing(*one), wanted))
    return [k for (source, arch), text in zip(wanted, texts, strict=True) for k in kernels(source.stem, arch, text)]


def kernels(stem: str, architecture: str, text: str) -> list[Kernel]:
    """The kernels of a source, from its listing."""
    bounds, resources = sass.threads(text), _resources(text)
    found = [
        Kernel(f"{stem}.{readable(name)}", architecture, bounds[name], resources[name], code)
        for name, code in sass.kernels(text).items()
    ]
    return sorted(found, key=lambda kernel: kernel.name)


def readable(mangled: str) -> str:
    """A kernel's name with its template arguments, of one in an unnamed namespace."""
    rest = re.sub(r"^_ZN", "", mangled)
    name = ""
    while length := re.match(r"\d+", rest):
        start = len(length[0])
        name, rest = rest[start : start + int(length[0])], rest[start + int(length[0]) :]
    arguments = re.match(r"I((?:L[a-z]\d+E|[a-z])+)E", rest)
    parts = re.findall(r"L[a-z](\d+)E|([a-z])", arguments[1]) if arguments else []
    values = [value or {"f": "fp32", "t": "bf16"}.get(letter, letter) for value, letter in parts]
    return f"{name}<{','.join(values)}>" if values else name


def listing(source: Path, architecture: str) -> str:
    """What ptxas says of a source, and its machine code; from the cache if nothing has changed."""
    command, tool = find_compiler(CUDA), disassembler()
    assert tool is not None
    target = f"-gencode=arch={ARCHITECTURES[architecture]},code={architecture}"
    texts = [path.read_text() for path in (source, *sorted(source.parent.glob("*.cuh")))]
    parts = [*command, *CHECKED, target, version(), tool, str(Path(tool).stat().st_size), *texts]
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


def _resources(text: str) -> dict[str, Resources]:
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


# -------------------------------------------------------------------------------------------------------------- a table


def table(found: Iterable[Kernel]) -> dict[str, dict[str, dict[str, int]]]:
    """Architecture: kernel: registers, static shared memory, resident blocks."""
    out: dict[str, dict[str, dict[str, int]]] = {}
    for k in found:
        numbers = {"registers": k.resources.registers, "shared": k.resources.shared, "blocks": k.blocks}
        out.setdefault(k.architecture, {})[k.name] = numbers
    return out


def committed() -> dict[str, dict[str, dict[str, int]]]:
    """The table in static.toml."""
    return tomllib.loads(TABLE.read_text())


def _toml(of: Mapping[str, Mapping[str, Mapping[str, int]]]) -> str:
    lines = [
        f"# Written by `python tests/cuda/static.py` with nvcc {version()}: bytes, and blocks of a multiprocessor."
    ]
    for architecture, kernels_ in of.items():
        lines.append(f"\n[{architecture}]")
        for name, numbers in kernels_.items():
            lines.append(f'"{name}" = {{ {", ".join(f"{k} = {v}" for k, v in numbers.items())} }}')
    return "\n".join(lines) + "\n"


def _line(k: Kernel) -> str:
    b, code = k.budget, k.looped
    counts = " ".join(f"{n}x{what.replace(' ', '.')}" for what, n in sorted(accesses(code).items()))
    shares = f"{b.issue:6.0%} {b.special:7.0%} {b.flying / 1024:6.0f}"
    return (
        f"{k.architecture:7}{k.name:28} {k.resources.registers:4} {k.resources.shared:6} {k.threads:4} {k.blocks:3} "
        f"{b.streamed:5} {shares}  {counts}"
    )


def compile_seconds() -> float:
    """CPU time of compiling the whole library, for every architecture."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    more = [f"-gencode=arch={a},code={code}" for code, a in ARCHITECTURES.items()]
    extra = [flag for flag in more if flag not in CUDA.flags]
    with tempfile.TemporaryDirectory() as folder:
        _run([*find_compiler(CUDA), *CUDA.flags, *extra, *map(str, CUDA.sources), "-o", f"{folder}/cuda.so"])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> int:
    """Prints and writes the table; 1 where the compiler takes too long."""
    if why := missing():
        print(why, file=sys.stderr)
        return 2
    print(f"{'':7}{'':28} regs shared thrd blk bytes  issue special flying KiB, then accesses in loops by bits")
    for k in every():
        print(_line(k))
    TABLE.write_text(_toml(table(every())))
    seconds = compile_seconds()
    print(f"the compiler took {seconds:.0f} s of CPU for all of csrc/cuda; {COMPILE_SECONDS} are allowed")
    return int(seconds > COMPILE_SECONDS)


if __name__ == "__main__":
    raise SystemExit(main())
