"""What compiled kernels say about their speed, without a GPU: registers, access widths, and the work for a byte.

    python tests/cuda/static.py        prints a table of every kernel, rewrites static.toml, and times the compiler

nvcc compiles each source of csrc/cuda for each architecture, nvdisasm (from the package index) prints the machine code,
and sass.py finds the loops in it. A kernel's main loop, on the way through it that moves the most, gives for one warp

    memory    clocks that an H200's memory needs for the bytes that an iteration streams, of a multiprocessor's share
    issue     instructions / 4, what a multiprocessor issues in a clock, as a share of these clocks
    special   exponentials, roots, quotients and conversions times 2 clocks, as a share of them
    flying    bytes that all resident threads ask for before they wait for them; the mean, where an iteration waits often

This is a budget and no measurement: a kernel within it can be as fast as memory, one outside cannot. An iteration has
all that a kernel can be given (a residual, a bias); a call without them moves less, in nearly as many instructions.
"""

from __future__ import annotations

import functools
import math
import os
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))  # as a script

from tests.cuda import compiled, sass  # noqa: E402
from threed.core.native.build import CUDA  # noqa: E402
from threed.ops import norm  # noqa: E402

TABLE = HERE / "static.toml"
PINNED = "13.0.88"  # the nvcc that made the table
COMPILE_SECONDS = 60  # of CPU, for all sources and architectures

REGISTERS, THREADS, BLOCKS, PARTITIONS = 65536, 2048, 32, 4  # of a multiprocessor, as SHARED
SHARED = {"sm_80": 164 << 10, "sm_90": 228 << 10, "sm_100": 228 << 10}
# bytes of dynamic shared memory: GPT-2's vocabulary, padded
DYNAMIC = {"cross_entropy.whole<1>": 50304 * 2}
ALONE = "cross_entropy.whole<2>"  # takes all shared memory of a multiprocessor
# An H200: 4.8 TB/s for 132 multiprocessors of 1.755 GHz.
BYTES_A_CLOCK = 4.8e12 / 132 / 1.755e9
SPECIAL_CLOCKS = 2  # 32 lanes at 16 a clock


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel. name: source.kernel<template arguments>; threads: of a block."""

    name: str
    architecture: str
    threads: int
    resources: compiled.Resources
    code: sass.Code

    @property
    def plain(self) -> str:
        """The name without template arguments."""
        return self.name.split("<")[0]

    @property
    def blocks(self) -> int:
        """Blocks that a multiprocessor has at a time."""
        if self.name == ALONE:
            return 1
        warps = self.threads // 32
        of_warp = math.ceil(self.resources.registers * 32 / 256) * 256
        by_registers = REGISTERS // of_warp // PARTITIONS * PARTITIONS // warps
        shared = self.resources.shared + DYNAMIC.get(self.name, 0) + 1024  # the system's own
        return min(
            by_registers, SHARED[self.architecture] // shared, THREADS // self.threads, BLOCKS
        )

    @property
    def resident(self) -> int:
        """Those that a multiprocessor gets: a kernel that leaves parts of sums behind is started with few."""
        if self.plain != "norm.backward":
            return self.blocks
        _, warps, packs = map(int, self.name[:-1].split("<")[1].split(","))
        return min(self.blocks, norm.blocks_of_backward(warps * 32 * packs * 8))

    @property
    def looped(self) -> list[sass.Instruction]:
        """All instructions in loops; of a kernel without loops, all."""
        inside = {block for loop in self.code.loops for block in loop.blocks}
        return list(self.code.instructions(inside or self.code.order))

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
            _share(
                sum(n * t for n, t in zip(special, times, strict=True)) * SPECIAL_CLOCKS, memory
            ),
            int(max(sass.in_flight(code) for code in codes) * self.threads * self.resident),
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


@functools.cache
def every(*architectures: str) -> list[Kernel]:
    """Returns all kernels of csrc/cuda for some architectures; by default for all."""
    wanted = [
        (source, architecture)
        for architecture in architectures or compiled.ARCHITECTURES
        for source in CUDA.sources
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        texts = list(pool.map(lambda one: compiled.listing(*one), wanted))
    return [
        k
        for (source, arch), text in zip(wanted, texts, strict=True)
        for k in kernels(source.stem, arch, text)
    ]


def kernels(stem: str, architecture: str, text: str) -> list[Kernel]:
    """The kernels of a source, from its listing."""
    bounds, resources = sass.threads(text), compiled.resources(text)
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


# -------------------------------------------------------------------------------------------------------------- a table


def table(found: Iterable[Kernel]) -> dict[str, dict[str, dict[str, int]]]:
    """Architecture: kernel: registers, static shared memory, resident blocks."""
    out: dict[str, dict[str, dict[str, int]]] = {}
    for k in found:
        numbers = {
            "registers": k.resources.registers,
            "shared": k.resources.shared,
            "blocks": k.blocks,
        }
        out.setdefault(k.architecture, {})[k.name] = numbers
    return out


def committed() -> dict[str, dict[str, dict[str, int]]]:
    """The table in static.toml."""
    return tomllib.loads(TABLE.read_text())


def _toml(of: Mapping[str, Mapping[str, Mapping[str, int]]]) -> str:
    made = f"python tests/cuda/static.py, nvcc {compiled.version()}"
    lines = [
        f"# Registers of a thread, bytes of static shared memory, and blocks that a multiprocessor has. By {made}."
    ]
    for architecture, kernels_ in of.items():
        lines.append(f'\n["{architecture}"]')
        for name, numbers in kernels_.items():
            lines.append(f'"{name}" = {{ {", ".join(f"{k} = {v}" for k, v in numbers.items())} }}')
    return "\n".join(lines) + "\n"


def _line(k: Kernel) -> str:
    b, code = k.budget, k.looped
    found = accesses(code) + Counter(
        i.base for i in code if i.base in ("BAR", "SHFL", *sass.SPECIAL)
    )
    found += Counter({"calls": sum(i.calls for i in code), "fp64": sum(i.double for i in code)})
    counts = " ".join(f"{n}x{what.replace(' ', '.')}" for what, n in sorted(found.items()))
    shares = f"{b.issue:6.0%} {b.special:7.0%} {b.flying / 1024:6.0f}"
    return (
        f"{k.architecture:11}{k.name:28} {k.resources.registers:4} {k.resources.shared:6} {k.threads:4} {k.blocks:3} "
        f"{b.streamed:5} {shares}  {counts}"
    )


def main() -> int:
    """Prints and writes the table; 1 where the compiler takes too long."""
    if why := compiled.missing():
        print(why, file=sys.stderr)
        return 2
    print(
        f"{'':39} regs shared thrd blk bytes  issue special flying KiB, then what loops have: accesses by bits, ..."
    )
    for k in every():
        print(_line(k))
    TABLE.write_text(_toml(table(every())))
    seconds = compiled.compile_seconds()
    print(
        f"the compiler took {seconds:.0f} s of CPU for all of csrc/cuda; {COMPILE_SECONDS} are allowed"
    )
    return int(seconds > COMPILE_SECONDS)


if __name__ == "__main__":
    raise SystemExit(main())
