"""The kernels of csrc/cuda, compiled by g++ for tests/cuda/emulator.cpp and run on tensors of the CPU.

    with emulated(order="random", seed=3) as machine:
        loss = cross_entropy.whole(logits, targets, weight, columns)     the code that a GPU runs, up to the launch
    machine.launches[0].traffic["logits"].read                           bytes that the kernel read of it

`emulated` stands in for `threed.ops.launch.start`. Memory that was made by `torch.empty` meanwhile counts as never
written: a kernel that reads it before it writes it is at fault, as is one that reaches beyond a tensor. The first fault
raises `Fault`, which names the lines of the kernel.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from threed.core import device
from threed.ops import launch

HERE = Path(__file__).resolve().parent
SOURCES = HERE.parents[1] / "csrc" / "cuda"
COMPILER = shutil.which("g++")
COMMON = (
    "-std=c++20",
    "-g1",
    "-O1",
    "-fPIC",
    "-Wall",
    "-Wextra",
    "-Wno-unknown-pragmas",
    "-Iinclude",  # relative to HERE, so that clones share what is built
)
# -fno-tree-sra: a copy of 16 bytes stays one access. -fno-gnu-unique: two libraries do not share a kernel's variables.
KERNEL = (
    "-fno-gnu-unique", "-ffp-contract=fast", "-fsanitize=thread", "-fno-tree-sra", "-x", "c++", "-include",
    "cuda_runtime.h",
)  # fmt: skip

Order = Literal["random", "forward", "backward"]
ORDERS: tuple[Order, ...] = ("random", "forward", "backward")
PROCESSORS = 3  # multiprocessors of the emulated device
TRACED_BLOCKS = 2  # of each launch, whose sectors and bank passes are counted
SHARED_MEMORY = 227 << 10  # bytes that a block may ask for, as on sm_90


class Fault(AssertionError):
    """What a kernel did wrong."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that a launch read and wrote of a tensor. size: of the tensor."""

    read: int
    written: int
    size: int

    @property
    def times(self) -> tuple[float, float]:
        """How often the whole tensor was read, and written."""
        return self.read / max(self.size, 1), self.written / max(self.size, 1)


@dataclass(frozen=True)
class Launch:
    """What one call of a launcher did.

    sectors: of 32 bytes, that warps touched, in the first blocks; used: bytes of them that were asked for. bank_passes:
    of shared memory, and the least that would have done. kernels: that the launcher launched.
    """

    name: str
    traffic: dict[str, Traffic]
    sectors: int
    used: int
    bank_passes: int
    least_bank_passes: int
    barriers: int
    kernels: int
    counts: bool = True  # else it ran on a GPU, which counts nothing


@dataclass
class Machine:
    """An emulated device; `start` is its `threed.ops.launch.start`."""

    library: ctypes.CDLL
    parameters: dict[str, list[str]]
    forgets: bool = False  # after each launch, what was written: others write, too
    fresh: set[int] = field(default_factory=set)  # addresses of memory that nobody has written
    launches: list[Launch] = field(default_factory=list)
    _buffers: dict[tuple[int, int], int] = field(default_factory=dict)
    _alive: list[Tensor] = field(default_factory=list)  # else the same address might come again

    def start(self, name: str, *arguments: launch.Argument) -> None:
        """Runs a kernel; raises `Fault` at the first thing that it does wrong, and ValueError for a refused launch."""
        plain, names = launch.check_types(name, arguments), self.parameters[name]
        tensors = {n: a for n, a in zip(names, arguments, strict=True) if isinstance(a, Tensor)}
        numbers = {n: self._buffer(n, tensor) for n, tensor in tensors.items()}
        before, counts = {n: self._traffic(k) for n, k in numbers.items()}, self._counts()
        code = launch.declare(self.library, name)(*plain, None)
        if text := runtime().emulator_error().decode():
            raise Fault(readable(text))
        if code:
            raise ValueError(f"{name}: refused with CUDA error {code}")
        sectors, used, passes, least, barriers, _, kernels = (
            b - a for a, b in zip(counts, self._counts(), strict=True)
        )
        traffic = {}
        for n, number in numbers.items():
            read, written = (b - a for a, b in zip(before[n], self._traffic(number), strict=True))
            traffic[n] = Traffic(read, written, tensors[n].numel() * tensors[n].element_size())
        self.launches.append(Launch(name, traffic, sectors, used, passes, least, barriers, kernels))
        if self.forgets:
            runtime().emulator_forget()
            self._buffers.clear()
            self._alive.clear()
            self.fresh.clear()

    def _buffer(self, name: str, tensor: Tensor) -> int:
        """Hands a tensor's memory over, from its first element to its last, and returns its number."""
        extent = 1 + sum(
            (n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        key = (tensor.data_ptr(), extent * tensor.element_size() if tensor.numel() else 0)
        for (first, size), number in self._buffers.items():
            if first <= key[0] and key[0] + key[1] <= first + size:
                return number
        known = tensor.untyped_storage().data_ptr() not in self.fresh
        self._alive.append(tensor)
        self._buffers[key] = runtime().emulator_buffer(key[0], key[1], known, name.encode())
        return self._buffers[key]

    def _traffic(self, number: int) -> tuple[int, int]:
        out = (ctypes.c_int64 * 2)()
        runtime().emulator_traffic(number, out)
        return out[0], out[1]

    def _counts(self) -> list[int]:
        out = (ctypes.c_int64 * 7)()
        runtime().emulator_counts(out)
        return list(out)


class _FreshMemory(TorchDispatchMode):
    """Notes the memory that is made without values."""

    def __init__(self, machine: Machine, only_of_operators: bool) -> None:
        super().__init__()
        self.machine, self.only_of_operators, self.in_operator = machine, only_of_operators, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operator = launch.OPERATORS.get(func.overloadpacket._qualified_op_name)
        if operator is not None:
            self.in_operator = True
            try:
                with self:  # to see what memory it makes
                    return operator.work(*args, **(kwargs or {}))
            finally:
                self.in_operator = False
        out = func(*args, **(kwargs or {}))
        if "empty" in func.overloadpacket.__name__ and (
            self.in_operator or not self.only_of_operators
        ):
            self.machine.fresh.add(out.untyped_storage().data_ptr())
            self.machine._alive.append(out)
        return out


@contextmanager
def emulated(
    order: Order = "random",
    seed: int = 1,
    *,
    checks: bool = True,
    library: Path | None = None,
    torch_writes: bool = False,
    shared_memory: int = SHARED_MEMORY,
    driver_error: int = 0,
) -> Iterator[Machine]:
    """Runs what `threed.ops.launch` starts on the CPU, where layers take bf16 to these kernels.

    library: other kernels than those of csrc/cuda. torch_writes: kernels are not alone, so that only memory which one
    of our operators makes counts as never written. shared_memory: the most bytes that a block of the device may ask
    for. driver_error: with which every launch is refused.
    """
    if torch.get_default_device().type == "cuda":
        with _on_gpu() as machine:
            yield machine
        return
    path = library or kernels()
    machine = Machine(_loaded(path), parameters(), torch_writes)
    runtime().emulator_begin(
        seed, ORDERS.index(order), checks, TRACED_BLOCKS, shared_memory, driver_error
    )
    with (
        mock.patch.object(launch, "start", machine.start),
        mock.patch.object(launch, "available", return_value=True),
        mock.patch.object(device, "processors", return_value=PROCESSORS),
        mock.patch.object(device, "shared_memory", return_value=shared_memory),
        _FreshMemory(machine, torch_writes),
    ):
        yield machine


@contextmanager
def _on_gpu() -> Iterator[Machine]:
    """Runs kernels on the GPU that is the default device, and notes only which."""
    machine, start = Machine(ctypes.CDLL(None), {}), launch.start

    def noting(name: str, *arguments: launch.Argument) -> None:
        start(name, *arguments)
        machine.launches.append(Launch(name, {}, 0, 0, 0, 0, 0, 0, counts=False))

    with mock.patch.object(launch, "start", noting):
        yield machine
        torch.cuda.synchronize()


@functools.cache
def parameters() -> dict[str, list[str]]:
    """The names of each launcher's parameters, without the stream."""
    found = {}
    for source in sorted(SOURCES.glob("*.cu")):
        for name, inside in re.findall(r"\bint threed_cuda_(\w+)\(([^)]*)\)", source.read_text()):
            found[name] = [re.split(r"[\s*]+", one.strip())[-1] for one in inside.split(",")][:-1]
    return found


# --------------------------------------------------------------------------------------------------------------- build


@functools.cache
def kernels() -> Path:
    """The library of all kernels of csrc/cuda."""
    return build()


def build(changed: dict[str, str] | None = None, *, only: Sequence[str] = ()) -> Path:
    """Builds the library of all kernels, or of the kernels of some sources.

    Args:
        changed: texts by file name; they replace the files of csrc/cuda, or are further files.
        only: file names of the sources; () for all sources.

    Returns:
        The path of the library.
    """
    texts = {path.name: path.read_text() for path in sorted(SOURCES.iterdir())} | (changed or {})
    headers = {name: text for name, text in texts.items() if name.endswith(".cuh")}
    sources = only or [name for name in texts if name.endswith(".cu")]
    parts = [*(_compile(name, texts[name], headers) for name in sources), _runtime_path()]
    return _made(f"kernels-{_hash(*(part.name for part in parts))}.so", _command("-shared", *parts))


def _compile(name: str, text: str, headers: dict[str, str]) -> Path:
    """The object of one source. Of headers those that it includes, directly or not, decide whether it is the same."""
    used, included = [text], re.findall(r'#include "(\S+)"', text)
    while included:
        used.append(headers[included.pop()])
        included += re.findall(r'#include "(\S+)"', used[-1])
    runtime_headers = [path.read_text() for path in sorted((HERE / "include").glob("*.h"))]
    made = f"{name}-{_hash(*used, *runtime_headers, *KERNEL, *COMMON)}.o"
    if (built := _built(made)).exists():
        return built
    with tempfile.TemporaryDirectory() as folder:
        for file, content in {**headers, name: text}.items():
            (Path(folder) / file).write_text(content)
        fused = ("-mfma",) if os.uname().machine == "x86_64" else ()
        return _made(made, _command(*fused, *KERNEL, f"-I{folder}", "-c", Path(folder) / name))


@functools.cache
def _runtime_path() -> Path:
    source = HERE / "emulator.cpp"
    key = _hash(source.read_text(), (HERE / "include" / "cuda_runtime.h").read_text(), *COMMON)
    return _made(f"libemulator-{key}.so", _command("-shared", source, "-ldl"))


@functools.cache
def runtime() -> ctypes.CDLL:
    """The emulator itself."""
    loaded = ctypes.CDLL(str(_runtime_path()), mode=ctypes.RTLD_GLOBAL)
    loaded.emulator_error.restype = ctypes.c_char_p
    loaded.emulator_buffer.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_char_p,
    ]
    return loaded


@functools.cache
def _loaded(path: Path) -> ctypes.CDLL:
    runtime()
    return ctypes.CDLL(str(path))


def _command(*arguments: str | Path) -> list[str]:
    assert COMPILER is not None, "the emulator needs g++"
    return [COMPILER, *COMMON, *map(str, arguments)]


def _built(name: str) -> Path:
    """Where the file of this name is, once it has been built."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    cache = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return cache / "threed" / "emulator" / name


def _made(name: str, command: list[str]) -> Path:
    """The file of this name among those built before; built by the command where it is not there."""
    path = _built(name)
    folder = path.parent
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as place:
            out = Path(place) / name
            done = subprocess.run(
                [*command, "-o", str(out)], cwd=HERE, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stderr
            assert not done.stderr, done.stderr  # warnings are errors
            os.replace(out, path)  # another process may have made the same
    return path


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def readable(text: str) -> str:
    """A fault's text with source lines in place of addresses."""

    def line(match: re.Match[str]) -> str:
        tool = shutil.which("addr2line")
        if tool is None:
            return match[0]
        # inlined functions from the inside out: the line of the kernel's own text is the first outside the emulator
        done = subprocess.run(
            [tool, "-i", "-e", match[1], match[2]], capture_output=True, text=True, check=False
        )
        lines = [at for at in done.stdout.splitlines() if "/include/" not in at]
        return f"(line {lines[0].rsplit(':', 1)[-1].split()[0]})" if lines else match[0]

    return re.sub(r"<(\S+)\+(0x[0-9a-f]+)>", line, text)
