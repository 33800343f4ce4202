"""Measures how long saves and loads of checkpoints take, and how much they delay training.

    python benchmarks/checkpoint.py --folder /nvme/runs --rounds 5                    # 50 million parameters, AdamW
    python benchmarks/checkpoint.py --layers 40 --hidden 1024 --optimizer sgd         # 504 million, only weights

The methods save the same bytes in turn: threed's `save` and `start_save`; torch's DCP, `save` and
`async_save` (also with staging buffers that are kept); torch.save; safetensors; and one copy in
memory (`memcpy`), whose source and destination were touched before. One JSON record per method has
medians and ranges over the rounds:

    blocked_s: until the call returns; for `start_save` also the waits of updates
        (`Save.blocked_s`).
    durable_s: until all bytes are flushed to the disk, while nothing else runs.
    load_s: load from the disk into existing tensors, after the pages were dropped from the cache.
        threed loads into a new engine, as in a resume. `load_used_s` is a load into an engine that
        has trained, in which nothing is overwritten before everything is checked.

The record `steps` has the seconds of steps with and without a save, the CPU seconds of the thread
that writes, and the time for which training waited.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks import host  # noqa: E402
from threed import models  # noqa: E402
from threed.config import Config  # noqa: E402
from threed.config.resolution import resolve  # noqa: E402
from threed.core.device import processor  # noqa: E402
from threed.distributed.topology import Topology  # noqa: E402
from threed.engine import Engine  # noqa: E402
from threed.layers import Slicing  # noqa: E402
from threed.zero.state import read_records, records  # noqa: E402

VOCAB = 256


def engine_of(args: argparse.Namespace) -> Engine:
    """Returns an engine with 12 h² parameters per block, in fp32."""
    config = resolve(
        Config.model_validate({
            "model": {"layers": args.layers, "hidden": args.hidden, "heads": args.hidden // 64, "seq": args.seq},
            "optim": {"name": args.optimizer, **({"momentum": 0.0} if args.optimizer == "sgd" else {})},
            "train": {"global_batch": args.rows, "micro_batch": 1},
        }),
        vocab=VOCAB, world_size=1,
    )  # fmt: skip
    return Engine(models.build(config.model, Slicing()), Topology(), config)


def step(engine: Engine) -> float:
    """Runs a step and returns its seconds."""
    draw = torch.Generator().manual_seed(engine.steps)
    model, train = engine.config.model, engine.config.train
    tokens = torch.randint(0, VOCAB, (train.global_batch, model.seq), generator=draw)
    began = time.perf_counter()
    engine.step({"tokens": tokens, "labels": tokens})
    return time.perf_counter() - began


def files_of(path: Path) -> list[Path]:
    return [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]


def flush(path: Path) -> None:
    """Flushes the files of a checkpoint to the disk."""
    for place in (*files_of(path), path, path.parent):
        handle = os.open(place, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def forget(path: Path) -> None:
    """Drops the pages of a checkpoint from the page cache."""
    for file in files_of(path):
        handle = os.open(file, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def seconds_of(load: Callable[[Path], object], path: Path) -> float:
    """Returns the seconds of a load from the disk."""
    gc.collect()
    forget(path)
    began = time.perf_counter()
    load(path)
    return time.perf_counter() - began


class Peers:
    """Other methods, which save the same bytes from a dict of tensors.

    Each returns when its call returns; the result is a function that waits for the end of the save.
    """

    def __init__(self, engine: Engine) -> None:
        named = read_records(engine.optimizer, records(engine.optimizer))
        self.state = {
            f"{r.part}.{r.piece.name}.{n}": values.clone() for n, (r, values) in enumerate(named)
        }
        self.twin: dict[str, Tensor] = {}
        quiet = {"use_pinned_memory": False, "use_shared_memory": False, "use_async_staging": False}
        self.stager = DefaultStager(StagingOptions(**quiet, use_non_blocking_copy=False))

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.state.values())

    def memcpy(self) -> float:
        """Returns the seconds of one copy of all bytes by one thread."""
        first = not self.twin
        self.twin = self.twin or {
            name: torch.zeros_like(tensor) for name, tensor in self.state.items()
        }
        for _ in range(1 + first):
            began = time.perf_counter()
            for name, tensor in self.state.items():
                self.twin[name].copy_(tensor)
            took = time.perf_counter() - began
        return took

    def torch_save(self, path: Path) -> Callable[[], object]:
        torch.save(self.state, path)
        return lambda: None

    def safetensors(self, path: Path) -> Callable[[], object]:
        from safetensors.torch import save_file

        save_file(self.state, path)
        return lambda: None

    def dcp_save(self, path: Path) -> Callable[[], object]:
        dcp.save(self.state, storage_writer=dcp.FileSystemWriter(path))
        return lambda: None

    def dcp_async(self, path: Path) -> Callable[[], object]:
        return _uploaded(dcp.async_save(self.state, storage_writer=dcp.FileSystemWriter(path)))

    def dcp_cached(self, path: Path) -> Callable[[], object]:
        writer = dcp.FileSystemWriter(path)
        return _uploaded(
            dcp.async_save(self.state, storage_writer=writer, async_stager=self.stager)
        )

    def torch_load(self, path: Path) -> None:
        self._take(torch.load(path, weights_only=True, mmap=True))

    def safetensors_load(self, path: Path) -> None:
        from safetensors.torch import load_file

        self._take(load_file(path))

    def dcp_load(self, path: Path) -> None:
        dcp.load(self.state, storage_reader=dcp.FileSystemReader(path))

    def _take(self, found: dict[str, Tensor]) -> None:
        for name, tensor in self.state.items():
            tensor.copy_(found[name])


def _uploaded(answer: Any) -> Callable[[], object]:
    return getattr(answer, "upload_completion", answer).result  # type: ignore[no-any-return]


def steps_beside(engine: Engine, path: Path, seconds: dict[str, list[float]]) -> None:
    """Measures steps without a save, and steps during a save."""
    before, began = host.stamp(), 2
    alone = [step(engine) for _ in range(began)]
    between = host.stamp()
    started = time.perf_counter()
    save = engine.start_save(path)
    called = time.perf_counter() - started
    seconds["called_s"].append(called)
    beside: list[float] = []
    while not save.done:
        beside.append(step(engine))
    after = host.stamp()
    save.wait()
    seconds["blocked_s"].append(save.blocked_s)
    seconds["step_s"] += alone
    seconds["step_beside_s"].append((sum(beside) + called) / len(beside))
    own = (between[1] - before[1]) / began
    seconds["write_cpu_s"].append(after[1] - between[1] - own * len(beside))
    seconds["steps_beside"].append(len(beside))
    seconds["written_within_s"].append(after[0] - between[0])
    wall, mine, all_of_them = (b - a for a, b in zip(before, after, strict=True))
    seconds["foreign_cores"].append((all_of_them - mine) / wall)


def record(name: str, seconds: dict[str, list[float]], **more: Any) -> None:
    medians = {key: statistics.median(found) for key, found in seconds.items()}
    ranges = {key: [min(found), max(found)] for key, found in seconds.items()}
    print(json.dumps({"way": name, **more, **medians, "ranges": ranges}), flush=True)


def main() -> None:
    """Measures all methods in turn."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder", default=tempfile.gettempdir(), help="a folder on the disk to be measured"
    )
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--rows", type=int, default=4, help="sequences in a step")
    parser.add_argument("--optimizer", choices=("adamw", "sgd"), default="adamw")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", help="ways to measure; by default all")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=args.folder))
    try:
        _measure(args, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    sys.stdout.flush()
    os._exit(0)  # because DCP's threads may abort the process in a normal exit


def _measure(args: argparse.Namespace, folder: Path) -> None:
    dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{folder}/rendezvous")
    engine = engine_of(args)
    step(engine)
    peers, path = Peers(engine), folder / "step-1"
    ways: dict[
        str, tuple[Callable[[Path], Callable[[], object]], Callable[[Path], object] | None]
    ] = {
        "threed save": (lambda p: (engine.save(p), lambda: None)[1], None),
        "threed start_save": (lambda p: engine.start_save(p).wait, None),
        "dcp.save": (peers.dcp_save, peers.dcp_load),
        "dcp.async_save": (peers.dcp_async, peers.dcp_load),
        "dcp.async_save, staging kept": (peers.dcp_cached, peers.dcp_load),
        "torch.save": (peers.torch_save, peers.torch_load),
        "safetensors": (peers.safetensors, peers.safetensors_load),
    }
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    about = {
        "gb": peers.nbytes / 1e9,
        "processor": processor(torch.device("cpu")),
        "torch": torch.__version__,
    }
    for _ in range(args.rounds):
        found["memcpy"]["blocked_s"].append(peers.memcpy())
        for name, (save, load) in ways.items():
            if args.only is not None and name not in args.only:
                continue
            gc.collect()
            os.sync()  # writes all remaining data of the previous method
            before, began = host.stamp(), time.perf_counter()
            wait = save(path)
            found[name]["blocked_s"].append(time.perf_counter() - began)
            wait()
            flush(path)
            found[name]["durable_s"].append(time.perf_counter() - began)
            if load is None:
                found[name]["load_s"].append(seconds_of(engine_of(args).load, path))
                found[name]["load_used_s"].append(seconds_of(engine.load, path))
            else:
                found[name]["load_s"].append(seconds_of(load, path))
            wall, mine, everybody = (b - a for a, b in zip(before, host.stamp(), strict=True))
            found[name]["foreign_cores"].append((everybody - mine) / wall)
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        os.sync()
        steps_beside(engine, path, found["steps"])
        shutil.rmtree(path)
    for name, seconds in found.items():
        record(name, seconds, parameters=engine.layout.parameters, **about)


if __name__ == "__main__":
    main()
