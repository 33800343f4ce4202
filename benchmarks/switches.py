"""Measures the effect of each memory key: peak memory and step time of one model.

    python benchmarks/switches.py --folder /nvme/swap              # on one rank: about five minutes on 2 cores
    python benchmarks/switches.py --ranks 2                        # tensor parallelism over two ranks, for sliced activations

Each setting runs in a new process. It prints a line of JSON: the peak resident memory minus the
memory before the model was built, the peak in the forecast, and the median seconds of a step's
phases. Settings do not alternate, so run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

MIB = 2**20
NVME = "--zero.nvme-path FOLDER"
FULL = "--recompute.mode full"
SETTINGS = (
    "",
    "--recompute.mode selective",
    "--recompute.mode selective --recompute.ops attention,activation,norm",
    f"{FULL} --recompute.every 2",
    FULL,
    f"{FULL} --recompute.arena true",
    f"{FULL} --recompute.offload nvme {NVME}",
    "--zero.stage 2 --zero.offload-optimizer cpu",
    f"--zero.stage 1 --zero.offload-optimizer nvme {NVME}",
    f"--zero.stage 2 --zero.offload-optimizer nvme {NVME}",
    f"--zero.stage 3 --zero.offload-optimizer nvme --zero.offload-params nvme {NVME}",
    f"--zero.stage 3 --zero.tile 4 --zero.offload-optimizer nvme --zero.offload-params nvme {NVME}",
    f"--zero.stage 3 --zero.tile 4 --zero.offload-optimizer nvme --zero.offload-params nvme {FULL} {NVME}",
)
SLICED = (
    "--parallel.sequence false",
    f"--parallel.sequence false {FULL}",
    f"--parallel.sequence false {FULL} --recompute.partition true",
    f"--parallel.sequence true {FULL}",
)


def child(args: argparse.Namespace, flags: list[str]) -> None:
    """Trains a few steps with the training flags; rank 0 prints a record."""
    import torch

    from threed import models
    from threed.config import arguments
    from threed.config.resolution import resolve
    from threed.core import process
    from threed.distributed.topology import Topology
    from threed.engine import Engine
    from threed.layers import Slicing
    from threed.planner.forecast import Forecast

    torch.set_num_threads(args.threads)
    config, _ = arguments.load(flags, presets=ROOT)
    config = resolve(config, 8192, args.ranks)
    topology = Topology(pp=1, tp=config.parallel.tp)
    tokens = torch.randint(0, 8192, (config.train.global_batch, config.model.seq))
    before = process.peak_rss_bytes()
    slicing = Slicing(topology.axis("tp"), bool(config.parallel.sequence), 1, config.zero.tile)
    engine = Engine(models.build(config.model, slicing), topology, config)
    seconds = []
    for _ in range(args.steps):
        began = time.perf_counter()
        metrics = engine.step({"tokens": tokens, "labels": tokens})
        seconds.append({"step_s": time.perf_counter() - began, **metrics.seconds})
    peak = process.peak_rss_bytes() - before
    if topology.rank == 0:
        medians = {name: statistics.median(s[name] for s in seconds[1:]) for name in seconds[0]}
        planned = Forecast.of(config, args.ranks).ranks[0].bytes["peak"]
        print(
            json.dumps({"peak_mib": peak / MIB, "planned_mib": planned / MIB, **medians}),
            flush=True,
        )
    os._exit(0)


def measure(args: argparse.Namespace, setting: str) -> dict[str, Any]:
    """Returns the record of a setting."""
    shape = f"--model.layers {args.layers} --model.hidden {args.hidden} --model.heads 12 --model.seq 512"
    train = "--train.global-batch 4 --train.micro-batch 4 --zero.bucket-mib 16"
    flags = f"{shape} {train} --parallel.tp {args.ranks} {setting}".replace(
        "FOLDER", args.folder
    ).split()
    launch = [sys.executable]
    if args.ranks > 1:
        launch += [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(args.ranks),
        ]
    own = ["--ranks", str(args.ranks), "--steps", str(args.steps), "--threads", str(args.threads)]
    done = subprocess.run(
        [*launch, __file__, "--child", *own, *flags], cwd=ROOT, capture_output=True, text=True
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise RuntimeError(f"{setting}: {done.stderr[-2000:]}")
    return {"setting": setting.replace(f" {NVME}", ""), **lines[-1]}


def main() -> None:
    """Runs the settings; in a child process, runs one setting."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="a folder on the drive")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args, flags = parser.parse_known_args()
    if args.child:
        child(args, flags)
    for setting in SETTINGS if args.ranks == 1 else SLICED:
        print(json.dumps(measure(args, setting)), flush=True)


if __name__ == "__main__":
    main()
