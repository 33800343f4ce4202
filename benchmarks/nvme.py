"""Measures threed's I/O to a drive, fio, O_DIRECT from Python, and DeepSpeed's async_io.

    python benchmarks/nvme.py --dir /nvme                       # 10 rounds of 2 GiB; JSON lines, a table on stderr
    python benchmarks/nvme.py --dir /nvme --rounds 20 --only threed fio_libaio o_direct
    python benchmarks/nvme.py --dir /nvme --fresh               # new files in every round, so that writes allocate

Every program has one file and overwrites it, as swapping does. The programs run in turn within a
round, in a random order each time; the first round is not counted. Reads are checked. The results
are the median and the range of GB/s and the CPU seconds per GB of each program, and the median over
the rounds of the ratio of threed's speed to the peer's, with a 95 % bootstrap interval. If fio or
DeepSpeed is not installed (apt-get install fio libaio-dev; pip install deepspeed), a message names
it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks.host import busy_seconds  # noqa: E402
from threed.memory.io import Disk  # noqa: E402
from threed.memory.pool import host_buffer  # noqa: E402

MIB = 2**20
OPERATIONS = ("write", "read")


class Contender:
    """Writes `buffers` to files in `folder` and reads them back."""

    def __init__(self, folder: Path, name: str, buffers: list[Tensor]) -> None:
        self.folder, self.name, self.buffers = folder / name, name, buffers
        self.open()

    def open(self) -> None:
        """Creates the files; not timed."""
        self.folder.mkdir(exist_ok=True)

    def close(self) -> None:
        """Removes the files."""
        shutil.rmtree(self.folder)

    def run(self, operation: str) -> None:
        """Writes or reads all buffers; this is timed."""
        raise NotImplementedError


class Threed(Contender):
    """threed's I/O engine: submits all transfers, then waits for them."""

    def open(self) -> None:
        super().open()
        self.disk = Disk(self.folder, "swap")
        self.offsets = [self.disk.reserve(buffer.nbytes) for buffer in self.buffers]

    def close(self) -> None:
        self.disk.close()
        super().close()

    def run(self, operation: str) -> None:
        begin = getattr(self.disk, operation)
        for transfer in [
            begin(offset, buffer) for offset, buffer in zip(self.offsets, self.buffers, strict=True)
        ]:
            transfer.wait()


class Direct(Contender):
    """One thread of Python with O_DIRECT, 8 MiB per call, from memory in huge pages."""

    def open(self) -> None:
        super().open()
        self.files = [
            os.open(self.folder / str(i), os.O_RDWR | os.O_CREAT | os.O_DIRECT)
            for i in range(len(self.buffers))
        ]

    def close(self) -> None:
        for file in self.files:
            os.close(file)
        super().close()

    def run(self, operation: str) -> None:
        call = os.pwritev if operation == "write" else os.preadv
        for file, buffer in zip(self.files, self.buffers, strict=True):
            memory = memoryview(buffer.numpy())
            for at in range(0, len(memory), 8 * MIB):
                piece = memory[at : at + 8 * MIB]
                if call(file, [piece], at) != len(piece):
                    raise OSError(f"a short {operation}")


class DeepSpeed(Contender):
    """DeepSpeed's async_io, from its own page-locked tensors."""

    block, threads = MIB, 1

    def __init__(self, folder: Path, name: str, buffers: list[Tensor]) -> None:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        from deepspeed.ops.op_builder import AsyncIOBuilder

        self.engine = AsyncIOBuilder().load(verbose=False).aio_handle(
            block_size=self.block, queue_depth=32, single_submit=False, overlap_events=True,
            intra_op_parallelism=self.threads,
        )  # fmt: skip
        locked = [
            self.engine.new_cpu_locked_tensor(b.numel(), torch.empty(0, dtype=b.dtype))
            for b in buffers
        ]
        super().__init__(folder, name, [to.copy_(b) for to, b in zip(locked, buffers, strict=True)])

    def run(self, operation: str) -> None:
        call = self.engine.sync_pwrite if operation == "write" else self.engine.sync_pread
        for number, buffer in enumerate(self.buffers):
            if call(buffer, str(self.folder / str(number)), 0) < 0:
                raise OSError(f"DeepSpeed's {operation} failed")


class DeepSpeed4(DeepSpeed):
    """DeepSpeed's async_io with four threads and blocks of 8 MiB."""

    block, threads = 8 * MIB, 4


class Fio(Contender):
    """fio, with its own time and CPU measurement: blocks of 1 MiB, up to 32 in flight."""

    def run(self, operation: str) -> None:
        size = sum(buffer.nbytes for buffer in self.buffers)
        options = f"--name=x --filename={self.folder / 'file'} --size={size} --bs=1M --direct=1 --iodepth=32"
        command = f"fio {options} --ioengine={self.name.removeprefix('fio_')} --rw={operation} --output-format=json"
        done = subprocess.run(command.split(), capture_output=True, text=True, check=True)
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        if job["error"]:
            raise OSError(job["error"], os.strerror(job["error"]))
        self.gb_s = job[operation]["bw_bytes"] / 1e9
        self.cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3


CONTENDERS: dict[str, type[Contender]] = {
    "threed": Threed, "o_direct_hugepages_1thread_8MiB": Direct, "fio_libaio": Fio, "fio_io_uring": Fio, "fio_psync": Fio,
    "deepspeed_pinned_1thread_1MiB": DeepSpeed, "deepspeed_pinned_4threads_8MiB": DeepSpeed4,
}  # fmt: skip


def chosen(names: list[str]) -> Iterator[str]:
    """Yields the programs that can run here, and prints the names of the others."""
    missing = {
        "fio": shutil.which("fio") is None,
        "deepspeed": importlib.util.find_spec("deepspeed") is None,
    }
    for name in names:
        if missing.get(name.split("_")[0]):
            print(f"left out, as {name.split('_')[0]} is not installed: {name}", file=sys.stderr)
        else:
            yield name


def cpu_seconds() -> float:
    """Returns the CPU seconds of this process, including the kernel's workers for it."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measure(contender: Contender, operation: str) -> dict[str, float]:
    """Measures one run: GB/s, CPU seconds per GB, and the cores that other processes used."""
    size = sum(buffer.nbytes for buffer in contender.buffers) / 1e9
    checked = operation == "read" and not isinstance(contender, Fio)
    for buffer in contender.buffers if checked else []:
        buffer.zero_()
    began, cpu, busy = time.perf_counter(), cpu_seconds(), busy_seconds()
    contender.run(operation)
    wall, cpu, busy = time.perf_counter() - began, cpu_seconds() - cpu, busy_seconds() - busy
    if isinstance(contender, Fio):
        return {"gb_s": contender.gb_s, "cpu_s_per_gb": contender.cpu_s / size}
    for number, buffer in enumerate(contender.buffers if checked else []):
        if not bool((buffer.view(torch.int64) == number + 1).all()):
            raise OSError(f"{contender.name} did not read back what it wrote, in buffer {number}")
    return {
        "gb_s": size / wall,
        "cpu_s_per_gb": cpu / size,
        "foreign_cores": max(0.0, busy - cpu) / wall,
    }


Rounds = dict[str, dict[str, list[dict[str, float]]]]


def play(contenders: dict[str, Contender], rounds: int, fresh: bool) -> Rounds:
    """Runs the rounds; returns the measurements of all but the first, by program and operation."""
    found: Rounds = {name: {operation: [] for operation in OPERATIONS} for name in contenders}
    names, shuffle = list(contenders), random.Random(0).shuffle
    for turn in range(rounds + 1):
        # in a new order, because data in the drive's cache affect the next program
        shuffle(names)
        for name in names:
            for operation in OPERATIONS:
                record = measure(contenders[name], operation)
                if turn:
                    found[name][operation].append(record)
            if fresh:
                contenders[name].close()
                contenders[name].open()
        print(f"round {turn} of {rounds}", file=sys.stderr, flush=True)
    return found


def interval(values: list[float], draws: int = 2000) -> tuple[float, float]:
    """Returns the 95 % bootstrap interval of the median."""
    pick: Callable[[], list[float]] = lambda: random.choices(values, k=len(values))  # noqa: E731
    medians = sorted(statistics.median(pick()) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws)]


def speeds(found: Rounds, name: str, operation: str) -> list[float]:
    """Returns the GB/s of each round."""
    return [record["gb_s"] for record in found[name][operation]]


def summary(found: Rounds) -> Iterator[dict[str, Any]]:
    """Yields a record per program, then the ratios of threed to every peer."""
    for name, operations in found.items():
        record: dict[str, Any] = {"contender": name}
        for operation, runs in operations.items():
            values = speeds(found, name, operation)
            record[f"{operation}_gb_s"] = statistics.median(values)
            record[f"{operation}_range"] = [min(values), max(values)]
            record[f"{operation}_cpu_s_per_gb"] = statistics.median(
                run["cpu_s_per_gb"] for run in runs
            )
            record["foreign_cores"] = max(
                record.get("foreign_cores", 0.0), *(run.get("foreign_cores", 0.0) for run in runs)
            )
        yield record
    peers = [name for name in found if not name.startswith("threed")]
    for operation in OPERATIONS:
        best = max(
            peers, key=lambda peer: statistics.median(speeds(found, peer, operation)), default=""
        )
        for ours in found.keys() - peers:
            for peer in peers:
                pairs = zip(
                    speeds(found, ours, operation), speeds(found, peer, operation), strict=True
                )
                ratios = [mine / theirs for mine, theirs in pairs]
                yield {
                    "operation": operation, "contender": ours, "peer": peer, "best_peer": peer == best,
                    "ratio": statistics.median(ratios), "interval": interval(ratios), "rounds": len(ratios),
                }  # fmt: skip


def table(records: list[dict[str, Any]]) -> str:
    """Returns the records as Markdown."""
    lines = [
        "| contender | write GB/s | read GB/s | CPU s/GB write | read | foreign cores |",
        "|---" * 6 + "|",
    ]
    for r in (r for r in records if "write_gb_s" in r):
        cells = [
            f"{r[f'{o}_gb_s']:.2f} ({r[f'{o}_range'][0]:.2f}–{r[f'{o}_range'][1]:.2f})"
            for o in OPERATIONS
        ]
        cells += [f"{r[f'{o}_cpu_s_per_gb']:.4f}" for o in OPERATIONS]
        lines.append(f"| {r['contender']} | {' | '.join(cells)} | {r['foreign_cores']:.2f} |")
    lines += ["", "| operation | ours / peer | ratio | 95 % | rounds |", "|---" * 5 + "|"]
    for r in (r for r in records if "ratio" in r):
        low, high = r["interval"]
        pair = f"{r['contender']} / {r['peer']}{' (best)' if r['best_peer'] else ''}"
        lines.append(
            f"| {r['operation']} | {pair} | {r['ratio']:.3f} | {low:.3f}–{high:.3f} | {r['rounds']} |"
        )
    return "\n".join(lines)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--dir", type=Path, default=Path(tempfile.gettempdir()), help="a folder on the drive"
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--tensors", type=int, default=8)
    parser.add_argument("--mib", type=int, default=256, help="size of a tensor")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="contenders whose names begin with one of these"
    )
    parser.add_argument("--fresh", action="store_true", help="new files in every round")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    buffers = [host_buffer(args.mib * MIB) for _ in range(args.tensors)]
    for number, buffer in enumerate(buffers):
        buffer.view(torch.int64).fill_(number + 1)
    names = [name for name in CONTENDERS if not args.only or name.startswith(tuple(args.only))]
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="threed-nvme-") as folder:
        contenders = {name: CONTENDERS[name](Path(folder), name, buffers) for name in chosen(names)}
        records = list(summary(play(contenders, args.rounds, args.fresh)))
        for contender in contenders.values():
            contender.close()
    for record in records:
        print(json.dumps(record))
    print(table(records), file=sys.stderr)


if __name__ == "__main__":
    main()
