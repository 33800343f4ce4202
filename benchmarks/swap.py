"""Measures how well the optimizer's I/O to NVMe and its arithmetic overlap.

    python benchmarks/swap.py --folder /nvme/swap --rounds 10          # 200 million parameters, fp32 states

Three methods run in turn over the same buckets: `pipelined` reads bucket i + 1 and writes bucket i
- 1 while it updates bucket i; `io` reads and writes without an update; `compute` updates states in
memory. The JSON record has medians, ranges, the GB/s of the drive, and the longer of the times of
`io` and `compute` divided by that of `pipelined`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks import host  # noqa: E402
from threed import models  # noqa: E402
from threed.config import Config  # noqa: E402
from threed.config.resolution import resolve  # noqa: E402
from threed.distributed.topology import Topology  # noqa: E402
from threed.engine import Engine  # noqa: E402
from threed.layers import Slicing  # noqa: E402
from threed.memory.tiers import Drive  # noqa: E402
from threed.ops.adam import Adam  # noqa: E402
from threed.ops.update import StepScalars  # noqa: E402
from threed.zero.reductions import Gradient  # noqa: E402


def nothing(*_: Any) -> None:
    """An update that does nothing."""


def engine_of(args: argparse.Namespace, place: str) -> Engine:
    """Returns an engine with blocks of width 1024 (12.6 million parameters each).

    `place` is the location of its states.
    """
    where = {"offload_optimizer": place, "nvme_path": args.folder if place == "nvme" else None}
    config = resolve(
        Config.model_validate({
            "model": {"layers": args.layers, "hidden": 1024, "heads": 8, "seq": 64},
            "zero": {"stage": 2, "bucket_mib": args.bucket_mib, **where},
            "precision": {"dtype": args.dtype},
            "train": {"global_batch": 1, "micro_batch": 1},
        }),
        vocab=260, world_size=1,
    )  # fmt: skip
    engine = Engine(models.build(config.model, Slicing()), Topology(), config)
    tokens = torch.randint(0, 260, (1, 64))
    engine.step({"tokens": tokens, "labels": tokens})
    return engine


def step(engine: Engine, update: Callable[..., None], number: int) -> float:
    """Updates all buckets; returns the seconds until all states are on the drive."""
    one = torch.ones((), dtype=torch.float64)
    gradients = [Gradient(bucket.grad, one) for bucket in engine.layout.buckets]
    tier = engine.layout.policy.optimizer_tier
    began = time.perf_counter()
    with patch.object(Adam, "update", update):
        engine.optimizer._update_all(
            gradients, StepScalars(one[None] * 1e-4, one * number, one, one * 0)
        )
        if isinstance(tier, Drive):
            tier.settle()
    return time.perf_counter() - began


def main() -> None:
    """Measures the three methods in turn."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="a folder on the drive")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--bucket-mib", type=float, default=64.0)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    swapped, resident = engine_of(args, "nvme"), engine_of(args, "cpu")
    adam = Adam.update
    ways = {"pipelined": (swapped, adam), "io": (swapped, nothing), "compute": (resident, adam)}
    times: dict[str, list[float]] = {name: [] for name in ways}
    numbers = {engine: itertools.count(2) for engine in (swapped, resident)}
    moved = 0
    for _ in range(args.rounds):
        for name, (engine, way) in ways.items():
            before = sum(host.drive_bytes())
            times[name].append(step(engine, way, next(numbers[engine])))
            moved += sum(host.drive_bytes()) - before if name == "io" else 0
    medians = {name: statistics.median(found) for name, found in times.items()}
    ratios = [max(io, compute) / both for both, io, compute in zip(*times.values(), strict=True)]
    print(json.dumps({
        "parameters": swapped.layout.parameters, "rounds": args.rounds, "threads": args.threads, "seconds": medians,
        "range": {name: [min(found), max(found)] for name, found in times.items()},
        "gb_s": moved / sum(times["io"]) / 1e9, "overlap": statistics.median(ratios),
        "overlap_range": [min(ratios), max(ratios)],
    }))  # fmt: skip


if __name__ == "__main__":
    main()
