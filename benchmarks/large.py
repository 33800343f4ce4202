"""Trains a model that does not fit into memory: states on a drive, under a hard memory limit.

    python benchmarks/large.py --folder /nvme/swap                     # 1.46 billion parameters in 6 GiB, on one rank
    python benchmarks/large.py --layers 8 --hidden 1024 --limit-gib 2  # smaller

There are three runs: with all states on the drive, under the limit; the same without offload, which
must fail; and a control with the same depth and an eighth of the width, in memory, whose loss must
also fall. The limit is that of a memory cgroup, which includes the page cache and needs write
access to /sys/fs/cgroup; otherwise it is a limit of the address space. One JSON record per run is
printed: the loss of each step, the seconds of its phases, the peak memory, and the forecast.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

GIB = 2**30
CGROUP = Path("/sys/fs/cgroup")


class Limit:
    """A memory limit for a child process.

    It is a cgroup (version 1 or 2), or a limit of the address space if no cgroup can be created.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        old = CGROUP / "memory"
        self.group = (old if old.is_dir() else CGROUP) / f"threed-{os.getpid()}"
        self.file = "memory.limit_in_bytes" if old.is_dir() else "memory.max"
        self.peak_file = "memory.max_usage_in_bytes" if old.is_dir() else "memory.peak"
        try:
            self.group.mkdir()
            (self.group / self.file).write_text(str(nbytes))
            self.kind = "cgroup"
        except OSError:
            self.kind = "address space"

    def enter(self) -> None:
        """Applies the limit; called in the child before it runs anything."""
        if self.kind == "cgroup":
            (self.group / "cgroup.procs").write_text(str(os.getpid()))
        else:
            resource.setrlimit(resource.RLIMIT_AS, (self.nbytes, self.nbytes))

    def leave(self) -> int | None:
        """Removes the cgroup, and returns its peak memory in bytes, or None."""
        if self.kind != "cgroup":
            return None
        peak = int((self.group / self.peak_file).read_text())
        self.group.rmdir()
        return peak


def child(args: argparse.Namespace) -> None:
    """Trains a few steps, and prints a line of JSON."""
    import torch

    from threed import models
    from threed.config import Config
    from threed.config.resolution import resolve
    from threed.data import open_data
    from threed.distributed.topology import Topology
    from threed.engine import Engine
    from threed.layers import Slicing
    from threed.planner.forecast import Forecast

    torch.set_num_threads(args.threads)
    place = (
        {"offload_optimizer": "nvme", "offload_params": "nvme", "nvme_path": args.folder}
        if args.offload
        else {}
    )
    config = resolve(
        Config.model_validate({
            "model": {
                "layers": args.layers, "hidden": args.hidden, "heads": max(1, args.hidden // 128), "seq": args.seq
            },
            "zero": {"stage": 3, "bucket_mib": args.bucket_mib, **place},
            "precision": {"dtype": args.dtype},
            "train": {"global_batch": args.batch, "micro_batch": args.batch, "steps": 100},
            "optim": {"lr": args.lr, "warmup": 2},
        }),
        vocab=260, world_size=1,
    )  # fmt: skip
    began = time.perf_counter()
    engine = Engine(models.build(config.model, Slicing()), Topology(), config)
    record: dict[str, Any] = {
        "parameters": engine.layout.parameters, "built_s": time.perf_counter() - began, "steps": [],
        "planned_gib": Forecast.of(config, 1).ranks[0].bytes["peak"] / GIB,
    }  # fmt: skip
    data = open_data(None, "bytes", 0.05, args.seq, config.train.seed)
    # every step uses the same batch, so that its loss falls within a few steps
    batch = data.train.batch(0, args.batch)
    for _ in range(args.steps):
        began = time.perf_counter()
        metrics = engine.step(batch)
        record["steps"].append(
            {"loss": metrics.loss, "s": time.perf_counter() - began, **metrics.seconds}
        )
    record["peak_rss_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
    print(json.dumps(record), flush=True)


def run(args: argparse.Namespace, what: str, limit: Limit | None, *flags: str) -> dict[str, Any]:
    """Runs a child process; returns its record, or how it ended."""
    command = [sys.executable, __file__, "--child", *flags]
    shared = ("folder", "layers", "seq", "batch", "steps", "bucket_mib", "dtype", "lr", "threads")
    for name in shared:
        command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        preexec_fn=limit.enter if limit else None,
        check=False,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    last = done.stderr.strip().splitlines()[-1:] or [""]
    return {
        "run": what,
        "exit": done.returncode,
        **(lines[-1] if lines else {"error": last[0][:300]}),
    }


def main() -> int:
    """Runs the three runs and prints their records."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="a folder on the drive")
    parser.add_argument("--limit-gib", type=float, default=6.0)
    parser.add_argument("--layers", type=int, default=29)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--bucket-mib", type=float, default=32.0)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--lr", type=float, default=5e-6)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--offload", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args)
        return 0
    size = int(args.limit_gib * GIB)
    wide, narrow = ("--hidden", str(args.hidden)), ("--hidden", str(max(args.hidden // 8, 64)))
    records = []
    for what, limited, flags in (
        ("offload", True, (*wide, "--offload")), ("resident", True, wide), ("control", False, narrow),
    ):  # fmt: skip
        limit = Limit(size) if limited else None
        record = run(args, what, limit, *flags)
        record["limit"] = f"{args.limit_gib:g} GiB, {limit.kind}" if limit else "none"
        peak = limit.leave() if limit else None
        record["peak_gib"] = peak / GIB if peak else record.get("peak_rss_gib")
        print(json.dumps(record), flush=True)
        records.append(record)
    offload, resident, control = records
    falls = all(
        r["steps"][-1]["loss"] < r["steps"][0]["loss"] for r in (offload, control) if "steps" in r
    )
    return 0 if "steps" in offload and "steps" not in resident and falls else 1


if __name__ == "__main__":
    sys.exit(main())
